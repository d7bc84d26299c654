"""``dgm-infer bench programs``: a simulator as written, traced, beside the same by hand.

In one process, in turns: the simulator as somebody would write it, made a model by ``from_simulator``; the same
arithmetic as a function of inputs for many chains at once, with a Python loop over time where the simulator has one;
that function for one chain, vectorised by ``torch.func.vmap`` alone, which tracing adds to; and the model of
``generators``, whose structure is declared and whose arithmetic is tuned. The model by hand has the structure that is
found in the traced one: independent outputs for the quantile distribution, none for the series.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer import Fibre, GenerativeModel
from generators import GeneralisedLambda, LotkaVolterra

from ..problems import naive
from ..reports.records import write_record
from ..reports.tables import markdown
from .publishing import new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder

__all__ = ["bench", "page", "programs_table"]

# Leapfrog steps of a transition.
_STEPS = 5
# A step that every chain can make from where it starts: what is timed is the work of a trajectory.
_STEP_SIZE = 1e-3
# Least seconds per timing, in which a call is repeated.
_LEAST = 0.05


# By which the published series was simulated.
_PREDATOR_PREY = (0.4, 0.005, 0.05, 0.001)
# Standard deviations of the prior about them, within which chains of the series start.
_NEAR = 0.01


class _Problem(NamedTuple):
    data: Tensor
    models: Mapping[str, GenerativeModel]
    """By how they are written; the order of inputs is the same."""

    def start(self, fibre: Fibre, chains: int, seed: int) -> Tensor:
        """Where transitions of every way of writing work: a series near prior draws has noise of thousands of sds."""
        rng, by_hand = torch.Generator().manual_seed(seed), self.models["by hand"]
        if not isinstance(by_hand, naive.PredatorPreyByHand):
            return fibre.start(chains, rng)
        u1 = torch.tensor(_PREDATOR_PREY, dtype=torch.float64).log() + 2
        u1 = u1 + _NEAR * torch.randn(chains, len(u1), generator=rng, dtype=u1.dtype)
        return by_hand.inputs_of(self.data.to(u1), u1)


def bench(
    units: int = 250,
    steps: int = 50,
    chains: int = 64,
    repeats: int = 15,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Time forward passes, linearisations and transitions of traced simulators and of models by hand.

    Args:
        units: outputs of the generalised lambda distribution.
        steps: time steps of the predator-prey series.
        chains: chains at once.
        repeats: turns, of which medians are taken.
        seed: of the starting points and transitions.
        output: folder for ``programs.json`` and ``programs.md``.

    Returns:
        path of the JSON file.
    """
    # a series of one step or a single unit has no structure to find
    check_counts(least=2, units=units, steps=steps)
    check_counts(chains=chains, repeats=repeats)
    check_seed(seed)
    folder = writable_folder(output)
    settings = {"units": units, "steps": steps, "chains": chains, "repeats": repeats, "seed": seed}
    record = new_record("programs", settings, ["dgm-infer", "torch"], threads=torch.get_num_threads())
    record["problems"] = {}
    path = folder / "programs.json"
    for name, problem in _problems(units, steps).items():
        print(f"{name}: {', '.join(problem.models)}", flush=True)
        record["problems"][name] = _measured(problem, chains, repeats, seed)
        write_record(path, record)
    publish(path, "programs", page(record))
    return path


def page(record: dict[str, Any]) -> str:
    """Markdown: milliseconds by measure and way of writing, and the overhead of tracing."""
    settings = record["settings"]
    return "\n".join(
        [
            "# Simulators as written, beside the same by hand\n",
            f"`{record['command']}`: milliseconds for {settings['chains']} chains, medians of {settings['repeats']} "
            f"turns in one process; a transition has {_STEPS} steps. *Traced*: the simulator as written, by "
            "`from_simulator`. *By hand*: the same arithmetic and structure as a function of the inputs of all "
            "chains, with a loop over time where the simulator has one. *Vectorised*: the same for one chain under "
            "`torch.func.vmap`. *Declared*: the model of `generators`; for the series it declares the structure of a "
            "Markov chain. *Overhead of tracing*: of traced over vectorised.\n",
            programs_table(record),
            f"On {record['processor']}, {record['threads']} threads; {versions(record)}.\n",
        ]
    )


