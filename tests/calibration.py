"""The law of simulation-based calibration (Talts et al. 2018)."""

import torch
from scipy import stats


def uniformity(truth: torch.Tensor, draws: torch.Tensor) -> float:
    """Chi-square p-value of the ranks of ``truth [B]`` among independent ``draws [n, B]`` being uniform."""
    ranks = (draws < truth).sum(0)
    return float(stats.chisquare(torch.bincount(ranks, minlength=len(draws) + 1).numpy()).pvalue)
