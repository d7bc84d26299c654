"""Relaxations of frustrated Boltzmann machines: log Z, mean and covariance against time (T 5.6.1, T fig. 5.2).

The five published systems of 30 units with their enumerated truth; without the reference data five of 16 units by the
published recipe, enumerated here. All methods start from one Gaussian, moment-matched to mean-field fits, and six
independent runs of 64 chains go side by side in one batch, so that seconds compare. Two things differ from the
original: step sizes are adapted on pilots, whose time counts, instead of fixed at 0.5; tempering, as annealing, has
many chains per run, not one.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer import Gaussian
from dgm_infer.errors import uninterrupted
from dgm_infer.evidence import Method
from dgm_infer.references.density import weighted_moments

from ..figures import log_evidence
from ..problems.boltzmann import BoltzmannRelaxation, Moments, published_system, random_system
from ..problems.repeated import repeated
from ..reports.kept import NOT_KEPT, Parts
from ..reports.published import GOAL, seconds_to

__all__ = ["run"]

# Leapfrog steps of a transition, as published.
_STEPS = 20
# Functions of a length and a number of chains.
_FAMILIES: dict[str, Callable[[int, int], Method]] = {
    "AIS": lambda k, _: dgm.AIS(temperatures=k, schedule="sigmoid", n_steps=_STEPS),
    "SMC": lambda k, chains: dgm.SMC(particles=chains, temperatures=k, schedule="barrier", n_steps=_STEPS),
    "ST": lambda k, _: dgm.SimulatedTempering(draws=k, n_steps=_STEPS, thin=_thin(k), schedule="sigmoid"),
    "Gibbs CT": lambda k, _: dgm.GibbsTempering(draws=k, n_steps=_STEPS, thin=_thin(k)),
    "CT-HMC": lambda k, _: dgm.ContinuousTempering(draws=k, n_steps=_STEPS, thin=_thin(k)),
}
# Mean-field fits; from 200 on the base of a published system has next to no error in its moments.
_STARTS = 100
_QUANTITIES = ("log_z", "mean", "covariance")


@dataclass(frozen=True)
class Sizes:
    systems: int
    runs: int
    chains: int
    lengths: tuple[int, ...]
    """Temperatures of annealing and of particles, draws of tempering."""


_FULL = Sizes(systems=5, runs=6, chains=64, lengths=(300, 1200, 4800))
_FAST = Sizes(systems=1, runs=2, chains=16, lengths=(50, 150))


@dataclass(frozen=True)
class Errors:
    """Errors of independent runs, or of a deterministic approximation (one run)."""

    log_z: Tensor
    """Signed, ``[runs]``."""
    mean: Tensor
    """Root mean square over the coordinates, ``[runs]``."""
    covariance: Tensor
    """Root mean square over the entries, ``[runs]``."""
    seconds: float = 0.0
    gradient_evaluations: int = 0
    """Gradient evaluations of one run, all chains together."""

    @classmethod
    def of(cls, log_z: Tensor, mean: Tensor, covariance: Tensor, truth: Moments, **spent) -> "Errors":
        return cls(
            log_z.double() - truth.log_z,
            (mean - truth.mean).square().mean(-1).sqrt(),
            (covariance - truth.covariance).square().mean((-2, -1)).sqrt(),
            **spent,
        )


def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict:
    """Write ``errors.png``.

    Args:
        folder: folder of the picture.
        fast: fewer systems, runs, chains and draws.
        data: the reference folder, with ``boltzmann`` in it; None for random systems.
        seed: seed of all randomness.
        parts: what a run that was stopped takes up again.
    """
    sizes = _FAST if fast else _FULL
    published = data is not None and (data / "boltzmann").is_dir()
    found: dict[str, list[list[Errors]]] = {label: [] for label in _FAMILIES}
    bases, chains_of_hmc = [], []
    descriptions = []
    for i in range(sizes.systems):
        if published:
            assert data is not None
            relaxation, truth = published_system(data, i)
        else:
            relaxation = BoltzmannRelaxation(*random_system(16, seed + i))
            truth = relaxation.exact()
        base, _ = parts.value(partial(relaxation.mean_field, _STARTS, seed=seed))
        assert base.log_zeta is not None
        bases.append(Errors.of(base.log_zeta[None], base.mean[None], base.covariance[None], truth))
        descriptions.append({"units": relaxation.units, "dim": relaxation.dim, "log_z": float(truth.log_z)})
        print(f"system {i}: {relaxation.units} units, {relaxation.dim} dimensions, log Z {truth.log_z:.4f}", flush=True)
        for label, method in _FAMILIES.items():
            methods = [method(k, sizes.chains) for k in sizes.lengths]
            found[label].append([_errors(relaxation, base, truth, each, sizes, seed, parts) for each in methods])
        chains_of_hmc.append(_plain_hmc(relaxation, base, truth, sizes, seed, parts))
    curves = {label: _curve(systems, bases) for label, systems in found.items()}
    hmc = {
        **{name: _pooled([errors for errors, _ in chains_of_hmc], bases, name) for name in ("mean", "covariance")},
        "max_r_hat": max(r_hat for _, r_hat in chains_of_hmc),
        "seconds": sum(errors.seconds for errors, _ in chains_of_hmc) / sizes.systems,
    }
    log_evidence.relative_errors(
        folder / "errors.png",
        curves,
        {"mean": hmc["mean"], "covariance": hmc["covariance"]},
        title=f"{sizes.systems} Boltzmann machine relaxations, {sizes.runs} runs of {sizes.chains} chains",
    )
    return {
        "summary": _table(curves, hmc, bases, published),
        "systems": descriptions,
        "runs": sizes.runs,
        "chains": sizes.chains,
        "lengths": list(sizes.lengths),
        "base": [{name: float(getattr(b, name).abs()) for name in _QUANTITIES} for b in bases],
        "methods": curves,
        "plain_hmc": hmc,
    }


def _thin(draws: int) -> int:
    """Thinning that keeps about 400 draws per chain: the log Z estimate uses all states anyway."""
    return max(1, draws // 400)


def _errors(
    relaxation: BoltzmannRelaxation,
    base: Gaussian,
    truth: Moments,
    method: Method,
    sizes: Sizes,
    seed: int,
    parts: Parts = NOT_KEPT,
) -> Errors:
    target, own = repeated(relaxation, base.to(torch.float32), sizes.runs)
    # the particles of one run are its chains
    chains = 1 if isinstance(method, dgm.SMC) else sizes.chains
    options = {"chains": chains, "seed": seed, "coverage": False}
    evidence = uninterrupted(parts.run(dgm.log_evidence, target, own, method, **options)[0])
    assert evidence.draws is not None
    moments = weighted_moments(evidence.draws.flatten(0, 1).double(), evidence.log_weights.flatten(0, 1))
    return Errors.of(
        evidence.log_z,
        moments.mean,
        moments.covariance,
        truth,
        seconds=evidence.diagnostics["seconds"],
        gradient_evaluations=evidence.diagnostics["gradient_evaluations"] * chains,
    )


def _plain_hmc(
    relaxation: BoltzmannRelaxation, base: Gaussian, truth: Moments, sizes: Sizes, seed: int, parts: Parts
) -> tuple[Errors, float]:
    """Chains on the target alone from draws of the base, in runs of one: their errors, and the largest R-hat."""
    rng = torch.Generator().manual_seed(seed)
    start = base.sample((sizes.runs,), rng)
    draws = sizes.lengths[-1] // 2
    options = {"chains": sizes.runs, "warmup": 100, "draws": draws, "seed": seed, "initial": start}
    with warnings.catch_warnings():
        # that the chains disagree is what is shown here
        warnings.simplefilter("ignore", UserWarning)
        result, seconds = parts.run(dgm.sample, relaxation, dgm.HMC(n_steps=_STEPS), **options)
    uninterrupted(result)
    assert result.inputs is not None
    x = result.inputs.double().movedim(0, 1)
    moments = weighted_moments(x, torch.zeros(x.shape[:-1]))
    none = torch.full((sizes.runs,), torch.nan)
    errors = Errors.of(none, moments.mean, moments.covariance, truth, seconds=seconds)
    return errors, float(result.summary()["r_hat"].to_numpy().max())


def _pooled(errors: Sequence[Errors], bases: Sequence[Errors], name: str) -> dict[str, float]:
    """Root mean square over systems and runs in units of the bases' over systems, and its standard error."""
    squares = torch.cat([getattr(e, name) for e in errors]).square()
    unit = torch.cat([getattr(b, name) for b in bases]).square().mean().sqrt()
    value = squares.mean().sqrt()
    error = squares.std() / len(squares) ** 0.5 / (2 * value)
    return {"value": float(value / unit), "error": float(error / unit)}


