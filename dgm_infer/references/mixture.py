"""``Mixture``: a normalised mixture of Gaussians as a base (math 11.10)."""

import math
from typing import Any, Self

import torch
from torch import Tensor

from ..arguments import choice, indices, numbers, within
from ..errors import ArgumentError, EvidenceError
from ..linear_maps import TriangularMap, factorised, scale_of
from .density import (
    GaussianDensity,
    Whitened,
    check_weighted,
    distinct,
    given_log_zeta,
    mixture_moments,
    weighted_moments,
)
from .gaussian import Gaussian
from .modes import Modes, modes


class Mixture(Whitened):
    """``sum_k w_k N(m_k, L_k L_k^T)``, normalised, with exact draws: one per problem of a batch (math 11.10).

    It covers separate modes, where a single Gaussian that covers them lies mostly between them. Whitened coordinates
    are those of its mean and covariance. A base is frozen.

    Args:
        means: ``[K, *batch, D]``.
        sd: ``[K, *batch, D]`` standard deviations, or a number; or else
        cholesky: ``[K, *batch, D, D]`` lower triangular factors of the covariances.
        log_weights: ``[K, *batch]``, which are normalised here; ``-inf`` leaves a component out. None for equal ones.
        log_zeta: ``[*batch]`` guess of the target's log evidence that tempering starts from; None if unknown.

    Attributes:
        components: the Gaussians, of batch shape ``[K, *batch]``.
        log_weights: ``[K, *batch]``; their exponentials sum to 1.

    Raises:
        ArgumentError: shapes that do not fit, no component, or a value that is not finite or not positive.
        EvidenceError: all weights of a problem are zero.
    """

    components: GaussianDensity
    log_weights: Tensor

    def __init__(
        self,
        means: Tensor,
        sd: Tensor | float | None = None,
        *,
        cholesky: Tensor | None = None,
        log_weights: Tensor | None = None,
        log_zeta: Tensor | float | None = None,
    ):
        means = numbers("Mixture", "means", means)
        if means.ndim < 2 or not means.shape[0] or not means.shape[-1]:
            raise ArgumentError(f"Mixture(means of shape {tuple(means.shape)}): expected [components, *batch, D]")
        components = GaussianDensity(means, sd, cholesky=cholesky)
        if log_weights is None:
            log_weights = means.new_zeros(means.shape[:-1])
        log_weights = numbers("Mixture", "log_weights", log_weights)
        if log_weights.shape != means.shape[:-1] or log_weights.isnan().any() or (log_weights == math.inf).any():
            raise ArgumentError(
                f"Mixture(log_weights of shape {tuple(log_weights.shape)}): expected {tuple(means.shape[:-1])}, finite "
                "or -inf"
            )
        log_zeta = given_log_zeta("Mixture", log_zeta, means[0])
        vars(self).update(vars(Mixture._made(components, log_weights.to(means), log_zeta)))

    @classmethod
    def _made(cls, components: GaussianDensity, log_weights: Tensor, log_zeta: Tensor | None) -> Self:
        """A mixture of parts that have been checked."""
        total = log_weights.logsumexp(0)
        if total.isneginf().any():
            raise EvidenceError(
                f"all components have zero weight for {int(total.isneginf().sum())} of {total.numel()} problems"
            )
        log_weights = log_weights - total
        parts = mixture_moments(components.mean.double(), components.covariance.double(), log_weights.double())
        scale = TriangularMap(factorised(parts.covariance).to(components.mean))
        new = object.__new__(cls)
        vars(new).update(
            components=components,
            log_weights=log_weights,
            log_zeta=log_zeta,
            mean=parts.mean.to(components.mean),
            scale=scale,
        )
        return new

    @property
    def moments(self) -> Gaussian:
        return Gaussian._of(self.mean, self.scale, log_zeta=self.log_zeta)

    def take(self, problems: Tensor) -> "Mixture":
        """The mixtures of the problems with flat indices ``[N]``; the batch shape is ``[N]``.

        Raises:
            ArgumentError: an index is out of range.
        """
        problems = indices("Mixture.take", "problems", problems, self.batch_shape.numel()).to(self.mean.device)
        n = len(self.batch_shape)

        def taken(value: Tensor) -> Tensor:
            return (value.flatten(1, n) if n else value.unsqueeze(1))[:, problems]

        components = self.components
        scale = components.scale.remade([taken(part) for part in components.scale.parts])
        log_zeta = None if self.log_zeta is None else self.log_zeta.reshape(-1)[problems]
        components = GaussianDensity._of(taken(components.mean), scale)
        return Mixture._made(components, taken(self.log_weights), log_zeta)

    def to(self, *args: Any, **kwargs: Any) -> "Mixture":
        """The same mixtures on another device or in another dtype."""
        components = self.components
        scale = components.scale.remade([part.to(*args, **kwargs) for part in components.scale.parts])
        mean = components.mean.to(*args, **kwargs)
        log_zeta = None if self.log_zeta is None else self.log_zeta.to(mean.device)
        return Mixture._made(GaussianDensity._of(mean, scale), self.log_weights.to(mean), log_zeta)

    # -------------------------------------------------------------------------------------------------- the density

    def energy(self, x: Tensor) -> Tensor:
        """``-log sum_k w_k N(x; m_k, L_k L_k^T)``: ``[..., *batch, D] -> [..., *batch]``.

        Raises:
            ArgumentError: x is not a tensor whose last dimension is D.
        """
        return -self._log_parts(self._repeated(x)).logsumexp(self._across(x))

    def energy_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient is ``sum_k r_k C_k^-1 (x - m_k)``, ``r_k`` the share of component k in the density at x."""
        x = self._repeated(x)
        across = x.ndim - 1 - self.mean.ndim
        logs = self._log_parts(x)
        shares = logs.softmax(across).unsqueeze(-1)
        scale = self.components.scale
        slopes = scale.solve_transpose(self.components.whiten(x))
        return -logs.logsumexp(across), (shares * slopes).sum(across)

    def _across(self, x: Tensor) -> int:
        """The dimension of the components, inserted before the batch."""
        return x.ndim - self.mean.ndim

    def _repeated(self, x: Tensor) -> Tensor:
        """Points ``[..., K, *batch, D]``, of which the K are one."""
        lead = self._across(self._points("energy", "x", x))
        batch = torch.broadcast_shapes(x.shape[max(lead, 0) :], self.mean.shape)
        x = x.expand(*x.shape[: max(lead, 0)], *batch).unsqueeze(max(lead, 0))
        return x.expand(*x.shape[: max(lead, 0)], *self.components.mean.shape)

    def _log_parts(self, x: Tensor) -> Tensor:
        """Log of the weighted density of every component, ``[..., K, *batch]``."""
        return self.log_weights - self.components.energy(x)

    def sample(self, shape: tuple[int, ...] | int = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws ``[*shape, *batch, D]``: a component by its weight, then a draw of it.

        Raises:
            ArgumentError: the shape is neither an integer >= 0 nor a sequence of them.
        """
        noise = self._normal(shape, generator)
        below = self.log_weights.exp().cumsum(0)
        uniform = torch.rand(noise.shape[:-1], generator=generator, dtype=noise.dtype, device=noise.device)
        chosen = torch.zeros_like(uniform, dtype=torch.long)
        for edge in below[:-1]:
            # a component of zero weight, whose edge is that before it, is never drawn
            chosen += uniform * below[-1] >= edge
        x = torch.empty_like(noise)
        for k in range(len(below)):
            parts = [part[k] for part in self.components.scale.parts]
            own = self.components.mean[k] + self.components.scale.remade(parts).apply(noise)
            x = torch.where((chosen == k).unsqueeze(-1), own, x)
        return x

    def refined(
        self, draws: Tensor, log_weights: Tensor, log_zeta: Tensor | None = None, *, kind: Any = None
    ) -> "Mixture":
        """One step of expectation maximisation on weighted draws of the target, such as a tempered pilot's.

        Every component takes weight, mean and covariance of the draws by its share in the density there; its own
        covariance counts as D + 2 draws, and one without any draws stays as it is, with the weight of one.

        Args:
            draws: ``[chains, draws, *batch, D]``.
            log_weights: ``[chains, draws, *batch]``.
            log_zeta: ``[*batch]``, the pilot's log evidence.
            kind: kind of the components' scales, ``"diagonal"`` or ``"full"``; None keeps theirs.

        Raises:
            EvidenceError: all weights of a problem are zero.
        """
        call = "Mixture.refined"
        draws, log_weights = check_weighted(call, draws, log_weights, self.mean)
        if kind is not None:
            choice(call, "kind", kind, ("diagonal", "full"))
        log_zeta = given_log_zeta(call, log_zeta, self.mean)
        x, logs = draws.flatten(0, 1), log_weights.flatten(0, 1).double()
        effective = weighted_moments(x.double(), logs).ess
        shares = self._log_parts(self._repeated(x)).double().log_softmax(1) + logs.log_softmax(0).unsqueeze(1)
        taken = shares.logsumexp(0)
        # of a component without draws, anything finite
        own = torch.where(taken.isneginf(), 0.0, shares)
        repeated = self._repeated(x).double()
        moments = weighted_moments(repeated, own)
        count = effective * taken.exp()
        part = (torch.minimum(moments.ess, count) / (torch.minimum(moments.ess, count) + self.dim + 2)).unsqueeze(-1)
        mean = torch.lerp(self.components.mean.double(), moments.mean, part)
        apart = moments.mean - self.components.mean.double()
        spread = part * (1 - part) * apart
        covariance = torch.lerp(self.components.covariance.double(), moments.covariance, part.unsqueeze(-1))
        covariance = covariance + spread.unsqueeze(-1) * apart.unsqueeze(-2)
        weights = (count.clamp_min(1.0)).log().masked_fill(self.log_weights.isneginf(), -math.inf)
        kind = self.components.kind if kind is None else kind
        scale = scale_of(covariance, "diagonal" if kind == "diagonal" else "full", 1)
        scale = scale.remade([part.to(self.mean) for part in scale.parts])
        components = GaussianDensity._of(mean.to(self.mean), scale)
        return Mixture._made(components, weights.to(self.mean), log_zeta)

    # ------------------------------------------------------------------------------------------------------ fits

    @classmethod
    def from_modes(cls, target, starts: int = 64, *, widen: float = 1.2, **search: Any) -> Self:
        """Laplace's approximations at the :func:`modes` of a target, weighted by their masses.

        ``log_zeta`` is the log of the sum of the masses.

        Args:
            target: as in :func:`modes`, or the :class:`Modes` themselves.
            starts: minimisations per round and problem.
            widen: factor of the components' standard deviations. A base narrower than its target hides what it misses
                from the standard error: more for modes with heavy tails.
            search: ``start``, ``iterations`` and ``seed`` of :func:`modes`.

        Raises:
            ArgumentError: an argument is outside its range.
            EvidenceError: no mode of some problem was found.
        """
        widen = within("Mixture.from_modes", "widen", widen, 0)
        found = target if isinstance(target, Modes) else modes(target, starts, **search)
        kept = found.log_masses > -math.inf
        # those that are missing repeat the first, with weight zero
        first = found.covariances[:1].expand_as(found.covariances)
        covariances = torch.where(kept[..., None, None], found.covariances, first)
        means = torch.where(kept.unsqueeze(-1), found.positions, found.positions[:1])
        components = GaussianDensity._of(means, TriangularMap(widen * factorised(covariances)))
        return cls._made(components, found.log_masses.to(means), found.log_z.double())

    @classmethod
    def from_local_fits(
        cls,
        target,
        starts: int = 16,
        *,
        start: Gaussian | None = None,
        tolerance: float = 0.3,
        seed: int | None = 0,
        **fit: Any,
    ) -> Self:
        """Diagonal fits by the evidence lower bound from many starts, weighted by the exponentials of their bounds.

        Takes no second derivatives, unlike :meth:`from_modes`. Arguments and errors as in
        :meth:`Gaussian.from_local_fits`, which matches a single Gaussian to the moments of this mixture.
        """
        local = Gaussian._local_fits("Mixture.from_local_fits", target, starts, start, tolerance, seed, **fit)
        assert local.elbo is not None
        kept = distinct(local.mean, local.covariance, local.elbo, tolerance)
        log_weights = torch.where(kept, local.elbo, -math.inf)
        components = GaussianDensity._of(local.mean, local.scale)
        return cls._made(components, log_weights.to(local.mean), log_weights.logsumexp(0).double())

    def __repr__(self):
        return f"Mixture(components, *batch, D = {tuple(self.components.mean.shape)}; {self.mean.dtype})"
