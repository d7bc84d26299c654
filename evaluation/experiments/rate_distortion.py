"""Rate against distortion of the shipped generators, every curve from one annealing run (math 7.9)."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dgm_infer as dgm
import generators
from trainers import DigitsData

from ..figures.rates import rates
from ..reports.kept import NOT_KEPT, Parts
from ..reports.rates import LEVELS, rates_table

__all__ = ["run"]

# Points of a curve that are kept.
_POINTS = 50


class _Set(NamedTuple):
    words: str
    images: Tensor
    generators: Sequence[str]


def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict:
    """Write ``rate_distortion.png`` into ``folder``.

    Args:
        folder: folder of the picture.
        fast: two images, few chains and temperatures.
        data: the reference folder; MNIST's generators are left out unless it has ``mnist_10k`` in it.
        seed: seed of all randomness.
        parts: what a run that was stopped takes up again.
    """
    n, chains, temperatures = (2, 4, 12) if fast else (20, 16, 600)
    results: dict[str, Any] = {"chains": chains, "temperatures": temperatures, "levels": list(LEVELS), "sets": {}}
    for name, kind in _sets(data, n):
        curves = {}
        for generator in kind.generators:
            print(f"{name}: {generator}", flush=True)
            model = generators.load(generator)
            # a bound that is loose is not a mistake here: the least effective number of chains is in the record
            method = dgm.AIS(temperatures, target_acceptance=0.85, pilot_temperatures=-(-temperatures // 4))
            options = {"method": method, "chains": chains, "seed": seed, "progress": False}
            found = partial(dgm.evidence.rate_distortion, model, kind.images, **options)
            curves[generator], _ = parts.value(lambda found=found: _record(found()))
        results["sets"][name] = {"words": kind.words, "images": len(kind.images), "curves": curves}
    panels: Mapping[str, Mapping] = {each["words"]: each["curves"] for each in results["sets"].values()}
    rates(folder / "rate_distortion.png", panels)
    return {**results, "summary": rates_table(results)}


def _sets(data: Path | None, n: int) -> Iterator[tuple[str, _Set]]:
    digits = ("digits_vae", "digits_iwae", "digits_gan")
    yield "digits", _Set(f"{n} held-out digits, 8 x 8", DigitsData().held_out(n), digits)
    if data is not None and (data / "mnist_10k").is_dir():
        from trainers import MNISTData

        mnist = ("mnist_vae", "mnist_conv_vae", "mnist_gan")
        yield "mnist", _Set(f"{n} held-out images of MNIST", MNISTData(data / "mnist_10k").held_out(n), mnist)


def _record(found: dgm.evidence.RateDistortion) -> dict[str, Any]:
    means = found.mean()
    kept = torch.linspace(0, len(found.beta) - 1, min(_POINTS, len(found.beta))).round().long()
    return {
        "beta": found.beta[kept].tolist(),
        **{name: values[kept].tolist() for name, values in means._asdict().items()},
        "acceptance": float(found.diagnostics["acceptance"].mean()),
        "gradient_evaluations": found.diagnostics["gradient_evaluations"],
        "seconds": found.diagnostics["seconds"],
    }