def _curve(systems: list[list[Errors]], bases: list[Errors]) -> list[dict]:
    """One entry per length: errors relative to the base, and the plain one of log Z, over all systems."""
    entries = []
    for errors in zip(*systems, strict=True):
        log_z = torch.cat([e.log_z for e in errors])
        entries.append(
            {
                "seconds": sum(e.seconds for e in errors) / len(errors),
                "gradient_evaluations": sum(e.gradient_evaluations for e in errors) // len(errors),
                "log_z_rmse": float(log_z.square().mean().sqrt()),
                "log_z_bias": float(log_z.mean()),
                "log_z_rmse_by_system": [float(e.log_z.square().mean().sqrt()) for e in errors],
                **{name: _pooled(errors, bases, name) for name in _QUANTITIES},
            }
        )
    return entries


def _table(curves: dict[str, list[dict]], hmc: dict, bases: list[Errors], published: bool) -> str:
    base = float(torch.cat([b.log_z for b in bases]).square().mean().sqrt())
    lines = [
        f"{'published' if published else 'random'} systems; root mean square errors over systems and runs, of mean and "
        f"covariance in units of the base's; the base's guess of log Z is {base:.3f} off",
        f"{'':9}  seconds  gradients   log Z   bias   mean    cov  s to {GOAL:g}  s to mean 1",
    ]
    for label, entries in curves.items():
        for e in entries:
            # errors fall with the square root of time, where they are not bias
            to_mean = e["seconds"] * e["mean"]["value"] ** 2
            lines.append(
                f"{label:9}  {e['seconds']:7.1f}  {e['gradient_evaluations']:9d}  {e['log_z_rmse']:6.3f} "
                f"{e['log_z_bias']:6.3f} {e['mean']['value']:6.2f} {e['covariance']['value']:6.2f}  "
                f"{seconds_to(e):8.1f}  {to_mean:11.1f}"
            )
    lines.append(
        f"plain HMC  {hmc['seconds']:6.1f}  {'':9}  {'':6} {'':6} {hmc['mean']['value']:6.2f} "
        f"{hmc['covariance']['value']:6.2f}   largest R-hat {hmc['max_r_hat']:.2f}: no method for this target"
    )
    return "\n".join(lines)
