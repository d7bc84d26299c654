"""The peer of evidence on regressions: BlackJAX's adaptive tempered sequential Monte Carlo from a Gaussian base."""

import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .jax_images import Function, differences, jax, jnp, precision
from .workers import Clock, Report

__all__ = ["RegressionTask", "regression_energy", "run"]

blackjax: Any = importlib.import_module("blackjax")
resampling: Any = importlib.import_module("blackjax.smc.resampling")

# Effective share of particles at which the next temperature is set, and leapfrog steps per transition.
_TARGET_ESS, _STEPS = 0.5, 3


@dataclass(frozen=True)
class RegressionTask:
    """What one process estimates.

    Args:
        design: ``[N, D]``.
        labels: ``[N]``.
        mean: ``[D]`` of the base.
        cholesky: ``[D, D]`` of its covariance.
        particles: their number.
        moves: transitions per temperature.
        step_size: in the base's coordinates.
        runs: independent ones.
        seed: of the first; the others follow.
        points: ``[k, D]``, at which energies are compared.
        ours: this project's ``energy [k]`` and ``gradient [k, D]`` there.
    """

    design: np.ndarray
    labels: np.ndarray
    mean: np.ndarray
    cholesky: np.ndarray
    particles: int
    moves: int
    step_size: float
    runs: int
    seed: int
    points: np.ndarray
    ours: dict[str, np.ndarray]


def regression_energy(design: np.ndarray, labels: np.ndarray) -> Function:
    """That of :class:`evaluation.problems.regressions.LogisticRegression`, ``[D] -> []``."""
    constant = 0.5 * design.shape[1] * math.log(2 * math.pi)

    def energy(w):
        logits = jnp.asarray(design) @ w
        return 0.5 * (w @ w) + constant + (jax.nn.softplus(logits) - jnp.asarray(labels) * logits).sum()

    return energy


def run(task: RegressionTask, report: Report) -> dict[str, Any]:
    """Independent estimates of log Z, float64.

    Returns:
        ``log_z`` ``[runs]``, ``seconds`` of every run, compiled, and ``compilation``; ``agreed``.
    """
    energy = regression_energy(task.design, task.labels)
    agreed = differences(energy, task.points, task.ours)
    with precision("float64"):
        clock = Clock(math.inf)
        run_once = jax.jit(_tempered(task, energy)).lower(jax.random.key(0)).compile()
        compilation = clock.elapsed
        report(f"compiled in {compilation:.1f} s")
        log_z, seconds = [], []
        for i in range(task.runs):
            before = clock.elapsed
            log_z.append(float(run_once(jax.random.key(task.seed + i))))
            seconds.append(clock.elapsed - before)
    report(f"{task.runs} runs of {np.median(seconds):.4f} s, sd of log Z {np.std(log_z, ddof=1):.3f}")
    return {"log_z": np.array(log_z), "seconds": seconds, "compilation": compilation, "agreed": agreed}


def _tempered(task: RegressionTask, energy: Function) -> Function:
    """``key -> log Z``, in coordinates in which the base is standard normal."""
    dim = len(task.mean)
    mean, cholesky = jnp.asarray(task.mean), jnp.asarray(task.cholesky)
    volume = jnp.log(jnp.diagonal(cholesky)).sum() + 0.5 * dim * math.log(2 * math.pi)

    def log_prior(v):
        return -0.5 * (v @ v)

    def log_weight(v):
        return -energy(mean + cholesky @ v) + 0.5 * (v @ v) + volume

    parameters = {"step_size": task.step_size, "inverse_mass_matrix": jnp.ones(dim), "num_integration_steps": _STEPS}
    sampler = blackjax.adaptive_tempered_smc(
        log_prior,
        log_weight,
        blackjax.hmc.build_kernel(),
        blackjax.hmc.init,
        blackjax.smc.extend_params(parameters),
        resampling.systematic,
        _TARGET_ESS,
        num_mcmc_steps=task.moves,
    )

    def tempered(key):
        first, key = jax.random.split(key)
        state = sampler.init(jax.random.normal(first, (task.particles, dim)))

        def once(carry):
            key, state, log_z = carry
            key, own = jax.random.split(key)
            state, info = sampler.step(own, state)
            return key, state, log_z + info.log_likelihood_increment

        carry = jax.lax.while_loop(lambda carry: carry[1].tempering_param < 1, once, (key, state, jnp.zeros(())))
        return carry[2]

    return tempered
