"""``dgm-infer bench flows``: the shipped flows given part of an image, exactly or with noise, and what a step costs.

Seconds are those on the clock, on as many cores as torch has threads, and those of the processor, which other programs
do not change much.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dgm_infer as dgm
import generators
from dgm_infer.errors import uninterrupted
from generators import FlowGenerator
from trainers import DigitsData, MNISTData
from trainers.data import ImageData

from ..reports.records import write_record
from ..reports.tables import markdown
from .completions import top_half
from .publishing import measured_before, new_record, publish, versions
from .settings import check_counts, check_positive, check_seed, names_of, writable_folder

__all__ = ["PROBLEMS", "bench", "cost", "page"]


class Problem(NamedTuple):
    """An image seen in part."""

    title: str
    generator: str
    data: type[ImageData]
    mask: Callable[[tuple[int, ...]], Tensor]
    noise: float | None = None
    """Standard deviation; None for pixels that are met exactly, or have the noise of a decoder."""


def _lattice(shape: tuple[int, ...]) -> Tensor:
    """64 pixels of 28 x 28: every third of the inner rows and columns."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[3:27:3, 3:27:3] = True
    return mask


PROBLEMS = {
    "digits": Problem("half of a digit of 8 x 8, exactly", "digits_flow", DigitsData, top_half),
    "pixels": Problem("64 pixels of an MNIST digit, exactly", "mnist_flow", MNISTData, _lattice),
    "noise": Problem("half of an MNIST digit, noise 0.05", "mnist_flow", MNISTData, top_half, 0.05),
    "latent": Problem("half of an MNIST digit, latent flow", "mnist_latent_flow", MNISTData, top_half),
}
"""By name."""

# Flows, their steps and observed pixels whose costs are measured.
_COSTS = (("digits_flow", (4, 8), (8, 32)), ("mnist_flow", (2, 4, 8), (16, 64, 196, 392)))
_REPEATS = 3


