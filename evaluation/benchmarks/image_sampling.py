"""What is sampled in ``dgm-infer bench images``, and how: with this project as it is, or as it was.

This module imports nothing of its own package, and of the others only what they have had since revision b1b3d75: run
as a script with an earlier checkout first on the path, it measures that one.

    python -P image_sampling.py TASK.json RESULT.npz
"""

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dgm_infer as dgm
import generators

__all__ = ["Conditioned", "ImageTask", "run", "sample_until"]

# Iterations that show how long a transition takes.
_FIRST = 10
# Share of the seconds after start-up that warm-up may take.
_WARMUP_SHARE = 0.5
# Draws per chain that are made even if they are late, and how late at most.
_FEWEST, _LATE = 20, 1.3
# Draws per chain that one call makes at most, more than the seconds allow.
_MOST = 10**6
# Bytes of inputs that a chunk of draws may hold at once.
_CHUNK_BYTES = 2**27


@dataclass(frozen=True)
class Conditioned:
    """A generator and observed images, in terms of torch alone.

    Args:
        net: ``[n, *latent] -> [n, *shape]``, noiseless, of plain layers: it says nothing of any revision's classes.
        latent: shape of one latent, standard normal.
        sd: standard deviation of normal output noise; None without.
        images: ``[n, *shape]``.
        mask: pixels observed, ``[*shape]``; None for block means.
        factor: side of the blocks whose means are observed; None for pixels.
    """

    net: nn.Module
    latent: tuple[int, ...]
    sd: float | None
    images: Tensor
    mask: Tensor | None = None
    factor: int | None = None

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: str) -> "Conditioned":
        # written by this benchmark: a network is not a table of tensors
        return cls(**torch.load(path, weights_only=False))

    def operator(self) -> Any:
        """``condition(observe=...)``."""
        return dgm.pixels(self.mask) if self.factor is None else dgm.downsample(self.factor)

    def observed(self) -> Tensor:
        """``condition(observed=...)``."""
        if self.factor is None:
            return self.images
        return nn.functional.avg_pool2d(self.images, self.factor)

    def model(self, noise: float | None) -> Any:
        return generators.from_module(self.net, self.latent, noise=noise)

    def fibre(self, device: str = "cpu") -> Any:
        """Given exactly, output noise among the inputs."""
        return dgm.condition(self.model(self.sd), self.observed(), observe=self.operator(), device=device)

    def latent_posterior(self, noise: float | None, device: str = "cpu") -> Any:
        """Posterior of the latents alone: with the model's own noise, or of a noiseless model given some."""
        if self.mask is None or noise is not None:
            where: dict[str, Any] = {"observe": self.operator(), "device": device}
            return dgm.condition(self.model(None), self.observed(), tolerance=noise, **where)
        from .noisy_decoder import NoisyDecoder

        dim = int(np.prod(self.latent))
        decoder = NoisyDecoder(self.model(None), self.sd).to(device)  # type: ignore[arg-type]
        return generators.LatentPosterior(decoder, self.images, dgm.StandardNormal(dim), self.mask)


@dataclass(frozen=True)
class ImageTask:
    """What one process samples.

    Args:
        path: file of the :class:`Conditioned`.
        kernel: constrained, compiled (the same with ``compile=True``), lifted, default or nuts.
        seconds: wall-clock seconds, start-up and warm-up included.
        chains: chains per image.
        warmup: iterations that adapt the kernel, fewer where they would take more than half of the time after start-up;
            None for as many as it takes.
        cores: threads.
        seed: seed of all randomness.
        noise: sd that the observations of a noiseless model are given for NUTS; None for the model's own.
        index: index among the processes of a method.
        checkout: folder of the revision to measure; None for this one.
        dtype: float32 or float64, of peers in JAX.
        start: where their chains start, at the best of 32 descents of each image (descents) or at prior draws (prior).
        device: of this project's samplers.
    """

    path: str
    kernel: str
    seconds: float
    chains: int
    warmup: int | None
    cores: int
    seed: int
    noise: float | None = None
    index: int = 0
    checkout: str | None = None
    dtype: str = "float32"
    start: str = "descents"
    device: str = "cpu"


def run(task: ImageTask, report: Callable[[str], None]) -> dict[str, Any]:
    """Warm up and draw until the time is used, in chunks of draws.

    Returns:
        ``z`` ``[chains, draws, pairs]``, the latents of all images; ``constraint_error``, the largest relative to the
        scale of the data, or NaN; ``steps`` per transition; ``seconds``, ``warmup_seconds``; ``kernel``, its class;
        ``last``, the inputs at the end, ``[chains, Du]``.
    """
    began = time.perf_counter()
    torch.set_num_threads(task.cores)
    given = Conditioned.load(task.path)
    if task.kernel == "nuts":
        problem: Any = given.latent_posterior(task.noise, task.device)
    else:
        problem = given.fibre(task.device)
    return sample_until(problem, task, began, report, lambda draws: draws.latents["z"])


