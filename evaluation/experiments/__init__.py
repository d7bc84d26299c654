"""The published experiments: what ``dgm-infer reproduce NAME`` runs.

An experiment is a module of this folder, named as in :data:`EXPERIMENTS`, with one function::

    def run(folder: Path, *, fast: bool, data: Path | None, seed: int) -> dict

It writes its pictures into ``folder`` and returns its results, ready for JSON; the text under the key ``"summary"``,
if there is one, is printed and kept as ``log.txt``.
"""

import importlib
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dgm_infer import __version__
from dgm_infer.errors import ArgumentError, ConfigError
from dgm_infer.extras import extra
from dgm_infer.files import complete_run

__all__ = ["EXPERIMENTS", "REFERENCE_DATA", "reproduce", "required_data"]

EXPERIMENTS = {
    "quantile": "parameters of a generalised lambda distribution from 250 observations (J 10.1)",
    "lotka_volterra": "predator-prey dynamics from the full series and from nine summaries (J 10.2)",
    "pose": "human poses from binocular and monocular projections (J 10.3; needs the reference data)",
    "inpainting": "MNIST digits of which the top quarter is observed (needs the reference data)",
    "boltzmann": "log Z and moments of Boltzmann machine relaxations, against time (T 5.6.1)",
    "radon": "evidence of a hierarchical regression by tempering of a Pyro program (T 5.6.3; needs the reference data)",
    "iwae": "log p(x) of images under an IWAE, against time (T 5.6.2; needs the reference data)",
}
"""Names and one line each; the modules are imported when they are run."""

REFERENCE_DATA = "DGM_INFER_REFERENCE_DATA"
"""Environment variable that names the reference folder where ``data`` does not."""


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
        name: one of :data:`EXPERIMENTS`.
        fast: a smoke run under a minute, whose numbers mean little.
        data: the reference folder, for the experiments that need one; None for the environment variable
            ``DGM_INFER_REFERENCE_DATA``.
        seed: of all randomness.
        output: folder of all runs.
        command: the command line, kept with the results.

    Returns:
        the run folder, with ``results.json``, ``log.txt`` and the experiment's pictures.

    Raises:
        ConfigError: no such experiment, or no such folder.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment {name!r} (there are {', '.join(EXPERIMENTS)})")
    if seed < 0:
        raise ArgumentError(f"seed={seed}: must be 0 or more")
    if data is not None and not Path(data).is_dir():
        raise ConfigError(f"data: {data} is no folder; name the reference data's")
    data = data or os.environ.get(REFERENCE_DATA)
    with extra("experiments"):
        experiment = importlib.import_module(f"{__name__}.{name}")
    with complete_run(f"reproduce_{name}", output) as folder:
        started = time.perf_counter()
        results = dict(experiment.run(folder, fast=fast, data=Path(data) if data else None, seed=seed))
        seconds = time.perf_counter() - started
        summary = results.pop("summary", "")
        record = {
            "experiment": name,
            "settings": {"fast": fast, "seed": seed, "data": data},
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
        (folder / "log.txt").write_text(text)
        (folder / "results.json").write_text(json.dumps(_strict(record), indent=1, allow_nan=False) + "\n")
    print(text, end="")
    print(f"results in {folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())))
    return folder


def required_data(data: Path | None, name: str, origin: str) -> Path:
    """The reference folder, with ``name`` in it.

    Args:
        origin: where the files are to be had, for the message.

    Raises:
        ConfigError: it is not there.
    """
    if data is None or not (data / name).is_dir():
        raise ConfigError(
            f"data: {data or 'not given'}; name the folder that has {name} in it (--data FOLDER): {origin}"
        )
    return data


def _strict(value: Any) -> Any:
    """The value with null for what JSON has no number for, such as the R-hat of a chain that never moved."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
