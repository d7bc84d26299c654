"""Necks: where a density narrows as it rises, and moves of one step size hardly come (math 6.14)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..references.density import GaussianDensity
from ..references.minimise import curvature, minimise
from ..references.modes import in_units_of
from .method import Outcome
from .path import AnnealedPath
from .wide_sample import CrossCheck, beside_run


@dataclass(frozen=True)
class NeckSettings:
    """Sizes of the search for a neck and of the sample along it, and when they count."""

    dim: int = 64
    """Dimensions above which none is looked for: of every slice there is a Hessian."""
    share: float = 0.1
    """Share of the run's gradients that the search may take."""
    draws: int = 1000
    """Draws of the run whose spread sets the coordinates."""
    starts: int = 16
    """Descents from draws of the run."""
    iterations: int = 100
    """Gradients of each, and of those in the slices."""
    below: float = 5.0
    """Nats below all draws, beyond those at which a normal law has its mode, at which a descent ends where there may be
    a neck; where there is none, this costs the sample."""
    slices: int = 64
    """Slices from one side of the draws to far down the neck."""
    beyond: float = 3.0
    """Spreads of the draws beyond them, on either side."""
    far: float = 40.0
    """The same down the neck, at most: of the log of a scale about that."""
    points: int = 4096
    """Points of the sample."""
    dof: float = 5.0
    """Degrees of freedom of Student's t in a slice: tails may be heavier than Laplace's approximation."""
    effective: float = 50.0
    """Effective points below which their error is not known."""
    false: float = 1e-3
    """Probability of a shift where there is none."""


SETTINGS = NeckSettings()


@torch.no_grad()
def neck_sample(path: AnnealedPath, outcome: Outcome, rng: torch.Generator) -> CrossCheck:
    """By how much log Z is larger by importance sampling along where descents fall far below the draws.

    There has to be one problem, of few dimensions. ``x = m + s (t d + Q z)``, d the direction in units of the draws'
    spreads and Q the others. In slices of constant t the energy is minimised; ``log m(t) = -phi + (D - 1)/2 log 2 pi -
    log|Q^T H Q|/2`` is Laplace's mass of a slice, by which t is drawn, and z from Student's t with its inverse Hessian.
    A centred hierarchy is normal in each slice. As with :func:`~dgm_infer.evidence.wide_sample.wide_sample`, a larger Z
    is evidence against the run, whatever chains have seen, and a smaller one is not.
    """
    estimate, base = outcome.estimate, path.base
    nothing = CrossCheck.none(estimate.log_z)
    affordable = SETTINGS.share * path.evaluations * len(outcome.draws) >= SETTINGS.starts * SETTINGS.iterations
    usable = base.batch_shape.numel() == 1 and path.target.has_gradient and outcome.draws.shape[1] > 0
    fits = 1 < base.dim <= SETTINGS.dim and affordable
    if not (usable and fits and estimate.log_z.isfinite().all()) or outcome.interrupted:
        return nothing
    try:
        neck = _found(path, outcome, rng)
        if neck is None:
            return nothing
        log_w = _log_weights(neck, rng)
    except (RuntimeError, ValueError, ArithmeticError):
        return nothing
    log_w = log_w.reshape(-1, *base.batch_shape)
    return beside_run(log_w, outcome, least=SETTINGS.effective, false=SETTINGS.false)


class _Neck(NamedTuple):
    """Slices through a density, in the coordinates of ``base``."""

    base: GaussianDensity
    energy: "_Energy"
    direction: Tensor
    """d, ``[D]``."""
    others: Tensor
    """Q, ``[D, D - 1]``."""
    at: Tensor
    """t, evenly spaced, ``[K]``."""
    centres: Tensor
    """z of least energy, ``[K, D - 1]``."""
    factors: Tensor
    """Lower triangular factors of the Hessians there, ``[K, D - 1, D - 1]``."""
    log_masses: Tensor
    """``-inf`` where a Hessian has no factor, ``[K]``."""


class _Energy:
    """Energy and gradient of the one problem, in whitened coordinates: ``[n, D]``."""

    def __init__(self, path: AnnealedPath, base: GaussianDensity):
        self._evaluate, self._lead = in_units_of(base, path.target), path.batch_shape

    def __call__(self, v: Tensor) -> tuple[Tensor, Tensor]:
        energy, gradient = self._evaluate(v.reshape(len(v), *self._lead, v.shape[-1]))
        return energy.reshape(len(v)), gradient.reshape(v.shape)


