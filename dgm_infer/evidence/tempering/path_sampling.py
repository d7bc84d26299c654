"""Path sampling, or thermodynamic integration (Gelman and Meng 1998), on the states of tempered chains."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...arguments import whole_number
from ...arguments.values import shown
from ...errors import ArgumentError, EvidenceError
from ...progress import Progress
from ...settings import Settings
from ..estimators import Estimate, known_where, log_ratios, log_weights_at_ends
from ..method import EstimateStatus, Outcome
from ..path import AnnealedPath
from .continuous import ContinuousTempering
from .gibbs import GibbsTempering
from .tempering import Record


@dataclass(frozen=True, eq=False)
class PathSampling(Settings):
    """``log Z = -integral of E_beta[phi - psi] d beta`` over [0, 1], from the states of chains in parts of it.

    In a part ``[a, a + h]`` the temperature given x is exponential with rate Delta(x), truncated to the part; averaged
    over it, the integral over the part is ``log sum p(a + h | x) - log sum p(a | x)`` over the states in the part,
    without quadrature error: consistent for any number of parts. One part gives the estimate of tempering; with many,
    each term is ``-h`` times the mean of Delta. Every part uses only its own states, so that the error reveals poorly
    visited parts; it is infinite where no chain was in one. Among the diagnostics, ``mean_difference`` is the mean of
    ``phi - psi`` per part, the integrand, and ``tempering_log_z`` the estimate from the same chains with one part.

    Args:
        tempering: method that runs the chains; None for ``GibbsTempering()``.
        parts: number of equal parts of [0, 1].
    """

    tempering: GibbsTempering | ContinuousTempering | None = None
    parts: int = 10

    def __post_init__(self):
        whole_number("PathSampling", "parts", self.parts)
        if self.tempering is not None and not getattr(self.tempering, "continuous", False):
            raise ArgumentError(
                f"PathSampling(tempering={shown(self.tempering)}): must be a GibbsTempering or a ContinuousTempering, "
                "whose temperatures are continuous, or None"
            )
        if self.tempering is not None:
            for field, plain in (("plateau", None), ("schedule", "linear")):
                value = getattr(self.tempering, field, plain)
                if value != plain:
                    raise ArgumentError(
                        f"PathSampling(tempering={type(self.tempering).__name__}({field}={value!r})): its temperatures "
                        f"are not uniform; leave {field} out"
                    )

    @property
    def status(self) -> EstimateStatus:
        return "consistent"

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        tempering = GibbsTempering() if self.tempering is None else self.tempering
        record, spent = tempering.recorded(path, chains, rng, progress)
        outcome = record.outcome(spent)
        estimate, means = _integral(record, self.parts)
        estimate = known_where(means.isfinite().all(0), estimate, outcome.estimate)
        diagnostics = outcome.diagnostics | {
            "mean_difference": means,
            "tempering_log_z": outcome.estimate.log_z,
        }
        return outcome._replace(estimate=estimate, diagnostics=diagnostics)


def _integral(record: Record, parts: int) -> tuple[Estimate, Tensor]:
    """The estimate, and the mean of ``phi - psi`` in every part, ``[parts, *batch]``, NaN where no chain was in it.

    Raises:
        EvidenceError: in every problem some part was not visited.
    """
    delta = record.log_w0 - record.log_w1
    w1, w0 = log_weights_at_ends(delta / parts)
    part = (record.beta * parts).long().clamp_max(parts - 1)
    numerators, denominators, means = [], [], []
    for b in range(parts):
        inside = part == b
        count = inside.sum((0, 1))
        if (count == 0).all():
            raise EvidenceError(
                f"PathSampling(parts={parts}): no chain visited temperatures between {b / parts:g} and "
                f"{(b + 1) / parts:g}; use fewer parts, more draws or a better log_zeta"
            )
        numerators.append(torch.where(inside, w1, -torch.inf).logsumexp(1))
        denominators.append(torch.where(inside, w0, -torch.inf).logsumexp(1))
        means.append(torch.where(inside, delta, 0.0).sum((0, 1)) / count - record.log_zeta)
    estimate = log_ratios(torch.stack(numerators, 1), torch.stack(denominators, 1))
    return estimate._replace(log_z=record.log_zeta + estimate.log_z), torch.stack(means)
