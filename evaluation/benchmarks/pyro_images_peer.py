"""The peer of the images benchmark: Pyro's NUTS on the latents, one chain per process."""

import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgm_infer.errors import extra

from .image_sampling import Conditioned, ImageTask
from .workers import Report

with extra("pyro"), warnings.catch_warnings():
    # about torch.jit on this version of Python, which Pyro needs only for what is not used here
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    from pyro import distributions as dist
    from pyro.infer import NUTS

__all__ = ["program", "run"]

# Draws that are made even if they are late.
_FEWEST = 20


def program(given: Conditioned):
    """``z ~ N(0, I)``, ``y ~ N(g(z)[observed], sd^2)`` with a plate over the images, as a Pyro user writes it."""
    mask, sd = given.mask, given.sd
    assert mask is not None
    assert sd is not None
    index = mask.flatten().nonzero().squeeze(-1)
    y = given.images.flatten(1)[:, index]

    def model() -> None:
        with pyro.plate("images", len(y)):
            z: Tensor = pyro.sample("z", dist.Normal(torch.zeros(given.latent), 1.0).to_event(1))
            mean = given.net(z).flatten(1)[:, index]
            pyro.sample("y", dist.Normal(mean, sd).to_event(1), obs=y)

    return model


def run(task: ImageTask, report: Report) -> dict[str, Any]:
    """One chain of all images until the time is used; the result as :func:`.image_sampling.run`.

    Its defaults: step size and diagonal mass matrix adapted, trees of depth 10 at most. The loop is that of Pyro's
    ``MCMC``, which stops after a number of draws, not on time.
    """
    began = time.perf_counter()

    def elapsed() -> float:
        return time.perf_counter() - began

    torch.set_num_threads(1)
    pyro.set_rng_seed(task.seed + task.index)
    kernel = NUTS(program(Conditioned.load(task.path)))
    assert task.warmup is not None
    kernel.setup(task.warmup)
    parameters = kernel.initial_params
    for _ in range(task.warmup):
        parameters = kernel.sample(parameters)
    warm = elapsed()
    report(f"process {task.index}: {task.warmup} warm-up iterations in {warm:.1f} s")
    kept: list[np.ndarray] = []
    while elapsed() < task.seconds or len(kept) < _FEWEST:
        parameters = kernel.sample(parameters)
        kept.append(parameters["z"].detach().flatten().numpy().copy())
    return {
        "z": np.stack(kept)[None],
        "constraint_error": float("nan"),
        "steps": float("nan"),
        "seconds": elapsed(),
        "warmup_seconds": warm,
        "kernel": "pyro.infer.NUTS",
    }
