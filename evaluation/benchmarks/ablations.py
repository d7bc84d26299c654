"""``dgm-infer bench ablations``: what every heuristic brings, by switching it off.

Every problem is sampled as a user would, by ``dgm.sample(problem)``, with everything on and then with one switch off
(:mod:`.switches`), the same seeds for all. What brings less than a fifth in speed and prevents no failure goes.
"""

import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import dgm_infer as dgm
import generators
from dgm_infer.errors import ConfigError, DgmInferError, uninterrupted
from dgm_infer.evidence import Evidence, Method
from dgm_infer.sampling.chain_groups import side_by_side
from dgm_infer.sampling.inference_data import effective_draws, r_hat

from ..problems.families import FAMILIES, HEAVY
from ..problems.known import known_target
from ..problems.mixtures import NormalMixture
from ..problems.regressions import LogisticRegression
from ..problems.small import eight_schools, folded, squares, wide_mass
from ..reports.records import write_record
from ..reports.tables import markdown
from .image_problems import PROBLEMS as IMAGES
from .problems import Problem as Published
from .publishing import new_record, publish, versions
from .series_problems import SERIES
from .settings import check_counts, check_positive, names_of, writable_folder
from .switches import SWITCHES

__all__ = ["PROBLEMS", "Problem", "bench", "page"]

_ON = "everything on"
# Log Z of the regression, by a million weights of a widened Laplace approximation.
_REGRESSION = -85.910


@dataclass(frozen=True)
class Problem:
    """Something to run with and without a switch.

    Args:
        room: ``"sampling"``, ``"conditioning"`` or ``"evidence"``, which switches are measured on it.
        words: what it is, in a line.
        measure: runs it with ``seed, chains, draws``; ``rate`` (smallest effective draws per second), ``seconds``,
            ``r_hat``, ``findings`` and, where the truth is known, ``error``: None for what it does not have.
    """

    room: str
    words: str
    measure: Callable[[int, int, int], dict[str, Any]]


def bench(
    switches: str | None = None,
    problems: str | None = None,
    seeds: str = "1,2,3",
    chains: int = 16,
    draws: int = 500,
    seconds: float = 120.0,
    output: str = "evaluation/results",
) -> Path:
    """Run problems with everything on, and with one switch off at a time.

    Args:
        switches: names, separated by commas; null for all.
        problems: names, separated by commas; null for all.
        seeds: of the runs, separated by commas.
        chains: chains per problem.
        draws: draws per chain.
        seconds: of processor time per run, after which it is stopped and judged by what it has.
        output: folder for ``ablations.json`` and ``ablations.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(2, chains=chains)
    check_counts(20, draws=draws)
    check_positive(seconds=seconds)
    chosen = list(SWITCHES) if switches is None else names_of("switches", switches, SWITCHES)
    on = list(PROBLEMS) if problems is None else names_of("problems", problems, PROBLEMS)
    numbers = _numbers(seeds)
    folder = writable_folder(output)
    settings = {"switches": switches, "problems": problems, "seeds": seeds, "chains": chains, "draws": draws}
    settings["seconds"] = seconds
    record = new_record("ablations", settings, ["dgm-infer", "torch"], threads=torch.get_num_threads())
    record["rows"] = []
    path = folder / "ablations.json"
    for name in on:
        problem = PROBLEMS[name]
        mine = [each for each in chosen if SWITCHES[each].room == problem.room]
        if not mine:
            continue
        # what is compiled and cached by the first run of a process is in no row
        _run(problem, nullcontext(), 0, chains, 20, seconds)
        for seed in numbers:
            for each in (_ON, *mine):
                off = nullcontext() if each == _ON else SWITCHES[each].off()
                row = {"problem": name, "switch": each, "seed": seed}
                row |= _run(problem, off, seed, chains, draws, seconds)
                record["rows"].append(row)
                write_record(path, record)
                print({key: value for key, value in row.items() if value is not None}, flush=True)
    publish(path, "ablations", page(record))
    return path


def page(record: dict[str, Any]) -> str:
    """Markdown: means over seeds by problem and switch."""
    used = {row["switch"]: SWITCHES[row["switch"]].words for row in record["rows"] if row["switch"] in SWITCHES}
    return "\n".join(
        [
            "# What every heuristic brings\n",
            f"`{record['command']}`: means over the seeds; seconds of processor time, start and warm-up included; "
            "*rate*: smallest bulk effective sample size per second; *of all on*: the same over that with everything "
            "on; *error*: of what is known of the problem (below); *failed*: runs without a draw.\n",
            _table(record["rows"]),
            "".join(f"- *{name}*: {words}\n" for name, words in used.items()),
            "".join(f"- {name}: {PROBLEMS[name].words}\n" for name in _in_order(record["rows"], "problem")),
            f"On {record['processor']}, {record['threads']} threads; {versions(record)}.\n",
        ]
    )


def _table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for problem in _in_order(rows, "problem"):
        every: float | None = None
        for switch in _in_order(rows, "switch"):
            mine = [row for row in rows if (row["problem"], row["switch"]) == (problem, switch)]
            if not mine:
                continue
            rate = _mean(mine, "rate")
            every = rate if switch == _ON else every
            share = rate / every if rate is not None and every else None
            found = sorted({text for row in mine for text in row["findings"]})
            lines.append(
                [
                    problem,
                    switch if switch == _ON else f"without {switch}",
                    *(_shown(value) for value in (rate, share)),
                    *(_shown(_mean(mine, name)) for name in ("seconds", "r_hat", "error")),
                    str(sum(row["failed"] for row in mine)),
                    "; ".join(found) or "-",
                ]
            )
    return markdown(["problem", "", "rate", "of all on", "seconds", "R-hat", "error", "failed", "findings"], lines)


def _in_order(rows: list[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _mean(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None and math.isfinite(row[name])]
    return fmean(values) if values else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _numbers(seeds: str) -> list[int]:
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ConfigError(f"seeds: {seeds!r} is not integers separated by commas") from None


def _run(problem: Problem, off: Any, seed: int, chains: int, draws: int, seconds: float) -> dict[str, Any]:
    started = time.process_time()
    try:
        with off, _limited(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {**problem.measure(seed, chains, draws), "failed": False}
    except (DgmInferError, KeyboardInterrupt) as error:
        text = f"no result in {seconds:g} s" if isinstance(error, KeyboardInterrupt) else str(error).split(":")[0]
        return {"failed": True, "findings": [text], "seconds": time.process_time() - started}


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer, as Ctrl-C does: ``sample`` then returns the draws it has."""

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _sampled(
    make: Callable[[], Any], kernel: Any = None, error: Callable[[dgm.Draws], float] | None = None
) -> Callable[[int, int, int], dict[str, Any]]:
    """Measures ``dgm.sample(problem)``."""

    def measure(seed: int, chains: int, draws: int) -> dict[str, Any]:
        problem, started = make(), time.process_time()
        made = dgm.sample(problem, kernel, chains=chains, draws=draws, seed=seed, progress=False)
        seconds = time.process_time() - started
        variables = made.latents or {"inputs": made.inputs}
        values = side_by_side(variables, len(made.shape) - 2)  # type: ignore[arg-type]
        values = values[..., (values != values[:1, :1]).flatten(0, -2).any(0)]
        # interrupted runs are short, which is not due to the switch
        findings = [each.what.split(",")[0] for each in made.diagnose() if each.severity != "imprecise"]
        return {
            "rate": effective_draws(values, "bulk").min().item() / seconds,
            "seconds": seconds,
            "r_hat": r_hat(values).max().item(),
            "draws": made.shape[1],
            "kernel": type(made.kernel).__name__,
            "findings": findings,
            "error": None if error is None else error(made),
        }

    return measure


