"""Rate against distortion of a decoder, the whole curve from one annealing run (Huang et al. 2020; math 7.9)."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from ..arguments import digits, finite, flag, instance, numbers, positive
from ..arguments.values import shown
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, ModelError, warn
from ..models import GenerativeModel, InputDensity, LatentVariableModel, evaluation_copy, reference_tensor
from ..references import Gaussian
from ..target import Target
from .annealing import AIS, anneal
from .estimators import CurvePoints, curve_points, finite_or_zero
from .method import Outcome
from .path import AnnealedPath, PathPoint
from .result import read_archive, write_archive
from .run import EvidenceRun, RunOptions

if TYPE_CHECKING:
    import pandas

_FORMAT = "dgm-infer rate distortion 1"


@dataclass(frozen=True, eq=False)
class RateDistortion:
    """Result of :func:`rate_distortion`: points ``(distortion, rate)`` at every ``beta``, in one run.

    In expectation, and for each image, a point lies on or above the curve of the decoder and its prior: no code whose
    codewords are prior draws has less rate at that distortion. Rates are in nats.

    Attributes:
        beta: inverse temperatures, ``[K + 1]``, from 0 on.
        rate: ``[K + 1, *batch]``, float64 like all estimates.
        rate_error: standard errors from the spread over chains.
        distortion, distortion_error: ``[K + 1, *batch]``.
        ess: effective number of chains, ``[K + 1, *batch]``; a bound from less than two is loose.
        chains: chains per image.
        diagnostics: ``acceptance [*batch]``, ``gradient_evaluations`` per chain and image, including
            ``pilot_evaluations``, ``seconds``.
        seed: seed of the run.
    """

    beta: Tensor
    rate: Tensor
    rate_error: Tensor
    distortion: Tensor
    distortion_error: Tensor
    ess: Tensor
    chains: int
    diagnostics: dict[str, Any]
    seed: int

    @property
    def images(self) -> int:
        """Number of images."""
        return self.rate[0].numel()

    def mean(self) -> CurvePoints:
        """Means over the images, each ``[K + 1]``, with errors for these very images; the smallest ess of each."""

        def error(values: Tensor) -> Tensor:
            return values.reshape(len(self.beta), -1).square().sum(1).sqrt() / self.images

        def mean(values: Tensor) -> Tensor:
            return values.reshape(len(self.beta), -1).mean(1)

        least = self.ess.reshape(len(self.beta), -1).amin(1)
        return CurvePoints(
            mean(self.rate), error(self.rate_error), mean(self.distortion), error(self.distortion_error), least
        )

    def to_dataframe(self, per_image: bool = False) -> "pandas.DataFrame":
        """One row per temperature, of means over the images; or one per temperature and image."""
        import pandas

        beta = self.beta.cpu().numpy()
        if not flag("to_dataframe", "per_image", per_image):
            columns = {name: value.cpu().numpy() for name, value in self.mean()._asdict().items()}
            return pandas.DataFrame({"beta": beta, **columns})
        index = pandas.MultiIndex.from_product([beta, range(self.images)], names=["beta", "image"])
        names = CurvePoints._fields
        return pandas.DataFrame({name: getattr(self, name).reshape(-1).cpu().numpy() for name in names}, index=index)

    def save(self, path: str | os.PathLike) -> None:
        """Write a NumPy archive (``.npz``) atomically."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        write_archive(path, _FORMAT, tensors, {"chains": self.chains, "seed": self.seed}, self.diagnostics)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "RateDistortion":
        """Read what :meth:`save` wrote.

        Raises:
            CheckpointError: the file is missing, damaged, or was not written by :meth:`save`.
        """
        return read_archive(cls, path, _FORMAT, "rates and distortions", cls._fits)

    @staticmethod
    def _fits(shapes: dict[str, tuple[int, ...]]) -> bool:
        same = ("rate_error", "distortion", "distortion_error", "ess")
        return shapes["rate"][:1] == shapes["beta"] and all(shapes[name] == shapes["rate"] for name in same)

    def __repr__(self):
        means = self.mean()
        return (
            f"RateDistortion({self.images} images, {len(self.beta)} temperatures; at beta = {self.beta[-1]:.4g} rate "
            f"{means.rate[-1]:.2f} +- {means.rate_error[-1]:.2f}, distortion {means.distortion[-1]:.4g} +- "
            f"{means.distortion_error[-1]:.2g})"
        )


