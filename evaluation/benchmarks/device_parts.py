"""The lines of ``dgm-infer bench device``: pieces of work that are repeated for some seconds on a device.

Nothing is read but weights: the images are those that generators make of prior draws.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import dgm_infer as dgm
import generators
from dgm_infer import Gaussian
from dgm_infer.errors import CheckpointError, DgmInferError, MissingExtraError, cause, uninterrupted
from dgm_infer.evidence import Method
from generators import IWAE, BernoulliVAE, FaceGAN, LatentPosterior

from .comparison import FEWEST, diagnose
from .completions import top_half
from .plain_loop_peer import plain_loss, synchronise
from .problems import PROBLEMS, Problem
from .workers import Report

__all__ = ["PARTS", "SIZES", "DeviceTask", "Line", "Sizes", "host_waits", "measure", "run"]

# Annealing and nothing else.
_BARE: dict[str, Any] = {"keep_draws": False, "coverage": False, "progress": False}
# Columns of values of which effective draws are counted.
_COLUMNS = 64
# Steps of a piece of training.
_STEPS = 10
# Share of its seconds that a part plans with: the last piece may take longer than the others.
_PLANNED = 0.8


class Sizes(NamedTuple):
    """How much is done at once."""

    chains: int
    """On a fibre of a simulator."""
    images: int
    """Completed together."""
    image_chains: int
    """Per image."""
    face_chains: int
    evidence_images: int
    evidence_chains: int
    temperatures: int
    replica_images: int
    replica_chains: int
    replica_temperatures: int
    batch: int
    """Images of a training step."""
    warmup: int
    """Iterations that adapt a kernel."""
    draws: int
    """In a piece of sampling on a fibre of a simulator or of a face."""
    image_draws: int
    """In a piece of sampling of images."""


SIZES = {
    "cuda": Sizes(1024, 64, 16, 8, 1000, 16, 20, 100, 64, 32, 512, 40, 20, 1000),
    "cpu": Sizes(16, 2, 4, 2, 10, 4, 5, 2, 4, 4, 100, 20, 10, 10),
}
"""By device: what fills a GPU, and the same in small."""


@dataclass(frozen=True)
class DeviceTask:
    """What one process measures.

    Args:
        part: a key of :data:`PARTS`.
        dtypes: float32, float64, in this order.
        seconds: for all lines of the part in all dtypes.
        device: cpu or cuda.
        seed: seed of all randomness.
        data: folder with the published IWAE in it; None for the shipped one of digits.
        sizes: how much is done at once.
    """

    part: str
    dtypes: tuple[str, ...]
    seconds: float
    device: str
    seed: int
    data: str | None
    sizes: Sizes


@dataclass(frozen=True)
class Line:
    """A piece of work that is repeated.

    Args:
        name: in tables.
        unit: what is counted, in the plural.
        work: one piece, all waits for the device included that a user's call has; returns how many units it did and, of
            samplers, values ``[chains, draws, k]`` whose effective draws count, else None.
    """

    name: str
    unit: str
    work: "Callable[[], Piece]"


Piece = tuple[float, Tensor | None]
Make = tuple[str, Callable[[], Line]]


def _fibre(task: DeviceTask, dtype: torch.dtype) -> Iterator[Make]:
    for name in PROBLEMS:

        def make(problem: Problem = Problem(name)) -> Line:  # noqa: B008
            fibre = dgm.condition(problem.model(), problem.observations(), dtype=dtype, device=task.device)
            return _sampled(problem.name, fibre, dgm.ConstrainedHMC(), task.sizes.chains, task.sizes.draws, task)

        yield name, make


def _images(task: DeviceTask, dtype: torch.dtype) -> Iterator[Make]:
    for name in ("digits_vae", "mnist_vae", "mnist_conv_vae"):

        def make(name: str = name) -> Line:
            model: Any = generators.load(name)
            images, mask = _made(model, task.sizes.images, task.seed), top_half(tuple(model.output_shape))
            fibre = dgm.condition(model, images, observe=dgm.pixels(mask), dtype=dtype, device=task.device)
            title = f"{name}, top halves of {len(images)} images"
            return _sampled(title, fibre, None, task.sizes.image_chains, task.sizes.image_draws, task)

        yield name, make


def _faces(task: DeviceTask, dtype: torch.dtype) -> Iterator[Make]:
    def make() -> Line:
        model = FaceGAN()
        observed = torch.nn.functional.avg_pool2d(_made(model, 1, task.seed), 16)
        fibre = dgm.condition(model, observed, observe=dgm.downsample(16), dtype=dtype, device=task.device)
        return _sampled(
            "thumbnail of a face", fibre, dgm.ConstrainedHMC(), task.sizes.face_chains, task.sizes.draws, task
        )

    yield "faces", make


def _evidence(task: DeviceTask, dtype: torch.dtype) -> Iterator[Make]:
    def make() -> Line:
        n, chains = task.sizes.evidence_images, task.sizes.evidence_chains
        method = dgm.AIS(temperatures=task.sizes.temperatures, schedule="sigmoid", n_steps=10, step_size=0.2)
        return _estimated(f"annealing of {n} images x {chains} chains", method, n, chains, task, dtype)

    yield "annealing", make


def _replicas(task: DeviceTask, dtype: torch.dtype) -> Iterator[Make]:
    def make() -> Line:
        n, chains, temperatures = task.sizes.replica_images, task.sizes.replica_chains, task.sizes.replica_temperatures
        method = dgm.ParallelTempering(draws=1, temperatures=temperatures, pilot_temperatures=2, n_steps=5)
        name = f"parallel tempering of {n} images x {chains} chains x 2 x {temperatures} temperatures"
        return _estimated(name, method, n, chains, task, dtype)

    yield "parallel tempering", make


def _training(task: DeviceTask, dtype: torch.dtype) -> Iterator[Make]:
    for name, samples in (("VAE", None), ("IWAE-50", 50)):

        def make(name: str = name, samples: int | None = samples) -> Line:
            torch.manual_seed(task.seed)
            batch, where = task.sizes.batch, {"device": task.device, "dtype": dtype}
            model = BernoulliVAE(50, (28, 28), (200, 200)).to(**where)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            grey = torch.rand(batch, 28 * 28).to(**where)

            def work() -> Piece:
                for _ in range(_STEPS):
                    optimizer.zero_grad()
                    plain_loss(model, torch.bernoulli(grey), samples).backward()
                    optimizer.step()
                return _STEPS * batch, None

            return Line(f"{name}, batches of {batch}", "images", work)

        yield name, make


PARTS: dict[str, Callable[[DeviceTask, torch.dtype], Iterator[Make]]] = {
    "fibre": _fibre,
    "images": _images,
    "faces": _faces,
    "evidence": _evidence,
    "replicas": _replicas,
    "training": _training,
}
"""By name: the lines of a part, each with its name and what makes it."""


def _sampled(name: str, fibre: Any, kernel: Any, chains: int, n: int, task: DeviceTask) -> Line:
    """Draws on from where the last piece ended, after a warm-up that is part of making the line.

    A piece is a call, and compiles its transitions.
    """
    options: dict[str, Any] = {"chains": chains, "seed": task.seed, "progress": False}
    draws: Any = dgm.sample(fibre, kernel, warmup=task.sizes.warmup, draws=1, **options)
    kernel, position = draws.kernel, draws.inputs[:, -1]

    def work() -> Piece:
        nonlocal position
        made: Any = dgm.sample(fibre, kernel, warmup=0, draws=n, initial=position, **options)
        options["seed"] += 1
        position = made.inputs[:, -1]
        values = torch.cat([v.flatten(2) if v.ndim > 2 else v.unsqueeze(-1) for v in made.latents.values()], -1)
        return float(n * chains * fibre.batch_shape.numel()), values[..., :_COLUMNS].cpu()

    return Line(f"{name}, {chains} chains, {type(kernel).__name__}", "transitions", work)


def _estimated(name: str, method: Method, n: int, chains: int, task: DeviceTask, dtype: torch.dtype) -> Line:
    """Estimates of the log evidence of images, tuning included."""
    target, base = _decoded(n, task, dtype)

    def work() -> Piece:
        with warnings.catch_warnings():
            # that so few temperatures estimate nothing: what is measured is their speed
            warnings.filterwarnings("ignore", message=f"{type(method).__name__}: ")
            evidence = uninterrupted(dgm.log_evidence(target, base, method, chains=chains, seed=task.seed, **_BARE))
        return float(n * chains * evidence.diagnostics["gradient_evaluations"]), None

    return Line(name, "image-gradients", work)


def _made(model: Any, n: int, seed: int) -> Tensor:
    """Images that a generator makes of prior draws, ``[n, *shape]``."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        flat = model.observed(model.input_density.sample((n,), generator=rng))
    return flat.reshape(n, *model.output_shape)


