"""``compare()``: the difference of two estimates of log Z, with its error, paired over problems."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import fraction, instance
from ..errors import ArgumentError
from .method import EstimateStatus
from .result import Evidence

__all__ = ["Comparison", "compare"]

# Which bound the difference of two results is: that of the first, and the other side of the second.
_LOWER, _UPPER = {"lower", "unbiased", "consistent"}, {"upper", "unbiased", "consistent"}


@dataclass(frozen=True, eq=False)
class Comparison:
    """``log Z_a - log Z_b`` of the same problems under two targets, such as two models.

    Attributes:
        difference: ``[*batch]``; NaN where either has no estimate.
        std_error: from the chains of both, ``sqrt(e_a^2 + e_b^2)``, ``[*batch]``.
        dof: degrees of freedom of ``std_error`` (Welch), ``[*batch]``.
        status: ``"consistent"``; ``"lower"`` or ``"upper"`` if a bound of one makes the difference one;
            ``"heuristic"`` if two bounds leave its sign open.
    """

    difference: Tensor
    std_error: Tensor
    dof: Tensor
    status: EstimateStatus

    @property
    def mean(self) -> float:
        """Mean difference over problems with estimates."""
        return float(self._known.mean())

    @property
    def mean_std_error(self) -> float:
        """Its standard error over problems like these: from the spread of the differences, in which the chains' errors
        are; from the chains for a single problem."""
        known = self._known
        if len(known) == 1:
            return float(self.std_error[self.difference.isfinite()])
        return float(known.std() / math.sqrt(len(known)))

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of ``difference +- t std_error``, each ``[*batch]``."""
        from scipy.stats import t

        fraction("interval", "level", level)
        half = torch.as_tensor(t.ppf(0.5 + level / 2, self.dof.cpu().numpy())).to(self.std_error) * self.std_error
        return self.difference - half, self.difference + half

    @property
    def _known(self) -> Tensor:
        return self.difference[self.difference.isfinite()].double()

    def __repr__(self):
        n = self.difference.numel()
        over = "" if n == 1 else f", mean over {len(self._known)} problems"
        return f"Comparison(log Z_a - log Z_b {self.mean:.3f} +- {self.mean_std_error:.3f}{over}; {self.status})"


def compare(a: Evidence, b: Evidence) -> Comparison:
    """The difference of two estimates of log Z with its error, problem by problem.

    What problems have in common, such as an image that is unlikely under both models, drops out of the differences, so
    that their mean is known better than either mean.

    Args:
        a, b: of the same problems in the same order, with separate random numbers (``seed``).

    Raises:
        ArgumentError: their batch shapes differ, or no problem has an estimate in both.
    """
    for name, value in (("a", a), ("b", b)):
        instance("compare", name, value, Evidence, "log_evidence(target)")
    if a.log_z.shape != b.log_z.shape:
        raise ArgumentError(
            f"compare(): batch shapes {tuple(a.log_z.shape)} and {tuple(b.log_z.shape)} must be equal: the same "
            "problems in the same order"
        )
    difference = a.log_z - b.log_z.to(a.log_z)
    if not difference.isfinite().any():
        raise ArgumentError("compare(): no problem has an estimate in both")
    squares = torch.stack([a.std_error, b.std_error.to(a.std_error)]).square()
    free = squares.new_tensor([a.dof, b.dof]).clamp_min(1).reshape(2, *[1] * difference.ndim)
    total = squares.sum(0)
    # two errors of zero have no degrees of freedom of their own
    dof = (total.square() / (squares.square() / free).sum(0)).nan_to_num(float(free.min()))
    return Comparison(difference, total.sqrt(), dof, _status(a.status, b.status))


def _status(a: EstimateStatus, b: EstimateStatus) -> EstimateStatus:
    below, above = a in _LOWER and b in _UPPER, a in _UPPER and b in _LOWER
    if below and above:
        return "consistent"
    return "lower" if below else "upper" if above else "heuristic"