Distortion = Callable[[Tensor, Tensor], Tensor]
"""Outputs ``[..., *batch, Dx]`` and images ``[*batch, Dx]`` to ``[..., *batch]``, differentiable."""


class _Decoder(NamedTuple):
    """``f(z)`` of a model, and its prior."""

    module: nn.Module
    outputs: Callable[[Tensor], Tensor]
    """``[..., Dz] -> [..., Dx]``."""
    log_prob: Callable[[Tensor, Tensor], Tensor] | None
    """``log p(x | z)`` of images ``[*batch, Dx]``, if the decoder is a density."""
    prior: InputDensity


def rate_distortion(
    model: nn.Module,
    images,
    distortion: str | Distortion = "mse",
    *,
    prior: InputDensity | None = None,
    beta: float | Tensor | None = None,
    method: AIS | None = None,
    chains: int = 16,
    seed: int | None = None,
    chunk: int | None = None,
    progress: bool = True,
) -> RateDistortion:
    """Rates and distortions of a decoder along ``q_beta(z) ~ p(z) exp(-beta d(x, f(z)))``, from one annealing run.

    ``R_beta = KL(q_beta | p) = -beta D_beta - log Z_beta`` is the least rate (nats) at distortion ``D_beta`` of codes
    for x whose codewords are the decoder's outputs at prior draws. Annealing from the prior visits all beta in turn;
    its weights at each give a point that lies, in expectation, on or above that curve, for any number of chains and
    temperatures, and comes to it as either grows (Huang et al. 2020; math 7.9).

    Args:
        model: a module with ``decoder`` and ``prior`` (the mean of its distribution is f), a
            :class:`GenerativeModel` without one, such as a GAN (``observed`` is f), or, with ``prior``, a decoder
            itself: ``decoder(z)`` is a distribution or a tensor. A frozen copy is used, in its own dtype.
        images: ``[*batch, *output_shape]``.
        distortion: ``"mse"``, the mean of squares over the values of an image; ``"nll"``, ``-log p(x | z)`` of the
            decoder, in nats, for which ``rate + distortion = -log p(x)`` at beta = 1; or a function of the outputs
            ``[..., *batch, Dx]`` and the images ``[*batch, Dx]``, differentiable, which returns ``[..., *batch]``.
        prior: density of z, standard normal; None for the model's own.
        beta: the largest inverse temperature, or all of them ``[K + 1]``, rising from 0; None for ``Dx/(2 0.1^2)`` with
            ``"mse"`` (the posterior of normal noise of sd 0.1) and 1 with ``"nll"``. From a largest one the others grow
            linearly where prior draws tell no beta from 0, and geometrically from there on.
        method: an :class:`AIS`, whose schedule is not used; None for 400 temperatures and an acceptance of 0.85.
        chains, seed, chunk, progress: as in :func:`log_evidence`; one chain alone has no standard errors.

    Raises:
        ArgumentError: an argument is outside its range, or the images do not fit.
        ModelError: the model has no decoder or prior, or the prior is not standard normal.
    """
    name = "rate_distortion"
    method = AIS(target_acceptance=0.85) if method is None else instance(name, "method", method, AIS, "AIS(200)")
    decoder = _decoder(model, prior)
    like = reference_tensor(decoder.module)
    x = _flat_images(decoder, finite(name, "images", images, digits(images)).to(like))
    measure, usual = _measure(decoder, distortion, x.shape[-1])
    largest = _largest(beta, usual)
    target, base = _Distorted(decoder, measure, x, largest), _prior_of(decoder, x)
    run = EvidenceRun(name, target, base, method, RunOptions(chains, seed, chunk, True, progress))
    betas = _schedule(target, method.temperatures, run.rng) if beta is None or isinstance(beta, int | float) else beta
    betas = numbers(name, "beta", betas, torch.float64).to(x.device)
    method = method.replace(schedule=betas / largest)

    def work(path: AnnealedPath, problems: slice | None) -> list[Outcome]:
        points: list[CurvePoints] = []

        def watch(log_weights: Tensor, point: PathPoint) -> None:
            # the difference from the prior is the largest beta times the distortion
            distortions = path.difference(point) / largest
            points.append(curve_points(betas[len(points)], finite_or_zero(log_weights), distortions))

        plan = method.plan(path, run.chains, run.rng, run.bar)
        spent = path.evaluations
        done = anneal(path, plan, path.normal(run.chains, run.rng), method.moves, run.rng, run.bar, watch=watch)
        curve = CurvePoints(*(torch.stack(values) for values in zip(*points, strict=True)))
        outcome = done.outcome(path, spent)
        return [outcome._replace(diagnostics=curve._asdict() | {"acceptance": outcome.diagnostics["acceptance"]})]

    (outcome,) = run.outcomes(work)
    found = outcome.diagnostics
    if run.chains > 1 and (few := (found["ess"].amin(0) < 1.5)).any():
        warn(
            f"{name}: the weights of {int(few.sum())} of {few.numel()} images rest on one chain at some beta: their "
            "rates are bounds still, but loose, with errors that are too small; use more temperatures or chains",
            DiagnosisWarning,
        )
    return RateDistortion(
        beta=betas,
        **{field: found[field] for field in CurvePoints._fields},
        chains=run.chains,
        diagnostics={
            "acceptance": found["acceptance"],
            "gradient_evaluations": run.evaluations,
            "pilot_evaluations": outcome.pilot_evaluations,
            "seconds": run.seconds,
        },
        seed=run.seed,
    )


