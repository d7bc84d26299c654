"""Evidence beside peers in JAX: the annealing that one writes by hand, and BlackJAX's tempering of a regression."""

import math
import tempfile
import time
from collections.abc import Mapping
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer import Gaussian
from dgm_infer.errors import uninterrupted
from dgm_infer.evidence import Method
from generators import IWAE, LatentPosterior

from ..problems.regressions import LogisticRegression
from .workers import one_thread, run_workers, threads

__all__ = ["missing", "plain_annealing", "regressions", "seconds_to"]

# Points at which energies are compared, and independent runs of estimates.
_COMPARED, _RUNS = 4, 20
# The regression: data and features, and the error that seconds are for.
_DATA, _FEATURES, _REGRESSION_ERROR = 200, 19, 0.05
# Particles per chain of the long run.
_TRUTH = 5_000
# BlackJAX: particles, transitions per temperature, step size.
_PARTICLES, _MOVES, _STEP_SIZE = 500, 1, 0.3
# This project's methods, by the names in tables.
_METHODS: Mapping[str, Method | None] = {"default": None, "AIS": dgm.AIS(), "SMC": dgm.SMC()}
_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)
# Seconds after which a peer is ended.
_PATIENCE = 600


def missing() -> str | None:
    """Which packages of the peers are not here, in one line; None if all are."""
    names = [name for name in ("jax", "blackjax") if find_spec(name) is None]
    return f"{' and '.join(names)} not installed: pip install 'dgm-infer[bench]'" if names else None


def seconds_to(error: float, seconds: float, square: float) -> float:
    """Seconds to a standard error, of an estimate whose squared error is ``square``: it falls with the chains."""
    return seconds * square / error**2


def plain_annealing(
    model: IWAE,
    pictures: Tensor,
    chains: int,
    temperatures: int,
    runs: int,
    cores: int,
    seed: int,
    n_steps: int,
    step_size: float,
) -> dict[str, Any]:
    """What :func:`.jax_annealing_peer.run` returns for images, or an ``error``."""
    from .jax_annealing_peer import AnnealingTask

    images = pictures.cpu().flatten(1)
    wide = deepcopy(model).cpu().double()
    with torch.no_grad():
        q = wide.encoder(images.double()).base_dist
    mean, sd = q.mean, q.stddev
    v = torch.randn(_COMPARED, *mean.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    energy, gradient = LatentPosterior(wide.decoder, images.double(), wide.prior).energy_and_gradient(mean + sd * v)
    # less the base's; the constants of the prior and of the base are the same
    ours = {
        "energy": (energy - 0.5 * v.square().sum(-1) - sd.log().sum(-1)).sum(-1) - mean.numel() * _HALF_LOG_2_PI,
        "gradient": (gradient * sd - v).flatten(1),
    }
    given = {
        "decoder": deepcopy(model.decoder.network).cpu(),
        "images": images,
        "mean": mean,
        "sd": sd,
        "points": v.flatten(1).numpy(),
        "ours": {name: part.detach().numpy() for name, part in ours.items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "annealing.pt")
        torch.save(given, path)
        task = AnnealingTask(str(path), chains, temperatures, n_steps, step_size, runs, seed)
        return _run("jax_annealing_peer", task, cores)


def regressions(cores: int, seed: int) -> dict[str, Any]:
    """Seconds to an error of 0.05 in log Z of a logistic regression, by this project's methods and by BlackJAX.

    From a Laplace approximation, in independent runs; errors are about a long run of sequential Monte Carlo. A squared
    error falls as seconds grow: seconds to an error are those of a run times its mean squared error over 0.05^2.
    """
    target = LogisticRegression.simulated(_DATA, _FEATURES, seed)
    began = time.perf_counter()
    base = Gaussian.laplace(target)
    laplace = time.perf_counter() - began
    options: dict[str, Any] = {"progress": False, "keep_draws": False}
    long = uninterrupted(
        dgm.log_evidence(target, base, dgm.SMC(particles=20_000), chains=8, seed=seed + 1000, **options)
    )
    truth = float(long.log_z)
    record: dict[str, Any] = {"log_z": truth, "std_error": float(long.std_error), "dim": target.dim, "laplace": laplace}
    record["methods"] = {}
    for name, method in _METHODS.items():
        found, claimed, seconds = [], [], []
        for run in range(_RUNS):
            began = time.perf_counter()
            estimate = uninterrupted(dgm.log_evidence(target, base, method, seed=seed + run, **options))
            seconds.append(time.perf_counter() - began)
            found.append(float(estimate.log_z))
            claimed.append(float(estimate.std_error))
        record["methods"][name] = _row(np.array(found), np.array(claimed), seconds, truth)
        print(f"  {name}: {record['methods'][name]}", flush=True)
    if reason := missing():
        record["methods"][_PEER] = {"left_out": reason}
        return record
    found = _tempered(target, base, cores, seed)
    if "error" not in found:
        row = _row(found["log_z"], None, found["seconds"], truth)
        found = row | {"compilation": found["compilation"], "agreed": found["agreed"]}
    print(f"  {_PEER}: {found}", flush=True)
    record["methods"][_PEER] = found
    return record


_PEER = "BlackJAX adaptive tempered SMC"


def _tempered(target: LogisticRegression, base: Gaussian, cores: int, seed: int) -> dict[str, Any]:
    from .blackjax_evidence_peer import RegressionTask

    rng = torch.Generator().manual_seed(seed)
    points = base.sample(_COMPARED, rng).double()
    energy, gradient = target.energy_and_gradient(points)
    task = RegressionTask(
        target.design.numpy(),
        target.labels.numpy(),
        base.mean.double().numpy(),
        torch.linalg.cholesky(base.covariance.double()).numpy(),
        _PARTICLES,
        _MOVES,
        _STEP_SIZE,
        _RUNS,
        seed,
        points.numpy(),
        {"energy": energy.detach().numpy(), "gradient": gradient.numpy()},
    )
    return _run("blackjax_evidence_peer", task, cores)


def _row(log_z: np.ndarray, claimed: np.ndarray | None, seconds: list[float], truth: float) -> dict[str, Any]:
    taken, square = float(np.median(seconds)), float(np.mean((log_z - truth) ** 2))
    row = {"seconds": taken, "rmse": square**0.5, "to_rmse": seconds_to(_REGRESSION_ERROR, taken, square)}
    if claimed is not None:
        row["claimed"] = float(np.mean(claimed**2)) ** 0.5
        row["to_claimed"] = seconds_to(_REGRESSION_ERROR, taken, row["claimed"] ** 2)
    return row


def _run(module: str, task: Any, cores: int) -> dict[str, Any]:
    """What a peer returns from a process of its own, or its ``error``."""
    (outcome,) = run_workers(
        f"evaluation.benchmarks.{module}:run",
        [task],
        environment=one_thread() if cores == 1 else threads(cores),
        patience=_PATIENCE,
        report=lambda line: print(f"    {line}", flush=True),
    )
    return outcome.value if outcome.error is None else {"error": outcome.error}