def bench(
    problems: str = ",".join(PROBLEMS),
    costs: bool = True,
    image: int = 3,
    chains: int = 8,
    draws: int = 200,
    warmup: int | None = None,
    seconds: float = 600,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Condition the shipped flows on part of a held-out image, and measure what steps cost.

    What an earlier run with the same settings has measured is kept.

    Args:
        problems: digits, half of one exactly; pixels, 64 of an MNIST digit exactly; noise, half of one with noise 0.05;
            latent, half of one under the latent flow; separated by commas.
        costs: also measure a gradient with noise, and a Jacobian and its determinant's gradient, by steps and pixels.
        image: index of the held-out image.
        chains: chains.
        draws: draws per chain.
        warmup: iterations of the warm-up; null for as many as it takes.
        seconds: wall-clock seconds per problem, after which the draws made so far count.
        seed: seed of all randomness.
        output: folder for ``flows.json`` and ``flows.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(2, chains=chains, draws=draws)
    check_counts(0, image=image)
    check_positive(seconds=seconds)
    check_seed(seed)
    chosen = names_of("problems", problems, PROBLEMS)
    path = writable_folder(output) / "flows.json"
    settings = {"image": image, "chains": chains, "draws": draws, "warmup": warmup, "seconds": seconds, "seed": seed}
    measured = measured_before(path, settings, "problems", "costs")
    record = new_record("flows", {"problems": problems, "costs": costs, **settings}, ["dgm-infer", "torch"]) | measured
    for name in chosen:
        print(PROBLEMS[name].title, flush=True)
        record["problems"][name] = _sampled(PROBLEMS[name], settings)
        print(record["problems"][name], flush=True)
        write_record(path, record)
    for name, steps, counts in _COSTS if costs else ():
        for n, observed in ((n, observed) for n in steps for observed in counts):
            record["costs"][f"{name}, {n} steps, {observed} pixels"] = cost(name, n, observed, chains)
            write_record(path, record)
    publish(path, "flows", page(record))
    return path


def _sampled(problem: Problem, settings: Mapping[str, Any]) -> dict[str, Any]:
    model = generators.load(problem.generator)
    image = problem.data().held_out(settings["image"] + 1)[-1]
    began, on_the_clock = time.process_time(), time.perf_counter()
    seen: dict[str, Any] = {} if problem.noise is None else {"noise": problem.noise}
    conditioned = dgm.condition(model, image, observe=dgm.pixels(problem.mask(tuple(image.shape))), **seen)
    with warnings.catch_warnings():
        # what runs find wrong with themselves is in the record
        warnings.simplefilter("ignore")
        sizes: dict[str, Any] = {name: settings[name] for name in ("chains", "draws", "warmup", "seed")}
        sizes |= {"until": {"seconds": settings["seconds"]}, "progress": False}
        result = uninterrupted(dgm.sample(conditioned, **sizes))
    seconds, waited = time.process_time() - began, time.perf_counter() - on_the_clock
    summary = result.summary()
    errors = result.stats.get("constraint_error")
    return {
        "seconds": waited,
        "processor_seconds": seconds,
        "threads": torch.get_num_threads(),
        "draws": len(result.stats["acceptance_rate"][0]),
        "kernel": type(result.kernel).__name__,
        "r_hat": float(summary["r_hat"].to_numpy(float).max()),
        "min_ess": float(summary["ess_bulk"].to_numpy(float).min()),
        "constraint_error": None if errors is None else errors.max().item(),
        "found": [str(finding) for finding in result.diagnose()],
    }


def cost(name: str, steps: int, observed: int, chains: int) -> dict[str, float]:
    """Milliseconds, for all chains together, of a gradient given pixels with noise, and of a Jacobian with the gradient
    of its determinant given them exactly.

    Args:
        name: of a shipped flow.
        steps: that it is to take.
        observed: pixels observed, evenly spaced.
        chains: rows at once.
    """
    given = generators.load(name)
    assert isinstance(given, FlowGenerator)
    flow = FlowGenerator(given.velocity, given.output_shape, steps, given.solver, given.loc, given.scale)
    mask = torch.zeros(flow.dim, dtype=torch.bool)
    mask[torch.linspace(0, flow.dim - 1, observed).long()] = True
    u = torch.randn(chains, flow.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    image, seen = flow(u[0].float()).detach(), dgm.pixels(mask.reshape(flow.output_shape))
    image = image.reshape(flow.output_shape)
    noisy, exact = dgm.condition(flow, image, observe=seen, noise=0.05), dgm.condition(flow, image, observe=seen)
    # in the type that ConstrainedHMC computes them in
    marginal, rows = noisy.marginal, exact.computed(float32=exact.prefers_float32).rows(chains)
    assert marginal is not None
    return {
        "gradient": _milliseconds(lambda: marginal.energy_and_gradient(u)),
        "jacobian": _milliseconds(lambda: rows.evaluate(type(rows).linearise, u)),
    }


def _milliseconds(work: Callable[[], object]) -> float:
    work()
    began = time.process_time()
    for _ in range(_REPEATS):
        work()
    return 1e3 * (time.process_time() - began) / _REPEATS


def page(record: Mapping[str, Any]) -> str:
    """Markdown: a table of the problems, and one of the costs."""
    settings = record["settings"]
    parts = ["# Flows given part of an image\n"]
    if record["problems"]:
        lines = [
            [
                PROBLEMS[name].title,
                row["kernel"],
                f"{settings['chains']} x {row['draws']}",
                f"{row['seconds']:.0f}",
                f"{row['processor_seconds']:.0f}",
                str(row["threads"]),
                f"{row['r_hat']:.3f}",
                f"{row['min_ess']:.0f}",
                "" if row["constraint_error"] is None else f"{row['constraint_error']:.0e}",
                "; ".join(row["found"]) or "nothing",
            ]
            for name, row in record["problems"].items()
        ]
        header = [
            "observed",
            "kernel",
            "chains x draws",
            "seconds",
            "of the processor",
            "threads",
            "largest R-hat",
            "smallest ESS",
            "constraint",
            "`diagnose()`",
        ]
        parts.append("Start-up and warm-up included.\n")
        parts.append(markdown(header, lines))
    if record["costs"]:
        lines = [[name, f"{row['gradient']:.0f}", f"{row['jacobian']:.0f}"] for name, row in record["costs"].items()]
        parts.append(f"Milliseconds of one core for {settings['chains']} chains.\n")
        parts.append(markdown(["flow", "gradient, with noise", "Jacobian and force, exactly"], lines))
    parts.append(f"`{record['command']}`, {record['date']}, {record['processor']}; {versions(record)}.\n")
    return "\n".join(parts)
