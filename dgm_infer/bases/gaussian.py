"""``Gaussian``: the normalised base density that tempering and annealing start from."""

import math
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from ..arguments import whole_number
from ..errors import ArgumentError, EvidenceError
from ..target import Target, as_target
from .laplace import find_mode
from .moments import distinct, mixture_moments, weighted_moments
from .scales import KINDS, Diagonal, Full, LowRank, Scale, check_kind, factorised, remade, scale_of
from .variational import maximise_elbo

__all__ = ["Gaussian"]


class Gaussian:
    """Normalised Gaussians ``N(mean, L L^T)`` on R^D, one for every problem of a batch.

    Whitened coordinates are ``v = L^-1 (x - mean)``, in which the base is standard normal.

    Args:
        mean: ``[*batch, D]``.
        sd: ``[*batch, D]`` standard deviations, positive; with ``factor`` those of the diagonal part.
        cholesky: ``[*batch, D, D]`` lower triangular factor of the covariance, in place of ``sd``.
        factor: ``[*batch, D, R]``, for the covariance ``diag(sd^2) + factor factor^T``.
        log_zeta: ``[*batch]`` guess of the target's log evidence that tempering starts from; None to have one made.

    Attributes:
        elbo: ``[*batch]`` evidence lower bound after :meth:`fit`, else None.
        elbo_trace: ``[steps, *batch]`` noisy estimates of it while :meth:`fit` went on, else None.
        log_evidence: ``[*batch]`` Laplace's approximation of the log evidence after :meth:`laplace`, else None.
    """

    elbo: Tensor | None = None
    elbo_trace: Tensor | None = None
    log_evidence: Tensor | None = None

    def __init__(
        self,
        mean: Tensor,
        sd: Tensor | float | None = None,
        *,
        cholesky: Tensor | None = None,
        factor: Tensor | None = None,
        log_zeta: Tensor | None = None,
    ):
        mean = torch.as_tensor(mean).detach()
        if not mean.is_floating_point():
            mean = mean.to(torch.get_default_dtype())
        if mean.ndim < 1 or mean.shape[-1] < 1:
            raise ArgumentError(f"Gaussian(mean of shape {tuple(mean.shape)}): expected [*batch, D]")
        if (sd is None) == (cholesky is None) or (factor is not None and sd is None):
            raise ArgumentError("Gaussian(): give the scale as sd, as sd and factor, or as cholesky")
        if not mean.isfinite().all():
            raise ArgumentError(f"Gaussian(mean={_first(mean, ~mean.isfinite())}): must be finite")
        self.mean = mean
        self.scale = self._make_scale(sd, cholesky, factor)
        self.log_zeta = None if log_zeta is None else torch.as_tensor(log_zeta, dtype=torch.float64, device=mean.device)
        if self.log_zeta is not None and self.log_zeta.shape != self.batch_shape:
            raise ArgumentError(
                f"Gaussian(log_zeta of shape {tuple(self.log_zeta.shape)}): expected {tuple(self.batch_shape)}"
            )
        if self.log_zeta is not None and not self.log_zeta.isfinite().all():
            bad = _first(self.log_zeta, ~self.log_zeta.isfinite())
            raise ArgumentError(f"Gaussian(log_zeta={bad}): must be finite")

    def _make_scale(self, sd, cholesky, factor) -> Scale:
        mean, shape = self.mean, tuple(self.mean.shape)
        if cholesky is not None:
            cholesky = torch.as_tensor(cholesky).detach().to(mean)
            if cholesky.shape != (*shape, shape[-1]):
                raise ArgumentError(
                    f"Gaussian(cholesky of shape {tuple(cholesky.shape)}): expected {(*shape, shape[-1])}"
                )
            _check_positive("the diagonal of cholesky", cholesky.diagonal(dim1=-2, dim2=-1))
            cholesky = cholesky.tril()
            if not cholesky.isfinite().all():
                raise ArgumentError("Gaussian(cholesky): is not finite somewhere")
            return Full(cholesky)
        sd = torch.as_tensor(sd).detach().to(mean)
        if sd.ndim and sd.shape != mean.shape:
            raise ArgumentError(f"Gaussian(sd of shape {tuple(sd.shape)}): expected {shape}, or a number")
        _check_positive("sd", sd)
        sd = sd.expand(shape)
        if factor is None:
            return Diagonal(sd)
        factor = torch.as_tensor(factor).detach().to(mean)
        if factor.shape[:-1] != mean.shape:
            raise ArgumentError(f"Gaussian(factor of shape {tuple(factor.shape)}): expected {(*shape, 'R')}")
        if not factor.isfinite().all():
            raise ArgumentError("Gaussian(factor): is not finite somewhere")
        return LowRank.of(sd, factor)

    # ---------------------------------------------------------------------------------------------- the density

    @property
    def dim(self) -> int:
        return self.mean.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self.mean.shape[:-1]

    @property
    def kind(self) -> str:
        """``"diagonal"``, ``"full"`` or ``"low_rank"``."""
        return KINDS[(Diagonal, Full, LowRank).index(type(self.scale))]  # type: ignore[arg-type]

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

    def energy(self, x: Tensor) -> Tensor:
        """``-log q(x) = |v|^2/2 + log|det L| + D/2 log 2 pi``: ``[..., *batch, D] -> [..., *batch]``."""
        return 0.5 * self.whiten(x).square().sum(-1) + self.log_det + 0.5 * self.dim * math.log(2 * math.pi)

    def log_prob(self, x: Tensor) -> Tensor:
        """``log q(x)``: ``[..., *batch, D] -> [..., *batch]``."""
        return -self.energy(x)

    def sample(self, shape: tuple[int, ...] | int = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws ``[*shape, *batch, D]``."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        mean = self.mean
        return self.unwhiten(
            torch.randn(*shape, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        )

    # ------------------------------------------------------------------------------------------------- variants

    def _like(self, mean: Tensor, scale: Scale, log_zeta: Tensor | None) -> "Gaussian":
        """A Gaussian of parts that are known to be right."""
        new = object.__new__(Gaussian)
        new.mean, new.scale, new.log_zeta = mean, scale, log_zeta
        return new

    def take(self, problems: Tensor) -> "Gaussian":
        """The Gaussians of some problems, by their flat indices ``[N]``: a batch of shape ``[N]``."""
        n = len(self.batch_shape)
        parts = [tensor.flatten(0, n - 1)[problems] if n else tensor[None][problems] for tensor in self.scale.tensors]
        mean = self.mean.reshape(-1, self.dim)[problems]
        scale = remade(self.scale, parts)
        return self._like(mean, scale, None if self.log_zeta is None else self.log_zeta.reshape(-1)[problems])

    def to(self, *args: Any, **kwargs: Any) -> "Gaussian":
        """The same on another device or of another dtype."""
        parts = [tensor.to(*args, **kwargs) for tensor in self.scale.tensors]
        scale = remade(self.scale, parts)
        log_zeta = None if self.log_zeta is None else self.log_zeta.to(parts[0].device)
        return self._like(self.mean.to(*args, **kwargs), scale, log_zeta)

    def refined(
        self,
        draws: Tensor,
        log_weights: Tensor,
        log_zeta: Tensor | None = None,
        *,
        kind: Literal["diagonal", "full", "low_rank"] | None = None,
    ) -> "Gaussian":
        """Moments matched to weighted draws of the target, such as a tempered pilot's.

        With few effective draws a covariance is a poor estimate; this Gaussian's own counts as D + 2 draws.

        Args:
            draws: ``[chains, draws, *batch, D]``.
            log_weights: ``[chains, draws, *batch]``.
            log_zeta: ``[*batch]``, the pilot's log evidence.
            kind: of the new scale; None for this one's, of the same rank.

        Raises:
            ArgumentError: shapes that do not fit.
            EvidenceError: a problem whose weights are all zero.
        """
        if draws.shape[2:] != self.mean.shape or log_weights.shape != draws.shape[:-1]:
            raise ArgumentError(
                f"refined(draws of shape {tuple(draws.shape)}, log_weights of shape {tuple(log_weights.shape)}): "
                f"expected [chains, draws, *{tuple(self.mean.shape)}] and that without its last dimension"
            )
        mean, covariance, ess = weighted_moments(draws.flatten(0, 1).double(), log_weights.flatten(0, 1))
        own = self.dim + 2
        share = (ess / (ess + own))[..., None, None]
        # an unbiased estimate needs a draw more than it has dimensions: shrunk, it needs none
        covariance = share * covariance + (1 - share) * self.covariance.double()
        rank = self.scale.factor.shape[-1] if isinstance(self.scale, LowRank) else min(4, self.dim)
        scale = scale_of(covariance, kind or self.kind, rank)
        scale = remade(scale, [tensor.to(self.mean) for tensor in scale.tensors])
        return self._like(mean.to(self.mean), scale, None if log_zeta is None else log_zeta.double())

    # ----------------------------------------------------------------------------------------------------- fits

    @classmethod
    def from_encoder(cls, encoder, images: Tensor) -> Self:
        """The encoder's ``q(z | x)`` of every image: ``encoder(images)`` is a Normal, or an Independent one.

        Raises:
            ArgumentError: the encoder returns something else.
        """
        with torch.no_grad():
            q = encoder(images)
        normal = q.base_dist if isinstance(q, Independent) else q
        if not isinstance(normal, Normal):
            kind = type(normal).__name__ if isinstance(normal, Distribution) else type(q).__name__
            raise ArgumentError(f"the encoder returns a {kind}: expected Independent(Normal(mean, sd), 1)")
        return cls(normal.mean, normal.stddev)

    @classmethod
    def fit(
        cls,
        target,
        kind: Literal["diagonal", "full", "low_rank"] = "diagonal",
        *,
        rank: int = 4,
        start: "Gaussian | None" = None,
        steps: int = 1000,
        samples: int = 8,
        rate: float = 0.05,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """The Gaussian of largest evidence lower bound (ADVI), found by Adam for all problems at once.

        ``elbo`` of the result is a fresh estimate from 1000 draws.

        Args:
            target: anything with ``energy``, ``dim`` and ``batch_shape``.
            kind: of the scale.
            rank: R, of a low-rank scale.
            start: where to begin; None for standard normals.
            steps: of the optimiser.
            samples: draws a step.
            rate: of learning, at first.
            seed: of all randomness.
            dtype, device: of a start that is not given.

        Raises:
            ArgumentError: an argument is outside its range.
            EvidenceError: the optimisation diverged.
        """
        check_kind("Gaussian.fit", kind)
        counts = {"rank": rank, "steps": steps, "samples": samples}
        for name, value in counts.items():
            counts[name] = whole_number("Gaussian.fit", name, value)
        if not rate > 0:
            raise ArgumentError(f"Gaussian.fit(rate={rate:g}): must be positive")
        target = as_target(target)
        if start is None:
            start = _standard(target, dtype, device)
        shape = (*target.batch_shape, target.dim)
        # further dimensions before these are fits of their own
        if not isinstance(start, Gaussian) or tuple(start.mean.shape)[-len(shape) :] != shape:
            found = start if isinstance(start, Gaussian) else f"a {type(start).__name__}"
            raise ArgumentError(f"Gaussian.fit(start={found}): expected a Gaussian over {shape}, as the target is")
        rng = torch.Generator(start.mean.device).manual_seed(seed)
        mean, scale, trace = maximise_elbo(
            target,
            start.mean,
            start.covariance_diagonal.sqrt(),
            kind=kind,
            rank=min(counts["rank"], start.dim),
            steps=counts["steps"],
            samples=counts["samples"],
            rate=rate,
            rng=rng,
        )
        base = cls(mean, torch.ones_like(mean))
        base.scale = scale
        base.elbo, base.elbo_trace = base._elbo(target, rng), trace
        return base

    def _elbo(self, target, rng: torch.Generator, samples: int = 1000, at_once: int = 50) -> Tensor:
        """``E_q[-energy(x) - log q(x)]``, ``[*batch]``."""
        total = torch.zeros(self.batch_shape, dtype=torch.float64, device=self.mean.device)
        with torch.no_grad():
            for _ in range(samples // at_once):
                x = self.sample((at_once,), rng)
                total += (self.energy(x) - target.energy(x)).double().sum(0)
        return total / samples

    @classmethod
    def of_mixture(
        cls,
        means: Tensor,
        covariances: Tensor,
        log_weights: Tensor,
        *,
        kind: Literal["diagonal", "full", "low_rank"] = "full",
        rank: int = 4,
        tolerance: float = 0.3,
    ) -> Self:
        """Moments matched to a mixture, ``m = sum_i exp(l_i) q_i/zeta`` with ``zeta = sum_i exp(l_i)`` (T (5.50)).

        With local fits to the modes of a target and their evidence lower bounds ``l_i``, ``log_zeta`` of the result is
        a guess of log Z. Of components whose means are less than ``tolerance`` apart, in sds a dimension, only the one
        of largest weight counts.

        Args:
            means: ``[L, *batch, D]``.
            covariances: ``[L, *batch, D, D]``.
            log_weights: ``l``, ``[L, *batch]``; ``-inf`` for a component that does not count.
            kind: of the scale.
            rank: of a low-rank scale.

        Raises:
            ArgumentError: shapes that do not fit, a value that is not finite, or no such kind.
            EvidenceError: a problem whose weights are all zero, or a covariance that is not positive definite.
        """
        if covariances.shape != (*means.shape, means.shape[-1]) or log_weights.shape != means.shape[:-1]:
            raise ArgumentError(
                f"Gaussian.of_mixture(means {tuple(means.shape)}, covariances {tuple(covariances.shape)}, log_weights "
                f"{tuple(log_weights.shape)}): expected [L, *batch, D], [L, *batch, D, D] and [L, *batch]"
            )
        check_kind("Gaussian.of_mixture", kind)
        rank = whole_number("Gaussian.of_mixture", "rank", rank)
        if not len(means):
            raise ArgumentError("Gaussian.of_mixture(means): there are no components")
        if not (means.isfinite().all() and covariances.isfinite().all() and (log_weights < math.inf).all()):
            raise ArgumentError("Gaussian.of_mixture(): a mean, a covariance or a weight is not finite")
        if not (covariances.diagonal(dim1=-2, dim2=-1) > 0).all():
            raise ArgumentError("Gaussian.of_mixture(covariances): a variance is not positive")
        empty = log_weights.isneginf().all(0)
        if empty.any():
            raise EvidenceError(
                f"no component has weight at {int(empty.sum())} of {empty.numel()} problems: all local fits reach "
                "where the target has no density; give a start inside its support"
            )
        log_weights = log_weights.double()
        kept = distinct(means, covariances, log_weights, tolerance)
        moments = mixture_moments(means, covariances, torch.where(kept, log_weights, -math.inf).to(means))
        base = cls(moments.mean, 1.0, log_zeta=moments.log_total)
        base.scale = scale_of(moments.covariance, kind, min(rank, base.dim))
        return base

    @classmethod
    def from_local_fits(
        cls,
        target,
        starts: int = 16,
        *,
        kind: Literal["diagonal", "full", "low_rank"] = "full",
        rank: int = 4,
        start: "Gaussian | None" = None,
        tolerance: float = 0.3,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **fit: Any,
    ) -> Self:
        """:meth:`of_mixture` of diagonal fits by the evidence lower bound from many starts: covers several modes.

        Args:
            target: as in :meth:`fit`.
            starts: fits of every problem.
            kind: of the result.
            rank: of a low-rank result.
            start: what the fits' first means are drawn from, wide enough to reach all modes; None for standard
                normals. Their first sds are a tenth of its.
            tolerance: of duplicates.
            seed: of all randomness.
            dtype, device: of a start that is not given.
            fit: ``steps``, ``samples`` and ``rate`` of :meth:`fit`.

        Raises:
            ArgumentError: an argument is outside its range.
            EvidenceError: the optimisation diverged, or no fit of a problem is inside the target's support.
        """
        check_kind("Gaussian.from_local_fits", kind)
        rank = whole_number("Gaussian.from_local_fits", "rank", rank)
        target = as_target(target)
        wide = _standard(target, dtype, device) if start is None else start
        rng = torch.Generator(wide.mean.device).manual_seed(seed)
        first = wide.sample((whole_number("Gaussian.from_local_fits", "starts", starts, 1),), rng)
        sds = 0.1 * wide.covariance_diagonal.sqrt().expand_as(first)
        local = cls.fit(target, start=Gaussian(first, sds), seed=seed, **fit)
        assert local.elbo is not None
        return cls.of_mixture(local.mean, local.covariance, local.elbo, kind=kind, rank=rank, tolerance=tolerance)

    @classmethod
    def laplace(
        cls,
        target,
        *,
        start: Tensor | None = None,
        max_iterations: int = 200,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """The Gaussian at the mode with the inverse Hessian as its covariance; sets ``log_evidence``.

        ``log Z ~ -energy(mode) + D/2 log 2 pi - 1/2 log|H|``

        Args:
            target: anything with ``energy``, twice differentiable, ``dim`` and ``batch_shape``.
            start: ``[*batch, D]``; None for zero.
            max_iterations: damped Newton steps.
            dtype, device: of a start that is not given; float64 unless said otherwise.

        Raises:
            EvidenceError: no mode was reached, or the Hessian there is not positive definite.
        """
        target = as_target(target)
        shape = (*target.batch_shape, target.dim)
        if start is None:
            start = torch.zeros(shape, dtype=dtype or torch.float64, device=device)
        if tuple(start.shape) != shape:
            raise ArgumentError(f"Gaussian.laplace(start of shape {tuple(start.shape)}): expected {shape}")
        mode = find_mode(
            target, start.detach(), max_iterations=whole_number("Gaussian.laplace", "max_iterations", max_iterations)
        )
        covariance = torch.cholesky_inverse(mode.cholesky)
        base = cls(mode.position, cholesky=factorised(covariance))
        base.log_evidence = -mode.energy + 0.5 * base.dim * math.log(2 * math.pi) + base.log_det
        return base

    def __repr__(self):
        return f"Gaussian(*batch, D = {tuple(self.mean.shape)}; {self.kind}, {self.mean.dtype})"


def _standard(target: Target, dtype, device) -> Gaussian:
    mean = torch.zeros(*target.batch_shape, target.dim, dtype=dtype, device=device)
    return Gaussian(mean, 1.0)


def _check_positive(what: str, values: Tensor) -> None:
    bad = ~((values > 0) & values.isfinite())
    if bad.any():
        raise ArgumentError(f"Gaussian(): {what} is {_first(values, bad)} somewhere: must be positive and finite")


def _first(values: Tensor, where: Tensor) -> str:
    return f"{values[where][0].item():g}"
