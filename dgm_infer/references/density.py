"""Normalised densities on R^D, the whitened coordinates of their moments, and the Gaussian ones among them."""

import math
from dataclasses import FrozenInstanceError
from typing import Self

import torch
from torch import Tensor

from ..arguments import allocatable, finite, instance, numbers, sizes, whole_number
from ..errors import ArgumentError
from .scales import Kind, Scale, given_scale

__all__ = ["GaussianDensity", "Whitened"]


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
        return self.scale.solve(x - self.mean)

    def unwhiten(self, v: Tensor) -> Tensor:
        """``x = mean + L v``, ``[..., *batch, D]``."""
        return self.mean + self.scale.apply(v)

    def _points(self, x: Tensor) -> Tensor:
        """Points ``[..., *batch, D]``, checked.

        Raises:
            ArgumentError: x is not a tensor whose last dimension is D.
        """
        call = f"{type(self).__name__}.energy"
        if instance(call, "x", x, Tensor, "base.sample(10)").shape[-1:] != self.mean.shape[-1:]:
            raise ArgumentError(f"{call}(x of shape {tuple(x.shape)}): expected [..., *batch, {self.dim}]")
        return x

    def _normal(self, shape: tuple[int, ...] | int, generator: torch.Generator | None) -> Tensor:
        """Standard normal numbers ``[*shape, *batch, D]``.

        Raises:
            ArgumentError: the shape is neither an integer >= 0 nor a sequence of them.
        """
        call = f"{type(self).__name__}.sample"
        if isinstance(shape, tuple | list):
            lead = sizes(call, "shape", shape, least=0, empty=True)
        else:
            lead = (whole_number(call, "shape", shape, 0),)
        mean = self.mean
        allocatable(call, "shape", shape, math.prod(lead) * mean.numel(), "fewer draws", like=mean)
        return torch.randn(*lead, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)

    def __repr__(self):
        return f"{type(self).__name__}(*batch, D = {tuple(self.mean.shape)}; {self.kind}, {self.mean.dtype})"


class GaussianDensity(Whitened):
    """``N(mean, L L^T)`` for every problem of a batch; standard normal in whitened coordinates.

    It copies the tensors it is made of.

    Args:
        mean: ``[*batch, D]``.
        sd: ``[*batch, D]`` standard deviations, positive; with ``factor``, those of the diagonal part.
        cholesky: ``[*batch, D, D]`` lower triangular factor of the covariance, in place of ``sd``.
        factor: ``[*batch, D, R]``, for the covariance ``diag(sd^2) + factor factor^T``.

    Raises:
        ArgumentError: shapes that do not fit, or a value that is not finite or, in a scale, not positive.
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

    def energy(self, x: Tensor) -> Tensor:
        """``-log q(x) = |v|^2/2 + log|det L| + D/2 log 2 pi``: ``[..., *batch, D] -> [..., *batch]``.

        Raises:
            ArgumentError: x is not a tensor whose last dimension is D.
        """
        return self._energy_of(self.whiten(self._points(x)))

    def energy_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v = self.whiten(self._points(x))
        return self._energy_of(v), self.scale.solve_transpose(v)

    def _energy_of(self, v: Tensor) -> Tensor:
        return 0.5 * v.square().sum(-1) + self.log_det + 0.5 * self.dim * math.log(2 * math.pi)

    def sample(self, shape: tuple[int, ...] | int = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws ``[*shape, *batch, D]``.

        Raises:
            ArgumentError: the shape is neither an integer >= 0 nor a sequence of them.
        """
        return self.unwhiten(self._normal(shape, generator))
