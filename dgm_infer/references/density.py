"""Normalised densities on R^D, the whitened coordinates of their moments, and moments of mixtures and draws."""

import math
from dataclasses import FrozenInstanceError
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..arguments import default_type, digits, finite, indices, lead_shape, numbers, points, positive_numbers
from ..autodiff.pytrees import take
from ..errors import ArgumentError, EvidenceError
from ..linear_maps import DiagonalMap, Kind, LowRankMap, Scale, TriangularMap
from ..target import Target, reference


class Whitened:
    """A normalised density per problem, of these moments: ``mean`` and covariance ``L L^T`` (math 11.9).

    Whitened coordinates are ``v = L^-1 (x - mean)``, in which the density has mean zero and unit variances. It is
    frozen: no attribute can be set.
    """

    mean: Tensor
    """``[*batch, D]``."""
    scale: Scale
    """L."""
    log_zeta: Tensor | None = None
    """``[*batch]`` guess of the target's log evidence; None if unknown."""

    def energy(self, x: Tensor) -> Tensor:
        """``-log q(x)``: ``[..., *batch, D] -> [..., *batch]``."""
        raise NotImplementedError

    def energy_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``-log q(x)`` and its gradient ``[..., *batch, D]``, detached."""
        raise NotImplementedError

    def sample(self, shape: tuple[int, ...] | int = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws ``[*shape, *batch, D]``."""
        raise NotImplementedError

    @property
    def moments(self) -> "GaussianDensity":
        """The Gaussian of the same mean and L."""
        raise NotImplementedError

    def take(self, problems: Tensor) -> "Whitened":
        """The densities of the problems with flat indices ``[N]``; the batch shape is ``[N]``."""
        raise NotImplementedError

    def refined(
        self,
        draws: Tensor,
        log_weights: Tensor,
        log_zeta: Tensor | None = None,
        *,
        kind: Kind | None = None,
    ) -> "Whitened":
        """A density of the same family that fits weighted draws of the target, as :func:`refine_base` asks for it."""
        raise NotImplementedError

    def log_prob(self, x: Tensor) -> Tensor:
        """``log q(x)``: ``[..., *batch, D] -> [..., *batch]``."""
        return -self.energy(x)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"a {type(self).__name__} is frozen: make another one instead of setting {name}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"a {type(self).__name__} is frozen: {name} cannot be deleted")

    @property
    def dim(self) -> int:
        return self.mean.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self.mean.shape[:-1]

    @property
    def kind(self) -> Kind:
        """``"diagonal"``, ``"full"`` or ``"low_rank"``: that of L."""
        return self.scale.kind

    @property
    def log_det(self) -> Tensor:
        """``log|det L|``, ``[*batch]``."""
        return self.scale.log_det()

    @property
    def covariance(self) -> Tensor:
        """``[*batch, D, D]``."""
        return self.scale.covariance()

    @property
    def covariance_diagonal(self) -> Tensor:
        """``[*batch, D]``."""
        return self.scale.covariance_diagonal()

    def whiten(self, x: Tensor) -> Tensor:
        """``v = L^-1 (x - mean)``, ``[..., *batch, D]``."""
        return self.scale.solve(self._points("whiten", "x", x) - self.mean)

    def unwhiten(self, v: Tensor) -> Tensor:
        """``x = mean + L v``, ``[..., *batch, D]``."""
        return self.mean + self.scale.apply(self._points("unwhiten", "v", v))

    def _points(self, method: str, field: str, value: Tensor) -> Tensor:
        """Points ``[..., *batch, D]``, checked.

        Raises:
            ArgumentError: they are not a real tensor whose last dimension is D.
        """
        call = f"{type(self).__name__}.{method}"
        return points(call, field, value, self.mean.shape[-1], "..., *batch").to(self.mean.dtype)

    def _normal(self, shape: tuple[int, ...] | int, generator: torch.Generator | None) -> Tensor:
        """Standard normal numbers ``[*shape, *batch, D]``.

        Raises:
            ArgumentError: the shape is neither an integer >= 0 nor a sequence of them.
        """
        mean = self.mean
        lead = lead_shape(f"{type(self).__name__}.sample", shape, mean.numel(), generator=generator)
        return torch.randn(*lead, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)

    def __repr__(self):
        return f"{type(self).__name__}(*batch, D = {tuple(self.mean.shape)}; {self.kind}, {self.mean.dtype})"


