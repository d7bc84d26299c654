"""The ``train`` command: LightningCLI's ``fit`` with a run folder, a tidy screen and a generator at the end."""

import math
import signal
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

# first: Lightning builds its command line with it, and its own error would not name the extra
import jsonargparse  # noqa: F401
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from dgm_infer.arguments import whole_number
from dgm_infer.errors import ConfigError, DgmInferError, cause, extra, reported_as
from dgm_infer.files import make_folder
from dgm_infer.html import table
from evaluation.reports.folders import check_room, new_folder, remove_folders
from generators.weights import read_checkpoint
from trainers.export import SaveGenerator
from trainers.progress import TrainingProgress
from trainers.quiet import quiet
from trainers.resuming import RandomState, WholeFiles

from ..reports.page import code, pictures, write_report
from .messages import suggest
from .options import check_configurations
from .processes import REPORTED, is_launched, together

__all__ = ["run", "train"]


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer train --config FILE``: see :func:`train`."""
    train(list(arguments))


def train(args: list[str]) -> None:
    """Train what a configuration names: ``--config FILE [--trainer.max_epochs N --ckpt_path FILE ...]``.

    Results go to ``runs/<config>/<time>/`` unless ``trainer.default_root_dir`` says otherwise.

    Raises:
        ConfigError, argparse.ArgumentError: a mistake in the options or the configuration file.
        CheckpointError: the checkpoint to resume from is missing, damaged or of another generator.
        KeyboardInterrupt: interrupted before the first epoch or checkpoint was done; nothing is left behind.
        SystemExit: with code 130, interrupted later; a line says where the last checkpoint is.
    """
    threads = torch.get_num_threads()
    try:
        with quiet():
            if is_launched():
                # the first process gives the same warnings
                warnings.simplefilter("ignore")
            TrainCLI(args)
    finally:
        torch.set_num_threads(threads)


class TrainCLI(LightningCLI):
    """Any LightningModule and LightningDataModule by class path, and every flag of ``Trainer`` and ``fit``."""

    def __init__(self, args: list[str]):
        strict = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            args=["fit", *args],
            seed_everything_default=0,
            parser_kwargs={"prog": "dgm-infer train", **strict, "fit": dict(strict)},
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": LightningCLI.subcommands()["fit"]}

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        super().setup_parser(*args, **kwargs)
        # the word "fit" is implied, so the usage must not ask for it
        self._subcommand_parsers["fit"].prog = "dgm-infer train"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(SaveGenerator, "export")
        parser.add_argument(
            "--threads",
            type=int | None,
            default=None,
            help="PyTorch's threads in this run; small networks are fastest with 1. Null leaves the process as it is.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        check_configurations(args or ())
        super().parse_arguments(parser, args)
        settings = self.config["fit"]
        seed = settings["seed_everything"]
        threads = settings["threads"]
        with reported_as(ConfigError):
            # the most that NumPy's generators take
            whole_number("train", "seed_everything", int(seed), 0, 2**32 - 1)
            if threads is not None:
                whole_number("train", "threads", threads)
            if settings["trainer"]["check_val_every_n_epoch"] is not None:
                whole_number("train", "trainer.check_val_every_n_epoch", settings["trainer"]["check_val_every_n_epoch"])
        precision = str(settings["trainer"]["precision"])
        if precision.endswith("16-true"):
            mixed = precision.replace("-true", "-mixed")
            raise ConfigError(f"trainer.precision={precision}: bounds of 16 bits mean little; choose {mixed}")
        _save_between_epochs(settings["trainer"])
        files = settings.get("config") or []
        self.name = Path(str(files[-1])).stem if files else "train"
        checkpoint, self.resumed_step = settings["ckpt_path"], None
        if checkpoint in ("best", "last"):
            raise ConfigError(
                f"ckpt_path={checkpoint}: every run has a folder of its own, without a checkpoint yet: name the file, "
                f"runs/{self.name}/<time>/checkpoints/{checkpoint}.ckpt"
            )
        if checkpoint not in (None, "hpc") and "://" not in str(checkpoint):
            stored = read_checkpoint(Path(checkpoint))
            self.resumed_step = stored.get("global_step") if isinstance(stored, dict) else None
        folder = settings["trainer"]["default_root_dir"]
        if folder is not None and (Path(folder) / "config.yaml").exists():
            raise ConfigError(
                f"trainer.default_root_dir={folder} already holds a run: name another, or none for runs/{self.name}/"
            )

    def before_instantiate_classes(self) -> None:
        threads = self._get(self.config, "threads")
        if threads is not None:
            # train() puts it back
            torch.set_num_threads(threads)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except MisconfigurationException as error:
            raise ConfigError(cause(error, 300)) from error
        except ValueError as error:
            raise ConfigError(_innermost(error)) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        # given here and not as defaults, so that the configuration kept with a run starts a new run in a new folder
        settings = self._get(self.config_init, "trainer")
        self.folder = self._make_folder(settings["default_root_dir"])
        try:
            return self._trainer_in_folder(settings, kwargs | {"default_root_dir": self.folder})
        except BaseException:
            remove_folders(self.made)
            raise

    def _trainer_in_folder(self, settings: Any, kwargs: dict[str, Any]) -> Trainer:
        if settings["logger"] in (None, True):
            with extra("train"):
                # Lightning's own error would name two packages and no extra
                import tensorboard  # noqa: F401
            # the first one's folder is that of the run
            board = TensorBoardLogger(self.folder, name="", version="tensorboard", default_hp_metric=False)
            kwargs["logger"] = [CSVLogger(self.folder, name="", version=""), board]
        plugins = settings["plugins"] or []
        plugins = list(plugins) if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(WholeFiles())
        callbacks = settings["callbacks"] or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        if settings["enable_progress_bar"] is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(TrainingProgress())
        callbacks.append(RandomState())
        if settings["enable_checkpointing"] is not False and not any(isinstance(c, Checkpoint) for c in callbacks):
            # as Lightning's own, but between epochs
            callbacks.append(ModelCheckpoint(save_on_train_epoch_end=True))
        return super().instantiate_trainer(callbacks=callbacks, plugins=plugins, **kwargs)

    def _make_folder(self, named: str | None) -> Path:
        """The folder of the run, made by the first of its processes."""
        self.made: list[Path] = []
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return Path(named or self.name)
        try:
            self.made = new_folder(self.name) if named is None else make_folder(Path(named))
            folder = Path(named) if named else self.made[0]
            check_room(folder)
        except OSError as error:
            remove_folders(self.made)
            where = f"trainer.default_root_dir={named}" if named else f"a folder in runs/{self.name}"
            raise ConfigError(f"{where} cannot be made or written to: {error.strerror}") from error
        return folder

    def before_fit(self) -> None:
        self.export: SaveGenerator = self._get(self.config_init, "export")
        given = self.export.notes
        self.export.notes = {"config": self.name, "seed": self._get(self.config, "seed_everything"), **given}
        self._check_monitors()
        data = "" if self.datamodule is None else f" on {type(self.datamodule).__name__}"
        n_parameters = sum(p.numel() for p in self.model.parameters())
        folder = "" if self.trainer.fast_dev_run else f", in {self.folder}"  # type: ignore[attr-defined]
        _say(self.trainer, f"training {type(self.model).__name__}{data}: {n_parameters} parameters{folder}")

    def _check_monitors(self) -> None:
        """Refuse callbacks that wait for a metric that nobody logs, where it is known what is logged."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        known = ("lightning.", "trainers.", "evaluation.commands.")
        sources = [self.model, *callbacks]
        # a user's own module or callback may log anything
        if not all(type(source).__module__.startswith(known) for source in sources):
            return
        logged = [name for source in sources for name in getattr(source, "metrics", ())]
        for callback in callbacks:
            monitor = getattr(callback, "monitor", None)
            if monitor is not None and monitor not in logged:
                remove_folders(self.made)
                raise ConfigError(
                    f"{type(callback).__name__}: monitor={monitor} is not logged{suggest(monitor, logged)} (there are "
                    f"{', '.join(logged)})"
                )

    def fit(self, **kwargs: Any) -> None:
        """``Trainer.fit``; leaves no folder behind when it is refused or interrupted before it has trained an epoch."""
        on_interrupt = signal.getsignal(signal.SIGINT)
        try:
            with together(self.trainer, self._last_words):
                self._fit(**kwargs)
                if self.trainer.global_step == self.resumed_step:
                    raise ConfigError(
                        f"ckpt_path={kwargs['ckpt_path']} has {self.trainer.current_epoch} epochs and "
                        f"{self.resumed_step} steps: nothing is left to train; raise trainer.max_epochs"
                    )
        except (*REPORTED, SystemExit, KeyboardInterrupt) as error:
            checkpoint = self._checkpoint()
            # metrics of finished epochs are results too
            unfinished = checkpoint is None and not self.trainer.fit_loop.epoch_progress.current.completed
            if unfinished or self.trainer.global_step == self.resumed_step:
                remove_folders(self.made)
            if isinstance(error, SystemExit | KeyboardInterrupt):
                # Lightning ends the process on an interrupt
                if unfinished:
                    raise KeyboardInterrupt from error
                _say(self.trainer, self._last_words())
                raise SystemExit(130) from error
            refused = error if isinstance(error, DgmInferError) else ConfigError(cause(error, 300))
            if self.folder.exists() and self.made:
                refused.add_note(f"{self.folder} keeps what was finished; {self._go_on()}")
            raise refused from error.__cause__
        finally:
            # which Lightning has switched off if there was an interrupt
            signal.signal(signal.SIGINT, on_interrupt)

    def _fit(self, **kwargs: Any) -> None:
        try:
            self.trainer.fit(**kwargs)
        except RuntimeError as error:
            # EarlyStopping's refusal of a metric that does not exist
            if "conditioned on metric" not in str(error):
                raise
            raise ConfigError(cause(error, 300)) from error

    def after_fit(self) -> None:
        limit = next((c for c in self.trainer.callbacks if isinstance(c, Timer)), None)  # type: ignore[attr-defined]
        # a run that ended by itself has no epochs left
        epochs = self.trainer.max_epochs or 0
        if limit is not None and (limit.time_remaining() or 0) <= 0 and not 0 <= epochs <= self.trainer.current_epoch:
            elapsed = timedelta(seconds=round(limit.time_elapsed()))
            of = f" of {epochs}" if epochs > 0 else ""
            checkpoint = self._checkpoint()
            more = "" if checkpoint is None else f"; continue with --ckpt_path {checkpoint} and a larger limit"
            _say(
                self.trainer,
                f"stopped by its time limit (trainer.max_time) after {elapsed}, {self.trainer.global_step} steps, in "
                f"epoch {self.trainer.current_epoch + 1}{of}{more}",
            )
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        if metrics:
            figures = ", ".join(f"{name} {value:.2f}" for name, value in metrics.items())
            _say(self.trainer, f"after epoch {self.trainer.current_epoch}: {figures}")
        if self.trainer.is_global_zero and self.folder.is_dir():
            self._write_report(metrics)
        for what, path in (("generator", self.export.written), ("checkpoint", self._checkpoint())):
            if path is not None:
                _say(self.trainer, f"{what}: {path}")

    def _write_report(self, metrics: dict[str, float]) -> None:
        model = self.export.written
        again = [f"dgm-infer train --config {self.folder / 'config.yaml'} --ckpt_path {self._checkpoint()}"]
        if model is not None:
            again.append(f"dgm-infer condition --name {self.name} --generator {model} --images FOLDER --mask mask.png")
        rows = list(metrics.items())
        config = self.folder / "config.yaml"
        sections = [
            ("Pictures", pictures(sorted(self.folder.rglob("*.png"))[-4:])),
            ("Last metrics", table(("metric", "value"), rows) if rows else ""),
            ("How to go on", code("\n".join(again))),
            ("What was asked", code(config.read_text()) if config.is_file() else ""),
        ]
        lead = f"{type(self.model).__name__}, {self.trainer.current_epoch} epochs, {self.trainer.global_step} steps"
        write_report(self.folder, f"Training: {self.name}", lead, sections)

    def _go_on(self) -> str:
        checkpoint = self._checkpoint()
        return f"continue with --ckpt_path {checkpoint}" if checkpoint else "there is no checkpoint"

    def _last_words(self) -> str:
        return f"interrupted in epoch {self.trainer.current_epoch + 1}: {self._go_on()}"

    def _checkpoint(self) -> Path | None:
        callbacks = self.trainer.checkpoint_callbacks
        paths = [getattr(c, name, "") for name in ("last_model_path", "best_model_path") for c in callbacks]
        return next((Path(path) for path in paths if path and Path(path).exists()), None)


def _save_between_epochs(trainer: Any) -> None:
    """Let checkpoints of epochs be written when their epoch has ended.

    After a validation Lightning would write them from within the epoch, which a run that resumes from one ends another
    time.
    """
    every = trainer["check_val_every_n_epoch"]
    if every is None or trainer["val_check_interval"] not in (None, 1.0) or not isinstance(trainer["callbacks"], list):
        return
    for callback in trainer["callbacks"]:
        given = callback.get("init_args") or {}
        own = ("every_n_train_steps", "train_time_interval", "save_on_train_epoch_end")
        if callback["class_path"].endswith(".ModelCheckpoint") and all(given.get(option) is None for option in own):
            if given.get("monitor") is not None:
                # where there is a validation, as Lightning would
                own_epochs = given.get("every_n_epochs")
                given["every_n_epochs"] = math.lcm(every if own_epochs is None else own_epochs, every)
            given["save_on_train_epoch_end"] = True
            callback["init_args"] = given


def _innermost(error: BaseException) -> str:
    """What went wrong, without jsonargparse's report around it."""
    cause = error
    while not isinstance(cause, DgmInferError) and (deeper := cause.__cause__ or cause.__context__) is not None:
        cause = deeper
    return str(cause)


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        print(text)
