"""What the posteriors of public programs are, by Pyro's own densities: quadrature, or Pyro's NUTS.

``python -m tests.reference_programs`` writes ``tests/data/public_programs.json``, half an hour on one core. Names as
arguments choose some; after a number of seconds no further one is begun. Up to two coordinates are integrated by the
trapezoidal rule on Pyro's potential, with the difference from a coarser grid as its error; the others are sampled, and
their means and standard deviations have the standard errors of their effective sample sizes.
"""

import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    # the data too
    torch.set_default_dtype(torch.float64)

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    from pyro import poutine
    from pyro.infer import MCMC, NUTS
    from pyro.infer.mcmc.util import initialize_model
    from pyro.ops.stats import effective_sample_size

from tests.public_programs import EXAMPLES, Example

__all__ = ["FILE", "potential_of"]

FILE = Path(__file__).parent / "data" / "public_programs.json"
# of Pyro's potential: how far it rises above its least where a density no longer matters
DEEP = 25.0


def potential_of(example: Example) -> tuple[dict[str, torch.Tensor], Any, dict[str, Any]]:
    """A point in Pyro's coordinates, its potential ``-log p`` of such a dict, and the bijections to them."""
    with torch.random.fork_rng():
        pyro.set_rng_seed(0)
        start, potential, bijections, _ = initialize_model(in_parallel(example.program), example.args)
    return start, potential, bijections


def in_parallel(program: Any) -> Any:
    """The program as Pyro's samplers want it: they sum over discrete variables in parallel only."""
    if getattr(program, "__name__", "") != "sequential_mixture":
        return program

    def config(node: Any) -> Any:
        return {"enumerate": "parallel"} if node["name"] == "k" else {}

    return poutine.infer_config(program, config)


def by_quadrature(example: Example) -> dict[str, Any] | None:
    """Means and log evidence of a program of up to two coordinates; None for more."""
    start, potential, bijections = potential_of(example)
    sizes = {name: value.numel() for name, value in start.items()}
    if sum(sizes.values()) > 2:
        return None
    shapes = {name: value.shape for name, value in start.items()}
    angles = [name for name in start if name in ("a", "loc") and not example.has_coordinates_of_pyro]

    def parts(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: part.reshape(shapes[name]) for name, part in zip(sizes, x.split(list(sizes.values())), strict=True)
        }

    def energy_at(row: torch.Tensor) -> torch.Tensor:
        try:
            return torch.as_tensor(potential(parts(row))).detach().reshape(())
        except ValueError:
            # parameters that overflow far out
            return torch.tensor(math.inf)

    def energies(axes: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cartesian_prod(*axes).reshape(-1, len(axes))
        return x, torch.stack([energy_at(row) for row in x]).nan_to_num(math.inf, math.inf, math.inf)

    names = [name for name in sizes for _ in range(sizes[name])]
    full = [torch.linspace(-math.pi, math.pi, 65) if name in angles else torch.linspace(-14, 14, 57) for name in names]
    axes = full
    for n in (41, 601 if len(full) == 1 else 91):
        x, energy = energies(axes)
        kept = x[energy < energy.min() + DEEP]
        steps = [axis[1] - axis[0] for axis in axes]
        ends = [(float(kept[:, i].min() - step), float(kept[:, i].max() + step)) for i, step in enumerate(steps)]
        ends = [(-math.pi, math.pi) if name in angles else each for name, each in zip(names, ends, strict=True)]
        axes = [torch.linspace(*each, n) for each in ends]
    x, energy = energies(axes)
    weights = torch.ones(len(x))
    for i, axis in enumerate(axes):
        edge = (x[:, i] == axis[0]) | (x[:, i] == axis[-1])
        weights = weights * torch.where(edge, 0.5, 1.0) * (axis[1] - axis[0])
    log_joint = -energy + weights.log()
    # every other point, twice as far from the next: where a density has kinks the rule is off by more than rounding
    shape = [len(axis) for axis in axes]
    every_other = (slice(None, None, 2),) * len(axes)
    coarse = (-energy.reshape(shape) + weights.reshape(shape).log())[every_other].flatten().logsumexp(0)
    error = (coarse + len(axes) * math.log(2) - log_joint.logsumexp(0)).abs().item()
    share = log_joint.softmax(0)
    values = [{name: bijections[name].inv(part) for name, part in parts(row).items()} for row in x]
    means, sds = {}, {}
    for name in sizes:
        every = torch.stack([value[name] for value in values])
        every, key = (every.cos(), f"cos {name}") if name in angles else (every, name)
        mean = torch.tensordot(share, every, 1)
        means[key], sds[key] = mean.tolist(), torch.tensordot(share, (every - mean).square(), 1).sqrt().tolist()
    return {"means": means, "sds": sds, "log_z": log_joint.logsumexp(0).item(), "log_z_error": error}


def by_nuts(example: Example, chains: int = 2, warmup: int = 200, draws: int = 400) -> dict[str, Any]:
    """Means and standard deviations with their Monte Carlo errors."""
    runs = []
    for seed in range(chains):
        pyro.set_rng_seed(seed)
        mcmc = MCMC(
            NUTS(in_parallel(example.program), max_tree_depth=8, target_accept_prob=0.9),
            num_samples=draws,
            warmup_steps=warmup,
            disable_progbar=True,
        )
        mcmc.run(*example.args)
        runs.append(mcmc.get_samples())
    found: dict[str, Any] = {"means": {}, "errors": {}, "sds": {}, "sd_errors": {}}
    for name in runs[0]:
        values = torch.stack([run[name] for run in runs])
        mean, error = _mean_and_error(values)
        variance, variance_error = _mean_and_error((values - mean).square())
        sd = variance.sqrt()
        # entries that cannot vary, as the corner of a factor, have no error
        sd_error = torch.where(sd > 1e-9, variance_error / (2 * sd), 0.0)
        for key, value in zip(found, (mean, error, sd, sd_error), strict=True):
            found[key][name] = value.tolist()
    return found


def _mean_and_error(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``[chains, draws, ...]``, by the effective sample size."""
    spread = values.flatten(0, 1).std(0)
    error = spread / effective_sample_size(values, 0, 1).sqrt()
    return values.mean((0, 1)), torch.where(spread > 1e-9, error, 0.0)


def main(names: list[str], seconds: float = math.inf) -> None:
    """Compute those that are missing, or those named; no new one is begun after some seconds."""
    began = time.monotonic()
    for name, example in EXAMPLES.items():
        found = json.loads(FILE.read_text()) if FILE.exists() else {}
        if not example.is_of_pyro or (name not in names if names else name in found):
            continue
        if time.monotonic() - began > seconds:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = by_quadrature(example) or by_nuts(example)
        result["command"] = f"python -m tests.reference_programs '{name}'"
        # another process may have written meanwhile
        found = {**(json.loads(FILE.read_text()) if FILE.exists() else {}), name: result}
        print(name, {key: value for key, value in result.items() if key == "log_z"}, flush=True)
        ordered = {key: found[key] for key in EXAMPLES if key in found}
        FILE.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    numbers = [float(word) for word in sys.argv[1:] if word.isdigit()]
    main([word for word in sys.argv[1:] if not word.isdigit()], *numbers)
