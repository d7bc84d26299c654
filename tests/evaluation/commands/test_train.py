"""The train command, run in the process."""

import gzip
import json
import logging
import resource
import signal
import sys
import warnings
from argparse import ArgumentError as ParseError
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

import generators
from dgm_infer.errors import ArgumentError, CheckpointError, ConfigError
from evaluation.commands.cli import main
from evaluation.commands.train import train
from tests.disks import fill
from tests.files import reference_folder, write_fashion
from tests.quick import cases
from trainers import DigitsData, VAETraining

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

CONFIG = Path(__file__).parents[3] / "configs" / "train" / "digits_vae.yaml"
SHORT = [
    *("--config", str(CONFIG), "--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "1"),
    *("--model.init_args.generator.init_args.hidden", "[16, 16]", "--trainer.enable_progress_bar", "false"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a short run, and what the working directory held."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train(SHORT)
    (folder,) = (home / "runs" / "digits_vae").iterdir()
    return folder


def test_a_run_folder_holds_everything(run):
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    board = {name for name in names if name.startswith("tensorboard/")}
    assert any("tfevents" in name for name in board)
    pictures = {name for name in names if name.startswith("images/")}
    assert pictures == {"images/samples_0002.png", "images/reconstructions_0002.png"}
    names -= board | pictures
    assert names == {
        *("config.yaml", "metrics.csv", "generator.json", "generator.safetensors", "report.html"),
        *("checkpoints/best.ckpt", "checkpoints/last.ckpt"),
    }
    notes = json.loads((run / "generator.json").read_text())["notes"]
    assert notes["config"] == "digits_vae"
    assert notes["seed"] == 1
    assert notes["epochs"] == 2
    assert {"train/elbo", "val/elbo"} <= notes.keys()


def test_generator_and_checkpoint_of_a_run_are_the_same_model(run):
    exported, stored = (
        generators.load(run / "generator.safetensors"),
        generators.load(run / "checkpoints" / "last.ckpt"),
    )
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, stored.state_dict()[name])


@pytest.mark.slow
def test_the_kept_configuration_repeats_the_run_in_a_new_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(["--config", str(run / "config.yaml")])
    (folder,) = (tmp_path / "runs" / "config").iterdir()
    assert (folder / "generator.safetensors").read_bytes() == (run / "generator.safetensors").read_bytes()


@pytest.mark.slow
def test_resuming_goes_on_after_the_checkpoint(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train([*SHORT, "--trainer.max_epochs", "3", "--ckpt_path", str(run / "checkpoints" / "last.ckpt")])
    assert "after epoch 3" in capsys.readouterr().out
    (folder,) = (tmp_path / "runs" / "digits_vae").iterdir()
    rows = (folder / "metrics.csv").read_text().splitlines()
    assert {row.split(",")[0] for row in rows[1:]} == {"2"}


@pytest.mark.parametrize("word", ["best", "last"])
def test_a_checkpoint_of_a_run_that_is_not_named_is_refused(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"ckpt_path={word}: .*name the file, .*/checkpoints/{word}\.ckpt"):
        train([*SHORT, "--ckpt_path", word])
    assert not list(tmp_path.iterdir())


def test_resuming_a_run_that_is_at_its_end_says_so_and_leaves_no_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"last\.ckpt has 2 epochs and 22 steps: nothing is left.*max_epochs"):
        train([*SHORT, "--trainer.max_epochs", "2", "--ckpt_path", str(run / "checkpoints" / "last.ckpt")])
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_screen_shows_what_was_trained_and_where_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train([*SHORT, "--trainer.max_epochs", "1", "--export.path", "mine/digits"])
    captured = capsys.readouterr()
    first, metrics, generator, checkpoint = captured.out.splitlines()
    assert first.startswith("training VAETraining on DigitsData: ")
    assert "val/elbo" in metrics
    assert generator == "generator: mine/digits.safetensors"
    assert Path(checkpoint.removeprefix("checkpoint: ")).is_file()
    assert captured.err == ""
    assert generators.load("mine/digits.safetensors").output_shape == (8, 8)


def test_a_run_that_its_time_limit_ends_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train([*SHORT, "--trainer.max_epochs", "100000", "--trainer.max_time", "00:00:00:01"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "time limit" in line)
    assert line.startswith("stopped by its time limit (trainer.max_time) after 0:00:0")
    assert "of 100000; continue with --ckpt_path" in line


@pytest.mark.slow
def test_the_process_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    state = (torch.get_num_threads(), logger.level, list(warnings.filters), list(sys.path), torch.get_default_dtype())
    train([*SHORT, "--trainer.max_epochs", "1", "--threads", "1"])
    assert state == (
        *(torch.get_num_threads(), logger.level, list(warnings.filters), list(sys.path), torch.get_default_dtype()),
    )


MODULE = """
import lightning.pytorch as pl
import torch


class Mean(pl.LightningModule):
    def __init__(self, rate: float = 0.1):
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(8, 8))
        self.rate = rate

    def training_step(self, batch, batch_idx):
        return (batch[0] - self.mean).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.rate)
"""


# what a larger data set adds is seen in one of them
CONFIGURATIONS = {path.stem: path for path in sorted(CONFIG.parent.glob("*.yaml"))}
QUICK = [name for name in CONFIGURATIONS if name.startswith("digits") or name == "mnist_conv_vae"]


@pytest.mark.parametrize("config", cases(CONFIGURATIONS, QUICK))
def test_every_shipped_configuration_takes_a_step_and_exports_its_generator(config, tmp_path, monkeypatch):
    if "mnist" in config.stem:
        reference_folder("mnist_10k")
    monkeypatch.chdir(tmp_path)
    short = {"max_epochs": 1, "check_val_every_n_epoch": 1, "limit_train_batches": 2, "limit_val_batches": 2}
    # what is looked at now and then is tested by itself
    (checkpoints,) = (
        callback
        for callback in yaml.safe_load(config.read_text())["trainer"]["callbacks"]
        if callback["class_path"].endswith("ModelCheckpoint")
    )
    Path("short.yaml").write_text(yaml.safe_dump({"trainer": short | {"callbacks": [checkpoints]}}))
    quiet = ["--trainer.enable_progress_bar", "false", "--export.path", "made"]
    if "fashion" in config.stem:
        write_fashion(tmp_path)
        for file in tmp_path.glob("*-ubyte"):
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        quiet += ["--data.root", str(tmp_path)]
    train(["--config", str(config), "--config", "short.yaml", *quiet])
    made, best = generators.load("made.safetensors"), generators.load(next(tmp_path.rglob("best.ckpt")))
    assert type(made) is type(best)
    # with two optimisers, if there are two, of which the generator's may take every second step
    assert json.loads(Path("made.json").read_text())["notes"]["steps"] in (2, 3, 4)
    assert config.read_text().startswith("#"), "a header says what it reaches"


DATA = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Stripes(pl.LightningDataModule):
    def __init__(self, n: int = 50):
        super().__init__()
        self.n = n

    def train_dataloader(self):
        columns = torch.arange(4) % 2 == torch.randint(2, (self.n, 1))
        return DataLoader(TensorDataset(columns[:, None].expand(-1, 4, -1).float()), batch_size=10)

    def val_dataloader(self):
        return self.train_dataloader()
"""


@pytest.mark.slow
def test_data_in_the_working_directory_trains_a_model_of_ours(tmp_path, monkeypatch):
    """Two images, of alternating columns: a generator that learnt them makes nothing else."""
    monkeypatch.chdir(tmp_path)
    Path("own_data.py").write_text(DATA)
    generator = {
        "class_path": "generators.IWAE",
        "init_args": {"latent_dim": 1, "output_shape": [4, 4], "hidden": [8]},
    }
    model = {
        "class_path": "trainers.IWAETraining",
        "init_args": {"generator": generator, "samples": 5, "learning_rate": 0.05},
    }
    trainer = {"max_epochs": 120, "accelerator": "cpu", "check_val_every_n_epoch": 120, "enable_progress_bar": False}
    data = {"class_path": "own_data.Stripes", "init_args": {"n": 40}}
    Path("own.yaml").write_text(yaml.safe_dump({"model": model, "data": data, "trainer": trainer}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["train", "--config", "own.yaml", "--export.path", "stripes"]) == 0
    model = generators.load("stripes.safetensors")
    assert isinstance(model, generators.IWAE)
    images = model.generate(200, seed=0).images
    both = torch.tensor([[0.0, 1, 0, 1], [1, 0, 1, 0]])
    share = [(images == columns).flatten(1).all(1).float().mean().item() for columns in both]
    assert sum(share) > 0.8
    assert min(share) > 0.2


def test_a_module_in_the_working_directory_is_named_by_class_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own_training.py").write_text(MODULE)
    config = {"model": {"class_path": "own_training.Mean"}, "data": {"class_path": "trainers.DigitsData"}}
    Path("own.yaml").write_text(yaml.safe_dump(config | {"trainer": {"max_epochs": 1, "accelerator": "cpu"}}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["train", "--config", "own.yaml", "--trainer.enable_progress_bar=false"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("checkpoint: runs/own/")
    assert not list(tmp_path.rglob("generator.*"))


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        (["--trainer.max_epoch", "3"], ParseError, "trainer.max_epoch"),
        (["--trainer.max_epochs", "many"], ParseError, "max_epochs"),
        (["--config", "absent.yaml"], ParseError, "absent.yaml"),
        (["--model.init_args.learning_rate", "-1"], ConfigError, "learning_rate=-1"),
        (["--data.init_args.augmentation.rotation", "-1"], ConfigError, "rotation=-1"),
        (["--data.init_args.batchsize", "3"], ParseError, "batchsize"),
        (["--seed_everything", "-1"], ConfigError, "seed_everything=-1"),
        (["--threads", "0"], ConfigError, "threads=0"),
        (["--ckpt_path", "absent.ckpt"], CheckpointError, "absent.ckpt does not exist"),
        (["--trainer.accelerator", "abacus"], ConfigError, "abacus"),
        (["--trainer.precision", "bf16-true"], ConfigError, "precision=bf16-true.*choose bf16-mixed"),
        (["--trainer.check_val_every_n_epoch", "0"], ConfigError, "check_val_every_n_epoch=0"),
        (["--model.init_args.learning_rate", "1e9"], ArgumentError, "train/elbo is .* in epoch .*lower the learning"),
    ],
)
def test_a_mistake_raises_and_leaves_nothing_behind(extra, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        train([*SHORT, *extra])
    assert not list(tmp_path.iterdir())


STOPPING = "lightning.pytorch.callbacks.EarlyStopping"


def stopping_at(monitor, *callbacks):
    """A configuration that monitors a metric, beside other callbacks."""
    named = [{"class_path": STOPPING, "init_args": {"monitor": monitor}}, *callbacks]
    Path("own.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": named}}))
    return [*SHORT, "--config", "own.yaml"]


def test_a_metric_that_nobody_logs_is_named_before_the_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = []
    monkeypatch.setattr(VAETraining, "training_step", lambda *_: steps.append(0))
    words = (
        r"EarlyStopping: monitor=val_elbo is not logged; did you mean 'val/elbo'\? \(there are train/elbo, val/elbo\)"
    )
    with pytest.raises(ConfigError, match=words):
        train(stopping_at("val_elbo"))
    with pytest.raises(ConfigError, match=r"val_loss is not logged.*held_out/iwae\)"):
        train(stopping_at("val_loss", {"class_path": "trainers.HeldOutEvidence"}))
    assert not steps
    assert not list(tmp_path.glob("runs/*/*"))


def test_a_metric_that_a_callback_of_ones_own_does_not_log_is_one_line_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"conditioned on metric `val_loss`.*`val/elbo`") as caught:
        train(stopping_at("val_loss", {"class_path": f"{__name__}._Stops"}))
    assert "\n" not in str(caught.value)


def test_what_the_trainer_refuses_of_a_gan_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ["--config", str(CONFIG.parent / "digits_gan.yaml"), "--trainer.enable_progress_bar", "false"]
    with pytest.raises(ConfigError, match="gradient accumulation") as caught:
        train([*config, "--trainer.accumulate_grad_batches", "2"])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_generator_leaves_no_folder(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = ["--model.init_args.generator.init_args.latent_dim", "3"]
    with pytest.raises(CheckpointError, match="latent_dim=12"):
        train([*SHORT, *other, "--ckpt_path", str(run / "checkpoints" / "last.ckpt")])
    assert not list(tmp_path.glob("runs/*/*"))


def test_a_folder_with_a_run_in_it_is_not_overwritten(run):
    with pytest.raises(ConfigError, match="already holds a run"):
        train([*SHORT, "--trainer.default_root_dir", str(run)])


@pytest.mark.slow
def test_the_configuration_reproduces_the_shipped_generator(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # without what is looked at on the way, which has tests of its own
    quiet = {"callbacks": [], "check_val_every_n_epoch": 1000, "log_every_n_steps": 1000, "enable_progress_bar": False}
    Path("quiet.yaml").write_text(yaml.safe_dump({"trainer": quiet}))
    train(["--config", str(CONFIG), "--config", "quiet.yaml", "--export.path", "again"])
    images = DigitsData().held_out()
    shipped, again = generators.load("digits_vae"), generators.load("again.safetensors")
    assert isinstance(shipped, generators.GaussianVAE)
    assert isinstance(again, generators.GaussianVAE)
    torch.manual_seed(0)
    with torch.no_grad():
        difference = VAETraining(shipped).elbo(images, 50) - VAETraining(again).elbo(images, 50)
    # the same weights on the machine that made them; elsewhere rounding sends training down another path
    assert difference.mean().abs() < 1.5
    assert again.decoder.sd.item() == pytest.approx(shipped.decoder.sd.item(), abs=0.005)


# ------------------------------------------------------------------------------------------------ what stops a training


class _Stops(Callback):
    """Acts at the first batch of an epoch."""

    epoch = 0

    def act(self):
        pass

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == self.epoch:
            self.act()


STOPS = ["--trainer.callbacks+", f"{__name__}._Stops", "--trainer.max_epochs", "3"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_last_checkpoint_and_says_where_it_is(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_Stops, "act", lambda self: signal.raise_signal(number))
    monkeypatch.setattr(_Stops, "epoch", 1)
    with pytest.raises(SystemExit) as caught:
        main(["train", *SHORT, *STOPS])
    assert caught.value.code == 130
    (checkpoint,) = tmp_path.glob("runs/digits_vae/*/checkpoints/last.ckpt")
    assert f"--ckpt_path {checkpoint.relative_to(tmp_path)}" in capsys.readouterr().out


def test_a_signal_in_the_first_epoch_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_Stops, "act", lambda self: signal.raise_signal(signal.SIGTERM))
    assert main(["train", *SHORT, *STOPS]) == 130
    assert "interrupted before anything could be kept" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_signal_leaves_the_metrics_of_a_run_without_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_Stops, "act", lambda self: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(_Stops, "epoch", 2)
    alone = ["--trainer.callbacks", f"[{{class_path: {__name__}._Stops}}]", "--trainer.enable_checkpointing", "false"]
    with pytest.raises(SystemExit):
        main(["train", *SHORT, *alone, "--trainer.max_epochs", "3"])
    (metrics,) = tmp_path.glob("runs/digits_vae/*/metrics.csv")
    assert len(metrics.read_text().splitlines()) > 1


def test_a_checkpoint_within_the_first_epoch_outlives_an_interrupt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    batches = iter(range(100))
    monkeypatch.setattr(_Stops, "act", lambda self: next(batches) == 4 and signal.raise_signal(signal.SIGINT))
    checkpoint = "lightning.pytorch.callbacks.ModelCheckpoint"
    best, step = {"monitor": "val/elbo", "filename": "best"}, {"every_n_train_steps": 2, "filename": "step"}
    # the configuration's own way is overridden
    callbacks = [{"class_path": checkpoint, "init_args": way} for way in (best, step | {"every_n_epochs": None})]
    callbacks.append({"class_path": f"{__name__}._Stops"})
    Path("own.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    with pytest.raises(SystemExit) as caught:
        main(["train", *SHORT, "--config", "own.yaml"])
    assert caught.value.code == 130
    (kept,) = tmp_path.glob("runs/*/*/checkpoints/*.ckpt")
    assert str(kept.relative_to(tmp_path)) in capsys.readouterr().out


@pytest.mark.parametrize("named", [[], ["--trainer.default_root_dir", "mine"]])
def test_a_disk_that_is_full_from_the_start_is_one_line_before_the_work(named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fill(monkeypatch, tmp_path)
    assert main(["train", *SHORT, *named]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("cannot be made or written to: No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_is_one_line_and_leaves_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(_Stops, "act", lambda self: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1])))
    monkeypatch.setattr(_Stops, "epoch", 1)
    try:
        assert main(["train", *SHORT, *STOPS]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("dgm-infer train: error:")
    assert "File too large" in error
    (checkpoint,) = tmp_path.glob("runs/digits_vae/*/checkpoints/last.ckpt")
    assert error.endswith(f"continue with --ckpt_path {checkpoint.relative_to(tmp_path)}")
    assert torch.load(checkpoint, weights_only=True)["epoch"] == 0
    assert not list(tmp_path.rglob("*.part"))
