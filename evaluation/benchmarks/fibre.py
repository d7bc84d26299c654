"""``dgm-infer bench fibre``: posterior draws on the fibre per second, this project beside Mici.

What is timed, for both alike: wall-clock seconds from the first statement after the imports to the last draw, so
compilation, the search for starting points and warm-up are included; process start, imports and the diagnostics
computed afterwards are not. The two run one after the other on the same machine, with the same number of processor
cores: this project in one process with that many threads, Mici in that many processes with one thread and one chain
each, which is how either is meant to be used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import dgm_infer as dgm
from dgm_infer.errors import ConfigError

from ..reports.records import write_record
from .comparison import compare, summarise, table
from .machine import check_device, checked_cores, device_name
from .problems import Problem
from .publishing import new_record, publish
from .settings import check_seed, writable_folder
from .tasks import MiciTask, Task
from .workers import Clock, Report, one_thread, run_workers, threads

__all__ = ["bench", "ours"]

# Bytes of inputs that a chunk of draws may hold at once.
_CHUNK_BYTES = 2**28


def bench(
    seconds: float = 120,
    problems: str = "generalised_lambda,lotka_volterra",
    chains: int | None = None,
    warmup: int = 300,
    compile: bool = True,
    device: Literal["cpu", "cuda"] = "cpu",
    cores: int | None = None,
    peer: bool = True,
    peer_warmup: int = 500,
    peer_form: Literal["generator", "residual"] = "generator",
    n_observed: int | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Sample the published problems with this project and with Mici, side by side.

    Args:
        seconds: wall-clock seconds per method and problem, including compilation and warm-up.
        problems: names, separated by commas: generalised_lambda, lotka_volterra.
        chains: chains of this project; null for 512, on cuda 4096.
        warmup: iterations of this project that adapt the kernel.
        compile: compile this project's kernel.
        device: device of this project; Mici runs on the CPU.
        cores: processor cores for either; null for all of them.
        peer: run Mici, which the ratio needs.
        peer_warmup: iterations of Mici that adapt its step size, or a quarter of the seconds if they take longer.
        peer_form: Mici's constraint, the generator's outputs or, in a Markov model, the residual of every step.
        n_observed: condition on the first so many outputs only, for a quick look.
        seed: seed of all randomness.
        output: folder for ``fibre_<device>.json`` and ``fibre.md``.

    Returns:
        path of the JSON file.
    """
    chosen = [Problem(name.strip(), n_observed) for name in problems.split(",")]
    cores = checked_cores(cores)
    chains = (4096 if device == "cuda" else 512) if chains is None else chains
    for name, value in (("seconds", seconds), ("chains", chains), ("warmup", warmup), ("peer_warmup", peer_warmup)):
        if not value > 0:
            raise ConfigError(f"{name}: {value} must be positive")
    check_seed(seed)
    if peer and (missing := [name for name in ("mici", "jax") if find_spec(name) is None]):
        raise ConfigError(
            f"{' and '.join(missing)} not installed: pip install 'dgm-infer[bench]', or give --peer false"
        )
    check_device(device)
    settings = {
        "seconds": seconds,
        "problems": ",".join(problem.name for problem in chosen),
        "chains": chains,
        "warmup": warmup,
        "compile": compile,
        "device": device,
        "cores": cores,
        "peer": peer,
        "peer_warmup": peer_warmup,
        "peer_form": peer_form,
        "n_observed": n_observed,
        "seed": seed,
    }
    folder = writable_folder(output)
    path = folder / f"fibre_{device}.json"
    record = new_record(
        "fibre",
        settings,
        ["dgm-infer", "torch", "numpy", "arviz", "mici", "jax", "jaxlib"],
        device_name=device_name(device),
        threads={"dgm-infer": f"1 process, {cores} threads", "mici": f"{cores} processes, 1 thread each"},
    )
    record["problems"] = {}
    task = Task(chosen[0], seconds, chains, warmup, compile, device, cores, seed)
    peer_task = MiciTask(chosen[0], seconds, peer_warmup, 0.25, seed, 0, peer_form)
    for problem in chosen:
        own = _run_ours(replace(task, problem=problem))
        other = _run_mici(replace(peer_task, problem=problem), cores) if peer else None
        record["problems"][problem.name] = compare(own, other)
        # after every problem: what was measured survives whatever happens to the next
        write_record(path, record)
    publish(path, "fibre", table(folder))
    return path


