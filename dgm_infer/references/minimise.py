"""Minimisers of energies, many rows at once: L-BFGS, damped Newton steps (math 11.7), and which ends are the same."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..autodiff.layers import differentiable_attention
from ..errors import EvidenceError


@dataclass(frozen=True)
class AlikeSettings:
    """Which minima are one."""

    same: float = 1e-2
    """Distance (sds of the coordinates) and energy (relative to its log) within which minima are the same."""
    within: float = 0.1
    """Squared distance (in sds of the mode) and nats within which another minimum is in the same mode."""


ALIKE = AlikeSettings()
# Share of the decrease promised by the slope that a step must bring, the usual one of textbooks.
_ARMIJO = 1e-4


class Minima(NamedTuple):
    """Where minimisations ended."""

    position: Tensor
    """``[..., D]``."""
    energy: Tensor
    """``[...]``; ``+inf`` where no point of the path had a finite energy."""
    converged: Tensor
    """Whether the predicted decrease of another step is negligible, ``[...]``."""
    evaluations: int
    """Gradients per row."""


class _Pair(NamedTuple):
    """A step and the change of the gradient along it; ``rho = 1/(s . y)``, 0 for rows that did not move."""

    s: Tensor
    y: Tensor
    rho: Tensor


def minimise(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    iterations: int = 100,
) -> Minima:
    """Minimise an energy from every row of ``start [..., D]`` by L-BFGS (Nocedal 1980).

    All rows take one gradient per iteration: those whose energy does not fall enough halve their step, the others go
    on from where they are. A row has converged when the predicted decrease, relative to ``max(1, |energy|)``, is below
    1e-9 in float64 and 1e-6 in float32. Curvature is learned from the last eight pairs of steps and gradients.

    Args:
        evaluate: energy ``[...]`` and gradient ``[..., D]`` at ``[..., D]``.
        start: first positions, in coordinates of about unit scale.
        iterations: gradients per row, at most.
    """
    tolerance = 1e-9 if start.dtype == torch.float64 else 1e-6
    x, (energy, gradient) = start, _finite(*evaluate(start))
    pairs: deque[_Pair] = deque(maxlen=8)
    # before curvature is known a step has at most the unit length of the coordinates
    scale = 1 / gradient.norm(dim=-1).clamp_min(1)
    direction, step = -scale.unsqueeze(-1) * gradient, torch.ones_like(energy)
    converged = torch.zeros_like(energy, dtype=torch.bool)
    resolution = 4 * torch.finfo(start.dtype).eps
    done = 1
    while done < iterations and not converged.all():
        there = x + step.unsqueeze(-1) * direction
        new_energy, new_gradient = _finite(*evaluate(there))
        done += 1
        slope = (gradient * direction).sum(-1)
        limit = energy + _ARMIJO * step * slope + resolution * energy.abs().nan_to_num(0.0, 0.0, 0.0)
        moved = ((new_energy <= limit) | energy.isinf()) & ~converged & new_energy.isfinite()
        row = moved.unsqueeze(-1)
        pair = _pair(torch.where(row, there - x, 0.0), torch.where(row, new_gradient - gradient, 0.0))
        pairs.append(pair)
        known = pair.rho > 0
        scale = torch.where(known, 1 / (pair.rho * pair.y.square().sum(-1)).clamp_min(1e-30), scale)
        x, gradient = torch.where(row, there, x), torch.where(row, new_gradient, gradient)
        energy = torch.where(moved, new_energy, energy)
        proposal = _direction(gradient, pairs, scale)
        # a row that stays keeps its direction and shortens its step
        direction = torch.where(row, proposal, direction)
        step = torch.where(moved, 1.0, 0.5 * step)
        decrease = -(gradient * direction).sum(-1)
        converged = converged | (energy.isfinite() & (decrease <= tolerance * energy.abs().clamp_min(1)))
    return Minima(x, energy, converged, done)


def _finite(energy: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    inside = energy.isfinite() & gradient.isfinite().all(-1)
    return torch.where(inside, energy, torch.inf), torch.where(inside.unsqueeze(-1), gradient, 0.0)


def _pair(s: Tensor, y: Tensor) -> _Pair:
    product = (s * y).sum(-1)
    positive = product > 1e-10 * s.norm(dim=-1) * y.norm(dim=-1)
    return _Pair(s, y, torch.where(positive, 1 / product.clamp_min(1e-300), 0.0))


def _direction(gradient: Tensor, pairs: deque[_Pair], scale: Tensor) -> Tensor:
    """``-H g`` by the two loops over the pairs; ``-scale g`` where that does not go down."""
    q, shares = gradient, []
    for pair in reversed(pairs):
        a = pair.rho * (pair.s * q).sum(-1)
        q = q - a.unsqueeze(-1) * pair.y
        shares.append(a)
    q = scale.unsqueeze(-1) * q
    for pair, a in zip(pairs, reversed(shares), strict=True):
        b = pair.rho * (pair.y * q).sum(-1)
        q = q + (a - b).unsqueeze(-1) * pair.s
    down = (q * gradient).sum(-1) > 0
    return -torch.where(down.unsqueeze(-1), q, scale.unsqueeze(-1) * gradient)


class Mode(NamedTuple):
    position: Tensor
    """``[*batch, D]``."""
    energy: Tensor
    """``[*batch]``."""
    cholesky: Tensor
    """Lower triangular factor of the Hessian, ``[*batch, D, D]``."""


def find_mode(target, start: Tensor, *, max_iterations: int) -> Mode:
    """Minimum of the energy by damped Newton steps (Levenberg 1944), with one damping per problem.

    A problem has converged when the Newton decrement ``g^T H^-1 g / 2``, the remaining decrease in energy, is below
    1e-10 in float64 and 1e-5 in float32, times ``max(1, |energy|)``.

    Raises:
        EvidenceError: a problem did not converge, or its Hessian is not positive definite.
    """
    tolerance = 1e-10 if start.dtype == torch.float64 else 1e-5
    x, energy, gradient, hessian, converged = descended(target, start, max_iterations, 0.0, tolerance)
    # near a mode a Newton step squares the remaining distance
    definite, step = _newton_step(hessian, gradient, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
    x = torch.where((definite & converged).unsqueeze(-1), x - step, x)
    energy, _, hessian = curvature(target, x)
    factor, failed = torch.linalg.cholesky_ex(hessian)
    for bad, what in (
        (failed != 0, "the Hessian at the mode is not positive definite"),
        (~converged, "Newton's method did not reach a mode"),
    ):
        if bad.any():
            raise EvidenceError(
                f"{what} for {int(bad.sum())} of {bad.numel()} problems: pass start= nearer to a mode, or fit the base "
                "with Gaussian.fit"
            )
    return Mode(x, energy, factor)


class Descended(NamedTuple):
    """Where damped Newton steps ended."""

    position: Tensor
    """``[*batch, D]``."""
    energy: Tensor
    """``[*batch]``."""
    gradient: Tensor
    """``[*batch, D]``."""
    hessian: Tensor
    """``[*batch, D, D]``."""
    converged: Tensor
    """Whether the Newton decrement is below the tolerance, ``[*batch]``."""


def descended(target, x: Tensor, steps: int, tolerance: float, relative: float) -> Descended:
    """Damped Newton steps from ``x [*batch, D]``, until the decrement is below
    ``max(tolerance, relative max(1, |energy|))``, at most so many."""
    energy, gradient, hessian = curvature(target, x)
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    damping = torch.zeros_like(energy)
    converged = torch.zeros_like(energy, dtype=torch.bool)
    # energies that differ by less are equal up to rounding
    resolution = 8 * torch.finfo(x.dtype).eps
    # a last look tells whether the last step has led there
    for left in range(steps, -1, -1):
        definite, step = _newton_step(hessian, gradient, identity)
        decrement = 0.5 * (gradient * step).sum(-1)
        near = decrement < (relative * energy.abs().clamp_min(1)).clamp_min(tolerance)
        converged = converged | (definite & near)
        if not left or converged.all():
            break
        definite, step = _newton_step(hessian + damping[..., None, None] * identity, gradient, identity)
        proposal = torch.where((definite & ~converged).unsqueeze(-1), x - step, x)
        new_energy = target.energy_and_gradient(proposal)[0].to(x)
        better = definite & (new_energy <= energy + resolution * energy.abs()) & ~converged
        x = torch.where(better.unsqueeze(-1), proposal, x)
        scale = hessian.diagonal(dim1=-2, dim2=-1).abs().amax(-1).clamp_min(1e-6)
        smaller = torch.where(damping > 1e-6 * scale, damping / 10, torch.zeros_like(damping))
        damping = torch.where(better, smaller, (damping * 4).clamp_min(1e-4 * scale))
        energy, gradient, hessian = curvature(target, x)
    return Descended(x, energy, gradient, hessian, converged)


def _newton_step(hessian: Tensor, gradient: Tensor, identity: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the Hessian is positive definite, ``[*batch]``, and ``H^-1 g`` where it is."""
    factor, failed = torch.linalg.cholesky_ex(hessian)
    definite = failed == 0
    factor = torch.where(definite[..., None, None], factor, identity)
    return definite, torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)