def _decoded(n: int, task: DeviceTask, dtype: torch.dtype) -> tuple[LatentPosterior, Gaussian]:
    """Posteriors of binary images that an IWAE makes, and its encoder's Gaussians."""
    model: Any = generators.load("digits_iwae") if task.data is None else IWAE.from_npz(task.data)
    rng = torch.Generator().manual_seed(task.seed)
    with torch.no_grad():
        images = torch.bernoulli(model.decoder(model.prior.sample((n,), generator=rng)).mean, generator=rng)
    where: Any = {"device": task.device, "dtype": dtype}
    model = model.to(**where).requires_grad_(False)
    target = LatentPosterior(model.decoder, images.reshape(n, *model.output_shape).to(**where), model.prior)
    return target, Gaussian.from_encoder(model.encoder, target.images)


def host_waits(work: Callable[[], Any]) -> int:
    """How often the host waits for a GPU during a call: what PyTorch's mode for finding synchronisations reports."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def run(task: DeviceTask, report: Report) -> None:
    """Measure a part; every line that is done is reported as JSON."""
    for line in measure(task, host_waits if task.device == "cuda" else None):
        report(json.dumps(line))


def measure(task: DeviceTask, waits: Callable[[Callable[[], Any]], int] | None) -> Iterator[dict[str, Any]]:
    """The lines of a part, one after the other, each for its share of the time that is left.

    Args:
        waits: counts the waits of the host in a call; None where there is nothing to wait for.

    Returns:
        records: ``rate`` in units per second, ``making`` and ``first`` the seconds that making the line (conditioning,
        warm-up, compilation) and its first piece took, ``waits`` of one piece; of samplers the smallest bulk ESS per
        second of drawing; ``left_out`` or ``error`` of a line that is not there or failed.
    """
    began = time.perf_counter()
    makes = [(dtype, *make) for dtype in task.dtypes for make in PARTS[task.part](task, getattr(torch, dtype))]
    for i, (dtype, name, make) in enumerate(makes):
        left = _PLANNED * task.seconds - (time.perf_counter() - began)
        record: dict[str, Any] = {"part": task.part, "line": name, "dtype": dtype}
        try:
            yield record | _worked(make, task.device, left / (len(makes) - i), waits)
        except (CheckpointError, MissingExtraError) as error:
            yield record | {"left_out": str(error)}
        except (DgmInferError, RuntimeError, NotImplementedError) as error:
            yield record | {"error": f"{type(error).__name__}: {cause(error)}"}


def _worked(
    make: Callable[[], Line], device: str, seconds: float, waits: Callable[[Callable[[], Any]], int] | None
) -> dict[str, Any]:
    """A line, worked until its seconds are used, and once in any case."""
    started = time.perf_counter()

    def elapsed() -> float:
        synchronise(device)
        return time.perf_counter() - started

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    line = make()
    making = elapsed()
    found: list[Piece] = []
    counted = None if waits is None else waits(lambda: found.append(line.work()))
    if waits is None:
        found.append(line.work())
    first = elapsed() - making
    found, before = [], elapsed()
    while not found or elapsed() - before < seconds - making - first:
        found.append(line.work())
    taken = elapsed() - before
    units = sum(piece[0] for piece in found)
    record = {"title": line.name, "unit": line.unit, "rate": units / taken, "pieces": len(found), "seconds": taken}
    record |= {"units_per_piece": units / len(found), "making": making, "first": first, "waits": counted}
    if device == "cuda":
        record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    values = [piece[1] for piece in found if piece[1] is not None]
    return record | (_effective(torch.cat(values, 1), taken) if values else {})


def _effective(values: Tensor, seconds: float) -> dict[str, Any]:
    """The smallest bulk ESS per second of columns ``[chains, draws, k]``, and the largest R-hat, from 20 draws on."""
    if values.shape[1] < FEWEST:
        return {}
    columns = np.ascontiguousarray(values.double().permute(2, 0, 1).numpy())
    found = [diagnose(column, 1.0) for column in columns]
    ess, r_hat = (np.array([row[name] for row in found], dtype=float) for name in ("ess_bulk", "r_hat"))
    return {"min_ess_per_second": float(ess.min()) / seconds, "max_r_hat": float(r_hat.max())}
