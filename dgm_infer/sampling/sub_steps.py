"""Geodesic sub-steps, adapted to the share of trajectories whose solvers fail."""

import torch
from torch import Tensor

from ..errors import Status
from ..kernels import Info

__all__ = ["SubSteps"]


class SubSteps:
    """Adds geodesic sub-steps when a problem's trajectories fail too often, or need the second solver.

    Failures are rejected; the second solver costs time. The limits are shares of transitions.

    Args:
        n: initial number.
        window: iterations between decisions.
    """

    failures = 0.005
    retries = 0.05
    most = 20

    def __init__(self, n: int, window: int):
        self.n, self.window = n, max(window, 1)
        self.is_steady = False
        """Whether the latest window asked for no more."""
        self._reset()

    def _reset(self) -> None:
        self.iterations = 0
        self.failed: Tensor | float = 0.0
        self.retried: Tensor | float = 0.0
        self.trials: Tensor | float = 0.0

    def update(self, info: Info, counted: Tensor) -> None:
        """Learn from one iteration of the problems ``counted [*batch]``."""
        failed = (info.status == Status.PROJECTION_FAILED) | (info.status == Status.REVERSAL_FAILED)
        self.failed = self.failed + failed.sum(0) * counted
        retried = None if info.tuning is None else info.tuning.retried
        self.retried = self.retried + (0 if retried is None else retried.sum(0) * counted)
        self.trials = self.trials + len(failed) * counted
        self.iterations += 1
        if self.iterations < self.window:
            return
        self.is_steady = not (self._exceeds(self.failed, self.failures) or self._exceeds(self.retried, self.retries))
        if not self.is_steady:
            self.n = min(self.n + max(1, self.n // 2), self.most)
        self._reset()

    def _exceeds(self, count: Tensor | float, limit: float) -> bool:
        # a problem at the limit exceeds this with a probability of 0.02 over the number of problems (a Poisson count)
        count = torch.as_tensor(count, dtype=torch.float64)
        expected = limit * torch.as_tensor(self.trials, dtype=torch.float64)
        return bool((torch.special.gammainc(count, expected) < 0.02 / count.numel()).any())
