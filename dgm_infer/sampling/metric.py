"""Metrics adapted in windows of the warm-up."""

import torch
from torch import Tensor

from ..kernels.metrics import Metric, refined

__all__ = ["MetricWindows"]


class MetricWindows:
    """The covariance of the positions of a window, of all chains of a problem, at the end of each (as in Stan).

    Windows double in length, the last one up to ``last``: early ones are typical of the posterior's scale only, and
    every metric is estimated from positions that the one before let chains reach, and refines it. (Stan Reference
    Manual, HMC algorithm parameters, automatic parameter tuning; there windows are of one chain.)

    Args:
        name: of the metric, as kernels take it.
        first: iteration at which the first window begins.
        last: iteration at which the last one ends.
        single: one window instead, if there is room for one, to refine a metric that chains have from elsewhere: the
            way to the posterior, which early windows see, would make it worse.
    """

    shortest = 10

    def __init__(self, name: str, first: int, last: int, *, single: bool = False):
        self._name = name
        self._positions: list[Tensor] = []
        self._ends = _ends(first, last, max(last - first, self.shortest) if single else self.shortest)
        self._first = first

    @property
    def last(self) -> int:
        """The iteration after which the last window ends; 0 without any."""
        return max(self._ends, default=0)

    def update(self, iteration: int, position: Tensor, metric: Metric | None) -> Metric | None:
        """The new metric if a window ends after this iteration, counted from 1.

        Args:
            position: ``[chains, *batch, D]``.
            metric: the adapted one in use, if there is one.
        """
        if not self._first < iteration <= self.last:
            return None
        self._positions.append(position)
        if iteration not in self._ends:
            return None
        positions = torch.stack(self._positions)
        self._positions.clear()
        return refined(self._name, metric, positions)


def _ends(first: int, last: int, shortest: int) -> set[int]:
    """Iterations after which windows of doubling length end; none if there is not room for one."""
    ends, length = set(), shortest
    while last - first >= shortest:
        # a rest that would not hold the next window belongs to this one
        end = first + length if last - first >= 3 * length else last
        ends.add(end)
        first, length = end, 2 * length
    return ends