class GaussianDensity(Whitened):
    """``N(mean, L L^T)`` for every problem of a batch; standard normal in whitened coordinates.

    It copies the tensors it is made of; arguments and errors as of :class:`Gaussian`.
    """

    def __init__(
        self,
        mean: Tensor,
        sd: Tensor | float | None = None,
        *,
        cholesky: Tensor | None = None,
        factor: Tensor | None = None,
    ):
        mean = numbers("Gaussian", "mean", mean).clone()
        if mean.ndim < 1 or mean.shape[-1] < 1:
            raise ArgumentError(f"Gaussian(mean of shape {tuple(mean.shape)}): expected [*batch, D]")
        finite("Gaussian", "mean", mean)
        vars(self).update(mean=mean, scale=given_scale(mean, sd, cholesky, factor))

    @classmethod
    def _of(cls, mean: Tensor, scale: Scale, **attributes: Tensor | None) -> Self:
        """A density of parts that have been checked."""
        new = object.__new__(cls)
        vars(new).update(mean=mean, scale=scale, **attributes)
        return new

    @property
    def moments(self) -> "GaussianDensity":
        return self

    def take(self, problems: Tensor) -> Self:
        """The densities of the problems with flat indices ``[N]``; the batch shape is ``[N]``.

        Raises:
            ArgumentError: an index is out of range.
        """
        problems = indices(f"{type(self).__name__}.take", "problems", problems, self.batch_shape.numel())
        tensors = (self.mean, *self.scale.parts, *([] if self.log_zeta is None else [self.log_zeta]))
        mean, *parts = take(tensors, self.batch_shape, problems.to(self.mean.device))
        log_zeta = None if self.log_zeta is None else parts.pop()
        return self._of(mean, self.scale.remade(parts), log_zeta=log_zeta)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The same densities on another device or in another dtype."""
        mean, *parts = (tensor.to(*args, **kwargs) for tensor in (self.mean, *self.scale.parts))
        log_zeta = None if self.log_zeta is None else self.log_zeta.to(mean.device)
        return self._of(mean, self.scale.remade(parts), log_zeta=log_zeta)

    def energy(self, x: Tensor) -> Tensor:
        """``-log q(x) = |v|^2/2 + log|det L| + D/2 log 2 pi``: ``[..., *batch, D] -> [..., *batch]``.

        Raises:
            ArgumentError: x is not a tensor whose last dimension is D.
        """
        return self._energy_of(self._whitened(x))

    def energy_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v = self._whitened(x)
        return self._energy_of(v), self.scale.solve_transpose(v)

    def _whitened(self, x: Tensor) -> Tensor:
        return self.scale.solve(self._points("energy", "x", x) - self.mean)

    def _energy_of(self, v: Tensor) -> Tensor:
        return 0.5 * v.square().sum(-1) + self.log_det + 0.5 * self.dim * math.log(2 * math.pi)

    def sample(self, shape: tuple[int, ...] | int = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws ``[*shape, *batch, D]``.

        Raises:
            ArgumentError: the shape is neither an integer >= 0 nor a sequence of them.
        """
        return self.unwhiten(self._normal(shape, generator))


def given_log_zeta(call: str, log_zeta: Any, mean: Tensor) -> Tensor | None:
    """A copy of a guess of log Z that a user gives, ``[*batch]`` in float64; None for none.

    Raises:
        ArgumentError: it is not finite, or of another shape.
    """
    if log_zeta is None:
        return None
    log_zeta = finite(call, "log_zeta", log_zeta, torch.float64).to(mean.device, copy=True)
    if log_zeta.shape != mean.shape[:-1]:
        raise ArgumentError(f"{call}(log_zeta of shape {tuple(log_zeta.shape)}): expected {tuple(mean.shape[:-1])}")
    return log_zeta