def _found(path: AnnealedPath, outcome: Outcome, rng: torch.Generator) -> _Neck | None:
    like, dim = path.base.mean, path.base.dim
    draws = outcome.draws.reshape(-1, dim).to(like)
    weights = outcome.log_weights.reshape(-1).softmax(0)
    x = draws[torch.multinomial(weights, SETTINGS.draws, True, generator=rng)]
    spread = x.std(0)
    if not bool((spread > 0).all()):
        return None
    base = GaussianDensity(x.mean(0).reshape(like.shape), spread.reshape(like.shape))
    energy = _Energy(path, base)
    v = (x - x.mean(0)) / spread
    lowest = energy(v)[0].min()
    ends = minimise(energy, v[: SETTINGS.starts], iterations=SETTINGS.iterations)
    # of a normal law the mode is D/2 nats below its draws, and three standard deviations less below the lowest
    usual = max(0.0, 0.5 * dim - 3 * math.sqrt(0.5 * dim))
    if not ends.energy.min() < lowest - usual - SETTINGS.below:
        return None
    end = ends.position[ends.energy.argmin()]
    length = torch.linalg.vector_norm(end)
    direction = end / length
    others = torch.linalg.svd(direction[None], full_matrices=True).Vh[1:].mT
    t = v @ direction
    beyond = SETTINGS.beyond * t.std()
    far = torch.minimum(length, SETTINGS.far * t.std()).maximum(t.max() + beyond)
    at = torch.lerp(t.min() - beyond, far, torch.linspace(0, 1, SETTINGS.slices, dtype=like.dtype, device=like.device))

    def slices(z: Tensor) -> Tensor:
        return at.unsqueeze(-1) * direction + z @ others.mT

    def within(z: Tensor) -> tuple[Tensor, Tensor]:
        values, gradient = energy(slices(z))
        return values, gradient @ others

    start = (at / length).clamp(0, 1).unsqueeze(-1) * (end @ others)
    centres = minimise(within, start, iterations=SETTINGS.iterations)
    points = base.unwhiten(slices(centres.position).reshape(len(at), *like.shape))
    hessians = curvature(path.target, points)[2].reshape(len(at), dim, dim) * spread * spread.unsqueeze(-1)
    own = (others.mT @ hessians @ others).double()
    usable = own.isfinite().all(-1).all(-1) & centres.energy.isfinite()
    unit = torch.eye(dim - 1, dtype=own.dtype, device=own.device)
    factors, failed = torch.linalg.cholesky_ex(torch.where(usable[:, None, None], own, unit))
    usable &= failed == 0
    factors = torch.where(usable[:, None, None], factors, unit)
    log_masses = 0.5 * (dim - 1) * math.log(2 * math.pi) - centres.energy.double() - _log_det(factors)
    log_masses = torch.where(usable, log_masses, -math.inf)
    if not usable.any():
        return None
    return _Neck(base, energy, direction, others, at, centres.position, factors, log_masses)


def _log_weights(neck: _Neck, rng: torch.Generator) -> Tensor:
    """``-phi - log q`` at the points of the sample, ``[n]``, float64."""
    n, dim, dof = SETTINGS.points, len(neck.direction), torch.tensor(SETTINGS.dof, dtype=torch.float64)
    width = float(neck.at[1] - neck.at[0])
    # t is uniform between two neighbours, of which each gives half of the points their spread
    pairs = torch.logaddexp(neck.log_masses[1:], neck.log_masses[:-1]).log_softmax(0)
    k = torch.multinomial(pairs.exp(), n, True, generator=rng)
    part = torch.rand(n, generator=rng, dtype=torch.float64, device=k.device)
    near = torch.where(part < 0.5, k, k + 1)
    near = torch.where(neck.log_masses[near].isfinite(), near, 2 * k + 1 - near)
    noise = torch.randn(n, dim - 1, generator=rng, dtype=torch.float64, device=k.device)
    # a gamma variable by sums of squares of normals, as its own has no generator
    squares = torch.randn(n, int(SETTINGS.dof), generator=rng, dtype=torch.float64, device=k.device).square().sum(-1)
    noise = noise * (dof / squares).sqrt().unsqueeze(-1)
    factors = neck.factors[near]
    apart = torch.linalg.solve_triangular(factors.mT, noise.unsqueeze(-1), upper=True).squeeze(-1)
    z = torch.lerp(neck.centres[k], neck.centres[k + 1], part.to(neck.centres).unsqueeze(-1)) + apart.to(neck.centres)
    t = neck.at[k] + part.to(neck.at) * width
    log_q = pairs[k] - math.log(width) + _log_det(factors) - 0.5 * (dim - 1) * math.log(SETTINGS.dof * math.pi)
    log_q = log_q + torch.lgamma((dof + dim - 1) / 2) - torch.lgamma(dof / 2)
    log_q = log_q - 0.5 * (dof + dim - 1) * torch.log1p(noise.square().sum(-1) / dof)
    energy = neck.energy(t.unsqueeze(-1) * neck.direction + z @ neck.others.mT)[0].double()
    return torch.where(energy.isfinite(), -energy, -math.inf) + neck.base.log_det.double().reshape(()) - log_q


def _log_det(factors: Tensor) -> Tensor:
    return factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
