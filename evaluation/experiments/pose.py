"""Human poses from two pictures of their joints, and from one (J 10.3).

Binocular: constrained HMC and plain HMC on the same posterior (output noise of 0.01 is a Gaussian kernel of that
width), from the same prior draws, each for the same time; the error is that of the posterior-mean position of every
joint, over the chains and the second half of the draws so far. Constrained HMC has default settings, and its start-up
and warm-up are in its time: the first draws come after them. Monocular: poses that one picture leaves possible.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer.errors import uninterrupted
from dgm_infer.kernels import Kernel
from generators import HumanPose

from ..figures.poses import joint_errors, poses
from ..reports.kept import NOT_KEPT, Parts
from .reference import required_data

__all__ = ["run"]

NOISE = 0.01
# The published baseline.
PLAIN = dgm.HMC(step_size=2e-4, n_steps=(100, 200))


def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict:
    """Write ``error.png`` (J fig. 13) and ``monocular.png`` (J fig. 14) into ``folder``.

    Raises:
        ConfigError: the files of the model are missing.
    """
    data = required_data(
        data, "pose", "its authors published the files on GitHub, matt-graham/differentiable-generative-models"
    )
    scenes, chains, seconds, draws, warmup = (1, 4, 5.0, 2, 2) if fast else (4, 16, 300.0, 20, 30)
    binocular = _binocular(HumanPose.from_folder(data), scenes, chains, seconds, warmup, seed, parts)
    methods = {label: found for label, found in binocular.items() if label != "start"}
    curves = {label: (found["seconds"], np.array(found["rmse"])) for label, found in methods.items()}
    title = f"{scenes} scenes (thin) and their mean, {chains} chains each"
    joint_errors(folder / "error.png", curves, float(np.mean(binocular["start"])), title=title)
    model = HumanPose.from_folder(data, views=1)
    # the annealed start comes with the warm-up: a minute that a fast run takes once
    monocular, inputs = _monocular(model, 1 if fast else 3, draws, chains, 0 if fast else warmup, seed, parts)
    poses(folder / "monocular.png", model.figure(inputs).numpy(), model.bones)
    return {"summary": _summary(binocular), "binocular": binocular, "monocular": monocular}


def _scenes(model: HumanPose, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs of ``n`` poses ``[n, 140]``, at the camera's median distance, and their noisy pictures."""
    rng = torch.Generator().manual_seed(seed)
    u = torch.randn(n, model.input_density.dim, generator=rng, dtype=torch.float64)
    u[:, -1] = 0
    clean = model(u)
    picture = clean + NOISE * torch.randn(clean.shape, generator=rng, dtype=torch.float64)
    return u, picture.reshape(n, *model.output_shape)


def _binocular(
    model: HumanPose, scenes: int, chains: int, seconds: float, warmup: int, seed: int, parts: Parts
) -> dict:
    u, picture = _scenes(model, scenes, seed)
    truth = model.latents(u)["joints"]
    fibre = dgm.condition(dgm.WithNoise(model, sd=NOISE), picture)
    target = dgm.condition(model, picture, tolerance=NOISE)
    start = fibre.start(chains, torch.Generator().manual_seed(seed))
    plain_start = start[..., : target.dim]
    first = _error(model.latents(plain_start)["joints"].mean(0), truth)
    results: dict = {"start": first.tolist()}
    methods = [
        ("constrained HMC", fibre, dgm.ConstrainedHMC(), None),
        ("HMC, published step 0.0002", target, PLAIN, plain_start),
    ]

    def timed(problem, kernel: Kernel, initial: Tensor | None) -> dict[str, Any]:
        times, errors, failed = [0.0], [first], 0.0
        joints: list[Tensor] = []
        for elapsed, draws in _chunks(problem, kernel, chains, initial, seconds, warmup, seed):
            joints.append(draws.latents["joints"].transpose(0, 1))
            kept = torch.cat(joints)
            times.append(elapsed)
            errors.append(_error(kept[len(kept) // 2 :].mean((0, 1)), truth))
            failed += float((draws.stats["acceptance_rate"] == 0).double().mean())
        curve = torch.stack(errors)
        below = (curve.mean(-1) < 0.1 * first.mean()).nonzero()
        return {
            "seconds": times,
            "rmse": curve.tolist(),
            "final_over_start": float(curve[-1].mean() / first.mean()),
            "scenes_below_a_tenth": int((curve[-1] < 0.1 * first).sum()),
            "seconds_to_a_tenth": times[int(below[0])] if len(below) else None,
            "never_accepted": failed / max(len(joints), 1),
            "draws": sum(len(part) for part in joints),
        }

    for label, *method in methods:
        # each has the same time, in one piece
        results[label], _ = parts.value(partial(timed, *method))
    return results


def _chunks(
    problem, kernel: Kernel, chains: int, initial: Tensor | None, seconds: float, warmup: int, seed: int
) -> Iterator[tuple[float, dgm.Draws]]:
    """Draws, a few at a time, until the time is over: without ``initial`` from prior draws and after a warm-up."""
    started = time.perf_counter()
    warmup = warmup if initial is None else 0
    for chunk in range(10**6):
        draws = dgm.sample(
            problem, kernel, chains=chains, warmup=warmup, draws=2, seed=seed + chunk, initial=initial, progress=False
        )
        uninterrupted(draws)
        assert draws.inputs is not None
        kernel, initial, warmup = draws.kernel, draws.inputs[:, -1], 0
        elapsed = time.perf_counter() - started
        yield elapsed, draws
        if elapsed > seconds:
            return


def _error(joints: Tensor, truth: Tensor) -> Tensor:
    """Root-mean-square distance over joints: ``[..., 19, 3] -> [...]``."""
    return (joints - truth).square().sum(-1).mean(-1).sqrt()


def _monocular(
    model: HumanPose, scenes: int, n_draws: int, chains: int, warmup: int, seed: int, parts: Parts
) -> tuple[dict, Tensor]:
    u, picture = _scenes(model, scenes, seed + 1)
    fibre = dgm.condition(dgm.WithNoise(model, sd=NOISE), picture)
    options = {"chains": chains, "warmup": warmup, "draws": n_draws, "seed": seed}
    draws, _ = parts.run(dgm.sample, fibre, dgm.ConstrainedHMC(), **options)
    uninterrupted(draws)
    assert draws.inputs is not None
    last = draws.inputs[:, -1, :, : model.input_density.dim]
    error = _error(draws.latents["joints"][:, -1], model.latents(u)["joints"])
    return {"rmse_of_last_draws": error.tolist(), "draws": n_draws}, torch.stack([u, *last[:4]])


def _summary(results: dict) -> str:
    lines = ["method                      draws  RMSE start  end     end/start  scenes below 0.1  seconds to 0.1"]
    start = float(np.mean(results["start"]))
    for label, result in results.items():
        if label == "start":
            continue
        reached = result["seconds_to_a_tenth"]
        lines.append(
            f"{label:26s} {result['draws']:6d}  {start:10.3f}  {start * result['final_over_start']:.4f}  "
            f"{result['final_over_start']:9.3f}  {result['scenes_below_a_tenth']:8d} of {len(results['start'])}  "
            + (f"{reached:14.1f}" if reached is not None else "         never")
        )
    return "\n".join(lines) + "\n"
