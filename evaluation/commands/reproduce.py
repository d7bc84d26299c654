"""The ``reproduce`` command: run a published experiment and keep its numbers and pictures."""

import importlib
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dgm_infer import __version__
from dgm_infer.arguments import random_seed
from dgm_infer.errors import ConfigError, extra
from dgm_infer.files import write_file
from evaluation.reports.folders import CONFIGURATION, complete_run

from .. import experiments
from ..experiments.reference import reference_folder
from ..reports.kept import Parts, kept_run
from ..reports.page import code, pictures, write_report
from ..reports.records import announce, write_record
from .keeping import keep
from .options import make_parser, parse, resumed

__all__ = ["reproduce", "run"]

# what the configuration of a run holds: arguments of reproduce()
_KEPT = ("name", "fast", "seed", "data", "command")


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer reproduce NAME [--fast] [--data FOLDER] [--seed N] [--output FOLDER]``, or ``--resume RUN``."""
    folder = resumed(arguments)
    if folder is not None:
        reproduce(**_settings(folder), resume=folder)
        return
    parser = make_parser("reproduce", "experiments")
    # described in the docstring of reproduce()
    parser.add_argument("name")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--data")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", default="runs")
    options = vars(parse(parser, arguments))
    reproduce(**options, command=["dgm-infer", "reproduce", *arguments])


def _settings(folder: Path) -> dict[str, Any]:
    """What a run of an experiment was begun with.

    Raises:
        ConfigError: the run is of another command.
    """
    try:
        found = json.loads((folder / CONFIGURATION).read_text())
        return {name: found[name] for name in _KEPT}
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--resume {folder}: holds no run of reproduce") from error


def reproduce(
    name: str,
    *,
    fast: bool = False,
    data: str | None = None,
    seed: int = 1,
    output: str = "runs",
    command: Sequence[str] = (),
    resume: Path | None = None,
) -> Path:
    """Run a published experiment; results go to ``<output>/reproduce_<name>/<time>/``.

    Args:
        name: one of :data:`evaluation.experiments.EXPERIMENTS`.
        fast: a smoke run under a minute, whose numbers mean little.
        data: the reference folder, for the experiments that need one; None for the environment variable
            ``DGM_INFER_REFERENCE_DATA``.
        seed: seed of all randomness.
        output: folder of all runs.
        command: the command line, kept with the results.
        resume: the folder of a run of this experiment that was stopped, which goes on; None for a new one.

    Returns:
        the run folder, with ``results.json``, ``log.txt`` and the experiment's pictures.

    Raises:
        ConfigError: no such experiment, or no such folder.
        KeyboardInterrupt: interrupted; the run folder keeps what the experiment had written and computed.
    """
    if name not in experiments.EXPERIMENTS:
        raise ConfigError(f"no experiment {name!r} (there are {', '.join(experiments.EXPERIMENTS)})")
    seed = random_seed("reproduce", seed)
    reference = reference_folder(data)
    with extra("experiments"):
        experiment = importlib.import_module(f"{experiments.__name__}.{name}")
    settings = {"fast": fast, "seed": seed, "data": None if reference is None else str(reference.absolute())}
    asked = json.dumps({"name": name, **settings, "command": list(command)}, indent=1) + "\n"
    made = complete_run(f"reproduce_{name}", output, asked, resume)
    with made as folder, kept_run(folder, "run", "reproduce") as run:
        parts = Parts(run.path)
        started, before = time.perf_counter(), parts.seconds
        results = dict(experiment.run(folder, fast=fast, data=reference, seed=seed, parts=parts))
        seconds = before + time.perf_counter() - started
        summary = results.pop("summary", "")
        record = {
            "experiment": name,
            "settings": settings,
            "command": list(command),
            "versions": {
                "dgm_infer": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            "threads": torch.get_num_threads(),
            "seconds": seconds,
            "results": results,
        }
        text = "\n".join([summary.rstrip("\n"), f"{seconds:.0f} s in all, seed {seed}"]).lstrip("\n") + "\n"
        keep(lambda path: write_record(path, record, indent=1), folder / "results.json")
        write_file(folder / "log.txt", text)
        again = " ".join(command) or f"dgm-infer reproduce {name}"
        sections = [
            ("Pictures", pictures(sorted(folder.glob("*.png")))),
            ("Numbers", code(text)),
            ("How to do it again", code(again)),
        ]
        write_report(folder, f"Reproduced: {name}", experiments.EXPERIMENTS[name], sections)
        run.is_saved = not results.get("interrupted")
        run.clear()
        announce(text, folder)
        if not run.is_saved:
            raise KeyboardInterrupt
    return folder