def ours(task: Task, report: Report) -> dict[str, Any]:
    """Self-tuning constrained HMC until the time is used, in chunks of draws, in a separate process.

    Returns:
        ``latents`` ``{name: [chains, draws]}``; ``acceptance``, ``failed`` and ``n_steps`` of every transition of the
        main run; ``seconds``, ``cpu_seconds``, ``warmup_seconds``, ``warmup_iterations``, ``step_size``.
    """
    clock = Clock(task.seconds)
    torch.set_num_threads(task.cores)
    fibre = task.problem.fibre(task.device)
    kernel = dgm.ConstrainedHMC(compile=task.compile)
    # one draw after warm-up provides positions to continue from; it is not counted
    draws = dgm.sample(fibre, kernel, chains=task.chains, warmup=task.warmup, draws=1, seed=task.seed, progress=False)
    warm = clock.elapsed
    step_size = draws.stats["step_size"].double().mean().item()
    report(f"{task.warmup} warm-up iterations of {task.chains} chains in {warm:.1f} s, step size {step_size:.3g}")
    largest = max(1, _CHUNK_BYTES // (8 * task.chains * fibre.dim))
    assert draws.inputs is not None
    position = draws.inputs[:, -1]
    latents: list[dict[str, np.ndarray]] = []
    stats: list[dict[str, np.ndarray]] = []
    per_draw = warm / task.warmup
    while not latents or clock.left > per_draw:
        began = clock.elapsed
        n = min(largest, max(1, int(0.9 * clock.left / per_draw)) if latents else 5)
        draws = dgm.sample(
            fibre,
            draws.kernel,
            chains=task.chains,
            warmup=0,
            draws=n,
            seed=task.seed + 1 + len(latents),
            initial=position,
            progress=False,
        )
        assert draws.inputs is not None
        position = draws.inputs[:, -1]
        latents.append({name: value.cpu().numpy() for name, value in draws.latents.items()})
        failed = draws.stats["projection_failed"] | draws.stats["reversal_failed"]
        kept = {"acceptance": draws.stats["acceptance_rate"], "failed": failed, "n_steps": draws.stats["n_steps"]}
        stats.append({name: value.cpu().numpy() for name, value in kept.items()})
        per_draw = (clock.elapsed - began) / n
    return {
        "latents": _joined(latents),
        **_joined(stats),
        "seconds": clock.elapsed,
        "cpu_seconds": clock.cpu,
        "warmup_seconds": warm,
        "warmup_iterations": task.warmup,
        "step_size": step_size,
    }


def _run_ours(task: Task) -> dict[str, Any]:
    print(f"{task.problem.name}: dgm-infer, {task.chains} chains on {task.device}, {task.seconds:g} s", flush=True)
    outcomes = run_workers(
        "evaluation.benchmarks.fibre:ours",
        [task],
        environment=threads(task.cores),
        patience=_patience(task.seconds),
        report=lambda line: print(f"  {line}", flush=True),
    )
    return _reported(summarise(outcomes, task.seconds, task.cores))


def _run_mici(task: MiciTask, cores: int) -> dict[str, Any]:
    print(f"{task.problem.name}: mici, {cores} processes, {task.seconds:g} s", flush=True)
    outcomes = run_workers(
        "evaluation.benchmarks.mici_peer:run",
        [replace(task, index=i) for i in range(cores)],
        environment=one_thread(),
        patience=_patience(task.seconds),
        report=lambda line: print(f"  {line}", flush=True),
    )
    return _reported(summarise(outcomes, task.seconds, cores))


def _patience(seconds: float) -> float:
    """A method that is late is still heard, and its rate counted over the time it took; one that hangs is not."""
    return 3 * seconds + 120


def _reported(summary: dict[str, Any]) -> dict[str, Any]:
    if "latents" in summary:
        print(
            f"  {summary['chains']} chains x {summary['draws']} draws: min bulk ESS {summary['min_ess']:.0f}, "
            f"{summary['min_ess_per_second']:.3g}/s, max R-hat {summary['max_r_hat']:.3f}",
            flush=True,
        )
    for error in summary["errors"]:
        print(f"  failed: {error}", flush=True)
    return summary


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Chunks of draws as one, along their second dimension."""
    return {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}
