"""Weighted draws of approximate Bayesian computation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import StartError

__all__ = ["ABCDraws", "Found", "equal_weights", "nothing_accepted"]


@dataclass(frozen=True)
class Found:
    """What a method returns."""

    parameters: Tensor
    log_weights: Tensor
    distances: Tensor
    tolerance: float
    simulations: int
    acceptance_rate: float


@dataclass(frozen=True)
class ABCDraws(Found):
    """Draws from an ABC posterior.

    Args:
        parameters: z, ``[n, D]``.
        log_weights: of the draws, ``[n]``; all 0 where draws count equally.
        distances: of their simulations from the data, ``[n]``.
        tolerance: the tolerance that was reached.
        simulations: rows that were simulated in all.
        acceptance_rate: share of the simulations, or of the proposals, that were accepted.
        seed: seed of the run.
    """

    seed: int

    @property
    def weights(self) -> Tensor:
        """Normalised weights ``[n]``."""
        return self.log_weights.softmax(0)

    @property
    def ess(self) -> float:
        """``1/sum w^2``: how many equally weighted draws these are worth, if they are independent."""
        return 1 / self.weights.square().sum().item()

    @property
    def mean(self) -> Tensor:
        """Posterior means ``[D]``."""
        return self.weights @ self.parameters

    @property
    def sd(self) -> Tensor:
        """Posterior standard deviations ``[D]``."""
        return (self.weights @ (self.parameters - self.mean).square()).sqrt()


def nothing_accepted(tolerance: float, smallest: float, simulations: int) -> StartError:
    """The error of a run without any acceptance."""
    return StartError(
        f"none of {simulations} simulations was accepted at tolerance={tolerance:g}: the smallest distance seen is "
        f"{smallest:.3g}, and the acceptance rate is below {3 / simulations:.1g}: raise the tolerance, simulate "
        "more, or use ABCSMC()"
    )


def equal_weights(parameters: Tensor) -> Tensor:
    """Log weights of 0, ``[n]``."""
    return torch.zeros(len(parameters), dtype=parameters.dtype)
