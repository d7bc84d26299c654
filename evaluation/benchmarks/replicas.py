"""``dgm-infer bench replicas``: parallel tempering of many images at once, its memory and its gradients per second.

Temperatures x chains x images of the published importance-weighted auto-encoder in one call, float32, beside annealing
of as many images and chains: image-gradients per second of each, all of its tuning included, and the peak memory of the
process.
"""

import resource
import time
from pathlib import Path
from typing import Any

import torch

import dgm_infer as dgm
from dgm_infer import Gaussian
from dgm_infer.errors import ConfigError, uninterrupted
from dgm_infer.evidence import Method
from dgm_infer.files import REFERENCE_DATA
from generators import IWAE, LatentPosterior

from ..experiments.reference import reference_folder
from ..reports.records import write_record
from ..reports.tables import markdown
from .publishing import new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder

__all__ = ["bench", "page"]


def bench(
    images: int = 100,
    chains: int = 64,
    temperatures: int = 32,
    draws: int = 1,
    data: str | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Measure a short parallel tempering of many images, and annealing beside it.

    Args:
        images: images, the first of the published ones.
        chains: chains per image.
        temperatures: temperatures of each of the two legs.
        draws: sweeps of the last round of parallel tempering; annealing has as many gradients, about.
        data: the reference folder, with iwae_mnist in it; null for the environment variable DGM_INFER_REFERENCE_DATA.
        seed: seed of all randomness.
        output: folder for ``replicas.json`` and ``replicas.md``.

    Returns:
        path of the JSON file.
    """
    settings = {"images": images, "chains": chains, "temperatures": temperatures, "draws": draws}
    check_counts(least=2, chains=chains, temperatures=temperatures)
    check_counts(least=1, images=images, draws=draws)
    check_seed(seed)
    source = reference_folder(data)
    if source is None or not source.is_dir():
        raise ConfigError(
            f"data: {source or 'not given'}; name the folder that has iwae_mnist in it (--data FOLDER, or "
            f"{REFERENCE_DATA})"
        )
    folder = writable_folder(output)
    record = new_record("replicas", settings | {"seed": seed}, ["dgm-infer", "torch"], threads=torch.get_num_threads())
    model = IWAE.from_npz(source)
    pictures = IWAE.published_images(source).images
    if images > len(pictures):
        raise ConfigError(f"images: {images} must be at most the {len(pictures)} published images")
    target = LatentPosterior(model.decoder, pictures[:images], model.prior)
    base = Gaussian.from_encoder(model.encoder, target.images)
    tempering = dgm.ParallelTempering(draws=draws, temperatures=temperatures, pilot_temperatures=2, n_steps=5)
    # as many gradients as the sweeps of both legs, the rounds of tuning and the last one
    annealing = dgm.AIS(temperatures=4 * temperatures * draws, schedule="sigmoid", pilot_temperatures=2)
    record["rows"] = {
        "annealing": _row(target, base, annealing, chains, seed),
        "parallel tempering": _row(target, base, tempering, chains, seed),
    }
    record["share"] = record["rows"]["parallel tempering"]["rate"] / record["rows"]["annealing"]["rate"]
    path = folder / "replicas.json"
    write_record(path, record)
    publish(path, "replicas", page(record))
    return path


def _row(target: LatentPosterior, base: Gaussian, method: Method, chains: int, seed: int) -> dict[str, Any]:
    print(f"{type(method).__name__}: {len(target.images)} images x {chains} chains", flush=True)
    options = {"chains": chains, "seed": seed, "keep_draws": False, "coverage": False, "progress": False}
    started = time.process_time()
    evidence = uninterrupted(dgm.log_evidence(target, base, method, **options))
    seconds = time.process_time() - started
    gradients = evidence.diagnostics["gradient_evaluations"] * chains * len(target.images)
    return {
        "seconds": seconds,
        "image_gradients": gradients,
        "rate": gradients / seconds,
        # in KiB on Linux; of the process so far, so that what comes first has the least
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def page(record: dict[str, Any]) -> str:
    """Markdown: rates and memory."""
    s = record["settings"]
    rows = [
        [name, f"{row['seconds']:.0f}", f"{row['image_gradients']:.2e}", f"{row['rate']:.0f}", f"{row['peak_gib']:.1f}"]
        for name, row in record["rows"].items()
    ]
    columns = ["method", "seconds", "image-gradients", "image-gradients/s", "peak memory of the process, GiB"]
    return "\n".join(
        [
            "# Parallel tempering of many images at once\n",
            f"`{record['command']}`: {s['images']} images of the published IWAE x {s['chains']} chains, for parallel "
            f"tempering x {s['temperatures']} temperatures of each of two legs, in one call, which cuts the images "
            "into chunks. Seconds of processor time, tuning included.\n",
            markdown(columns, rows),
            f"Rate of parallel tempering over annealing's: {record['share']:.2f}.\n",
            f"On {record['processor']}, {record['threads']} threads; {versions(record)}.\n",
        ]
    )