def sample_until(
    problem: Any,
    task: Any,
    began: float,
    report: Callable[[str], None],
    values: Callable[[Any], Tensor],
    initial: Tensor | None = None,
    keep: str = "latents",
) -> dict[str, Any]:
    """Warm up and draw until the seconds of a task are used; the result as :func:`run`.

    With as long a warm-up as it takes that is one call, as a user would make it; an earlier revision, or a warm-up of
    given length, is called for chunks of draws whose time is known.

    Args:
        problem: a fibre or a target.
        task: an :class:`ImageTask`, or what has its kernel, seconds, chains, warmup and seed.
        began: reading of ``time.perf_counter`` from which seconds count.
        report: called with a line of progress.
        values: what is recorded of draws, ``[chains, draws, ...]``.
        initial: where chains start, ``[chains, ..., Du]``; None for ``sample`` to find.
        keep: what draws hold; ``last`` needs ``"inputs"``.
    """

    def elapsed() -> float:
        return time.perf_counter() - began

    if task.warmup is None:
        return _in_one_call(problem, task, elapsed(), values, initial, keep)
    chains = _Chains(problem, task, initial)
    per_draw = _warmed_up(chains, task, elapsed)
    warm = elapsed()
    report(f"{task.chains} chains warmed up in {warm:.1f} s")
    latents: list[np.ndarray] = []
    errors, steps, count = [], [], 0
    largest = max(1, _CHUNK_BYTES // (8 * chains.position.numel()))
    while (left := task.seconds - elapsed()) > per_draw or (count < _FEWEST and left > (1 - _LATE) * task.seconds):
        # two draws, then what takes a tenth of the time at most: a call of few draws says little of the time of one
        most = (2, min(50, int(0.1 * left / per_draw)), int(0.9 * left / per_draw))[min(2, len(latents))]
        started, n = elapsed(), min(largest, max(1, most))
        draws = chains.sample(chains.kernel, 0, n)
        latents.append(values(draws).reshape(task.chains, n, -1).cpu().numpy())
        steps.append(draws.stats["n_steps"].double().mean().item())
        if "constraint_error" in draws.stats:
            scale = problem.values.abs().amax(-1).clamp_min(1)
            errors.append((draws.stats["constraint_error"] / scale).max().item())
        count += n
        per_draw = (elapsed() - started) / n
    return {
        "z": np.concatenate(latents, 1) if latents else np.empty((task.chains, 0, 1)),
        "constraint_error": max(errors, default=float("nan")),
        "steps": float(np.average(steps, weights=[part.shape[1] for part in latents])) if latents else float("nan"),
        "seconds": elapsed(),
        "warmup_seconds": warm,
        "kernel": type(chains.kernel).__name__,
        "last": chains.position.flatten(1).cpu().numpy(),
    }


def _in_one_call(
    problem: Any, task: Any, used: float, values: Callable[[Any], Tensor], initial: Tensor | None, keep: str
) -> dict[str, Any]:
    """``sample(until=dict(seconds=...))``, which draws for the seconds that are left; warm-up is not timed apart."""
    began = time.perf_counter()
    options: dict[str, Any] = {"chains": task.chains, "seed": task.seed, "keep": keep, "initial": initial}
    until = {"seconds": task.seconds - used}
    draws: Any = dgm.sample(problem, _kernel(task.kernel), draws=_MOST, until=until, progress=False, **options)
    errors = draws.stats.get("constraint_error")
    worst = float("nan") if errors is None else (errors / problem.values.abs().amax(-1).clamp_min(1)).max().item()
    return {
        "z": values(draws).reshape(task.chains, draws.shape[1], -1).cpu().numpy(),
        "constraint_error": worst,
        "steps": draws.stats["n_steps"].double().mean().item(),
        "seconds": used + time.perf_counter() - began,
        "warmup_seconds": float("nan"),
        "kernel": type(draws.kernel).__name__,
        "last": np.empty((task.chains, 0)) if draws.inputs is None else draws.inputs[:, -1].flatten(1).cpu().numpy(),
    }


def _warmed_up(chains: "_Chains", task: Any, elapsed: Callable[[], float]) -> float:
    """Adapt the kernel; the seconds that a draw takes."""
    chains.sample(_kernel(task.kernel), task.warmup and _FIRST, 1)
    started = elapsed()
    chains.sample(chains.kernel, 0, 1)
    per_draw = elapsed() - started
    if task.warmup is None:
        return per_draw
    warmup = int(min(task.warmup, max(0.0, _WARMUP_SHARE * (task.seconds - elapsed())) / per_draw))
    # fewer are not worth their own start-up
    if warmup <= _FIRST:
        return per_draw
    started = elapsed()
    # open again: the first iterations only led here
    chains.sample(_kernel(task.kernel) or type(chains.kernel)(), warmup, 1)
    return (elapsed() - started) / warmup


class _Chains:
    """Chains that go on from call to call."""

    kernel: Any = None

    def __init__(self, problem: Any, task: Any, position: Tensor | None):
        self.problem, self.chains, self.seed = problem, task.chains, task.seed
        self.position: Any = position

    def sample(self, kernel: Any, warmup: int | None, n: int) -> Any:
        options: dict[str, Any] = {"chains": self.chains, "initial": self.position, "progress": False}
        draws: Any = dgm.sample(self.problem, kernel, warmup=warmup, draws=n, seed=self.seed, **options)
        self.position, self.kernel = draws.inputs[:, -1], draws.kernel
        self.seed += 1
        return draws


def _kernel(name: str) -> Any:
    """A kernel of its default settings; None for ``sample()`` to choose."""
    if name == "compiled":
        return dgm.ConstrainedHMC(compile=True)
    names = {"constrained": "ConstrainedHMC", "lifted": "LiftedHMC", "nuts": "NUTS"}
    return None if name == "default" else getattr(dgm, names[name])()


def main(task_file: str, result_file: str) -> None:
    # the process that started this one may ignore interrupts, and hands that on
    signal.signal(signal.SIGINT, signal.default_int_handler)
    task = ImageTask(**json.loads(Path(task_file).read_text()))
    home = Path(dgm.__file__).resolve()
    if task.checkout is not None and not home.is_relative_to(Path(task.checkout).resolve()):
        raise SystemExit(f"{task.checkout} is not the dgm_infer that is found first, {home.parent}")
    result = run(replace(task, checkout=None), lambda line: print(line, flush=True))
    np.savez(result_file, **result)


if __name__ == "__main__":
    main(*sys.argv[1:])
