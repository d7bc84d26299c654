"""The peer of annealing: the loop that one would write in JAX, with a fixed step size and fixed temperatures."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .jax_images import Function, differences, jax, jnp, network, precision
from .workers import Clock, Report

__all__ = ["AnnealingTask", "annealed", "run", "whitened_energies"]


@dataclass(frozen=True)
class AnnealingTask:
    """What one process anneals.

    Args:
        path: file of ``decoder`` (its network of logits), binary ``images [n, Dx]``, ``mean`` and ``sd [n, Dz]`` of the
            base, and ``ours``: this project's ``energy`` and ``gradient``, all images together, at ``points``.
        chains: chains per image.
        temperatures: K.
        n_steps: leapfrog steps per temperature.
        step_size: in standard deviations of the base.
        runs: independent ones.
        seed: of the first; the others follow.
    """

    path: str
    chains: int
    temperatures: int
    n_steps: int
    step_size: float
    runs: int
    seed: int


def whitened_energies(decoder: Function, images: Any, mean: Any, sd: Any) -> Function:
    """``log q(z) - log p(x, z)`` at ``z = mean + sd v``, ``[..., n, Dz] -> [..., n]``: less the logs of weights.

    The mean of ``exp(-energy)`` under standard normal ``v`` is ``p(x)``.
    """
    log_sd = jnp.log(sd).sum(-1)

    def energies(v):
        z = mean + sd * v
        logits = decoder(z.reshape(-1, z.shape[-1])).reshape(*z.shape[:-1], -1)
        misfit = (jax.nn.softplus(logits) - images * logits).sum(-1)
        return misfit + 0.5 * jnp.square(z).sum(-1) - 0.5 * jnp.square(v).sum(-1) - log_sd

    return energies


def annealed(energies: Function, shape: tuple[int, ...], betas: np.ndarray, n_steps: int, step_size: float) -> Any:
    """Annealed importance sampling between standard normals and ``exp(-energies - |v|^2/2)`` along ``beta``.

    Args:
        energies: ``[*shape] -> [*shape[:-1]]``, of the weights.
        shape: of all points.
        betas: from 0 to 1.
        n_steps: leapfrog steps per temperature.
        step_size: of every step.

    Returns:
        the compiled ``key -> (log weights [*shape[:-1]], mean acceptance)``.
    """

    def transition(carry, at):
        v, w, log_weight, slope, accepted = carry
        key, beta, before = at
        log_weight = log_weight - (beta - before) * w
        first, second = jax.random.split(key)
        p = jax.random.normal(first, shape)
        kinetic = 0.5 * jnp.square(p).sum(-1)

        def leapfrog(state, _):
            v, p, _, slope = state
            p = p - 0.5 * step_size * (v + beta * slope)
            v = v + step_size * p
            w, slope = value_and_slope(v)
            return (v, p - 0.5 * step_size * (v + beta * slope), w, slope), None

        (v1, p1, w1, slope1), _ = jax.lax.scan(leapfrog, (v, p, w, slope), None, length=n_steps)
        total = kinetic + 0.5 * jnp.square(v).sum(-1) + beta * w
        total1 = 0.5 * jnp.square(p1).sum(-1) + 0.5 * jnp.square(v1).sum(-1) + beta * w1
        accept = jnp.log(jax.random.uniform(second, w.shape)) < total - total1
        keep = accept[..., None]
        moved = jnp.where(keep, v1, v), jnp.where(accept, w1, w), log_weight, jnp.where(keep, slope1, slope)
        return (*moved, accepted + accept.mean() / (len(betas) - 1)), None

    def value_and_slope(v):
        w, back = jax.vjp(energies, v)
        return w, back(jnp.ones_like(w))[0]

    @jax.jit
    def run(key):
        first, second = jax.random.split(key)
        v = jax.random.normal(first, shape)
        w, slope = value_and_slope(v)
        keys = jax.random.split(second, len(betas) - 1)
        at = keys, jnp.asarray(betas[1:], v.dtype), jnp.asarray(betas[:-1], v.dtype)
        start = v, w, jnp.zeros_like(w), slope, jnp.zeros((), v.dtype)
        (_, _, log_weight, _, accepted), _ = jax.lax.scan(transition, start, at)
        return log_weight, accepted

    return run


def run(task: AnnealingTask, report: Report) -> dict[str, Any]:
    """Estimates of the log evidence of every image, float32.

    Returns:
        ``log_z``, ``std_error`` ``[runs, n]``; ``seconds`` of every run, compiled, and ``compilation``;
        ``gradients`` per image of a run, ``acceptance``, ``agreed``.
    """
    # of this project's network: written by the process that reads what comes back
    given = torch.load(task.path, weights_only=False)
    images, mean, sd = (given[name].double().numpy() for name in ("images", "mean", "sd"))
    decoder = network(given["decoder"])

    def total(v):
        return whitened_energies(decoder, images, mean, jnp.asarray(sd))(v.reshape(mean.shape)).sum()

    agreed = differences(total, given["points"], given["ours"])
    with precision("float32"):
        clock = Clock(math.inf)
        energies = whitened_energies(decoder, *map(jnp.asarray, (images, mean, sd)))
        shape = task.chains, *mean.shape
        betas = np.linspace(0, 1, task.temperatures + 1)
        run_once = annealed(energies, shape, betas, task.n_steps, task.step_size).lower(jax.random.key(0)).compile()
        compilation = clock.elapsed
        report(f"compiled in {compilation:.1f} s")
        log_z, errors, seconds, acceptance = [], [], [], []
        for i in range(task.runs):
            before = clock.elapsed
            weights, accepted = run_once(jax.random.key(task.seed + i))
            weights = np.asarray(weights, np.float64)
            seconds.append(clock.elapsed - before)
            largest = weights.max(0)
            ratios = np.exp(weights - largest)
            log_z.append(largest + np.log(ratios.mean(0)))
            errors.append(ratios.std(0, ddof=1) / ratios.mean(0) / math.sqrt(task.chains))
            acceptance.append(float(accepted))
        report(f"{task.runs} runs of {np.median(seconds):.2f} s, acceptance {np.mean(acceptance):.2f}")
    return {
        "log_z": np.stack(log_z),
        "std_error": np.stack(errors),
        "seconds": seconds,
        "compilation": compilation,
        "gradients": task.chains * (task.temperatures * task.n_steps + 1),
        "acceptance": float(np.mean(acceptance)),
        "agreed": agreed,
    }