@differentiable_attention
def curvature(target, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Energy ``[*batch]``, gradient ``[*batch, D]`` and Hessian ``[*batch, D, D]``.

    Where there are no second derivatives, or they overflow, as those of ``torch.logaddexp`` of far apart values do, the
    Hessian is that of central differences of the gradient.
    """
    dim = x.shape[-1]
    rows = torch.eye(dim, dtype=x.dtype, device=x.device).reshape(dim, *[1] * (x.ndim - 1), dim)
    hessian = x.new_full((*x.shape, dim), torch.nan)
    try:
        with torch.enable_grad():
            # one copy per row of the Hessian: an energy takes any leading dimensions, but need not support
            # torch.func.vmap
            copies = x.detach().expand(dim, *x.shape).clone().requires_grad_()
            value = target.energy(copies)
            (slope,) = torch.autograd.grad(value.sum(), copies, create_graph=True)
            if slope.requires_grad:
                hessian = torch.autograd.grad((slope * rows).sum(), copies)[0].movedim(0, -2).detach()
        energy, gradient = value[0].detach().to(x), slope[0].detach()
    except RuntimeError:
        energy, gradient = target.energy_and_gradient(x)
        energy = energy.to(x)
    lost = energy.isfinite() & gradient.isfinite().all(-1) & ~hessian.flatten(-2).isfinite().all(-1)
    if lost.any():
        hessian = torch.where(lost[..., None, None], _differences(target, x, rows), hessian)
    return energy, gradient, 0.5 * (hessian + hessian.mT)


def _differences(target, x: Tensor, rows: Tensor) -> Tensor:
    """Central differences of the gradient along the rows of the identity, ``[*batch, D, D]``."""
    # the step that balances rounding with the third derivative
    step = torch.finfo(x.dtype).eps ** (1 / 3) * x.abs().amax(-1, keepdim=True).clamp_min(1)
    ahead, behind = target.energy_and_gradient(torch.cat([x + step * rows, x - step * rows]))[1].chunk(2)
    return ((ahead - behind) / (2 * step)).movedim(0, -2)


def same_minimum(v: Tensor, energy: Tensor) -> Tensor:
    """The first of the minima that are the same as each, ``[N, *batch]`` indices.

    The same are those whose whitened positions ``v [N, *batch, D]`` are less than a hundredth apart in root mean square
    and whose energies ``[N, *batch]`` are as near.
    """

    def alike(i: int) -> Tensor:
        near = (v[i] - v[:i]).square().mean(-1) < ALIKE.same**2
        return near & ((energy[i] - energy[:i]).abs() < ALIKE.same * energy[i].abs().clamp_min(1).log1p())

    return _first(energy, alike)


def _first(like: Tensor, alike: Callable[[int], Tensor]) -> Tensor:
    """The first place that each of ``like [N, *batch]`` is alike, of which of those before it, ``[i, *batch]``, are."""
    index = places(like)
    first = index.clone()
    for i in range(1, len(like)):
        same = alike(i) & (first[:i] == index[:i])
        first[i] = torch.where(same.any(0), same.long().argmax(0), i)
    return first


def same_mode(x: Tensor, energy: Tensor, covariance: Tensor, counts: Tensor) -> Tensor:
    """The first of the minima that are in the same mode as each, ``[N, *batch]`` indices, by their curvatures.

    Descents along a wide direction of a narrow energy end some way from each other: what lies within a third of a
    standard deviation and a tenth of a nat of a minimum is the same mode.

    Args:
        x: ``[N, *batch, D]``, in the order of their energies.
        energy: ``[N, *batch]``.
        covariance: inverse Hessians ``[N, *batch, D, D]``, NaN where one is not positive definite.
        counts: whether each is a minimum at all, ``[N, *batch]``; those that are not stand for none but themselves.
    """
    return _first(energy, lambda i: counts[:i] & beside_mode(x[i], energy[i], x[:i], energy[:i], covariance[:i]))


def beside_mode(x: Tensor, energy: Tensor, mode: Tensor, lowest: Tensor, covariance: Tensor) -> Tensor:
    """Whether points ``x [..., *batch, D]`` are in a mode ``[..., *batch, D]`` of this energy and covariance, as in
    :func:`same_mode`: ``[..., *batch]``."""
    definite = covariance.flatten(-2).isfinite().all(-1)
    unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    factor = torch.linalg.cholesky_ex(torch.where(definite[..., None, None], covariance, unit)).L
    distance = torch.linalg.solve_triangular(factor, (x - mode).unsqueeze(-1), upper=False)
    return definite & (distance.square().sum((-2, -1)) < ALIKE.within) & (energy - lowest < ALIKE.within)


def places(values: Tensor) -> Tensor:
    """The place of each in dimension 0, ``[N, *batch]``."""
    return torch.arange(len(values), device=values.device).reshape(-1, *[1] * (values.ndim - 1)).expand_as(values)
