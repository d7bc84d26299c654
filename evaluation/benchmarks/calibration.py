"""``dgm-infer bench calibration``: samplers under generative priors, where posteriors are known.

The mixtures' velocity and denoiser are known in closed form, so that a flow's error is that of its steps alone, and
their posteriors under linear observations are mixtures too: draws are compared with exact ones.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer.errors import ConfigError, DgmInferError, MissingExtraError, uninterrupted

from ..problems.gaussian_mixture_flow import ObservedMixture
from ..problems.levy import INCREMENTS, OPERATORS
from ..reports.records import write_record
from ..reports.tables import markdown
from .calibration_levy import levy_row, levy_table
from .calibration_peers import DEEPINV, from_deepinv, retried_hmc
from .calibration_ranks import rank_rows, rank_table
from .calibration_scores import highest, sliced_distance
from .machine import check_device, device_name
from .publishing import measured_before, new_record, publish, versions
from .settings import check_counts, check_seed, names_of, writable_folder

__all__ = ["METHODS", "bench", "page", "scores"]

_PARTS = ("mixtures", "signals", "ranks")
METHODS = ("exact", "default", "hmc", "elliptical", "retried", *DEEPINV)

_TITLES = {
    "exact": "exact draws",
    "default": "`sample()`, its own kernel",
    "hmc": "HMC in noise space",
    "elliptical": "elliptical slices in noise space",
    "retried": "HMC, rejections retried and not kept",
    "dps": "DPS (deepinv)",
    "ddrm": "DDRM (deepinv)",
    "diffpir": "DiffPIR (deepinv)",
}


# Leapfrog steps of plain HMC, and how much longer than adapted those of the chains that try again are: at the adapted
# length few proposals are rejected, and the rule hardly matters.
_LEAPFROG, _LONGER = 6, 1.5


def bench(
    part: str = "mixtures",
    dims: str = "2,8,64",
    methods: str = ",".join(METHODS),
    problems: int = 20,
    chains: int = 4,
    draws: int = 100,
    warmup: int = 200,
    steps: int = 8,
    peer_steps: int = 200,
    increments: str = "laplace,student3",
    operators: str = "blur,mask",
    gibbs: int = 1000,
    generator: str = "mnist_latent_flow",
    device: Literal["cpu", "cuda"] = "cpu",
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Compare the draws of samplers with posteriors that are known, or with the inputs that made images.

    What an earlier run with the same settings has measured is kept: give the parts, dimensions and methods to add.

    Args:
        part: mixtures, of which exact draws are known; signals, with independent increments, beside a Gibbs sampler; or
            ranks, of the inputs of images that a generator made among draws given the top half of the images.
        dims: dimensions, even, separated by commas.
        methods: any of exact, default, hmc, elliptical, retried, dps, ddrm, diffpir, separated by commas.
        problems: data sets per dimension, each simulated from the mixture; signals; or images.
        chains: chains per data set.
        draws: draws per chain; samplers of independent draws make as many in all.
        warmup: iterations of the warm-up of kernels.
        steps: steps of the flow, by Heun's method.
        peer_steps: steps of DPS.
        increments: laws of the signals' increments: normal, laplace, student1, student2, student3.
        operators: what is measured of signals: identity, blur, mask, fourier.
        gibbs: draws of the Gibbs sampler, after a quarter as many.
        generator: shipped generators of latents whose images are ranked, separated by commas.
        device: device of this project's samplers; exact draws, Gibbs samplers and peers run on the CPU.
        seed: seed of all randomness.
        output: folder for ``calibration.json`` and ``calibration.md``, on a GPU ``calibration_cuda.json`` and ``.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(problems=problems, warmup=warmup, steps=steps, peer_steps=peer_steps, gibbs=gibbs)
    check_counts(2, chains=chains, draws=draws)
    check_seed(seed)
    chosen = names_of("methods", methods, METHODS)
    sizes = [int(dim) for dim in names_of("dims", dims, [str(2 * k) for k in range(1, 513)])]
    check_device(device)
    if part not in _PARTS:
        raise ConfigError(f"part: {part!r} is not one of {', '.join(_PARTS)}")
    folder = writable_folder(output)
    laws, seen = names_of("increments", increments, INCREMENTS), names_of("operators", operators, OPERATORS)
    settings = {
        "problems": problems, "chains": chains, "draws": draws, "warmup": warmup, "steps": steps,
        "peer_steps": peer_steps, "gibbs": gibbs, "device": device, "seed": seed,
    }  # fmt: skip
    title = "calibration" if device == "cpu" else f"calibration_{device}"
    path = folder / f"{title}.json"
    measured = measured_before(path, settings, *_PARTS)
    given = {
        "part": part, "dims": dims, "methods": methods, "increments": increments, "operators": operators,
        "generator": generator,
    }  # fmt: skip
    packages = ["dgm-infer", "torch", "deepinv"]
    record = new_record("calibration", {**given, **settings}, packages, device_name=device_name(device)) | measured
    for each in generator.split(",") if part == "ranks" else ():
        record["ranks"] |= rank_rows(each.strip(), settings)
        write_record(path, record)
    for law, operator in ((law, operator) for law in laws for operator in seen if part == "signals"):
        name = f"{law}, {operator}"
        record["signals"][name] = levy_row(law, operator, settings)
        print(f"{name}: {record['signals'][name]}", flush=True)
        write_record(path, record)
    for dim in sizes if part == "mixtures" else ():
        problem, rng = ObservedMixture(dim), torch.Generator().manual_seed(seed)
        truth = problem.draws(problems, rng)
        y = problem.data(truth, rng)
        exact = problem.exact(y, chains * draws, rng)
        rows = record["mixtures"].setdefault(str(dim), {})
        for name in chosen:
            began = time.perf_counter()
            try:
                found, evaluations = _draws(name, problem, y, settings, rng)
            except MissingExtraError as error:
                print(f"{dim} dimensions, {name}: {error}", flush=True)
                continue
            except DgmInferError as error:
                rows[name] = {"failed": str(error)}
                continue
            seconds = time.perf_counter() - began
            rows[name] = scores(problem, y, truth, found, exact) | {
                "seconds": seconds / problems,
                "evaluations": evaluations,
            }
            print(f"{dim} dimensions, {name}: {rows[name]}", flush=True)
            write_record(path, record)
    publish(path, title, page(record))
    return path


def _draws(
    name: str, problem: ObservedMixture, y: Tensor, settings: Mapping[str, Any], rng: torch.Generator
) -> tuple[Tensor, float]:
    """Draws ``[chains, draws, P, D]``, and the evaluations of the network that each took after the warm-up."""
    chains, draws, seed = settings["chains"], settings["draws"], settings["seed"]
    if name == "exact":
        return problem.exact(y, chains * draws, rng).unflatten(0, (chains, draws)), 0.0
    if name in DEEPINV:
        found, evaluations = from_deepinv(name, problem, y, chains * draws, settings["peer_steps"], seed)
        return found.unflatten(0, (chains, draws)), evaluations
    fibre = problem.fibre(y, settings["steps"], settings["device"])
    target = fibre.marginal
    assert target is not None
    options: dict[str, Any] = {"chains": chains, "draws": draws, "seed": seed, "progress": False}
    with warnings.catch_warnings():
        # what runs find wrong with themselves: here it is measured
        warnings.simplefilter("ignore")
        if name == "default":
            result = uninterrupted(dgm.sample(fibre, warmup=settings["warmup"], **options))
        elif name == "elliptical":
            result = dgm.sample(target, dgm.kernels.EllipticalSlice(), warmup=settings["warmup"], **options)
            result = uninterrupted(result)
        else:
            kernel = dgm.HMC(n_steps=_LEAPFROG)
            result = uninterrupted(dgm.sample(target, kernel, warmup=settings["warmup"], **options))
    counted = "slice_evaluations" if name == "elliptical" else "n_steps"
    u, n_steps = result.inputs, result.stats[counted].double().mean().item()
    assert u is not None
    if name == "retried":
        step = torch.as_tensor(result.kernel.step_size).median().item()  # type: ignore[union-attr]
        u, accepted = retried_hmc(target, u[:, -1], _LONGER * step, _LEAPFROG, draws, rng)
        u, n_steps = u.transpose(0, 1), _LEAPFROG / accepted if accepted else float("inf")
    with torch.no_grad():
        return problem.flow(settings["steps"])(u[..., : problem.dim].cpu()), 2 * settings["steps"] * n_steps


def scores(problem: ObservedMixture, y: Tensor, truth: Tensor, found: Tensor, exact: Tensor) -> dict[str, float]:
    """How far draws ``[chains, draws, P, D]`` are from the exact posteriors.

    ``coverage``: share of problems whose truth lies in the draws' region of highest density of 90 %. ``weights``: root
    mean square error of the weight of a mode. ``distance``: sliced Wasserstein distance from exact draws, over that of
    other exact draws.
    """
    all_draws = found.flatten(0, 1)
    weights, shares = problem.posterior_weights(y), problem.shares(found).mean(1)
    mean, error = shares.mean(0), shares.std(0) / len(shares) ** 0.5
    # of the heavier mode of each pair: the others are this one's complement, or nothing
    mode = weights.argmax(-1, keepdim=True)
    off = (mean - weights).gather(-1, mode).squeeze(-1)
    z = off / error.gather(-1, mode).squeeze(-1).clamp_min(1e-12)
    inside = highest(problem.log_posterior(all_draws, y), problem.log_posterior(truth.unsqueeze(0), y)[0])
    other = problem.exact(y, len(all_draws), torch.Generator().manual_seed(1))
    near = sliced_distance(all_draws, exact)
    return {
        "coverage": inside.double().mean().item(),
        "coverage_error": (0.9 * 0.1 / len(y)) ** 0.5,
        "weights": off.square().mean().sqrt().item(),
        "bias": off.mean().item(),
        "bias_error": off.std().item() / len(y) ** 0.5 if len(y) > 1 else float("nan"),
        "within": (z.abs() < 3).double().mean().item(),
        "distance": (near.mean() / sliced_distance(other, exact).mean()).item(),
    }


def page(record: Mapping[str, Any]) -> str:
    """Markdown: a table per dimension."""
    settings = record["settings"]
    forms: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("coverage of 90 %", lambda row: f"{row['coverage']:.3f} ± {row['coverage_error']:.3f}"),
        ("error of a mode's weight", lambda row: f"{row['weights']:.3f}"),
        ("its mean", lambda row: f"{row['bias']:+.3f} ± {row['bias_error']:.3f}"),
        ("within 3 errors", lambda row: f"{row['within']:.0%}"),
        ("distance", lambda row: f"{row['distance']:.2f}"),
        ("evaluations per draw", lambda row: f"{row['evaluations']:.0f}"),
        ("seconds per data set", lambda row: f"{row['seconds']:.2f}"),
    ]
    parts = ["# Calibration where posteriors are known\n"]
    if record["signals"]:
        parts.append(
            "Signals of 64 independent increments, measured with noise 25 dB below; "
            f"{settings['problems']} signals, {settings['chains']} chains of {settings['draws']} draws by `sample()` "
            "of the simulator. Gap: squared error of the posterior mean over that of the Gibbs sampler's.\n"
        )
        parts.append(markdown(*levy_table(record["signals"])))
    if record["ranks"]:
        parts.append(
            f"Inputs that made {settings['problems']} images, ranked among 20 draws given the top half of the image, "
            f"{settings['chains']} chains of {settings['draws']} draws. p: of uniform ranks, of all inputs and of the "
            "energy together (Bonferroni), and of the energy alone.\n"
        )
        parts.append(markdown(*rank_table(record["ranks"])))
    mixtures = (
        "Mixtures of four Gaussians of which half of the entries are observed with noise 0.1; "
        f"{settings['problems']} data sets per dimension, {settings['chains']} chains of {settings['draws']} draws. "
        f"The flow takes {settings['steps']} steps of Heun's method along the exact velocity.\n\n"
        "Distance: sliced Wasserstein from exact draws, over that of other exact draws: 1 is exact. Within 3 errors: "
        "share of data sets whose mode has its weight within 3 standard errors of the chains. Evaluations: of the "
        "network, after the warm-up.\n"
    )
    parts += [mixtures] if record["mixtures"] else []
    for dim, rows in record["mixtures"].items():
        lines = [
            [
                _TITLES[name],
                *([row["failed"], *[""] * (len(forms) - 1)] if "failed" in row else [f(row) for _, f in forms]),
            ]
            for name, row in ((name, rows[name]) for name in METHODS if name in rows)
        ]
        parts.append(f"## {dim} dimensions\n")
        parts.append(markdown(["sampler", *(title for title, _ in forms)], lines))
    parts.append(f"`{record['command']}`, {record['date']}, {record['processor']}; {versions(record)}.\n")
    return "\n".join(parts)
