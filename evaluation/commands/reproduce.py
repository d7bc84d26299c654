"""The ``reproduce`` command: run a published experiment and keep its numbers and pictures."""

import importlib
import platform
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch

from dgm_infer import __version__
from dgm_infer.arguments import random_seed
from dgm_infer.errors import ConfigError
from dgm_infer.extras import extra
from dgm_infer.files import REFERENCE_DATA, complete_run, write_file

from .. import experiments
from ..experiments.reference import reference_folder
from ..reports.records import announce, write_record
from .keeping import keep
from .messages import suggest
from .options import make_parser, parse

__all__ = ["reproduce", "run"]


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer reproduce NAME [--fast] [--data FOLDER] [--seed N] [--output FOLDER]``."""
    known = experiments.EXPERIMENTS
    width = max(map(len, known))
    lines = "".join(f"\n  {name:{width}}  {line}" for name, line in known.items())
    parser = make_parser(
        "reproduce",
        "experiments",
        description=f"Run a published experiment:{lines}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", default="", help="one of the experiments above")
    parser.add_argument("--fast", action="store_true", help="a smoke run under a minute, whose numbers mean little")
    parser.add_argument("--data", help=f"the reference folder, if one is needed (default: ${REFERENCE_DATA})")
    parser.add_argument("--seed", type=int, default=1, help="of all randomness (default: 1)")
    parser.add_argument("--output", default="runs", help="folder of all runs (default: runs)")
    options = vars(parse(parser, arguments))
    name = options["name"]
    if name not in known:
        raise ConfigError(f"no experiment {name!r}{suggest(name, known)} (there are {', '.join(known)})")
    reproduce(**options, command=["dgm-infer", "reproduce", *arguments])


def reproduce(
    name: str,
    *,
    fast: bool = False,
    data: str | None = None,
    seed: int = 1,
    output: str = "runs",
    command: Sequence[str] = (),
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

    Returns:
        the run folder, with ``results.json``, ``log.txt`` and the experiment's pictures.

    Raises:
        ConfigError: no such experiment, or no such folder.
        KeyboardInterrupt: interrupted; the run folder keeps what the experiment had written.
    """
    if name not in experiments.EXPERIMENTS:
        raise ConfigError(f"no experiment {name!r} (there are {', '.join(experiments.EXPERIMENTS)})")
    seed = random_seed("reproduce", seed)
    reference = reference_folder(data)
    with extra("experiments"):
        experiment = importlib.import_module(f"{experiments.__name__}.{name}")
    with complete_run(f"reproduce_{name}", output) as folder:
        started = time.perf_counter()
        results = dict(experiment.run(folder, fast=fast, data=reference, seed=seed))
        seconds = time.perf_counter() - started
        summary = results.pop("summary", "")
        record = {
            "experiment": name,
            "settings": {"fast": fast, "seed": seed, "data": None if reference is None else str(reference)},
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
        announce(text, folder)
        if results.get("interrupted"):
            raise KeyboardInterrupt
    return folder
