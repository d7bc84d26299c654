"""Starting points of chains: given, near prior draws, annealed, or near modes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import default_type
from ..conditioning.abc_kernels import InputPosterior
from ..conditioning.fibre import Fibre
from ..conditioning.posterior import Posterior
from ..conditioning.projection import damped_gauss_newton, solver_tolerance
from ..errors import ArgumentError, EvidenceError
from ..kernels import Kernel
from ..kernels.kernel import FibreKernel
from ..kernels.mode_jumps import Jumps, ModeJumps, innermost
from ..references import Gaussian, modes
from ..target import Target
from .annealed_starts import Start, anneal_likelihood, anneal_noise
from .low_points import low_points


@dataclass(frozen=True)
class StartSettings:
    """Settings of given and searched starts."""

    searches: int = 256
    """Minimisations per round of a search for the modes of a target: a mode that is missed may be missed for good."""
    nearby: float = 0.1
    """Distance, root mean square over the inputs, up to which given points are moved onto the fibre."""


_SETTINGS = StartSettings()


def starting_points(
    problem: Fibre | Target,
    kernel: Kernel,
    chains: int,
    rng: torch.Generator,
    initial: Tensor | None,
    *,
    anneal: bool,
    target_acceptance: float | None,
    report: Callable[[str], None],
) -> Start:
    """The given points, moved onto the fibre, or points near prior draws, annealed or near modes if requested.

    Raises:
        ArgumentError: the given points have another shape, or are far from the fibre.
        StartError: no points were found.
    """
    if not isinstance(problem, Fibre):
        given = None if initial is None else _given(problem, chains, initial)
        if isinstance(kernel, ModeJumps) and kernel.modes is None:
            report("start-up, modes")
            return _near_modes(problem, chains, rng, given)
        if given is None and anneal and isinstance(problem, Posterior):
            return anneal_likelihood(problem, kernel, chains, rng, target_acceptance=target_acceptance, report=report)
        return Start(problem.start(chains, rng) if given is None else given)
    tolerance, annealing, kernel = solver_tolerance(problem.values.dtype), None, innermost(kernel)
    if isinstance(kernel, FibreKernel):
        tolerance, annealing = kernel.relative_tolerance(problem.values.dtype), kernel.annealing()
    if initial is not None:
        return Start(_on_fibre(problem, _given(problem, chains, initial), tolerance))
    if anneal and annealing is not None and problem.observed.can_scale_noise:
        return anneal_noise(
            problem, annealing, chains, rng, tolerance=tolerance, target_acceptance=target_acceptance, report=report
        )
    if anneal and problem.has_low_points:
        position, ancestors = low_points(problem, chains, rng, tolerance=tolerance, report=report)
        own = torch.arange(chains, device=position.device).view(-1, *[1] * (ancestors.ndim - 1))
        return Start(position, None if (ancestors == own).all() else ancestors)
    return Start(problem.start(chains, rng, tolerance=tolerance, report=report))


def _near_modes(problem: Target, chains: int, rng: torch.Generator, given: Tensor | None) -> Start:
    """Draws from the normal approximations of the modes of a target, or the given points; and jumps between them.

    Raises:
        EvidenceError: no mode was found.
    """
    start = problem.start(chains, rng) if given is None else given
    seed = int(torch.randint(2**31, (), generator=rng, device=rng.device))
    try:
        found = modes(problem, _SETTINGS.searches, start=Gaussian(torch.zeros_like(start[0]), 1.0), seed=seed)
    except EvidenceError as error:
        raise EvidenceError(
            f"ModeJumps: {error}; give modes=dgm.modes(target, start=...), or use the kernel alone"
        ) from error
    jumps = Jumps.between(found.positions, found.covariances, found.log_masses)
    if given is not None:
        return Start(given, jumps=jumps)
    centre, position = jumps.draws(chains, rng)
    with torch.no_grad():
        inside = problem.energy(position).isfinite().unsqueeze(-1)
    return Start(torch.where(inside, position, centre), jumps=jumps)


def _given(problem: Fibre | Target, chains: int, initial: Tensor) -> Tensor:
    initial = torch.as_tensor(initial).detach()
    if isinstance(problem, Fibre | InputPosterior):
        initial = initial.to(problem.values)
    elif not initial.is_floating_point():
        initial = initial.to(default_type())
    shape = (chains, *problem.batch_shape, problem.dim)
    if tuple(initial.shape) != shape:
        raise ArgumentError(f"initial has shape {tuple(initial.shape)}; expected {shape}: [chains, *batch, D]")
    return initial


def _on_fibre(problem: Fibre, initial: Tensor, tolerance: float) -> Tensor:
    """The given points, those off the fibre moved to points on it nearby."""
    error = problem.constraint_error(initial) / (tolerance * problem.scale)
    if (error < 1).all():
        return initial
    fibre, flat = problem.rows(len(initial)), initial.reshape(-1, problem.dim)
    point, residual = damped_gauss_newton(fibre, flat, tolerance=tolerance * fibre.scale)
    far = ~(residual < tolerance * fibre.scale) | ((point - flat).square().mean(-1).sqrt() > _SETTINGS.nearby)
    if far.any():
        raise ArgumentError(
            f"initial violates the constraint at {int(far.sum())} of {len(far)} points, by up to {error.max():.3g} "
            "times the tolerance, and no point of the fibre is near: omit initial to have points found"
        )
    return point.reshape(initial.shape)