def origin(target: Target, unknown: torch.dtype | None = None) -> Tensor:
    """Zeros ``[*batch, D]`` of the target's type and on its device.

    Args:
        unknown: the type if the target does not say; None for torch's default.
    """
    like = reference(target)
    dtype, device = (unknown or default_type(), None) if like is None else (like.dtype, like.device)
    return torch.zeros(*target.batch_shape, target.dim, dtype=dtype, device=device)


class MixtureMoments(NamedTuple):
    mean: Tensor
    """``[*batch, D]``."""
    covariance: Tensor
    """``[*batch, D, D]``."""
    log_total: Tensor
    """Log of the sum of the weights, ``[*batch]``."""


def mixture_moments(means: Tensor, covariances: Tensor, log_weights: Tensor) -> MixtureMoments:
    """Mean and covariance of ``sum_i w_i q_i / sum_i w_i`` from those of its components.

    Args:
        means: ``[L, *batch, D]``.
        covariances: ``[L, *batch, D, D]``.
        log_weights: ``[L, *batch]``; ``-inf`` ignores a component.
    """
    log_total = log_weights.logsumexp(0)
    weights = (log_weights - log_total).exp()
    mean = (weights.unsqueeze(-1) * means).sum(0)
    deviations = weights.sqrt().unsqueeze(-1) * (means - mean)
    within = (weights[..., None, None] * covariances).sum(0)
    return MixtureMoments(mean, within + _outer_sum(deviations), log_total)