class _Distorted(Target):
    """``exp(-energy) = p(z) exp(-beta d(x, f(z)))`` for images ``[*batch, Dx]``, with the largest beta."""

    def __init__(self, decoder: _Decoder, measure: Callable[[Tensor, Tensor], Tensor], x: Tensor, beta: float):
        super().__init__(None, decoder.prior.dim, tuple(x.shape[:-1]))
        self.decoder, self.measure, self.x, self.beta = decoder, measure, x, beta

    def energy(self, x):
        constant = 0.5 * self.dim * math.log(2 * math.pi)
        return 0.5 * x.square().sum(-1) + constant + self.beta * self.measure(x, self.x)

    def take(self, problems):
        return _Distorted(self.decoder, self.measure, self.x.reshape(-1, self.x.shape[-1])[problems], self.beta)


def _prior_of(decoder: _Decoder, x: Tensor) -> Gaussian:
    """The prior, one per image."""
    return Gaussian(x.new_zeros(*x.shape[:-1], decoder.prior.dim), 1.0)


def _decoder(model: nn.Module, prior: InputDensity | None) -> _Decoder:
    """The function of a model that makes outputs of latents, and the density of those."""
    instance("rate_distortion", "model", model, nn.Module, 'generators.load("digits_vae")')
    if prior is not None:
        instance("rate_distortion", "prior", prior, InputDensity, "StandardNormal(50)")
    frozen = evaluation_copy(model)
    found = LatentVariableModel.find(frozen)
    function, own = (frozen, None) if found is None else (found.decoder, found.prior)
    if found is None and isinstance(frozen, GenerativeModel):
        function, own = frozen.observed, frozen.input_density
    prior = own if prior is None else prior
    if prior is None:
        raise ModelError(
            f"rate_distortion(): a {type(model).__name__} has no prior: give prior=StandardNormal(D), the density of "
            "its latents"
        )
    if not prior.is_standard_normal:
        raise ModelError(
            f"rate_distortion(): the prior is {prior}: only standard normal latents are annealed from; write the model "
            "as a function of these"
        )

    def outputs(z: Tensor) -> Tensor:
        made = function(z)
        return (made.mean if isinstance(made, Distribution) else made).flatten(z.ndim - 1)

    def log_prob(z: Tensor, x: Tensor) -> Tensor:
        made = function(z)
        assert isinstance(made, Distribution)
        return made.log_prob(x.reshape(*x.shape[:-1], *made.event_shape))

    with torch.no_grad():
        like = reference_tensor(frozen)
        is_density = isinstance(function(torch.zeros(prior.dim, dtype=like.dtype, device=like.device)), Distribution)
    return _Decoder(frozen, outputs, log_prob if is_density else None, prior)


