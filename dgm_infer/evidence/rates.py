"""Rate against distortion of a decoder, the whole curve from one annealing run (Huang et al. 2020; math 7.9)."""

import math
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from ..arguments import (
    finite,
    flag,
    fraction,
    instance,
    numbers,
    optional_positive,
    positive,
    random_seed,
    whole_number,
)
from ..diagnosis import DiagnosisWarning
from ..errors import ArgumentError, ModelError, cause
from ..models import GenerativeModel, InputDensity, LatentVariableModel, evaluation_copy, reference_tensor
from ..probe import energy_fault, probe_points
from ..progress import Progress
from ..references import Gaussian
from ..target import Target
from .annealing import Annealed, FreshMoves, anneal
from .curve import RateDistortion, curve_points
from .estimators import finite_or_zero
from .path import AnnealedPath, Point
from .plan import Plan

__all__ = ["rate_distortion"]

# Change of the log step size per unit of error in the mean acceptance, and the acceptance aimed at.
_GAIN = 0.4
# Draws of the prior that set the scale of the first temperatures, at least.
_SCALE_DRAWS = 64
# Below so many effective chains the bound is loose.
_EFFECTIVE = 1.5

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
    beta: float | None = None,
    betas: Tensor | None = None,
    temperatures: int = 400,
    n_steps: int = 5,
    step_size: float | None = None,
    target_acceptance: float = 0.8,
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
        beta: the largest; None for ``Dx/(2 0.1^2)`` with ``"mse"`` (the posterior of normal noise of sd 0.1) and 1
            with ``"nll"``.
        betas: all of them, ``[K + 1]``, rising from 0, in place of ``beta`` and ``temperatures``.
        temperatures: K. They grow linearly where prior draws tell no beta from 0, and geometrically from there on.
        n_steps: leapfrog steps per temperature.
        step_size: largest step, z being standard normal; None adapts it, per temperature and image, on a pilot of a
            quarter of the temperatures, whose chains are discarded.
        target_acceptance: mean acceptance probability that step sizes are adapted to.
        chains: per image; one alone has no standard errors.
        seed: seed of all randomness; None draws one.
        chunk: images at a time; None for all.
        progress: show a bar on the standard error stream.

    Raises:
        ArgumentError: an argument is outside its range, or the images do not fit.
        ModelError: the model has no decoder or prior, or the prior is not standard normal.
    """
    name = "rate_distortion"
    temperatures, n_steps = whole_number(name, "temperatures", temperatures, 4), whole_number(name, "n_steps", n_steps)
    optional_positive(name, "step_size", step_size)
    fraction(name, "target_acceptance", target_acceptance)
    chains, seed = whole_number(name, "chains", chains), random_seed(name, seed)
    shown = flag(name, "progress", progress)
    decoder = _decoder(model, prior)
    like = reference_tensor(decoder.module)
    x, batch = _flat_images(decoder, finite(name, "images", images).to(like))
    measure, usual = _measure(decoder, distortion, x.shape[-1])
    largest = _largest(beta, betas, usual)
    problem = _Problem(decoder, measure, x, largest)
    chunk = len(x) if chunk is None else whole_number(name, "chunk", chunk)
    rng = torch.Generator(like.device).manual_seed(seed)
    problem.check(chunk)
    schedule, growth = _schedule(problem, betas, temperatures, rng)
    started, parts = time.perf_counter(), []
    with Progress(shown, describe=lambda news: "") as bar:
        for first in range(0, len(x), chunk):
            path = AnnealedPath(problem.take(first, first + chunk), problem.base(x[first : first + chunk]))
            plan = _plan(path, schedule / largest, growth, step_size, n_steps, target_acceptance, chains, rng, bar)
            spent = path.evaluations
            parts.append((*_anneal(path, plan, schedule, n_steps, chains, rng, bar), spent, path.evaluations))
    curves, acceptances, spent, evaluations = zip(*parts, strict=True)
    curve = {
        field: torch.cat([getattr(points, field) for points in curves], 1).reshape(len(schedule), *batch)
        for field in curves[0]._fields
    }
    if chains > 1 and (few := (curve["ess"].amin(0) < _EFFECTIVE)).any():
        warnings.warn(
            f"{name}: the weights of {int(few.sum())} of {few.numel()} images rest on one chain at some beta: their "
            "rates are bounds still, but loose, with errors that are too small; use more temperatures or chains",
            DiagnosisWarning,
            stacklevel=2,
        )
    return RateDistortion(
        beta=schedule,
        **curve,
        chains=chains,
        diagnostics={
            "acceptance": torch.cat(acceptances).reshape(batch),
            "gradient_evaluations": max(evaluations),
            "pilot_evaluations": max(spent),
            "seconds": time.perf_counter() - started,
        },
        seed=seed,
    )


class _Problem:
    """Images ``[n, Dx]`` with a decoder and the largest beta."""

    def __init__(self, decoder: _Decoder, measure: Callable[[Tensor, Tensor], Tensor], x: Tensor, beta: float):
        self.decoder, self.measure, self.x, self.beta = decoder, measure, x, beta

    def take(self, first: int, stop: int) -> Target:
        """``exp(-energy) = p(z) exp(-beta d(x, f(z)))`` for some of the images."""
        x, dim = self.x[first:stop], self.decoder.prior.dim
        constant = 0.5 * dim * math.log(2 * math.pi)

        def energy(z: Tensor) -> Tensor:
            return 0.5 * z.square().sum(-1) + constant + self.beta * self.measure(z, x)

        return Target(energy, dim, (len(x),))

    def base(self, x: Tensor) -> Gaussian:
        """The prior, one per image."""
        return Gaussian(x.new_zeros(len(x), self.decoder.prior.dim), 1.0)

    def check(self, chunk: int) -> None:
        """Name a distortion that is faulty at prior draws."""
        target, base = self.take(0, chunk), self.base(self.x[:chunk])
        z = base.sample(probe_points(target), torch.Generator(self.x.device).manual_seed(0))
        try:
            fault = energy_fault(target, z)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ArgumentError(f"rate_distortion(): the distortion fails, {cause(error)}") from error
        if fault:
            raise ArgumentError(f"rate_distortion(): of prior plus beta times distortion, {fault}")


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


def _flat_images(decoder: _Decoder, images: Tensor) -> tuple[Tensor, torch.Size]:
    """Images ``[n, Dx]`` and their batch shape."""
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
    return images.reshape(-1, size), images.shape[: images.ndim - event]


def _measure(
    decoder: _Decoder, distortion: str | Distortion, size: int
) -> tuple[Callable[[Tensor, Tensor], Tensor], float | None]:
    """``d(x, f(z))`` of latents and images, and the usual largest beta."""
    if distortion == "mse":
        return lambda z, x: (decoder.outputs(z) - x).square().mean(-1), size / (2 * 0.1**2)
    if distortion == "nll":
        log_prob = decoder.log_prob
        if log_prob is None:
            raise ModelError('rate_distortion(distortion="nll"): the model returns no distribution over outputs')
        return lambda z, x: -log_prob(z, x), 1.0
    if not callable(distortion):
        raise ArgumentError(
            f'rate_distortion(distortion={distortion!r}): must be "mse", "nll" or a function of outputs and images'
        )
    own: Distortion = distortion
    return lambda z, x: own(decoder.outputs(z), x), None


def _largest(beta: float | None, betas: Tensor | None, usual: float | None) -> float:
    name = "rate_distortion"
    if betas is not None:
        values = numbers(name, "betas", betas, torch.float64)
        rises = values.ndim == 1 and len(values) >= 2 and bool((values[1:] > values[:-1]).all())
        if not (rises and values[0] == 0 and values.isfinite().all()):
            raise ArgumentError(f"{name}(betas of shape {tuple(values.shape)}): must be a vector that rises from 0")
        return float(values[-1])
    if beta is None and usual is None:
        raise ArgumentError(f"{name}(beta=None): name the largest inverse temperature for a distortion of your own")
    return positive(name, "beta", usual if beta is None else beta)


def _schedule(problem: _Problem, betas: Tensor | None, n: int, rng: torch.Generator) -> tuple[Tensor, float]:
    """``beta_k = beta expm1(a k/K)/expm1(a)``, ``a = log(1 + beta s)``, s the sd of d over prior draws: ``[K + 1]``.

    Also a, by which the logarithm of ``1 + s beta_k`` grows evenly; 0 for temperatures that are given.
    """
    if betas is not None:
        return numbers("rate_distortion", "betas", betas, torch.float64).to(problem.x.device), 0.0
    x = problem.x[:_SCALE_DRAWS]
    with torch.no_grad():
        z = problem.base(x).sample((_SCALE_DRAWS,), rng)
        spread = float(problem.measure(z, x).double().std(0).median())
    a = max(math.log1p(problem.beta * spread), 1e-6) if math.isfinite(spread) else 1.0
    k = torch.arange(n + 1, dtype=torch.float64, device=x.device)
    values = problem.beta * torch.expm1(a * k / n) / math.expm1(a)
    values[-1] = problem.beta
    return values, a


def _plan(
    path: AnnealedPath,
    shares: Tensor,
    growth: float,
    step_size: float | None,
    n_steps: int,
    target_acceptance: float,
    chains: int,
    rng: torch.Generator,
    bar: Progress,
) -> Plan:
    """Temperatures as shares of the largest, and step sizes, adapted on a pilot at every fourth of them.

    Widths of a density fall with the root of beta: steps follow it from one temperature to the next, and what is
    adapted is their factor.
    """
    n, (problems,) = len(shares) - 1, path.batch_shape
    betas = shares[:, None].expand(-1, problems)
    like = path.base.mean
    if step_size is not None:
        return Plan(betas, torch.full_like(betas, step_size).to(like))
    at = torch.arange(1, n + 1, 4, device=shares.device)
    bar.expect(len(at))
    point = path.at(path.normal(max(chains, 4), rng))
    log_step = like.new_full((problems,), math.log(1.2 * path.base.dim**-0.25))
    fall = growth / (2 * n)
    found = []
    for k in at.tolist():
        # before the path leaves the prior, the step finds its size
        for _ in range(8 if k == 1 else 1):
            move = path.move(point, betas[k].expand(point.energy.shape), (log_step - fall * k).exp(), n_steps, rng)
            point = move.point
            error = move.acceptance.mean(0).to(like.dtype) - target_acceptance
            log_step = (log_step + _GAIN * error).clamp(-12, math.log(2))
        found.append(log_step)
        bar.update("pilot")
    smooth = _running_mean(torch.stack(found))
    # at the temperatures between, the nearest before
    index = torch.arange(n + 1, device=shares.device).sub(1).clamp_min(0) // 4
    falling = fall * torch.arange(n + 1, device=shares.device, dtype=like.dtype)
    return Plan(betas, (smooth[index] - falling[:, None]).exp())


def _running_mean(rows: Tensor, half: int = 3) -> Tensor:
    n = len(rows)
    sums = torch.cat([torch.zeros_like(rows[:1]), rows.cumsum(0)])
    index = torch.arange(n, device=rows.device)
    low, high = (index - half).clamp_min(0), (index + half + 1).clamp_max(n)
    return (sums[high] - sums[low]) / (high - low)[:, None]


def _anneal(
    path: AnnealedPath,
    plan: Plan,
    schedule: Tensor,
    n_steps: int,
    chains: int,
    rng: torch.Generator,
    bar: Progress,
):
    """Points of the curve at every temperature, each ``[K + 1, n]``, and the mean acceptance ``[n]``."""
    seen = []

    def watch(log_weights: Tensor, point: Point) -> None:
        # the difference from the prior is the largest beta times the distortion
        distortions = path.difference(point) / schedule[-1]
        seen.append(curve_points(schedule[len(seen)], finite_or_zero(log_weights), distortions))

    done: Annealed = anneal(path, plan, path.normal(chains, rng), FreshMoves(path, n_steps, rng), bar, watch)
    points = type(seen[0])(*(torch.stack(values) for values in zip(*seen, strict=True)))
    return points, done.acceptance.mean(0)
