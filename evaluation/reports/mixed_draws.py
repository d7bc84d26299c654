"""What the draws of one run say about its chains: effective draws, R-hat, stays, errors against a known mean."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dgm_infer.sampling.chain_groups import longest_run
from dgm_infer.sampling.inference_data import effective_draws, r_hat

__all__ = ["Mixing", "largest_r_hat", "longest_stay", "mixing", "r_hats"]


@dataclass(frozen=True)
class Mixing:
    """Chains on one problem."""

    ess: list[float]
    """Effective draws of the mean of every coordinate, all chains together, NaN as 0."""
    r_hat: float
    """The largest of the coordinates, infinite where no chain moved."""
    longest_stay: int
    """Longest run of draws over which no coordinate of a chain changed."""
    error: float | None
    """Largest error of the mean over the coordinates in Monte Carlo standard errors, if the mean is known."""

    @property
    def worst_ess(self) -> float:
        """That of the worst coordinate."""
        return min(self.ess)


def mixing(values: Tensor, mean: Tensor | None = None) -> Mixing:
    """The numbers of one run.

    Standard errors are standard deviations over the root of the effective draws, both of all chains together: chains
    that disagree have few effective draws.

    Args:
        values: ``[chains, draws, D]``.
        mean: the exact mean ``[D]``, if it is known.
    """
    x = values.double().cpu().numpy()
    ess = effective_draws(values, "mean").nan_to_num().numpy()
    error = None
    if mean is not None:
        flat = x.reshape(-1, x.shape[-1])
        with np.errstate(divide="ignore", invalid="ignore"):
            error = float((np.abs(flat.mean(0) - mean.double().numpy()) * np.sqrt(ess) / flat.std(0)).max())
    return Mixing([float(value) for value in ess], largest_r_hat(values), longest_stay(values), error)


def r_hats(values: Tensor) -> np.ndarray:
    """Rank-normalised split R-hat of ``[chains, draws, D]``, ``[D]``; infinite where chains are still."""
    return r_hat(values).nan_to_num(nan=np.inf, posinf=np.inf).numpy()


def largest_r_hat(values: Tensor) -> float:
    """That of the worst coordinate."""
    return float(r_hats(values).max())


def longest_stay(values: Tensor) -> int:
    """Longest run of draws ``[chains, draws, D]`` over which a chain did not move."""
    return int(longest_run((values.diff(dim=1) == 0).all(-1)).max())
