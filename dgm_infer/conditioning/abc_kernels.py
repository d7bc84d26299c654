"""The ABC posterior in input space, and the fibre of inputs and noise whose shadow it is (J 5, J 7, math 8.14)."""

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from ..arguments import choice, function, points, positive
from ..errors import ArgumentError, StartError, cause
from ..structures import Units, of_units
from ..target import Block, Target
from .fibre import Fibre
from .observed import ObservedModel

# Iterations of the power method, which say a largest singular value well enough.
_POWERS = 10
_DISTANCE = "lambda a, b: (a - b).abs().amax(-1)"
_SUMMARIES = "lambda y: y.mean(-1, keepdim=True)"


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
            # the columns of the noise are not part of J
            product = jacobian.forward(torch.cat([v, v.new_zeros(len(v), self.fibre.values.shape[-1])], -1))
            v = self.project(jacobian.transpose(product))
        return v.norm(dim=-1).sqrt().reshape(u.shape[:-1]) / self._outputs.tolerance


class InputPrior:
    """``p_u`` of the inputs that an observation leaves: a :class:`~dgm_infer.target.Density`."""

    def __init__(self, observed: ObservedModel, like: Tensor):
        self.observed, self.dim, self._like = observed, observed.dim, like

    def log_prob(self, u: Tensor) -> Tensor:
        return self.observed.log_prior(u)

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        return self.observed.sample_inputs(shape, generator, self._like)


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda r2: 0.5 * r2,
    "uniform": lambda r2: torch.where(r2 <= 1, 0.0, torch.inf).to(r2),
    "epanechnikov": lambda r2: torch.where(r2 < 1, -torch.log1p(-r2.clamp_max(1)), torch.inf).to(r2),
}
"""Minus the logs of ABC kernels, of the square of the distance in units of the tolerance (math 2.7)."""


