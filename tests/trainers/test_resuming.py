"""An interrupted run continues as if it had not been, and its last checkpoint is always complete."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import generators
from evaluation.commands.train import train
from tests.quick import cases
from trainers.resuming import RandomState, WholeFiles

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

ROOT = Path(__file__).parents[2]
SMALL = {"latent_dim": 3, "output_shape": [8, 8], "hidden": [16]}
MODELS = {
    "VAE": {"class_path": "trainers.VAETraining", "init_args": {
        "generator": {"class_path": "generators.GaussianVAE", "init_args": SMALL | {"sd": 0.2}}}},
    "IWAE": {"class_path": "trainers.IWAETraining", "init_args": {
        "samples": 5, "generator": {"class_path": "generators.IWAE", "init_args": SMALL}}},
    "GAN": {"class_path": "trainers.GANTraining", "init_args": {
        "critic_steps": 2,
        "generator": {"class_path": "generators.GAN", "init_args": SMALL | {"channels": None}},
        "critic": {"class_path": "generators.Critic", "init_args": {
            "output_shape": [8, 8], "hidden": [16], "channels": None}}}},
}  # fmt: skip


# of every epoch; of those with a validation, as the shipped configurations have it; in other ways
SAVING = {
    "every epoch": {"every_n_epochs": 1},
    "by validation": {"monitor": "val/elbo", "mode": "max"},
    "by the last validation": {"monitor": "val/elbo", "mode": "max", "every_n_epochs": 1},
    "without a choice": {},
}


def configuration(name: str, epochs: int, saving: str = "every epoch", **trainer) -> dict:
    data: dict = {"batch_size": 350, "augmentation": {"probability": 0.5}}
    if name == "IWAE":
        data["binarise"] = "dynamic"
    # every checkpoint is kept
    keeping = {"filename": "{epoch}", "save_top_k": -1, "save_last": True, **SAVING[saving]}
    callbacks = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keeping}]
    return {
        "seed_everything": 3,
        "model": MODELS[name],
        "data": {"class_path": "trainers.DigitsData", "init_args": data},
        "trainer": {
            "accelerator": "cpu", "max_epochs": epochs, "num_sanity_val_steps": 0, "log_every_n_steps": 1,
            "enable_progress_bar": False, "callbacks": callbacks, **trainer
        },
    }  # fmt: skip


def run(folder: Path, config: dict, *arguments: str) -> Path:
    """The run folder."""
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    train(["--config", str(path), "--trainer.default_root_dir", str(folder), *arguments])
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return generators.load(folder / "generator.safetensors").state_dict()


def rows(folder: Path, epoch: int) -> list[str]:
    """The metrics from an epoch on."""
    header, *lines = (folder / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("epoch")
    return [line for line in lines if int(line.split(",")[column]) >= epoch]


RUNS = {name: (name, "every epoch") for name in MODELS} | {
    f"VAE {saving}": ("VAE", saving) for saving in SAVING if saving != "every epoch"
}


@pytest.mark.parametrize(("name", "saving"), cases(RUNS, quick=("VAE by validation",)))
def test_a_resumed_run_is_the_uninterrupted_one(name, saving, tmp_path):
    config = configuration(name, 4, saving, check_val_every_n_epoch=1 if saving == "every epoch" else 2)
    whole = run(tmp_path / "whole", config)
    first = next((whole / "checkpoints").glob("epoch=1*.ckpt"))
    resumed = run(tmp_path / "resumed", config, "--ckpt_path", str(first))
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(resumed).items())
    assert rows(resumed, 2) == rows(whole, 2)
    assert len(rows(resumed, 2)) >= 2


def test_control_without_the_random_state_the_curve_is_another(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", configuration("VAE", 3))
    monkeypatch.setattr(RandomState, "load_state_dict", lambda self, state: None)
    first = next((whole / "checkpoints").glob("epoch=1*.ckpt"))
    resumed = run(tmp_path / "resumed", configuration("VAE", 3), "--ckpt_path", str(first))
    expected = weights(whole)
    assert not all(torch.equal(tensor, expected[key]) for key, tensor in weights(resumed).items())


def test_every_stream_of_random_numbers_goes_on_where_it_was():
    def draw():
        return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()  # noqa: NPY002

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        callback = RandomState()
        state = callback.state_dict()
        first = draw()
        assert draw() != first
        callback.load_state_dict(state)
        assert draw() == first
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def test_a_write_that_fails_keeps_the_old_checkpoint(tmp_path):
    files = WholeFiles()
    path = tmp_path / "folder" / "last.ckpt"
    files.save_checkpoint({"a": 1}, path)
    with pytest.raises(AttributeError):
        # a local function has no name to be found by
        files.save_checkpoint({"a": lambda: None}, path)
    assert torch.load(path, weights_only=True) == {"a": 1}


def start(folder: Path, config: dict) -> subprocess.Popen:
    folder.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "evaluation.commands.cli", "train", "--config", str(folder.with_suffix(".yaml"))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command += ["--trainer.default_root_dir", str(folder)]
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        text=True,
        # children of a shell's background job ignore interrupts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    last = folder / "checkpoints" / "last.ckpt"
    while not last.exists():
        assert process.poll() is None
        time.sleep(0.01)
    return process


@pytest.mark.slow
def test_an_interrupt_leaves_a_checkpoint_that_loads_and_goes_on(tmp_path):
    folder = tmp_path / "interrupted"
    process = start(folder, configuration("VAE", 100_000))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    last = folder / "checkpoints" / "last.ckpt"
    assert f"continue with --ckpt_path {last}" in output
    assert generators.load(last).output_shape == (8, 8)
    epoch = torch.load(last, weights_only=True)["epoch"]
    resumed = run(tmp_path / "resumed", configuration("VAE", epoch + 2), "--ckpt_path", str(last))
    assert generators.load(resumed / "generator.safetensors").output_shape == (8, 8)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    # every step writes, so that most kills meet a write
    config = configuration("VAE", 100_000)
    saving = {"filename": "newest", "save_last": True, "every_n_train_steps": 1}
    config["trainer"]["callbacks"][0]["init_args"] = saving
    wide = {"class_path": "generators.GaussianVAE", "init_args": SMALL | {"hidden": [1024, 1024]}}
    config["model"] = {"class_path": "trainers.VAETraining", "init_args": {"generator": wide}}
    for attempt, wait in enumerate((0.0, 0.05, 0.11, 0.23)):
        folder = tmp_path / f"killed_{attempt}"
        process = start(folder, config)
        time.sleep(wait)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        loaded = generators.load(folder / "checkpoints" / "last.ckpt")
        assert all(tensor.isfinite().all() for tensor in loaded.state_dict().values())
