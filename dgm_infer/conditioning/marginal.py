"""The posterior of the global inputs where local ones are additive normal noise, which then integrates out."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..autodiff.capture import Graph, affine_graph
from ..autodiff.pytrees import take
from ..autodiff.randomness import normal
from ..settings import Settings
from ..structures import Dense, Units, push_forward
from ..target import Posterior
from .observed import ObservedModel


@dataclass(frozen=True)
class MarginalSettings(Settings):
    """How a constraint is found to be linear in its noise, and differentiated."""

    draws: int = 4
    """Prior draws at which it must be."""
    rounding: float = 1e4
    """Rounding errors, in units of the dtype's spacing, that it may show."""
    off: float = 0.1
    """Share of points that may miss the observation: a base reaches where the posterior does not."""
    columns: int = 20
    """Forward derivatives taken at once: memory for so many copies of the network."""


SETTINGS = MarginalSettings()


class NoiseMarginal(Posterior):
    """``p(u1 | y)`` where the constraint is ``c = r(u1) + D(u1) u2`` with standard normal ``u2`` (math 2.6).

    The noise integrates out to ``energy(u1) = -log p(u1) - log p(y | u1)``, with ``-log p(y | u1) = |R^-1 r|^2 / 2 +
    log|R| + Dy log(2 pi) / 2`` and ``R R^T = D D^T``, so that its evidence is ``log p(y)``. The posterior on the fibre
    is this density of u1, with u2 normal given ``D u2 = -r``.

    Args:
        observed: the model through its observation operator.
        values: ``[*batch, Dy]`` observed values.
        blocks: D if it does not depend on u1, ``[*batch, U, m, k]``, one block per independent unit; None to compute it
            at every position.
        coarse: the observed model in float32, which gradients are computed with; None for ``observed`` itself.
        everywhere: whether the constraint is known to be of this form at all inputs.
    """

    def __init__(
        self,
        observed: ObservedModel,
        values: Tensor,
        blocks: Tensor | None = None,
        coarse: ObservedModel | None = None,
        everywhere: bool = False,
    ):
        self.observed = observed
        self.holds_everywhere = everywhere
        self._values = values
        self.model: Any = observed.model
        super().__init__(None, self.model.global_density.dim, tuple(values.shape[:-1]))
        self._n_local = observed.dim - self.dim
        self._blocks = blocks
        self._root = None if blocks is None else _Root.of(blocks)
        self._knows_prior = self.model.global_density.is_standard_normal and not self.model.has_log_factor
        self.coarse: Any = coarse and type(self)(coarse, values.float(), blocks if blocks is None else blocks.float())

    @classmethod
    def of(cls, observed: ObservedModel, values: Tensor, coarse: ObservedModel | None = None) -> Self | None:
        """The marginal of a constraint; None unless it is linear in standard normal local inputs, with full row rank,
        and there are global ones.

        Where the model declares it, or its operations show it, the constraint is linear everywhere. Else it is tested
        at prior draws, with random numbers of its own: what holds there might fail elsewhere, where a position from
        :meth:`lift` does not satisfy the constraint.
        """
        model: Any = observed.model
        if not (model.has_local_inputs and model.local_density.is_standard_normal and model.global_density.dim):
            return None
        marginal = cls(observed, values)
        if not marginal._n_local > 0 or values.shape[-1] > marginal._n_local:
            return None
        rng = torch.Generator(values.device).manual_seed(0)
        with torch.no_grad():
            u = observed.sample_inputs((SETTINGS.draws, *marginal.batch_shape), rng, values)
            u1, u2 = u[..., : marginal.dim], u[..., marginal.dim :]
            shown, graph = model.adds_noise and observed.operator.is_linear, None
            # a D that is fixed is found here, once
            residual, blocks = marginal._linear(u1, exactly=True)
            if not (shown and blocks.isfinite().all()):
                graph = affine_graph(lambda a, b: observed.residual(torch.cat([a, b], -1), values), u1, u2)
                residual, blocks = marginal._linear(u1, exactly=True, graph=graph)
                shown |= graph is not None
            constraint = observed.residual(u, values)
            data = observed.in_units(values).abs().amax(-1).expand(u1.shape[:-1])
            size = torch.stack([constraint.abs().amax(-1), residual.abs().amax(-1), data])
            # a simulator may overflow at some prior draws
            usable = blocks.isfinite().flatten(-3).all(-1) if shown else size.amax(0).isfinite()
            allowed = SETTINGS.rounding * torch.finfo(u.dtype).eps * size.amax(0)
            error = (residual + _times(blocks, u2) - constraint).abs().amax(-1)
            depends = usable & ~(((error <= allowed) | shown) & _has_full_rank(blocks))
            if model.has_log_factor:
                moved = model.log_factor(observed.inputs(u)) - model.log_factor(observed.inputs(marginal._full(u1)))
                depends |= usable & (moved != 0)
            if not usable.any(0).all() or depends.any():
                return None
            first = usable.to(torch.int8).argmax(0)[None, ..., None, None, None].expand(1, *blocks.shape[1:])
            one = blocks.gather(0, first)[0]
            # rounding of D itself where outputs overflow
            allowed = torch.where(allowed.isfinite(), allowed, SETTINGS.rounding * torch.finfo(u.dtype).eps)
            differs = (blocks - one).abs().flatten(-3).amax(-1) > allowed
        return cls(observed, values, None if (usable & differs).any() else one, coarse, shown)

    @property
    def _units(self) -> Units:
        """Sizes of the units that the noise splits into; one unit of everything if there are none."""
        return self.observed.structure.units or Units(self.dim, self._n_local, self.values.shape[-1])

    def take(self, problems):
        data, values = take((self.observed.data, self.values), self.batch_shape, problems)
        blocks = None if self._blocks is None else take(self._blocks, self.batch_shape, problems)
        taken = type(self)(self.observed.with_data(data), values, blocks, everywhere=self.holds_everywhere)
        taken.coarse = self.coarse and self.coarse.take(problems)
        return taken

    @property
    def values(self):
        return self._values

    @property
    def n_outputs(self):
        return math.prod(self.model.output_shape)

    @property
    def convolves(self):
        return self.observed.convolves

    def energy(self, x):
        return self.energy_and_extra(x)[0]

    def to(self, dtype: torch.dtype) -> Self:
        if self.values.dtype == dtype:
            return self
        blocks = None if self._blocks is None else self._blocks.to(dtype)
        return type(self)(self.observed.to(dtype), self.values.to(dtype), blocks, everywhere=self.holds_everywhere)

    def energy_and_extra(self, x):
        residual, blocks = self._linear(x)
        energy = self._misfit(residual, self._root or _Root.of(blocks)) - self._log_prior(x)
        return energy, () if self._root is None else (residual,)

    def energy_and_gradient(self, x):
        return self.energy_gradient_and_extra(x)[:2]

    def energy_gradient_and_extra(self, x):
        """Energy and gradient, and the residual if D is fixed, from which :meth:`lift` goes on."""
        # distributions that check their parameters would raise for the whole batch where one trajectory has diverged
        finite = x.isfinite().all(-1)
        x = torch.where(finite.unsqueeze(-1), x, 0.0)
        if self.coarse is not None:
            with torch.no_grad():
                energy, extra = self.energy_and_extra(x)
            gradient = self.gradient(x)
        elif self._root is None:
            (energy, gradient), extra = super().energy_and_gradient(x), ()
        else:
            gradient, residual, log_prior = self._differentiated(x, self._root)
            with torch.no_grad():
                energy = self._misfit(residual, self._root) - (self._log_prior(x) if log_prior is None else log_prior)
            extra = (residual,)
        return torch.where(finite, energy, torch.nan), gradient, extra

    def gradient(self, x):
        if self.coarse is not None:
            return self.coarse.gradient(x.float()).to(x)
        if self._root is None:
            return super().gradient(x)
        # a trajectory that diverged has no use for its gradient, the others of the batch have
        return self._differentiated(x.nan_to_num(0, 0, 0), self._root)[0]

    def _differentiated(self, x: Tensor, root: "_Root") -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradient, the residual, and the log prior if it had to be differentiated, too."""
        with torch.enable_grad():
            u1 = x.detach().requires_grad_()
            residual = self._residual(u1)
            there = residual.detach()
            weight = root.unwhiten(root.whiten(there))
            # with D fixed only the residual is differentiated, and a prior whose slope is not known
            if self._knows_prior:
                return torch.autograd.grad(residual, u1, weight)[0] + x, there, None
            log_prior = self._log_prior(u1)
            (gradient,) = torch.autograd.grad((residual, log_prior), u1, (weight, -torch.ones_like(log_prior)))
        return gradient, there, log_prior.detach()

    def precision(self, u1: Tensor) -> Tensor:
        """``I + K^T K`` with K the Jacobian of ``R^-1 r``, that of the posterior about u1 if r is linear there."""
        own = self.coarse or self
        u = u1.to(own.values.dtype)
        with torch.no_grad():
            root = own._root or _Root.of(own._linear(u)[1])
        return gauss_newton(own._residual, u, root.whiten)

    def lift(self, u1: Tensor, rng: torch.Generator | None, residual: Tensor | None = None) -> Tensor:
        """Positions on the fibre at these global inputs: ``u2 = n - D^+ (r + D n)`` with n standard normal.

        That is a draw of u2 given ``D u2 = -r``, and ``u2 = -r / d`` if every output has one noise.

        Args:
            rng: None for the shortest u2, n = 0.
            residual: r, the extra of :meth:`energy_gradient_and_extra` at u1; None to compute it.
        """
        with torch.no_grad():
            if residual is None or self._blocks is None:
                residual, blocks = self._linear(u1)
            else:
                blocks = self._blocks
            if blocks.shape[-2:] == (1, 1):
                return torch.cat([u1, -residual / blocks.flatten(-3)], -1)
            shape = (*u1.shape[:-1], self._n_local)
            noise = u1.new_zeros(shape)
            if self._n_local > self.values.shape[-1] and rng is not None:
                noise = normal(shape, u1, rng)
                residual = residual + _times(blocks, noise)
            root = self._root or _Root.of(blocks)
            weight = root.unwhiten(root.whiten(residual)).unflatten(-1, blocks.shape[-3:-1])
            return torch.cat([u1, noise - (blocks.mT @ weight.unsqueeze(-1)).flatten(-3)], -1)

    def explained(
        self, u1: Tensor, rng: torch.Generator | None, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """:meth:`lift`, and ``max|c|`` at these positions, ``[...]``."""
        position = self.lift(u1, rng, residual)
        with torch.no_grad():
            if self.holds_everywhere and residual is not None and self._blocks is not None:
                # the model need not be computed again
                constraint = residual + _times(self._blocks, position[..., self.dim :])
            else:
                constraint = self.observed.residual(position, self.values)
            return position, constraint.abs().amax(-1)

    def own_fault(self, x):
        """That the constraint is not linear in the noise at more than a tenth of the points, but was at prior draws."""
        if self.holds_everywhere:
            return None
        position, error = self.explained(x, None)
        with torch.no_grad():
            noiseless = self.observed.residual(self._full(position[..., : self.dim]), self.values)
        size = noiseless.abs().amax(-1).maximum(self.observed.in_units(self.values).abs().amax(-1))
        off = error > torch.finfo(x.dtype).eps ** 0.5 * size
        if off.sum() <= SETTINGS.off * off.numel():
            return None
        return (
            f"at the data the noise of {type(self.model).__name__} is not added, independent and normal, as it is at "
            f"prior draws (points explained by that miss the observation by {error[off].max().item():.2g}): sample by "
            "kernels.ConstrainedHMC with structure='dense', or write the observation as a likelihood"
        )

    def initial_draws(self, n, rng):
        """Draws from the prior, ``[n, *batch, D]``."""
        return self.observed.sample_inputs((n, *self.batch_shape), rng, self.values)[..., : self.dim]

    def latents(self, x):
        with torch.no_grad():
            return self.observed.latents(self._full(x))

    def _full(self, u1: Tensor) -> Tensor:
        return torch.cat([u1, u1.new_zeros(*u1.shape[:-1], self._n_local)], -1)

    def _residual(self, u1: Tensor) -> Tensor:
        """``r(u1)``, ``[..., Dy]``."""
        return self.observed.noiseless_residual(u1, self.values)

    def tempered_energy(self, u1: Tensor, beta: Tensor) -> Tensor:
        """``beta |R^-1 r|^2 / 2 + log|R| - log p(u1)``, differentiably."""
        residual, blocks = self._linear(u1)
        root = self._root or _Root.of(blocks)
        return 0.5 * beta * root.whiten(residual).square().sum(-1) + root.log_det - self._log_prior(u1)

    def _misfit(self, residual: Tensor, root: "_Root") -> Tensor:
        """``-log p(y | u1)``, ``[...]``."""
        constant = 0.5 * residual.shape[-1] * math.log(2 * math.pi)
        if self.observed.unit is not None:
            # r is measured in units, y is not
            constant = constant + self.observed.unit.log().sum(-1)
        return 0.5 * root.whiten(residual).square().sum(-1) + root.log_det + constant

    def _log_prior(self, u1: Tensor) -> Tensor:
        log_prob = self.model.global_density.log_prob(u1)
        if self.model.has_log_factor:
            log_prob = log_prob + self.model.log_factor(self.observed.inputs(self._full(u1)))
        return log_prob

    def _linear(self, u1: Tensor, *, exactly: bool = False, graph: Graph | None = None) -> tuple[Tensor, Tensor]:
        """``r`` and ``D`` at ``u1``, ``[..., Dy]`` and ``[..., U, m, k]``, differentiably.

        Args:
            exactly: whether D is a derivative, without the rounding of differences.
            graph: of the constraint as a function of u1 and u2, whose derivative in u2 is defined whatever u1 gives.
        """
        if self._blocks is not None:
            return self._residual(u1), self._blocks
        _, inputs, outputs = self._units
        n_units = self._n_local // inputs

        def constraint(u2: Tensor) -> Tensor:
            if graph is not None:
                return graph(u1, u2)[0]
            return self.observed.residual(torch.cat([u1, u2], -1), self.values)

        # only the noise is differentiated: whatever u1 alone goes through is evaluated once
        origin = u1.new_zeros(*u1.shape[:-1], self._n_local)
        if n_units == 1 and outputs < inputs:
            value, (matrix,) = Dense().entries(constraint, origin)
            return value, matrix.unsqueeze(-3)
        steps = torch.eye(inputs, dtype=u1.dtype, device=u1.device).repeat(1, n_units)
        if exactly:
            value, products = push_forward(constraint, origin, steps)
            return value, products.unflatten(-1, (n_units, outputs)).movedim(0, -1)
        # what is linear in u2 is known from its values, without derivatives of the whole model
        points = torch.cat([torch.zeros_like(steps[:1]), steps]).view(-1, *[1] * (u1.ndim - 1), self._n_local)
        lead = (inputs + 1, *u1.shape[:-1])
        u = torch.cat([u1.expand(*lead, -1), points.expand(*lead, -1)], -1)
        value, products = self.observed.residual(u, self.values).split([1, inputs])
        return value[0], (products - value).unflatten(-1, (n_units, outputs)).movedim(0, -1)


def _times(blocks: Tensor, u2: Tensor) -> Tensor:
    """``D u2``: ``[..., U, m, k], [..., U k] -> [..., U m]``."""
    if blocks.shape[-2:] == (1, 1):
        return blocks.flatten(-3) * u2
    return (blocks @ u2.unflatten(-1, (blocks.shape[-3], -1)).unsqueeze(-1)).flatten(-3)


class _Root(NamedTuple):
    """R with ``R R^T = D D^T``."""

    factor: Tensor
    """``[..., U]`` of units of one output, else ``[..., U, m, m]``; not finite where ``D D^T`` is singular."""
    log_det: Tensor
    """``log|R|``, ``[...]``."""
    is_scalar: bool

    @classmethod
    def of(cls, blocks: Tensor) -> Self:
        if blocks.shape[-2] == 1:
            factor = blocks.square().sum(-1).sqrt().squeeze(-1)
            return cls(factor, factor.log().sum(-1), True)
        factor, info = torch.linalg.cholesky_ex(blocks @ blocks.mT)
        factor = torch.where((info == 0)[..., None, None], factor, torch.nan)
        return cls(factor, factor.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1)), False)

    def whiten(self, residual: Tensor) -> Tensor:
        """``R^-1 r``, ``[..., U m]``."""
        return residual / self.factor if self.is_scalar else self._solved(self.factor, residual, upper=False)

    def unwhiten(self, white: Tensor) -> Tensor:
        """``R^-T w``, ``[..., U m]``."""
        return white / self.factor if self.is_scalar else self._solved(self.factor.mT, white, upper=True)

    @staticmethod
    def _solved(factor: Tensor, x: Tensor, upper: bool) -> Tensor:
        columns = x.unflatten(-1, factor.shape[-3:-1]).unsqueeze(-1)
        return torch.linalg.solve_triangular(factor, columns, upper=upper).flatten(-3)


def _has_full_rank(blocks: Tensor) -> Tensor:
    """Whether every unit of D has full row rank up to rounding, ``[...]``."""
    finite = blocks.isfinite().flatten(-3).all(-1)
    values = torch.linalg.svdvals(blocks.nan_to_num(0, 0, 0))
    least = math.sqrt(torch.finfo(blocks.dtype).eps) * values.amax(-1)
    return finite & (values.amin(-1) > least).all(-1)


def gauss_newton(function: Callable[[Tensor], Tensor], u: Tensor, whiten: Callable[[Tensor], Tensor]) -> Tensor:
    """``I + K^T K``, in float64, without which rounding may leave it indefinite: ``[..., D] -> [..., D, D]``.

    Args:
        function: ``[..., D] -> [..., N]``, row by row.
        whiten: K t of derivatives ``J t`` of the function, ``[n, ..., N]``.
    """
    with torch.no_grad():
        unit = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
        columns = [whiten(push_forward(function, u, part)[1]) for part in unit.split(SETTINGS.columns)]
        k = torch.cat(columns).movedim(0, -1).double()
        return unit.double() + k.mT @ k
