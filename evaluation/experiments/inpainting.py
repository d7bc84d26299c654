"""MNIST digits of which the top quarter is observed, completed by a Gaussian VAE (math 10.4).

The shipped generator ``mnist_vae`` has 50 latents and an output sd of 0.05; 196 observed pixels make posteriors that
are narrow in many directions. The table names what has not mixed.
"""

from pathlib import Path

import torch

import dgm_infer as dgm
import generators

from ..figures.completions import completions
from ..figures.traces import traces
from ..reports.kept import NOT_KEPT, Parts
from ..reports.mixing import R_HAT, describe, parse_label
from .reference import required_data

__all__ = ["run"]

N_ROWS = 7
# Completions drawn per chain: all draws of a full run would take a gigabyte.
N_COMPLETIONS = 20


def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict:
    """Write ``completions.png`` and ``traces.png`` into ``folder``.

    Args:
        folder: folder of the pictures.
        fast: two images, few chains and draws.
        data: the reference folder, with ``mnist_10k`` in it.
        seed: seed of all randomness.
        parts: what a run that was stopped takes up again.

    Raises:
        ConfigError: the images are missing.
    """
    data = required_data(
        data, "mnist_10k", "MNIST in torchvision's layout; the digits come from yann.lecun.com/exdb/mnist"
    )
    from trainers import MNISTData

    n_images, chains, warmup, n_draws = (2, 8, 20, 20) if fast else (4, 64, 200, 300)
    images = MNISTData(data / "mnist_10k").held_out(n_images)
    mask = torch.zeros(28, 28, dtype=torch.bool)
    mask[:N_ROWS] = True
    problem = dgm.condition(generators.load("mnist_vae"), images, observe=dgm.pixels(mask))
    kernel = dgm.ConstrainedHMC(compile=not fast)
    draws, seconds = parts.run(dgm.sample, problem, kernel, chains=chains, warmup=warmup, draws=n_draws, seed=seed)
    summary = draws.summary()
    completions(folder / "completions.png", images, mask, draws.generate(N_COMPLETIONS))
    r_hat, ess = summary["r_hat"].to_numpy(float), summary["ess_bulk"].to_numpy(float)
    order = r_hat.argsort().tolist()
    shown = [parse_label(str(summary.index[i])) for i in (order[-1], order[-2], order[len(order) // 2])]
    traces(folder / "traces.png", draws, shown)
    failed = draws.stats["projection_failed"] | draws.stats["reversal_failed"]
    return {
        "summary": describe(draws, summary, seconds),
        "distinct_starts": [len(own.unique()) for own in draws.ancestors.T] if draws.ancestors is not None else None,
        "chains": chains,
        "warmup": warmup,
        "draws": n_draws,
        "seconds": seconds,
        "r_hat": {str(label): float(value) for label, value in zip(summary.index, r_hat, strict=True)},
        "share_mixed": float((r_hat <= R_HAT).mean()),
        "min_ess_per_second": float(ess.min() / seconds),
        "failed": float(failed.double().mean()),
        "constraint_error": float(draws.stats["constraint_error"].max()),
        "interrupted": draws.interrupted,
    }
