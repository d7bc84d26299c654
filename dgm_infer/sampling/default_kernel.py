"""The kernel of a problem for which none is given."""

from dataclasses import dataclass

import torch

from ..conditioning.abc_kernels import InputPosterior
from ..conditioning.fibre import Fibre
from ..conditioning.marginal import NoiseMarginal
from ..kernels import HMC, ConstrainedHMC, EllipticalSlice, Kernel, LiftedHMC, RiemannianHMC
from ..target import Target


@dataclass(frozen=True)
class RidgeSettings:
    """When a posterior is a ridge so narrow that kernels with Jacobians cost less than HMC.

    HMC takes steps of the width of a ridge, :class:`ConstrainedHMC` and :class:`RiemannianHMC` move along it. On
    ``dgm-infer bench samplers`` HMC no longer mixes from a stretch of about 40, with one row.
    """

    prior_draws: int = 8
    """At which the stretch is measured: how much narrower than the prior a posterior is across the ridge."""
    step: float = 5
    """Steps of HMC per step with a Jacobian of no rows, in time."""
    row: float = 2
    """The same for every row of the Jacobian: a backward pass."""

    def least(self, rows: int) -> float:
        """The stretch from which a ridge is narrow."""
        return self.step + self.row * rows


_RIDGE = RidgeSettings()


def default_kernel(problem: Fibre | Target) -> Kernel:
    """The default kernel for this kind of problem."""
    if isinstance(problem, Fibre):
        narrow = problem.marginal is None or _is_ridge(problem, problem.marginal)
        return ConstrainedHMC() if narrow else LiftedHMC()
    if not problem.has_gradient:
        return EllipticalSlice()
    return RiemannianHMC() if isinstance(problem, InputPosterior) and _is_narrow(problem) else HMC()


def _is_ridge(problem: Fibre, marginal: NoiseMarginal) -> bool:
    """Whether additive noise is narrow, and leaves most directions of the global inputs free.

    Where it fixes most of them an adapted metric suffices: a predator-prey series of 104 inputs and 100 values, and
    digits of 12 latents and 9 pixels, mix no better on the fibre.
    """
    rows = problem.values.shape[-1]
    if 2 * rows > marginal.dim:
        return False
    u1 = marginal.initial_draws(_RIDGE.prior_draws, torch.Generator(problem.values.device).manual_seed(0))
    precision = marginal.precision(u1)
    # a simulator may overflow at prior draws, which says nothing
    told = precision.isfinite().all(-1).all(-1)
    unit = torch.eye(marginal.dim).to(precision)
    stretch = torch.linalg.eigvalsh(torch.where(told[..., None, None], precision, unit))[..., -1].sqrt()
    return bool(told.any()) and stretch[told].median().item() > _RIDGE.least(rows)


def _is_narrow(problem: InputPosterior) -> bool:
    """Whether a tolerance is so small that its steps cost HMC more than Jacobians cost :class:`RiemannianHMC`."""
    if problem.embedding is None:
        return False
    u = problem.initial_draws(_RIDGE.prior_draws, torch.Generator(problem.values.device).manual_seed(0))
    rows = min(problem.embedding.fibre.values.shape[-1], problem.dim)
    return problem.embedding.stretch(u).nanmedian().item() > _RIDGE.least(rows)
