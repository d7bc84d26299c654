"""The peer of an earlier revision: this project's constrained HMC as a git worktree of that revision has it."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dgm_infer.errors import ConfigError

from . import image_sampling
from .image_sampling import ImageTask
from .workers import Report

__all__ = ["LATE", "revision", "run"]

LATE = 1.5
"""How many times its seconds a process may take, imports included."""


def revision(checkout: str) -> str:
    """The first seven digits of the commit of a worktree.

    Raises:
        ConfigError: it is not a worktree of this project.
    """
    command = ["git", "-C", checkout, "rev-parse", "--short=7", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode or not (Path(checkout) / "dgm_infer").is_dir():
        raise ConfigError(
            f"baseline: {checkout} is not a worktree of this project: git worktree add FOLDER REVISION makes one"
        )
    return found.stdout.strip()


def run(task: ImageTask, report: Report) -> dict[str, Any]:
    """:func:`evaluation.benchmarks.image_sampling.run` in a process that imports the packages of ``task.checkout``.

    Raises:
        RuntimeError: it failed, or was not done after :data:`LATE` times its seconds.
    """
    assert task.checkout is not None
    path = [str(Path(task.checkout).resolve()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "task.json"), Path(folder, "result.npz")
        given.write_text(json.dumps(asdict(task)))
        # -P: the folder of the script is not a place to import from
        command = [sys.executable, "-P", image_sampling.__file__, str(given), str(made)]
        patience = LATE * task.seconds + 20
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"fewer than 20 draws per chain after {patience:.0f} s, ended") from None
        for line in done.stdout.splitlines():
            report(line)
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or "it died").splitlines()[-1])
        with np.load(made) as result:
            return {name: value if value.ndim else value.item() for name, value in result.items()}
