"""The fibre of n equations in n + 1 unknowns, traced: the oracle of conditioning on them (math 2.2).

It knows nothing of the library: equations and prior densities are functions of the unknowns themselves, derivatives are
finite differences, and a curve is followed from a point on it until it closes or leaves the prior's support.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Curve(NamedTuple):
    """A piece of the fibre."""

    points: np.ndarray
    """``[n, D]``, in the order of the curve."""
    weights: np.ndarray
    """``[n]``: ``p |J J^T|^(-1/2)`` times the length that a point stands for; their sum is the piece's mass."""
    volume: np.ndarray
    """``[n]``: ``|J J^T|^(1/2)``."""

    def mean(self, statistics: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Exact expectations on this piece, of ``[n, D] -> [n, K]``."""
        return self.weights @ statistics(self.points) / self.weights.sum()

    def without_gram(self) -> "Curve":
        """The same piece under the density that leaves the Gram term out, the classic silent error."""
        return self._replace(weights=self.weights * self.volume)

    def distance(self, points: np.ndarray) -> np.ndarray:
        """Distance of each point ``[m, D]`` to the nearest of the curve."""
        return np.array([np.linalg.norm(self.points - point, axis=1).min() for point in points])


@dataclass
class Equations:
    """n equations in D = n + 1 unknowns, and the prior.

    Attributes:
        residual: ``[m, D] -> [m, n]``; zero on the fibre.
        log_prob: of the prior, ``[m, D] -> [m]``, up to a constant.
        low, high: ``[D]``, its support; infinite where there is no bound.
        step: length of a step along the curve.
        negligible: nats below the largest density met at which a curve without bounds ends.
    """

    residual: Callable[[np.ndarray], np.ndarray]
    log_prob: Callable[[np.ndarray], np.ndarray]
    low: np.ndarray
    high: np.ndarray
    step: float
    negligible: float = 30.0

    def jacobian(self, z: np.ndarray) -> np.ndarray:
        """``[n, D]`` by central differences."""
        h = 1e-6 * np.eye(len(z))
        return ((self.residual(z + h) - self.residual(z - h)) / 2e-6).T

    def along(self, z: np.ndarray, before: np.ndarray) -> np.ndarray:
        """The direction of the curve that goes on from the one before."""
        direction = np.linalg.svd(self.jacobian(z))[2][-1]
        return direction * np.sign(direction @ before)

    def on_fibre(self, z: np.ndarray) -> np.ndarray:
        for _ in range(4):
            z = z - np.linalg.pinv(self.jacobian(z)) @ self.residual(z[None])[0]
        assert np.abs(self.residual(z[None])).max() < 1e-8
        return z

    def trace(self, start: np.ndarray) -> Curve:
        """The piece of the fibre through a point near it."""
        start = self.on_fibre(start)
        ahead = self.along(start, np.ones(len(start)))
        points, closed = self._one_way(start, ahead)
        if not closed:
            points = self._one_way(start, -ahead)[0][:0:-1] + points
        curve = np.array(points)
        lengths = np.linalg.norm(np.diff(curve, axis=0), axis=1)
        own = (np.append(lengths, 0) + np.append(0, lengths)) / 2
        volume = np.array([np.linalg.svd(self.jacobian(z), compute_uv=False).prod() for z in curve])
        log_prob = self.log_prob(curve)
        return Curve(curve, own * np.exp(log_prob - self.log_prob(start[None])) / volume, volume)

    def _one_way(self, start: np.ndarray, ahead: np.ndarray) -> tuple[list[np.ndarray], bool]:
        points, most = [start], -np.inf
        while True:
            z = points[-1]
            middle = self.along(z + 0.5 * self.step * ahead, ahead)
            new = self.on_fibre(z + self.step * middle)
            if not ((new > self.low) & (new < self.high)).all():
                with np.errstate(divide="ignore"):
                    share = np.where(new > z, (self.high - z) / (new - z), (self.low - z) / (new - z)).min()
                return [*points, z + share * (new - z)], False
            if len(points) > 5 and np.linalg.norm(new - start) < 0.6 * self.step:
                return [*points, start], True
            log_prob = self.log_prob(new[None])[0]
            most = max(most, log_prob)
            if log_prob < most - self.negligible:
                return points, False
            points.append(new)
            ahead = self.along(new, middle)
            assert len(points) < 20_000


def pieces(equations: Equations, starts: np.ndarray) -> list[Curve]:
    """The pieces of the fibre on which the starting points are."""
    curves: list[Curve] = []
    for start in starts:
        if all(curve.distance(start[None])[0] > equations.step for curve in curves):
            curves.append(equations.trace(start))
    return curves
