"""Starting points of chains: given, near prior draws, annealed, or near modes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import default_type
from ..autodiff.capture import calls_and_numbers
from ..conditioning.abc_kernels import InputPosterior
from ..conditioning.fibre import Fibre
from ..conditioning.projection import damped_gauss_newton, solver_tolerance
from ..conditioning.start_points import search_once, towards
from ..errors import ArgumentError, EvidenceError
from ..kernels import HMC, NUTS, Kernel
from ..kernels.kernel import FibreKernel
from ..kernels.mode_jumps import Jumps, ModeJumps, innermost
from ..references import Gaussian, modes
from ..target import Posterior, Target
from .annealed_starts import Start, anneal_likelihood, anneal_noise


@dataclass(frozen=True)
class StartSettings:
    """Settings of given and searched starts."""

    searches: int = 256
    """Minimisations per round of a search for the modes of a target: a mode that is missed may be missed for good."""
    searched: int = 64
    """The same where no jumps are asked for: a mode that is missed is then one that nobody looked for."""
    operations: int = 300
    """Operations of an energy above which none are looked for unasked: 400 gradients take 2 s by count."""
    numbers: int = 2**20
    """The same of numbers that energies make where descents start, or that are in second derivatives at a mode, of all
    problems: a nanosecond each."""
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
        start = problem.start(chains, rng) if given is None else given
        return Start(start, jumps=_known_modes(problem, start) if anneal and isinstance(kernel, HMC | NUTS) else None)
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
    position = problem.start(chains, rng, tolerance=tolerance, report=report)
    # noise is explained at the price of its energy, from any inputs
    sheds = anneal and problem.marginal is None
    return _without_strays(problem, position, rng) if sheds else Start(position)


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


def _known_modes(problem: Target, start: Tensor) -> Jumps | None:
    """The modes of a target without a prior, which chains may all begin in one of, or beside; None where it has one,
    none were found or looking for them takes long."""
    size = start[0].numel() * problem.dim
    if not problem.has_gradient or size > _SETTINGS.numbers:
        return None
    try:
        calls, made = calls_and_numbers(problem.energy, start)
        if calls > _SETTINGS.operations or made * _SETTINGS.searched > _SETTINGS.numbers * len(start):
            return None
        # random numbers of its own: chains of a target with one mode are those without a search
        found = modes(problem, _SETTINGS.searched, start=Gaussian(torch.zeros_like(start[0]), 1.0), seed=0)
    except (EvidenceError, RuntimeError, ValueError, ArithmeticError):
        return None
    return Jumps.between(found.positions, found.covariances, found.log_masses)


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


@dataclass(frozen=True)
class StraySettings:
    """Settings of starts that end too high."""

    astray: float = 30.0
    """Nats above the lowest point of a problem from which a point has strayed: with normal inputs, pieces of a fibre
    that is nearly flat have masses in proportion to exp(-energy) at their lowest points. On fibres of faces, those
    up to 25 above were found to mix with the others."""
    rounds: int = 1
    """Rounds in which strays are searched for again, each from one prior draw: a search for a face takes seconds."""
    enough: float = 0.75
    """Share of long searches that have to end on the fibre: the last ones take as long as all others."""


_STRAYS = StraySettings()


def low_points(
    problem: Fibre,
    chains: int,
    rng: torch.Generator,
    *,
    tolerance: float,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[Tensor, Tensor]:
    """Points near modes on the fibre, ``[chains, *batch, D]``, and the chain that found each, ``[chains, *batch]``.

    Searches from prior draws end on the fibre tens of nats above typical points, some of them in pieces of negligible
    mass, which a chain may not leave while the run lasts. From where a search ends the point moves along the fibre
    towards the origin, the mode of the prior. Those that end more than 30 nats above the lowest of their problem, and
    the last quarter of long searches, which are given up, are searched for once more; chains that then have no low
    point begin where another one does. A transition or two lead from a mode to typical points; dozens do from too high
    an energy, of which a momentum takes little at a time.

    Args:
        problem: a fibre with ``searches``, of a model with standard normal inputs.
        chains: points per problem.
        rng: generator of the prior draws.
        tolerance: relative tolerance of the points.
        report: called with lines of progress.

    Raises:
        StartError: no points on the fibre were found.
    """
    rows, size = problem.rows(chains), problem.batch_shape.numel()
    own = torch.arange(size, device=problem.values.device).repeat(chains)

    def every_problem(found: Tensor) -> bool:
        return len(own[found].unique()) == size

    u, energy = _searched(rows, rng, tolerance, report, lambda found: _most(found) and every_problem(found))
    if not every_problem(energy.isfinite()):
        # more attempts, and what to say if they fail
        u = problem.start(chains, rng, tolerance=tolerance, report=report, typical=False).flatten(0, -2)
        u, energy = _descended(rows, u, tolerance)
    for _ in range(_STRAYS.rounds):
        astray = _astray(energy, chains).nonzero().squeeze(-1)
        if len(astray) == 0:
            break
        report(f"start-up, {len(astray)} of {len(u)} chains begin again")
        again, lower = _searched(rows.take(astray), rng, tolerance, report, _most)
        better = lower < energy[astray]
        u[astray[better]], energy[astray[better]] = again[better], lower[better]
    ancestors = _sources(_astray(energy, chains).reshape(chains, -1), rng)
    position = u.reshape(chains, -1, problem.dim).take_along_dim(ancestors.unsqueeze(-1), 0)
    return position.reshape(chains, *problem.batch_shape, problem.dim), ancestors.reshape(chains, *problem.batch_shape)


def _without_strays(problem: Fibre, position: Tensor, rng: torch.Generator) -> Start:
    """Points ``[chains, *batch, D]`` of which those that no chain would come from begin where others do.

    A search may end at the edge of a bounded input, 60 standard deviations out in the one that it is made of. Energies
    of prior draws spread by less than there are inputs.
    """
    chains = len(position)
    cheap = problem.rows(chains).computed(gram_force=False)
    energy = cheap.evaluate(type(cheap).linearise, position.reshape(-1, problem.dim)).energy.nan_to_num(nan=torch.inf)
    astray = _astray(energy, chains, problem.dim)
    if not astray.any():
        return Start(position)
    ancestors = _sources(astray.reshape(chains, -1), rng)
    flat = position.reshape(chains, -1, problem.dim).take_along_dim(ancestors.unsqueeze(-1), 0)
    return Start(flat.reshape(position.shape), ancestors.reshape(chains, *problem.batch_shape))


def _searched(
    rows: Fibre, rng: torch.Generator, tolerance: float, report: Callable[[str], None], enough: Callable[[Tensor], bool]
) -> tuple[Tensor, Tensor]:
    """A point ``[R, D]`` from a search for every row, and its energy ``[R]``: infinite if it found none."""
    u, found = search_once(rows, rng, tolerance=tolerance * rows.scale, report=report, enough=enough)
    energy = torch.full_like(rows.scale, torch.inf)
    at = found.nonzero().squeeze(-1)
    if len(at):
        u[at], energy[at] = _descended(rows.take(at), u[at], tolerance)
    return u, energy


def _most(found: Tensor) -> bool:
    """Whether few enough searches are left to be given up."""
    return int(found.sum()) >= _STRAYS.enough * len(found)


def _descended(rows: Fibre, u: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Points ``[R, D]`` moved towards the origin, and their energies ``[R]``."""
    fibre = rows.for_searches
    active = torch.ones(len(u), dtype=torch.bool, device=u.device)
    u = towards(fibre, u, torch.zeros_like(u), tolerance=tolerance * rows.scale, active=active)
    # without the gradient of the Gram term, which takes most of the time
    cheap = fibre.computed(gram_force=False)
    return u, cheap.evaluate(type(cheap).linearise, u).energy.nan_to_num(nan=torch.inf)


def _astray(energy: Tensor, chains: int, spread: float = 0.0) -> Tensor:
    """Which points ``[chains * problems]`` are too far above the lowest of their problem, and its usual spread."""
    own = energy.reshape(chains, -1)
    return (own > own.amin(0) + _STRAYS.astray + spread).flatten()


def _sources(astray: Tensor, rng: torch.Generator) -> Tensor:
    """The chain ``[chains, problems]`` that each begins with: itself, or for strays another one, each as often."""
    chains = len(astray)
    # of one type, whatever the default
    order = (
        torch.rand(astray.shape, generator=rng, dtype=torch.float32, device=astray.device)
        .masked_fill(astray, 2)
        .argsort(0)
    )
    there = (~astray).sum(0).clamp_min(1)
    turn = (astray.cumsum(0) - 1).clamp_min(0) % there
    own = torch.arange(chains, device=astray.device).unsqueeze(-1).expand_as(astray)
    return torch.where(astray, order.gather(0, turn), own)
