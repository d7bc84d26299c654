"""Path sampling, or thermodynamic integration (Gelman and Meng 1998), on the states of tempered chains."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...arguments import whole_number
from ...errors import ArgumentError, EvidenceError
from ...progress import Progress
from ...settings import Settings
from ..estimators import Estimate, log_ratios, log_weights_at_ends
from ..method import Outcome, Status
from ..path import AnnealedPath
from .continuous import ContinuousTempering
from .gibbs import GibbsTempering
from .record import Record

__all__ = ["PathSampling"]


@dataclass(frozen=True, eq=False)
class PathSampling(Settings):
    """``log Z = -integral of E_beta[phi - psi] d beta`` over [0, 1], from the states that chains have in parts of it.

    In a part ``[a, a + h]`` the temperature of a state x is exponential of rate Delta(x), truncated to it; averaged
    over that law the integral over the part is ``log sum p(a + h | x) - log sum p(a | x)`` over the states in it, with
    no error of quadrature: consistent for any number of parts. One part is the estimate of tempering; of many, each
    sum is ``-h`` times the mean of Delta. Every part has states of its own only, so that one that is hardly visited
    shows in the error, and ``mean_difference`` among the diagnostics, the mean of ``phi - psi`` in every part, shows
    where the work is; ``tempering_log_z`` is the estimate from the same chains as one part.

    Args:
        tempering: of the chains; None for ``GibbsTempering()``.
        parts: of [0, 1], of equal length.
    """

    tempering: GibbsTempering | ContinuousTempering | None = None
    parts: int = 10

    def __post_init__(self):
        whole_number("PathSampling", "parts", self.parts)
        if not isinstance(self.tempering, GibbsTempering | ContinuousTempering | None):
            raise ArgumentError(
                f"PathSampling(tempering={self.tempering!r}): must be a GibbsTempering or a ContinuousTempering, whose "
                "temperatures are continuous, or None"
            )

    @property
    def status(self) -> Status:
        return "consistent"

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        tempering = GibbsTempering() if self.tempering is None else self.tempering
        record, spent = tempering.recorded(path, chains, rng, progress)
        outcome = record.outcome(spent)
        estimate, means = _integral(record, self.parts)
        diagnostics = outcome.diagnostics | {
            "mean_difference": means,
            "tempering_log_z": outcome.estimate.log_z,
        }
        return outcome._replace(estimate=estimate, diagnostics=diagnostics)


def _integral(record: Record, parts: int) -> tuple[Estimate, Tensor]:
    """The estimate, and the mean of ``phi - psi`` in every part, ``[parts, *batch]``.

    Raises:
        EvidenceError: no chain was ever in some part.
    """
    delta = record.log_w0 - record.log_w1
    w1, w0 = log_weights_at_ends(delta / parts)
    part = (record.beta * parts).long().clamp_max(parts - 1)
    numerators, denominators, means = [], [], []
    for b in range(parts):
        inside = part == b
        count = inside.sum((0, 1))
        if (count == 0).any():
            raise EvidenceError(
                f"PathSampling(parts={parts}): no chain of {int((count == 0).sum())} of {count.numel()} problems was "
                f"at a temperature between {b / parts:g} and {(b + 1) / parts:g}; give it fewer parts, or the chains "
                "more draws or a better log_zeta"
            )
        numerators.append(torch.where(inside, w1, -torch.inf).logsumexp(1))
        denominators.append(torch.where(inside, w0, -torch.inf).logsumexp(1))
        means.append(torch.where(inside, delta, 0.0).sum((0, 1)) / count - record.log_zeta)
    estimate = log_ratios(torch.stack(numerators, 1), torch.stack(denominators, 1))
    return estimate._replace(log_z=record.log_zeta + estimate.log_z), torch.stack(means)