def _flat_images(decoder: _Decoder, images: Tensor) -> Tensor:
    """Images ``[*batch, Dx]``."""
    with torch.no_grad():
        size = decoder.outputs(torch.zeros(decoder.prior.dim).to(images)).numel()
    event = 0
    while event <= images.ndim and math.prod(images.shape[images.ndim - event :]) != size:
        event += 1
    if event > images.ndim or images.numel() == 0:
        raise ArgumentError(
            f"rate_distortion(images of shape {tuple(images.shape)}): expected {size} values per image, as the decoder "
            "returns"
        )
    return images.reshape(*images.shape[: images.ndim - event], size)


def _measure(
    decoder: _Decoder, distortion: str | Distortion, size: int
) -> tuple[Callable[[Tensor, Tensor], Tensor], float | None]:
    """``d(x, f(z))`` of latents and images, and the usual largest beta."""
    if isinstance(distortion, str) and distortion == "mse":
        return lambda z, x: (decoder.outputs(z) - x).square().mean(-1), size / (2 * 0.1**2)
    if isinstance(distortion, str) and distortion == "nll":
        log_prob = decoder.log_prob
        if log_prob is None:
            raise ModelError('rate_distortion(distortion="nll"): the model returns no distribution over outputs')
        return lambda z, x: -log_prob(z, x), 1.0
    if not callable(distortion):
        raise ArgumentError(
            f'rate_distortion(distortion={shown(distortion)}): must be "mse", "nll" or a function of outputs and images'
        )
    own: Distortion = distortion
    return lambda z, x: own(decoder.outputs(z), x), None


def _largest(beta: float | Tensor | None, usual: float | None) -> float:
    name = "rate_distortion"
    if beta is None and usual is None:
        raise ArgumentError(f"{name}(beta=None): name the largest inverse temperature for a distortion of your own")
    if beta is None or isinstance(beta, int | float):
        return positive(name, "beta", usual if beta is None else beta)
    values = numbers(name, "beta", beta, torch.float64)
    rises = values.ndim == 1 and len(values) >= 2 and bool((values[1:] > values[:-1]).all())
    if not (rises and values[0] == 0 and values.isfinite().all()):
        raise ArgumentError(f"{name}(beta of shape {tuple(values.shape)}): must be a vector that rises from 0")
    return float(values[-1])


def _schedule(target: _Distorted, n: int, rng: torch.Generator) -> Tensor:
    """``beta_k = beta expm1(a k/K)/expm1(a)``, ``a = log(1 + beta s)``, s the sd of d over prior draws: ``[K + 1]``.

    The logarithm of ``1 + s beta_k`` grows evenly.
    """
    # as many draws of the prior as images, to set the scale of the first temperatures
    x = target.x.reshape(-1, target.x.shape[-1])[:64]
    with torch.no_grad():
        z = _prior_of(target.decoder, x).sample((64,), rng)
        spread = float(target.measure(z, x).double().std(0).median())
    a = max(math.log1p(target.beta * spread), 1e-6) if math.isfinite(spread) else 1.0
    k = torch.arange(n + 1, dtype=torch.float64, device=x.device)
    values = target.beta * torch.expm1(a * k / n) / math.expm1(a)
    values[-1] = target.beta
    return values
