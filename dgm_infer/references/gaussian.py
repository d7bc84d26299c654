"""``Gaussian``: the normalised base density that tempering and annealing start from."""

import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from ..arguments import (
    allocatable,
    available_device,
    choice,
    context,
    finite,
    floating_type,
    function,
    instance,
    positive,
    random_seed,
    whole_number,
    within,
)
from ..errors import ArgumentError, EvidenceError, cause
from ..linear_maps import KINDS, Kind, LowRankMap, TriangularMap, factorised, scale_of
from ..probe import energy_doubt, energy_fault, probe_points
from ..target import as_target
from .density import (
    GaussianDensity,
    Whitened,
    check_mixture,
    check_weighted,
    distinct,
    given_log_zeta,
    mixture_moments,
    origin,
    weighted_moments,
)
from .minimise import find_mode
from .modes import Modes, cover, modes
from .variational import OBJECTIVES, Objective, check_divergence, lower_bound, maximise_elbo


class Gaussian(GaussianDensity):
    """Normalised Gaussians ``N(mean, L L^T)`` on R^D, one per problem of a batch.

    A base is frozen: it copies the tensors it is made of, and no attribute can be set. Its density and its whitened
    coordinates are those of :class:`GaussianDensity`.

    Args:
        mean: ``[*batch, D]``.
        sd: ``[*batch, D]`` standard deviations, positive; with ``factor``, those of the diagonal part.
        cholesky: ``[*batch, D, D]`` lower triangular factor of the covariance, in place of ``sd``.
        factor: ``[*batch, D, R]``, for the covariance ``diag(sd^2) + factor factor^T``.
        log_zeta: ``[*batch]`` guess of the target's log evidence that tempering starts from; None if unknown.

    Attributes:
        elbo: ``[*batch]`` evidence lower bound after :meth:`fit`, else None.
        elbo_trace: ``[steps, *batch]`` noisy estimates of the bound at every step of :meth:`fit`, else None.
        log_evidence: ``[*batch]`` Laplace's approximation of the log evidence after :meth:`laplace`, else None.

    Raises:
        ArgumentError: shapes that do not fit, or a value that is not finite or, in a scale, not positive.
    """

    log_zeta: Tensor | None = None
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
        log_zeta: Tensor | float | None = None,
    ):
        super().__init__(mean, sd, cholesky=cholesky, factor=factor)
        vars(self).update(log_zeta=given_log_zeta("Gaussian", log_zeta, self.mean))

    def refined(
        self,
        draws: Tensor,
        log_weights: Tensor,
        log_zeta: Tensor | None = None,
        *,
        kind: Kind | None = None,
    ) -> "Gaussian":
        """A Gaussian moment-matched to weighted draws of the target, such as a tempered pilot's.

        Few effective draws estimate a covariance poorly, so this Gaussian's own covariance counts as D + 2 draws.

        Args:
            draws: ``[chains, draws, *batch, D]``.
            log_weights: ``[chains, draws, *batch]``.
            log_zeta: ``[*batch]``, the pilot's log evidence.
            kind: kind of the new scale; None keeps this one's kind and rank.

        Raises:
            ArgumentError: shapes that do not fit, or an unknown kind.
            EvidenceError: all weights of a problem are zero.
        """
        call = "Gaussian.refined"
        draws, log_weights = check_weighted(call, draws, log_weights, self.mean)
        kind = self.kind if kind is None else choice(call, "kind", kind, KINDS)
        log_zeta = given_log_zeta(call, log_zeta, self.mean)
        mean, covariance, ess = weighted_moments(draws.flatten(0, 1).double(), log_weights.flatten(0, 1))
        own = self.dim + 2
        share = (ess / (ess + own))[..., None, None]
        # a full-rank unbiased estimate needs more draws than dimensions; a shrunk one does not
        covariance = share * covariance + (1 - share) * self.covariance.double()
        rank = self.scale.directions.shape[-1] if isinstance(self.scale, LowRankMap) else min(4, self.dim)
        scale = scale_of(covariance, kind, rank)
        scale = scale.remade([part.to(self.mean) for part in scale.parts])
        return Gaussian._of(mean.to(self.mean), scale, log_zeta=log_zeta)

    @classmethod
    def standard(cls, target, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Self:
        """Standard normals, one per problem of a target.

        Args:
            target: anything with ``energy``, ``dim`` and ``batch_shape``.
            dtype, device: None for those of the target's ``values``, if it has any.

        Raises:
            ArgumentError: an argument is outside its range.
        """
        mean = origin(as_target(target))
        if dtype is not None:
            mean = mean.to(floating_type("Gaussian.standard", "dtype", dtype))
        if device is not None:
            mean = mean.to(available_device("Gaussian.standard", "device", device))
        return cls(mean, 1.0)

    @classmethod
    def from_encoder(cls, encoder, images: Tensor) -> Self:
        """The encoder's ``q(z | x)`` per image: ``encoder(images)`` is a Normal, or an Independent Normal.

        Raises:
            ArgumentError: the images are not finite, or the encoder rejects them or returns something else.
        """
        call = "Gaussian.from_encoder"
        function(call, "encoder", encoder, "model.encoder")
        images = finite(call, "images", images)
        try:
            with torch.no_grad():
                q = encoder(images)
        except Exception as error:
            raise ArgumentError(
                f"{call}(images of shape {tuple(images.shape)}): the encoder fails, {cause(error)}; most take flat "
                "images, images.flatten(1)"
            ) from error
        normal = q.base_dist if isinstance(q, Independent) else q
        if not isinstance(normal, Normal):
            kind = type(normal).__name__ if isinstance(normal, Distribution) else type(q).__name__
            raise ArgumentError(f"the encoder returns a {kind}: expected Independent(Normal(mean, sd), 1)")
        return cls(normal.mean, normal.stddev)

    @classmethod
    def fit(
        cls,
        target,
        kind: Kind = "diagonal",
        *,
        objective: Objective = "elbo",
        rank: int = 4,
        start: "Gaussian | None" = None,
        steps: int = 1000,
        samples: int | None = None,
        rate: float = 0.05,
        seed: int | None = 0,
    ) -> Self:
        """The Gaussian with the largest evidence lower bound (ADVI), found by Adam for all problems at once.

        Other objectives need no gradient (math 11.12): ``"eubo"``, the evidence upper bound, is least for the target's
        moments, so that it covers modes where the lower bound picks one; ``"tvo"``, the thermodynamic objective, is
        between the two. ``elbo`` of the result is a fresh estimate from 1000 draws.

        Args:
            target: anything with ``energy``, ``dim`` and ``batch_shape``.
            kind: kind of the scale.
            objective: ``"elbo"``, ``"tvo"`` or ``"eubo"``; for these two ``start`` must reach what is to be covered.
            rank: R of a low-rank scale.
            start: initial Gaussian, whose type and device the fit has; None for :meth:`standard`.
            steps: steps of the optimiser.
            samples: draws per step; None for 8, or 64 if their weights take the place of gradients.
            rate: initial learning rate.
            seed: seed of all randomness; None draws one.

        Raises:
            ArgumentError: an argument is outside its range.
            EvidenceError: the energy is faulty, its density has no integral, or the optimisation diverged.
        """
        call = "Gaussian.fit"
        context(call)
        choice(call, "kind", kind, KINDS)
        choice(call, "objective", objective, OBJECTIVES)
        rank, steps = whole_number(call, "rank", rank), whole_number(call, "steps", steps)
        samples = samples if samples is not None else 8 if objective == "elbo" else 64
        samples, rate = whole_number(call, "samples", samples), positive(call, "rate", rate)
        seed = random_seed(call, seed)
        target = as_target(target)
        if start is None:
            start = cls(origin(target), 1.0)
        shape = (*target.batch_shape, target.dim)
        # further leading dimensions are separate fits
        if not isinstance(start, Gaussian) or tuple(start.mean.shape)[-len(shape) :] != shape:
            found = start if isinstance(start, Gaussian) else f"a {type(start).__name__}"
            raise ArgumentError(f"{call}(start={found}): expected a Gaussian over {shape}, like the target")
        within(call, "rate", rate, 0, torch.finfo(start.mean.dtype).max)
        allocatable(call, "samples", samples, 3 * samples * start.mean.numel(), "fewer draws", like=start.mean)
        allocatable(call, "steps", steps, steps * start.mean[..., 0].numel(), "fewer steps", like=start.mean)
        points = start.sample(probe_points(target), torch.Generator(start.mean.device).manual_seed(0))
        if fault := energy_fault(target, points) or energy_doubt(target, points):
            raise EvidenceError(f"{call}(): {fault}")
        rng = torch.Generator(start.mean.device).manual_seed(seed)
        mean, scale, trace = maximise_elbo(
            target,
            start.mean,
            start.covariance_diagonal.sqrt(),
            kind=kind,
            rank=min(rank, start.dim),
            steps=steps,
            samples=samples,
            rate=rate,
            rng=rng,
            objective=objective,
        )
        elbo = lower_bound(target, cls._of(mean, scale), rng)
        # far below the start; an infinite bound speaks for itself, and a fit that covers modes may have a low one
        check_divergence((objective == "elbo") & elbo.isfinite() & (elbo < trace[0] - 10 * (1 + trace[0].abs())), rate)
        return cls._of(mean, scale, elbo=elbo, elbo_trace=trace)

    @classmethod
    def of_mixture(
        cls,
        means: Tensor,
        covariances: Tensor,
        log_weights: Tensor,
        *,
        kind: Kind = "full",
        rank: int = 4,
        tolerance: float = 0.3,
    ) -> Self:
        """A Gaussian moment-matched to the mixture ``m = sum_i exp(l_i) q_i/zeta``, ``zeta = sum_i exp(l_i)``
        (T (5.50)).

        With local fits to the modes of a target and their evidence lower bounds ``l_i``, ``log_zeta`` of the result is
        a guess of log Z. Among components whose means are less than ``tolerance`` apart, in sds per dimension, only
        the one with the largest weight counts.

        Args:
            means: ``[L, *batch, D]``.
            covariances: ``[L, *batch, D, D]``.
            log_weights: ``l``, ``[L, *batch]``; ``-inf`` ignores a component.
            kind: kind of the scale.
            rank: rank of a low-rank scale.
            tolerance: distance below which components are duplicates.

        Raises:
            ArgumentError: shapes that do not fit, a value that is not finite, or an unknown kind.
            EvidenceError: all weights of a problem are zero, or a covariance is not positive definite.
        """
        call = "Gaussian.of_mixture"
        means, covariances, log_weights = check_mixture(call, means, covariances, log_weights)
        choice(call, "kind", kind, KINDS)
        rank, tolerance = whole_number(call, "rank", rank), within(call, "tolerance", tolerance, 0)
        log_weights = log_weights.double()
        kept = distinct(means, covariances, log_weights, tolerance)
        moments = mixture_moments(means, covariances, torch.where(kept, log_weights, -math.inf).to(means))
        scale = scale_of(moments.covariance, kind, min(rank, means.shape[-1]))
        return cls._of(moments.mean, scale, log_zeta=moments.log_total.double())

    @classmethod
    def from_local_fits(
        cls,
        target,
        starts: int = 16,
        *,
        kind: Kind = "full",
        rank: int = 4,
        start: "Gaussian | None" = None,
        tolerance: float = 0.3,
        seed: int | None = 0,
        **fit: Any,
    ) -> Self:
        """:meth:`of_mixture` of diagonal fits by the evidence lower bound from many starts: covers several modes.

        Args:
            target: as in :meth:`fit`.
            starts: fits per problem.
            kind: kind of the result's scale.
            rank: rank of a low-rank scale.
            start: distribution of the fits' initial means, wide enough to reach all modes; None for standard normals.
                Their initial sds are a tenth of its sds.
            tolerance: as in :meth:`of_mixture`.
            seed: seed of all randomness; None draws one.
            fit: ``steps``, ``samples`` and ``rate`` of :meth:`fit`.

        Raises:
            ArgumentError: an argument is outside its range.
            EvidenceError: the optimisation diverged, or no fit of a problem is inside the target's support.
        """
        call = "Gaussian.from_local_fits"
        choice(call, "kind", kind, KINDS)
        rank = whole_number(call, "rank", rank)
        local = cls._local_fits(call, target, starts, start, tolerance, seed, **fit)
        assert local.elbo is not None
        return cls.of_mixture(local.mean, local.covariance, local.elbo, kind=kind, rank=rank, tolerance=tolerance)

    @classmethod
    def _local_fits(cls, call: str, target, starts, start: "Gaussian | None", tolerance, seed, **fit: Any) -> Self:
        """Diagonal fits ``[starts, *batch, D]`` from draws of a wide Gaussian, with a tenth of its sds at first."""
        starts = whole_number(call, "starts", starts)
        within(call, "tolerance", tolerance, 0)
        seed = random_seed(call, seed)
        target = as_target(target)
        wide = Gaussian(origin(target), 1.0) if start is None else start
        instance(call, "start", wide, Gaussian, "Gaussian(mean, sd)")
        first = wide.sample((starts,), torch.Generator(wide.mean.device).manual_seed(seed))
        sds = 0.1 * wide.covariance_diagonal.sqrt().expand_as(first)
        return cls.fit(target, start=Gaussian(first, sds), seed=seed, **fit)

    @classmethod
    def broad(
        cls, target, starts: int = 64, *, like: Whitened | None = None, iterations: int = 200, seed: int | None = 0
    ) -> Self:
        """A Gaussian that covers all modes that many searches find: the second reference of ``ParallelTempering``.

        Where the coordinates have a standardised prior, as latents and random inputs do, it is a standard normal.
        Elsewhere it is :meth:`covering` the :func:`modes` of the target.

        Args:
            target, starts, iterations, seed: as in :func:`modes`.
            like: Gaussian whose draws the search starts from; None for standard normals in float64.

        Raises:
            ArgumentError, EvidenceError: as :func:`modes`.
        """
        if as_target(target).standardised:
            mean = origin(target, torch.float64) if like is None else torch.zeros_like(like.mean)
            return cls(mean, 1.0)
        return cls.covering(modes(target, starts, start=like, iterations=iterations, seed=seed))

    @classmethod
    def covering(cls, found: Modes) -> Self:
        """A Gaussian moment-matched to Laplace's approximations at modes, all those of some mass counting alike."""
        mean, covariance = cover(instance("Gaussian.covering", "found", found, Modes, "dgm.modes(target)"))
        return cls._of(mean, TriangularMap(factorised(covariance)), log_zeta=found.log_z)

    @classmethod
    def laplace(cls, target, *, start: Tensor | None = None, max_iterations: int = 200) -> Self:
        """The Gaussian at the mode with the inverse Hessian as its covariance; sets ``log_evidence``.

        ``log Z ~ -energy(mode) + D/2 log 2 pi - 1/2 log|H|``

        Args:
            target: anything with ``energy``, twice differentiable, ``dim`` and ``batch_shape``.
            start: ``[*batch, D]``, whose type and device the result has; None for zero, in float64 if the target has no
                type.
            max_iterations: damped Newton steps.

        Raises:
            ArgumentError: an argument is outside its range.
            EvidenceError: no mode was reached, or the Hessian there is not positive definite.
        """
        call = "Gaussian.laplace"
        context(call)
        target = as_target(target)
        if start is None:
            start = origin(target, torch.float64)
        start = finite(call, "start", start)
        shape = (*target.batch_shape, target.dim)
        if tuple(start.shape) != shape:
            raise ArgumentError(f"{call}(start of shape {tuple(start.shape)}): expected {shape}")
        mode = find_mode(target, start, max_iterations=whole_number(call, "max_iterations", max_iterations))
        scale = TriangularMap(factorised(torch.cholesky_inverse(mode.cholesky)))
        log_evidence = -mode.energy + 0.5 * target.dim * math.log(2 * math.pi) + scale.log_det()
        return cls._of(mode.position, scale, log_evidence=log_evidence)
