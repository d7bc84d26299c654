"""``dgm-infer bench unvisited``: do chains of completions miss a mode that a plain search finds, and do they say so?

Held-out images of which the top half is observed are sampled by the default kernel, all by itself. 256 descents an
image and round then look for modes of the same density (``dgm.modes``), whose Laplace masses are compared: of the best
mode that no draw came near, and of all that were visited, those included that chains alone have found: from their last
draws energies are minimised too.
"""

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer.diagnosis import Finding
from dgm_infer.references.minimise import minimise
from dgm_infer.references.modes import Modes, laplace_masses
from dgm_infer.sampling.inference_data import r_hat

from ..reports.records import write_record
from ..reports.tables import markdown
from .image_problems import PROBLEMS
from .publishing import new_record, publish, versions
from .settings import check_counts, check_seed, names_of, writable_folder

__all__ = ["bench", "near", "page"]

_NATS = 3.0


def bench(
    problems: str = "mnist_vae",
    images: int = 100,
    chains: int = 4,
    starts: int = 256,
    at_once: int = 10,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Compare the modes that chains have visited with those that searches find.

    Args:
        problems: names, separated by commas: digits, mnist_vae, mnist, fashion.
        images: held-out images of each.
        chains: chains per image.
        starts: descents per image and round of the search.
        at_once: images that are sampled together.
        seed: of the chains; the searches have the next.
        output: folder for ``unvisited.json`` and ``unvisited.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(images=images, chains=chains, starts=starts, at_once=at_once)
    check_seed(seed)
    folder = writable_folder(output)
    settings = {"problems": problems, "images": images, "chains": chains, "starts": starts, "at_once": at_once}
    record = new_record("unvisited", {**settings, "seed": seed}, ["dgm-infer", "torch"], problems={})
    path = folder / "unvisited.json"
    for name in names_of("problems", problems, PROBLEMS):
        rows = record["problems"].setdefault(name, [])
        given = PROBLEMS[name].conditioned(images)
        for part in given.images.split(at_once):
            rows += _rows(replace(given, images=part).fibre(), chains, starts, seed, len(rows))
            write_record(path, record)
            print(f"{name}: {len(rows)} of {images} images, {_summary(rows)}", flush=True)
    publish(path, "unvisited", page(record))
    return path


def _rows(fibre: Any, chains: int, starts: int, seed: int, first: int) -> list[dict[str, Any]]:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws = dgm.sample(fibre, chains=chains, seed=seed, progress=False)
    sampled = time.perf_counter() - began
    assert draws.inputs is not None
    diagnosis = draws.diagnose()
    found = dgm.modes(fibre.marginal, starts, seed=seed + 1)
    visited = near(found, draws.inputs[..., : fibre.marginal.dim])
    masses = found.log_masses
    best = masses.masked_fill(visited, -torch.inf).amax(0)
    ends = minimise(fibre.marginal.energy_and_gradient, draws.inputs[:, -1, ..., : fibre.marginal.dim], iterations=1000)
    own, _ = laplace_masses(fibre.marginal, ends.position, ends.energy)
    visited_mass = torch.maximum(masses.masked_fill(~visited, -torch.inf).logsumexp(0), own.amax(0))
    # no mode that is not visited, or none that is
    gap = (best - visited_mass).clamp(-1000, 1000)
    searched = time.perf_counter() - began - sampled
    worst = r_hat(draws.inputs[..., : fibre.marginal.dim].flatten(2)).unflatten(0, (len(gap), -1)).amax(-1)
    return [
        {
            "image": first + k,
            "modes": int(found.counts[k]),
            "visited": int((visited & (found.hits > 0))[:, k].sum()),
            "gap": float(gap[k]),
            "r_hat": float(worst[k]),
            "named": any(_tells_of_modes(each) and k in each.problems for each in diagnosis),
            "seconds": sampled / len(gap),
            "search_seconds": searched / len(gap),
        }
        for k in range(len(gap))
    ]


def _tells_of_modes(finding: Finding) -> bool:
    """Whether a finding warns of modes: not of data that the model misses, for one."""
    words = "never overlap", "mode", "starting point", "R-hat"
    return finding.severity in ("useless", "misleading") and any(word in finding.what for word in words)


def near(found: Modes, position: Tensor) -> Tensor:
    """Whether any of the positions ``[chains, draws, *batch, D]`` is among the draws of the normal approximation of
    each mode: ``[M, *batch]``."""
    dim = position.shape[-1]
    # of a normal's draws, all but one in a million
    most = dim + 5 * (2 * dim) ** 0.5
    result = torch.zeros_like(found.log_masses, dtype=torch.bool)
    for m in range(len(result)):
        covariance = found.covariances[m]
        usable = covariance.isfinite().flatten(-2).all(-1)
        factor = torch.linalg.cholesky(torch.where(usable[..., None, None], covariance, torch.eye(dim).to(covariance)))
        white = torch.linalg.solve_triangular(factor, (position - found.positions[m]).unsqueeze(-1), upper=False)
        result[m] = usable & (white.square().sum((-1, -2)).amin((0, 1)) < most)
    return result


def _summary(rows: list[dict[str, Any]]) -> str:
    missed = [row for row in rows if row["gap"] > _NATS]
    silent = [row["image"] for row in missed if not row["named"]]
    return f"{len(missed)} with a mode {_NATS:g} nats above those visited, of which {len(silent)} say nothing {silent}"


def page(record: Mapping[str, Any]) -> str:
    """Markdown: a line per problem."""
    settings = record["settings"]
    lines = [
        [
            PROBLEMS[name].title,
            str(len(rows)),
            f"{sum(row['modes'] for row in rows) / len(rows):.1f}",
            str(sum(row["gap"] > _NATS for row in rows)),
            str(sum(row["gap"] > _NATS and not row["named"] for row in rows)),
            f"{max(row['gap'] for row in rows):.2f}",
            f"{sum(row['seconds'] for row in rows) / len(rows):.1f}",
            f"{sum(row['search_seconds'] for row in rows) / len(rows):.1f}",
        ]
        for name, rows in record["problems"].items()
    ]
    header = [
        "problem", "images", "modes found", "with a mode 3 nats above those visited", "and nothing said",
        "largest difference, nats", "seconds per image", "of the search",
    ]  # fmt: skip
    return "\n".join(
        [
            "# Modes that completions miss\n",
            f"{settings['chains']} chains an image by the default kernel; then {settings['starts']} descents an image "
            "and round. Laplace masses of the best mode that no draw came near, above those of all visited.\n",
            markdown(header, lines),
            f"`{record['command']}`, {record['date']}, {record['processor']}; {versions(record)}.\n",
        ]
    )