def _estimated(
    target: Callable[[], dgm.Target],
    base: Callable[[dgm.Target], dgm.Gaussian],
    truth: float,
    method: Method | None = None,
) -> Callable[[int, int, int], dict[str, Any]]:
    """Measures ``dgm.log_evidence(target, base, method)``; draws per chain are the method's own."""

    def problem() -> tuple[dgm.Target, dgm.Gaussian]:
        made = target()
        return made, base(made)

    return _evidence(problem, lambda found: abs(float(found.log_z) - truth), method=method)


def _covered(family: str, n: int) -> Callable[[int, int, int], dict[str, Any]]:
    """Measures adaptive SMC on n problems of log Z = 0: the error is the share whose 95 % interval leaves it out."""

    def left_out(found: Evidence) -> float:
        low, high = found.interval()
        return 1 - float(((low < 0) & (high > 0)).double().mean())

    return _evidence(lambda: HEAVY[family](n), left_out, method=dgm.SMC(), coverage=False)


def _annealed(family: str, n: int) -> Callable[[int, int, int], dict[str, Any]]:
    """Measures annealed importance sampling on n problems of log Z = 0: the root mean square error."""
    make = (FAMILIES | HEAVY)[family]
    return _evidence(lambda: make(n), lambda found: float(found.log_z.square().mean().sqrt()), method=dgm.AIS())


def _evidence(
    problem: Callable[[], tuple[dgm.Target, dgm.Gaussian]], error: Callable[[Evidence], float], **options: Any
) -> Callable[[int, int, int], dict[str, Any]]:
    """Measures ``dgm.log_evidence(target, base, **options)``."""

    def measure(seed: int, chains: int, draws: int) -> dict[str, Any]:
        target, base = problem()
        started = time.process_time()
        found = uninterrupted(dgm.log_evidence(target, base, chains=chains, seed=seed, progress=False, **options))
        return {
            "rate": None,
            "seconds": time.process_time() - started,
            "r_hat": None,
            "draws": found.log_weights.shape[1],
            "kernel": found.method,
            "findings": [each.what.split(",")[0] for each in found.diagnose() if each.severity != "imprecise"],
            "error": error(found),
            "claimed": float(found.std_error.square().mean().sqrt()),
        }

    return measure


def _wide(target: dgm.Target) -> dgm.Gaussian:
    return dgm.Gaussian(torch.zeros(target.dim, dtype=torch.float64), 3.0)


