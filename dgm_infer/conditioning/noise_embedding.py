"""The noise of a Gaussian tolerance as further inputs: the fibre whose shadow the ABC posterior is (J 7, math 8.14)."""

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from ..structures import Units, of_units
from .fibre import Fibre
from .observed import ObservedModel

__all__ = ["NoiseEmbedding"]

# Iterations of the power method, which say a largest singular value well enough.
_POWERS = 10


class NoisyOutputs(ObservedModel):
    """``y + tolerance n`` of inputs ``(u, n)``, ``n ~ N(0, I)``, with the outputs y of another observed model.

    Args:
        inner: the observed model of u.
        summaries: what of its values is compared.
        tolerance: standard deviation of the noise.
        n_outputs: number of values that are compared.
    """

    def __init__(self, inner: ObservedModel, summaries: Callable[[Tensor], Tensor], tolerance: float, n_outputs: int):
        super().__init__(inner.model, inner.operator, of_units(Units(inner.dim, 1, 1)))
        self.inner, self.summaries, self.tolerance = inner, summaries, tolerance
        self.dim = inner.dim + n_outputs

    @property
    def data(self) -> tuple[Any, ...]:
        return self.inner.data

    def with_data(self, data: tuple[Any, ...]) -> Self:
        return self._around(self.inner.with_data(data))

    def to(self, dtype: torch.dtype) -> Self:
        return self._around(self.inner.to(dtype))

    def _around(self, inner: ObservedModel) -> Self:
        other = copy.copy(self)
        other.inner, other.model = inner, inner.model
        return other

    def split(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """u and n."""
        return position[..., : self.inner.dim], position[..., self.inner.dim :]

    def outputs(self, u: Tensor) -> Tensor:
        u, n = self.split(u)
        return self.summaries(self.inner.outputs(u)) + self.tolerance * n

    def residual(self, u: Tensor, values: Tensor) -> Tensor:
        return self.outputs(u) - values

    def log_density(self, u: Tensor) -> Tensor:
        """``log p_u(u) - |n|^2 / 2``, and the model's log factor."""
        u, n = self.split(u)
        return self.inner.log_density(u) - 0.5 * n.square().sum(-1)


class NoiseEmbedding:
    """The graph ``n(u) = (y - g(u)) / tolerance`` over the inputs, as a fibre of ``g(u) + tolerance n = y``.

    On it the Euclidean metric of ``(u, n)`` is ``G(u) = I + J^T J / tolerance^2``, J the Jacobian of g, and the
    posterior of u on the fibre is that under the tolerance (math 8.14).

    Args:
        inner: the observed model.
        summaries: what of its values is compared, ``[..., Dy] -> [..., K]``.
        tolerance: standard deviation of a Gaussian kernel.
        values: ``[*batch, K]``, those of the data.
    """

    def __init__(self, inner: ObservedModel, summaries: Callable[[Tensor], Tensor], tolerance: float, values: Tensor):
        self._outputs = NoisyOutputs(inner, summaries, tolerance, values.shape[-1])
        self.fibre = Fibre(self._outputs, values)
        """The problem of all inputs, ``(u, n)``."""

    def lift(self, u: Tensor) -> Tensor:
        """``(u, n(u))``: ``[..., *batch, D] -> [..., *batch, D + K]``."""
        with torch.no_grad():
            noise = (
                self.fibre.values - self._outputs.summaries(self._outputs.inner.outputs(u))
            ) / self._outputs.tolerance
        return torch.cat([u, noise], -1)

    def project(self, position: Tensor) -> Tensor:
        """u of ``(u, n)``."""
        return self._outputs.split(position)[0]

    def stretch(self, u: Tensor) -> Tensor:
        """The largest singular value of ``J / tolerance``: ``[n, *batch, D] -> [n, *batch]``.

        How much narrower than the prior the posterior is across the ridge, and steps of HMC with it.
        """
        flat = self.fibre.rows(len(u))
        jacobian = flat.evaluate(type(flat).jacobian, self.lift(u).reshape(-1, self.fibre.dim))
        v = torch.ones_like(u.reshape(-1, u.shape[-1]))
        for _ in range(_POWERS):
            v = v / v.norm(dim=-1, keepdim=True)
            # the columns of the noise are no part of J
            product = jacobian.forward(torch.cat([v, v.new_zeros(len(v), self.fibre.values.shape[-1])], -1))
            v = self.project(jacobian.transpose(product))
        return v.norm(dim=-1).sqrt().reshape(u.shape[:-1]) / self._outputs.tolerance
