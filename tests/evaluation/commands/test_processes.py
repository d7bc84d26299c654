"""Training in two processes: they end together, with everything that one process leaves, whatever stops them."""

import gzip
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import generators
from tests.files import reference_folder, write_fashion
from tests.quick import cases

ROOT = Path(__file__).parents[3]


def kind(config: Path) -> tuple:
    """What two processes share: the training, the generator with or without convolutions, and its critic's steps."""
    model = yaml.safe_load(config.read_text())["model"]
    generator = model["init_args"]["generator"]
    convolves = generator.get("init_args", {}).get("channels") is not None
    return model["class_path"], generator["class_path"], convolves, model["init_args"].get("critic_steps")


# the first of every kind; that each configuration trains and exports is tested in one process (test_train)
CONFIGURATIONS = list(
    {kind(path): path for path in sorted((ROOT / "configs" / "train").glob("*.yaml"), reverse=True)}.values()
)
SHORT = [
    *("--config", str(ROOT / "configs" / "train" / "digits_vae.yaml"), "--trainer.devices", "2"),
    *("--model.init_args.generator.init_args.hidden", "[16]", "--trainer.enable_progress_bar", "false"),
    *("--trainer.check_val_every_n_epoch", "1", "--trainer.limit_train_batches", "2"),
]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(folder: Path, *options: str) -> subprocess.Popen:
    """The command, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "evaluation.commands.cli", "train", *SHORT, *options],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # children of a shell's background job ignore interrupts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end(process: subprocess.Popen, timeout: float) -> tuple[str, str]:
    """What the command said; afterwards nothing of its session is left, which is a failure if it had to be killed."""
    try:
        return process.communicate(timeout=timeout)
    finally:
        left = others(process)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        assert not left


def others(process: subprocess.Popen) -> list[int]:
    """The processes of the command's session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == process.pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def test_a_run_of_two_processes_ends_and_leaves_everything(tmp_path):
    quick = {
        "n_images": 2,
        "chains": 2,
        "samples": 10,
        "method": {"class_path": "dgm_infer.evidence.ImportanceSampling"},
    }
    callbacks = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"filename": "best"}},
        {"class_path": "trainers.ImageGrids", "init_args": {"n": 4}},
        {"class_path": "trainers.HeldOutEvidence", "init_args": quick},
    ]
    (tmp_path / "short.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks, "max_epochs": 1}}))
    process = start(tmp_path, "--config", "short.yaml", "--trainer.default_root_dir", "here")
    output, error = end(process, 120)
    assert process.returncode == 0, error
    assert error == ""
    assert "held_out/log_evidence" in output
    names = {path.name for path in (tmp_path / "here").rglob("*") if path.is_file()}
    assert {"best.ckpt", "generator.safetensors", "samples_0001.png", "reconstructions_0001.png"} <= names
    assert generators.load(tmp_path / "here" / "generator.safetensors").output_shape == (8, 8)


# Both processes run this, each once, as those of torchrun do: what is imported is imported once for all configurations.
ALL = """
import sys, warnings
warnings.simplefilter("ignore")
from evaluation.commands.train import train

for line in open(sys.argv[1]):
    train(line.rstrip("\\n").split("\\t"))
"""


@pytest.mark.slow
def test_every_kind_of_shipped_configuration_trains_in_two_processes_and_resumes(tmp_path):
    reference_folder("mnist_10k")
    write_fashion(tmp_path)
    for file in tmp_path.glob("*-ubyte"):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    lines = []
    for config in CONFIGURATIONS:
        settings = yaml.safe_load(config.read_text())
        callbacks = settings["trainer"]["callbacks"]
        for callback in callbacks:
            if callback["class_path"] == "trainers.HeldOutEvidence":
                # the method has tests of its own
                cheap = {"method": {"class_path": "dgm_infer.evidence.ImportanceSampling"}, "samples": 10}
                callback["init_args"] = {"every_n_epochs": 1, "n_images": 2, "chains": 2} | cheap
            if callback["class_path"] == "trainers.ImageGrids":
                callback["init_args"] = {"every_n_epochs": 1, "n": 4}
        short = {"check_val_every_n_epoch": 1, "limit_train_batches": 2, "limit_val_batches": 1}
        trainer = short | {"callbacks": callbacks, "devices": 2, "strategy": "ddp", "enable_progress_bar": False}
        path = tmp_path / f"{config.stem}.yaml"
        path.write_text(yaml.safe_dump({"data": {"init_args": {"batch_size": 16}}, "trainer": trainer}))
        options = ["--config", str(config), "--config", str(path)]
        options += ["--data.root", str(tmp_path)] if "fashion" in config.stem else []
        first, second = (tmp_path / config.stem / name for name in ("first", "second"))
        lines.append([*options, "--trainer.max_epochs", "1", "--trainer.default_root_dir", str(first)])
        resumed = ["--trainer.max_epochs", "2", "--ckpt_path", str(first / "checkpoints" / "last.ckpt")]
        lines.append([*options, *resumed, "--trainer.default_root_dir", str(second)])
    (tmp_path / "lines").write_text("".join("\t".join(line) + "\n" for line in lines))
    (tmp_path / "all.py").write_text(ALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, "all.py", "lines"],
            cwd=tmp_path,
            env=ENVIRONMENT | group | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, error = process.communicate(timeout=240)
            assert process.returncode == 0, error
    finally:
        for process in processes:
            process.kill()
    for config in CONFIGURATIONS:
        for number, name in enumerate(("first", "second"), 1):
            folder = tmp_path / config.stem / name
            made = {path.name for path in folder.rglob("*") if path.is_file()}
            assert {"best.ckpt", "last.ckpt", "generator.safetensors", f"samples_000{number}.png"} <= made
            assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == number - 1
            wants_evidence = "HeldOutEvidence" in config.read_text()
            assert ("held_out/log_evidence" in (folder / "generator.json").read_text()) == wants_evidence
            generators.load(folder / "generator.safetensors")


# Acts in one process at the first batch of the second epoch.
CALLBACKS = """
import os, signal, time
from lightning.pytorch import Callback
from dgm_infer.errors import ArgumentError

class _Second(Callback):
    rank = 1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 1 and trainer.global_rank == self.rank:
            self.act(trainer)

class Refuses(_Second):
    def act(self, trainer):
        raise ArgumentError("rotation=-1: must be >= 0")

class Dies(_Second):
    def act(self, trainer):
        os.kill(os.getpid(), signal.SIGKILL)

class Waits(_Second):
    # a collective operation of one process alone: both wait, for different things
    rank = 0

    def act(self, trainer):
        open("waits", "w").close()
        trainer.strategy.barrier()
        trainer.log_dir
        time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "stuck"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_to_the_first_process_ends_both_within_seconds(number, stuck, tmp_path):
    (tmp_path / "own.py").write_text(CALLBACKS)
    options = ["--trainer.callbacks+", "own.Waits"] if stuck else []
    process = start(tmp_path, *options, "--trainer.max_epochs", "100000", "--trainer.default_root_dir", "here")
    sign = tmp_path / ("waits" if stuck else "here/checkpoints/last.ckpt")
    while not sign.exists() and process.poll() is None:
        time.sleep(0.05)
    assert len(others(process)) == 2
    process.send_signal(number)
    output, error = end(process, 20)
    assert process.returncode == 130
    (line,) = [line for line in (output + error).splitlines() if not line.startswith("training ")]
    assert line.startswith("interrupted in epoch ")
    assert line.endswith("continue with --ckpt_path here/checkpoints/last.ckpt")


@pytest.mark.slow
def test_the_second_process_does_not_outlive_the_first(tmp_path):
    process = start(tmp_path, "--trainer.max_epochs", "100000", "--trainer.default_root_dir", "here")
    while not (tmp_path / "here/checkpoints/last.ckpt").exists() and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    limit = time.monotonic() + 10
    while others(process) and time.monotonic() < limit:
        time.sleep(0.05)
    end(process, 1)


FAILURES = {
    "the second": (["--trainer.callbacks+", "own.Refuses"], "process 1: rotation=-1: must be >= 0; here keeps"),
    "the second, without a word": (["--trainer.callbacks+", "own.Dies"], "process 1 was ended by SIGKILL; here keeps"),
    "both": (["--model.init_args.learning_rate", "1e9"], "train/elbo is "),
}


@pytest.mark.parametrize(("options", "words"), cases(FAILURES, quick=()))
def test_a_process_that_fails_ends_both_with_one_line(options, words, tmp_path):
    (tmp_path / "own.py").write_text(CALLBACKS)
    process = start(tmp_path, *options, "--trainer.default_root_dir", "here", "--trainer.max_epochs", "5")
    _, error = end(process, 120)
    assert process.returncode == 2
    (line,) = error.splitlines()
    assert line.startswith(f"dgm-infer train: error: {words}")