def check_mixture(call: str, means, covariances, log_weights) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of :meth:`Gaussian.of_mixture` as tensors.

    Raises:
        ArgumentError: shapes that do not fit, no components, or a value that is not finite.
        EvidenceError: all weights of a problem are zero.
    """
    means, covariances = numbers(call, "means", means), numbers(call, "covariances", covariances)
    log_weights = numbers(call, "log_weights", log_weights)
    if not means.ndim or covariances.shape != (*means.shape, means.shape[-1]) or log_weights.shape != means.shape[:-1]:
        raise ArgumentError(
            f"{call}(means {tuple(means.shape)}, covariances {tuple(covariances.shape)}, log_weights "
            f"{tuple(log_weights.shape)}): expected [L, *batch, D], [L, *batch, D, D] and [L, *batch]"
        )
    if not len(means):
        raise ArgumentError(f"{call}(means): there are no components")
    if not (means.isfinite().all() and covariances.isfinite().all() and (log_weights < math.inf).all()):
        raise ArgumentError(f"{call}(): a mean, a covariance or a weight is not finite")
    if not (covariances.diagonal(dim1=-2, dim2=-1) > 0).all():
        raise ArgumentError(f"{call}(covariances): a variance is not positive")
    empty = log_weights.isneginf().all(0)
    if empty.any():
        raise EvidenceError(
            f"all components have zero weight for {int(empty.sum())} of {empty.numel()} problems: all local fits "
            "reach outside the target's support; give a start inside it"
        )
    return means, covariances, log_weights


def distinct(means: Tensor, covariances: Tensor, order: Tensor, tolerance: float) -> Tensor:
    """Which components to keep so that no two are duplicates, ``[L, *batch]``.

    Two are duplicates if ``d^T (C_1 + C_2)^-1 d / D``, with d the difference of their means, is below ``tolerance``
    squared. The one with the larger ``order [L, *batch]`` stays.
    """
    n = len(means)
    rank = order.argsort(0, descending=True)
    index = rank[..., None].expand_as(means)
    means = means.gather(0, index)
    covariances = covariances.gather(0, index[..., None].expand_as(covariances))
    kept = torch.ones_like(order, dtype=torch.bool)
    for i in range(1, n):
        d = (means[i] - means[:i]).unsqueeze(-1)
        solved = torch.linalg.solve(covariances[i] + covariances[:i], d)
        distance = (d * solved).sum((-2, -1)) / means.shape[-1]
        kept[i] = ~(kept[:i] & (distance < float(tolerance) * float(tolerance))).any(0)
    return torch.zeros_like(kept).scatter(0, rank, kept)


def check_weighted(call: str, draws: Any, log_weights: Any, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weighted draws ``[chains, draws, *batch, D]`` and ``[chains, draws, *batch]`` as tensors.

    Args:
        log_weights: None for equal ones.
        like: a tensor ``[*batch, D]``; None for any batch.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    draws = numbers(call, "draws", draws)
    log_weights = (
        draws.new_zeros(draws.shape[:-1]) if log_weights is None else numbers(call, "log_weights", log_weights)
    )
    fits = draws.ndim >= 3 if like is None else draws.shape[2:] == like.shape
    if not fits or log_weights.shape != draws.shape[:-1]:
        expected = "*batch, D" if like is None else f"*{tuple(like.shape)}"
        raise ArgumentError(
            f"{call}(draws of shape {tuple(draws.shape)}, log_weights of shape {tuple(log_weights.shape)}): "
            f"expected [chains, draws, {expected}] and the same without its last dimension"
        )
    return draws, log_weights


class WeightedMoments(NamedTuple):
    mean: Tensor
    """``[*batch, D]``."""
    covariance: Tensor
    """``[*batch, D, D]``."""
    ess: Tensor
    """Effective sample size of the weights, ``[*batch]``."""


def weighted_moments(draws: Tensor, log_weights: Tensor) -> WeightedMoments:
    """Moments of draws ``[N, *batch, D]`` with log weights ``[N, *batch]``; a weight that is not finite counts as zero.

    Raises:
        EvidenceError: all weights of a problem are zero.
    """
    log_weights = torch.where(log_weights < math.inf, log_weights.double(), -math.inf)
    log_weights = log_weights.nan_to_num(nan=-math.inf, neginf=-math.inf)
    empty = log_weights.isneginf().all(0)
    if empty.any():
        raise EvidenceError(
            f"all weights are zero for {int(empty.sum())} of {empty.numel()} problems: they determine no base"
        )
    weights = log_weights.softmax(0)
    mean = (weights.unsqueeze(-1) * draws).sum(0)
    deviations = weights.sqrt().unsqueeze(-1) * (draws - mean)
    return WeightedMoments(mean, _outer_sum(deviations), 1 / weights.square().sum(0))


def _outer_sum(deviations: Tensor) -> Tensor:
    """``sum_n d_n d_n^T``: ``[N, *batch, D]`` to ``[*batch, D, D]``."""
    return torch.einsum("n...i,n...j->...ij", deviations, deviations)


def given_scale(mean: Tensor, sd: Any, cholesky: Any, factor: Any) -> Scale:
    """The map that a user describes, with copies of the tensors; see :class:`Gaussian`.

    Raises:
        ArgumentError: none of the three forms, a wrong shape, or a number that is not finite or not positive.
    """
    if (sd is None) == (cholesky is None) or (factor is not None and sd is None):
        raise ArgumentError("Gaussian(): give the scale as sd, as sd and factor, or as cholesky")
    shape = tuple(mean.shape)
    if cholesky is not None:
        cholesky = numbers("Gaussian", "cholesky", cholesky, digits(cholesky)).to(mean)
        if cholesky.shape != (*shape, shape[-1]):
            raise ArgumentError(f"Gaussian(cholesky of shape {tuple(cholesky.shape)}): expected {(*shape, shape[-1])}")
        if cholesky.triu(1).any():
            raise ArgumentError(
                "Gaussian(cholesky): has numbers above the diagonal: must be the lower triangular factor, "
                "torch.linalg.cholesky(covariance)"
            )
        positive_numbers("Gaussian", "diagonal of cholesky", cholesky.diagonal(dim1=-2, dim2=-1))
        return TriangularMap(finite("Gaussian", "cholesky", cholesky).clone())
    sd = positive_numbers("Gaussian", "sd", sd, digits(sd)).to(mean)
    if sd.ndim and sd.shape != mean.shape:
        raise ArgumentError(f"Gaussian(sd of shape {tuple(sd.shape)}): expected {shape}, or a number")
    sd = sd.clone().expand(shape)
    if factor is None:
        return DiagonalMap(sd)
    factor = finite("Gaussian", "factor", factor, digits(factor)).to(mean).clone()
    if factor.shape[:-1] != mean.shape:
        raise ArgumentError(f"Gaussian(factor of shape {tuple(factor.shape)}): expected {(*shape, 'R')}")
    return LowRankMap.of(sd, factor)
