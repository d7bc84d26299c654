"""Image-gradients per second of annealed importance sampling, beside bare loops over the same points."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import dgm_infer as dgm
from dgm_infer import Gaussian
from dgm_infer.errors import uninterrupted
from generators import LatentPosterior

__all__ = ["STEPS", "one_large_run", "throughput"]

STEPS = 10
"""Leapfrog steps per temperature."""
_STEP_SIZE = 0.2
# The large run on a GPU: images, chains, temperatures.
_LARGE = (1000, 16, 1000)
# Annealing and nothing else.
_BARE: dict[str, Any] = {"keep_draws": False, "coverage": False, "progress": False}


def throughput(
    target: LatentPosterior, base: Gaussian, chains: int, temperatures: int, repeats: int, seed: int
) -> dict[str, Any]:
    """Image-gradients per second of annealing and of bare loops, in turns.

    The bare loop evaluates energies and gradients at fixed points, as often as annealing does. A second one is what is
    written by hand: the decoder's own log-probability, differentiated.
    """
    method = dgm.AIS(temperatures=temperatures, schedule="sigmoid", n_steps=STEPS, step_size=_STEP_SIZE)
    points = base.sample(chains, torch.Generator(base.mean.device).manual_seed(seed))
    plain_target = dgm.Target(_by_hand(target), target.dim, tuple(target.batch_shape))
    n = target.batch_shape.numel() * chains

    def annealing() -> float:
        _synchronise(points)
        started = time.perf_counter()
        evidence = uninterrupted(dgm.log_evidence(target, base, method, chains=chains, seed=seed, **_BARE))
        _synchronise(points)
        return n * evidence.diagnostics["gradient_evaluations"] / (time.perf_counter() - started)

    def loop(gradient: Callable[[torch.Tensor], object], times: int) -> float:
        _synchronise(points)
        started = time.perf_counter()
        for _ in range(times):
            gradient(points)
        _synchronise(points)
        return n * times / (time.perf_counter() - started)

    # first calls are slower
    annealing()
    loop(target.energy_and_gradient, 3)
    loop(plain_target.energy_and_gradient, 3)
    turns = [
        (
            loop(target.energy_and_gradient, STEPS * temperatures),
            annealing(),
            loop(plain_target.energy_and_gradient, STEPS * temperatures),
        )
        for _ in range(repeats)
    ]
    bare, annealed, by_hand = (list(column) for column in zip(*turns, strict=True))
    return {
        "bare_loop": median(bare),
        "annealing": median(annealed),
        "hand_written_loop": median(by_hand),
        "share": median(a / b for a, b in zip(annealed, bare, strict=True)),
        "share_of_hand_written": median(a / b for a, b in zip(annealed, by_hand, strict=True)),
        "turns": {"bare_loop": bare, "annealing": annealed, "hand_written_loop": by_hand},
    }


def _by_hand(target: LatentPosterior) -> Callable[[torch.Tensor], torch.Tensor]:
    def energy(z: torch.Tensor) -> torch.Tensor:
        return -target.decoder(z).log_prob(target.images) - target.prior.log_prob(z)

    return energy


def one_large_run(posterior: Callable[[int], tuple[LatentPosterior, Gaussian]], seed: int) -> dict[str, Any]:
    """The long run that only a GPU does in reasonable time."""
    images, chains, temperatures = _LARGE
    print(f"speed: {images} images x {chains} chains, {temperatures} temperatures", flush=True)
    method = dgm.AIS(temperatures=temperatures, schedule="sigmoid", n_steps=STEPS, step_size=_STEP_SIZE)
    target, base = posterior(images)
    _synchronise(base.mean)
    started = time.perf_counter()
    evidence = uninterrupted(dgm.log_evidence(target, base, method, chains=chains, seed=seed, **_BARE))
    _synchronise(base.mean)
    seconds = time.perf_counter() - started
    gradients = images * chains * evidence.diagnostics["gradient_evaluations"]
    return {
        "images": images,
        "chains": chains,
        "temperatures": temperatures,
        "seconds": seconds,
        "image_gradients_per_second": gradients / seconds,
        "mean_log_z": float(evidence.log_z.mean()),
    }


def _synchronise(like: torch.Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