def _problems(units: int, steps: int) -> dict[str, _Problem]:
    quantiles, _ = GeneralisedLambda.published_observations()
    series, _ = LotkaVolterra.published_observations()
    if units > len(quantiles):
        quantiles = quantiles.repeat(-(-units // len(quantiles)))
    if 2 * steps > len(series):
        series = LotkaVolterra(steps).simulate(
            LotkaVolterra(steps).global_latents(torch.tensor(_PREDATOR_PREY).double().log() + 2),
            torch.randn(2 * steps, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        )
    return {
        "generalised lambda": _Problem(
            quantiles[:units],
            {
                "traced": dgm.from_simulator(naive.generalised_lambda, naive.GENERALISED_LAMBDA_PRIOR, units),
                "by hand": naive.GeneralisedLambdaByHand(units),
                "declared": GeneralisedLambda(units),
            },
        ),
        "predator and prey": _Problem(
            series[: 2 * steps],
            {
                "traced": dgm.from_simulator(naive.predator_prey, naive.PREDATOR_PREY_PRIOR, steps),
                "by hand": naive.PredatorPreyByHand(steps),
                "declared": LotkaVolterra(steps),
            },
        ),
    }


def _measured(problem: _Problem, chains: int, repeats: int, seed: int) -> dict[str, Any]:
    """Seconds of every measure by way of writing, per turn and their medians; overheads of tracing, per turn too."""
    works = _works(problem, chains, seed)
    calls = {key: _calls(work) for key, work in works.items()}
    turns: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    for _ in range(repeats):
        for key, work in works.items():
            turns[key].append(_seconds(work, calls[key]))
    measured: dict[str, Any] = {}
    for (measure, label), seconds in turns.items():
        measured.setdefault(measure, {})[label] = {"median": median(seconds), "turns": seconds}
    pairs = zip(turns["forward", "traced"], turns["forward", "vectorised"], strict=True)
    structures = {label: str(getattr(model, "structure", "dense")) for label, model in problem.models.items()}
    return {"seconds": measured, "structures": structures, "overhead": median(a / b - 1 for a, b in pairs)}


def _works(problem: _Problem, chains: int, seed: int) -> dict[tuple[str, str], Callable[[], object]]:
    """What is timed, by measure and way of writing."""
    fibres = {label: dgm.condition(model, problem.data) for label, model in problem.models.items()}
    start = problem.start(fibres["declared"], chains, seed)
    works: dict[tuple[str, str], Callable[[], object]] = {}
    for label, fibre in fibres.items():
        works["forward", label] = _forward(fibre.model.observed, start)
    one = fibres["by hand"].model.observed
    works["forward", "vectorised"] = _forward(lambda u: torch.func.vmap(one)(u), start)
    for label, fibre in fibres.items():
        works["linearisation", label] = _linearisation(fibre, start)
        works["transition", label] = _transition(fibre, start, seed)
    return works


def _forward(function: Callable[[Tensor], Tensor], u: Tensor) -> Callable[[], object]:
    def work() -> Tensor:
        with torch.no_grad():
            return function(u)

    return work


def _linearisation(fibre: Fibre, u: Tensor) -> Callable[[], object]:
    rows = fibre.rows(len(u))
    return lambda: rows.linearise(u)


def _transition(fibre: Fibre, u: Tensor, seed: int) -> Callable[[], object]:
    kernel = dgm.ConstrainedHMC(step_size=_STEP_SIZE, n_steps=_STEPS, n_geodesic=1)
    state, rng = kernel.init(fibre, u), torch.Generator().manual_seed(seed)
    # always from the same state, so that all do the same work
    return lambda: kernel.step(fibre, state, rng)


def _calls(work: Callable[[], object]) -> int:
    """Calls that take :data:`_LEAST` seconds; the first ones, which are slower, are not among what is reported."""
    work()
    return max(1, round(_LEAST / _seconds(work, 2)))


def _seconds(work: Callable[[], object], calls: int) -> float:
    """Seconds per call."""
    started = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - started) / calls


def programs_table(record: dict[str, Any]) -> str:
    """Milliseconds: one row per simulator and measure, one column per way of writing, and ratios to that by hand."""
    rows = []
    for problem, entry in record["problems"].items():
        for measure, by_label in entry["seconds"].items():
            cells = [_milliseconds(by_label, label) for label in ("traced", "by hand", "vectorised", "declared")]
            ratio = f"{by_label['traced']['median'] / by_label['by hand']['median']:.2f}"
            overhead = f"{100 * entry['overhead']:.0f} %" if measure == "forward" else ""
            rows.append([problem, measure, *cells, ratio, overhead])
    header = ["simulator", "measure", "traced", "by hand", "vectorised", "declared", "traced / by hand"]
    return markdown([*header, "overhead of tracing"], rows)


def _milliseconds(by_label: dict[str, Any], label: str) -> str:
    return f"{1000 * by_label[label]['median']:.3g}" if label in by_label else ""
