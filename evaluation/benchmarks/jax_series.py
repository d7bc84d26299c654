"""The predator-prey series in JAX, and its sampling by a peer until the time is used."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .jax_images import Function, Sampler, differences, drawn_until, jax, jnp, precision
from .series_problems import SERIES, EquationSeries, NoisySeries, SeriesTask
from .workers import Clock, Report

__all__ = ["Series", "sample_series", "series_posterior"]

# Points at which energies are compared, and how far they are from what generated the data.
_COMPARED, _SPREAD = 8, 0.1
# Steps of the series in one turn of its loop: half the time of single ones, and compiled in seconds.
_UNROLLED = 5


class Series(NamedTuple):
    """The posterior of the inputs of a series."""

    predict: Function
    """``u [104] -> [100]``, the series before its measurement."""
    observed: np.ndarray
    sd: float
    dim: int

    def energy(self, u):
        """Minus ``log p(u, y)`` up to a constant."""
        misfit = (self.predict(u) - jnp.asarray(self.observed)) / self.sd
        return 0.5 * jnp.square(u).sum() + 0.5 * jnp.square(misfit).sum()


def series_posterior(series: NoisySeries | EquationSeries) -> Series:
    """Energy of standard normal inputs."""
    predict = _equations(series) if isinstance(series, EquationSeries) else _noisy(series)
    return Series(predict, series.observations().numpy(), series.sd, series.dim)


def _noisy(series: NoisySeries) -> Function:
    """Energy of logarithms of the parameters, less their means, and the noise of every step."""
    first, process = series.initial, series.process

    def predict(u):
        z = jnp.exp(u[:4] - 2)

        def step(state, noise):
            prey, predators = state
            state = (
                prey + z[0] * prey - z[1] * prey * predators + process * noise[0],
                predators + z[3] * prey * predators - z[2] * predators + process * noise[1],
            )
            return state, state

        start = tuple(jnp.full((), value, u.dtype) for value in first)
        _, populations = jax.lax.scan(step, start, u[4:].reshape(-1, 2), unroll=_UNROLLED)
        return jnp.stack(populations, -1).ravel()

    return predict


def _equations(series: EquationSeries) -> Function:
    """Energy of logarithms of the parameters, in units of their spread."""
    medians, at, h = np.asarray(series.log_medians), np.asarray(series.observed_steps) - 1, series.step

    def predict(u):
        a, b, c, d = jnp.exp(jnp.asarray(medians, u.dtype) + series.spread * u)

        def slope(state):
            prey, predators = state
            return jnp.stack([a * prey - b * prey * predators, d * prey * predators - c * predators])

        def step(state, _):
            first = slope(state)
            second = slope(state + h / 2 * first)
            third = slope(state + h / 2 * second)
            last = slope(state + h * third)
            state = state + h / 6 * (first + 2 * second + 2 * third + last)
            return state, state

        start = jnp.asarray(series.initial, u.dtype)
        _, populations = jax.lax.scan(step, start, None, length=series.n_steps, unroll=_UNROLLED)
        return jnp.log(populations[at]).ravel()

    return predict


def sample_series(task: SeriesTask, make: Callable[[Series], Sampler], report: Report) -> dict[str, Any]:
    """All chains in one process; the result as :func:`.series_problems.run`.

    Whatever is compiled and adapted counts; the comparison with this project's energies is made before.

    Args:
        make: the sampler of a posterior.
    """
    series = SERIES[task.problem]
    posterior = series_posterior(series)
    agreed = _disagreement(series, posterior, task.seed)
    with precision(task.dtype):
        clock = Clock(task.seconds)
        key, first = jax.random.split(jax.random.key(task.seed))
        if task.start == "shared":
            start = jnp.asarray(series.starts(task.chains, task.seed).numpy())
        else:
            start = jax.random.normal(first, (task.chains, posterior.dim))
        made = drawn_until(clock, make(posterior), key, start, report)
    draws = made.pop("draws")
    return {
        "z": draws[..., :4] - 2 if isinstance(series, NoisySeries) else draws[..., :4],
        "last": draws[:, -1],
        "constraint_error": float("nan"),
        "seconds": clock.elapsed,
        "agreed": agreed,
        **made,
    }


def _disagreement(series: NoisySeries | EquationSeries, posterior: Series, seed: int) -> dict[str, float]:
    """The largest differences of energies, up to a constant, and gradients from this project's."""
    points = series.starts(_COMPARED, seed, _SPREAD)
    energy, gradient = (part.detach().numpy() for part in series.target().energy_and_gradient(points))

    def above_the_first(u):
        return posterior.energy(u) - posterior.energy(jnp.asarray(points[0].numpy()))

    return differences(above_the_first, points.numpy(), {"energy": energy - energy[0], "gradient": gradient})