class InputPosterior(Target):
    """ABC posterior in input space (math 2.4, math 2.7, J (34), J (79)).

    ``energy(u) = -log p_u(u) - log K(d(s(A(g_x(u))), s(y))/tolerance)``; of the default kernel and distance
    ``-log p_u(u) + |A(g_x(u)) - y|^2 / (2 tolerance^2)``

    Args:
        observed: the model through its observation operator.
        values: ``[*batch, Dy]`` observed values.
        tolerance: width of the kernel, in units of the distance; of a Gaussian one its standard deviation.
        kernel: K, one of :data:`KERNELS`.
        distance: d, ``[..., *batch, K], [*batch, K] -> [..., *batch]``; None for the Euclidean one.
        summaries: s, ``[..., Dy] -> [..., K]``; None for the values themselves.
        has_gradient: whether the model's outputs have derivatives.

    Raises:
        ArgumentError: an argument is outside its range, or the distances are not non-negative numbers, one per point.
    """

    standardised = True

    def __init__(
        self,
        observed: ObservedModel,
        values: Tensor,
        tolerance: float,
        *,
        kernel: str = "gaussian",
        distance: Callable[[Tensor, Tensor], Tensor] | None = None,
        summaries: Callable[[Tensor], Tensor] | None = None,
        has_gradient: bool = True,
    ):
        tolerance = positive("condition", "tolerance", tolerance)
        choice("condition", "kernel", kernel, tuple(KERNELS))
        super().__init__(None, observed.dim, tuple(values.shape[:-1]))
        self.observed = observed
        self.values = values
        self.tolerance = tolerance
        self.kernel = kernel
        self.distance = None if distance is None else function("condition", "distance", distance, _DISTANCE)
        self.summaries = None if summaries is None else function("condition", "summaries", summaries, _SUMMARIES)
        self.has_gradient = has_gradient and kernel != "uniform"
        self.prior = InputPrior(observed, values)
        self._summary = values
        self._compare_summaries()

    @property
    def model(self):
        return self.observed.model

    @property
    def blocks(self):
        """``"global"`` and ``"local"`` inputs, of models that have both."""
        if not self.model.has_local_inputs:
            return {}
        n_global = self.model.split(self.values.new_empty(0, self.dim))[0].shape[-1]
        return {"global": Block(0, n_global), "local": Block(n_global, self.dim)}

    @property
    def is_bounded(self) -> bool:
        """Whether the kernel is zero beyond its width."""
        return self.kernel != "gaussian"

    @cached_property
    def embedding(self) -> NoiseEmbedding | None:
        """The fibre of inputs and noise whose posterior of the inputs this is; None if there is no such noise."""
        if self.is_bounded or self.distance is not None or not self.has_gradient:
            return None
        return NoiseEmbedding(self.observed, self._summarised, self.tolerance, self._summary)

    def square_distance(self, u: Tensor) -> Tensor:
        """Squared distance of the outputs at ``u`` from the observed values: ``[..., *batch, D] -> [..., *batch]``."""
        found = self._summarised(self.observed.outputs(u))
        if self.distance is None:
            return (found - self._summary).square().sum(-1)
        return self._distances(found).square()

    def _distances(self, found: Tensor) -> Tensor:
        assert self.distance is not None
        return self.distance(found, self._summary)

    def energy(self, x):
        x = points("InputPosterior.energy", "x", x, self.dim)
        return KERNELS[self.kernel](self.square_distance(x) / self.tolerance**2) - self.observed.log_density(x)

    def energy_and_gradient(self, x):
        if not self.has_gradient:
            outputs = f"the outputs of {type(self.model).__name__} have"
            why = "a uniform kernel has" if self.kernel == "uniform" else outputs
            raise ArgumentError(
                f"{why} no derivative, which this method needs: use EllipticalSlice, LinearSlice or RandomWalk, "
                f"and log_evidence(target, dgm.Gaussian(torch.zeros({self.dim}), 1.0), "
                "dgm.evidence.ImportanceSampling(10_000))"
            )
        return super().energy_and_gradient(x)

    def _summarised(self, y: Tensor) -> Tensor:
        return y if self.summaries is None else self.summaries(y)

    def _compare_summaries(self) -> None:
        """Take the data's own summaries, and check the distances of prior draws from them."""
        if self.distance is None and self.summaries is None:
            return
        u = self.initial_draws(2, torch.Generator(self.values.device).manual_seed(0))
        try:
            with torch.no_grad():
                self._summary = self._summarised(self.values)
                square = self.square_distance(u)
                found = square if self.distance is None else self._distances(self._summary)
                made = square if self.distance is None else self._distances(self._summarised(self.observed.outputs(u)))
        except Exception as error:
            raise ArgumentError(f"condition(distance=, summaries=): fails at prior draws: {cause(error)}") from error
        if square.shape != u.shape[:-1] or not found.isfinite().all():
            raise ArgumentError(
                f"condition(distance=, summaries=): gives shape {tuple(square.shape)} for {tuple(u.shape[:-1])} "
                "points: must be one finite number per point; compute with dimensions counted from the right"
            )
        if (made < 0).any():
            raise ArgumentError(
                f"condition(distance=): gives {made.min().item():.3g} at a prior draw: must not be negative"
            )

    def start(self, chains: int, rng: torch.Generator, attempts: int = 200):
        """Prior draws with a density, drawn again where they have none.

        Raises:
            StartError: a kernel of bounded width holds none of the draws of a problem.
        """
        x = super().start(chains, rng, attempts)
        if not self.is_bounded:
            return x
        with torch.no_grad():
            finite = self.energy(x).isfinite()
            if not finite.any(0).all():
                square = self.square_distance(self.initial_draws(max(chains, 1000), rng)).amin(0)
                nearest = square.sqrt()[~finite.any(0)].max().item()
                raise StartError(
                    f"none of {chains * (attempts + 1)} prior draws is within tolerance={self.tolerance:g}: the "
                    f"nearest of {max(chains, 1000)} more is {nearest:.3g} away, and fewer than 1 in "
                    f"{chains * (attempts + 1)} are accepted: raise the tolerance, use kernel='gaussian', or pass "
                    "initial="
                )
        # chains without a draw of their own share that of another
        order = torch.rand(finite.shape, generator=rng, dtype=torch.float32, device=x.device).to(x)
        source = (finite.to(x) * order).argmax(0)
        return torch.where(finite.unsqueeze(-1), x, x.gather(0, source[None, ..., None].expand(1, *x.shape[1:])))

    def latents(self, x):
        with torch.no_grad():
            return self.observed.latents(x)

    def initial_draws(self, n, rng):
        """Draws from the prior, ``[n, *batch, D]``."""
        return self.observed.sample_inputs((n, *self.batch_shape), rng, self.values)

    def complete(self, u: Tensor, rng: torch.Generator, mean: bool = False) -> Tensor:
        """Complete outputs ``[..., *batch, *output_shape]``: the observed part as observed, the rest generated."""
        return self.observed.complete(u, self.values, rng, mean)