def _image(name: str, n: int) -> Callable[[], Any]:
    return lambda: IMAGES[name].conditioned(n).fibre()


def _digits_gan() -> Any:
    """Four digits that a generator without noise makes, from 9 of their pixels."""
    model = generators.load("digits_gan")
    u = model.input_density.sample((4,), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[1::3, 1::3] = True
    with torch.no_grad():
        digits = model(u).reshape(4, *model.output_shape)
    return dgm.condition(model, digits, observe=dgm.pixels(mask.expand(tuple(model.output_shape))))


def _mixture() -> NormalMixture:
    return NormalMixture.spread(6, 5, 6, seed=1)


def _mixture_error(draws: dgm.Draws) -> float:
    """Error of the means, in standard deviations of the mixture."""
    means, x = _mixture().means, draws.inputs
    assert isinstance(x, Tensor)
    sd = (means.var(0, unbiased=False) + 1).sqrt()
    return ((x.double().mean((0, 1)) - means.mean(0)) / sd).abs().max().item()


def _folded_error(draws: dgm.Draws) -> float:
    """Error of the mass of the wide mode."""
    assert isinstance(draws.inputs, Tensor)
    share = (draws.inputs[..., 0] > 0).double().mean((0, 1))
    return (share - wide_mass()).abs().max().item()


PROBLEMS: dict[str, Problem] = {
    "digits": Problem("sampling", "halves of four digits, additive noise", _sampled(_image("digits", 4))),
    "mnist": Problem("sampling", "half of a larger digit, fully connected", _sampled(_image("mnist_vae", 1))),
    "gan": Problem("sampling", "9 pixels of four generated digits, no noise", _sampled(_digits_gan)),
    "mild series": Problem("sampling", "50 steps of prey and predators, noise added", _sampled(SERIES["mild"].fibre)),
    "series": Problem(
        "sampling", "10 steps of prey and predators, given exactly", _sampled(Published("lotka_volterra", 20).fibre)
    ),
    "quantiles": Problem(
        "sampling", "50 draws of a generalised lambda", _sampled(Published("generalised_lambda", 50).fibre)
    ),
    "folded": Problem(
        "sampling", "one number with a wide and a narrow mode; error of the mass of one",
        _sampled(folded, error=_folded_error),
    ),
    "squares": Problem("sampling", "four squares with noise, sixteen modes", _sampled(squares)),
    "schools": Problem("sampling", "eight schools, a Pyro program", _sampled(eight_schools)),
    "seeds": Problem("sampling", "random effects of seeds", _sampled(lambda: known_target("seeds", None).target)),
    "mixture": Problem(
        "sampling", "six normals in five dimensions, ModeJumps; error of the means in standard deviations",
        _sampled(_mixture, dgm.ModeJumps(), _mixture_error),
    ),
    "normals, Laplace base": Problem(
        "evidence", "four normals in three dimensions, the base at one of them; error of log Z",
        _estimated(lambda: NormalMixture.spread(4, 3, 4, seed=2), dgm.Gaussian.laplace, 0.0),
    ),
    "normals, Gibbs": Problem(
        "evidence", "the same by Gibbs tempering",
        _estimated(lambda: NormalMixture.spread(4, 3, 4, seed=2), dgm.Gaussian.laplace, 0.0, dgm.GibbsTempering()),
    ),
    "normals, wide base": Problem(
        "evidence", "four normals in eight dimensions, a base that covers them; error of log Z",
        _estimated(lambda: NormalMixture.spread(4, 8, 3, seed=3), _wide, 0.0),
    ),
    "regression": Problem(
        "evidence", "logistic regression of 20 weights from its prior; error of log Z",
        _estimated(
            lambda: LogisticRegression.simulated(200, 19, 0),
            lambda target: dgm.Gaussian(torch.zeros(target.dim, dtype=torch.float64), 1.0), _REGRESSION,
        ),
    ),
    **{
        name: Problem(
            "evidence", f"{name}, tails heavier than a narrow base's, SMC; error: share of 200 outside 95 % intervals",
            _covered(name, 200),
        )
        for name in HEAVY
    },
    **{
        f"{name.replace(',', '')} annealed": Problem(
            "evidence", f"{name}, AIS; error of log Z, root mean square of 100", _annealed(name, 100)
        )
        for name in FAMILIES | HEAVY
    },
    "conv gan": Problem(
        "conditioning", "16 pixels of a larger digit, a convolutional generator without noise",
        _sampled(_image("gan", 1), dgm.ConstrainedHMC()),
    ),
    "exact series": Problem(
        "conditioning", "10 steps of prey and predators, given exactly",
        _sampled(Published("lotka_volterra", 20).fibre, dgm.ConstrainedHMC()),
    ),
    "exact quantiles": Problem(
        "conditioning", "50 draws of a generalised lambda, given exactly",
        _sampled(Published("generalised_lambda", 50).fibre, dgm.ConstrainedHMC()),
    ),
}  # fmt: skip
"""By name; of other kinds than those that numbers were chosen on."""
