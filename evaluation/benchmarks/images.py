"""``dgm-infer bench images``: completions of images per second, sampler beside sampler.

What is timed, for all alike: wall-clock seconds from the first statement after the imports to the last draw, so
compilation, the search for starting points, the pilot of the default and warm-up are included; process start and
imports are not. Methods run one after the other on the same machine with the same number of cores: this project in one
process with that many threads, Pyro and Mici in that many processes with one thread and one chain each, BlackJAX and
NumPyro in one process with all chains, which is how each is meant to be used. Every method is given the generator as
the same plain network.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dgm_infer.arguments import positive
from dgm_infer.errors import CheckpointError, ConfigError, reported_as

from ..reports.records import plain, write_record
from .earlier_peer import LATE, revision
from .image_energies import reached
from .image_methods import METHODS, SMALL_NOISE, Method
from .image_problems import GIVEN_WARMUP, PROBLEMS, SWEPT, ImageProblem
from .image_sampling import Conditioned, ImageTask
from .image_summary import agreement, summarise
from .image_tables import page
from .machine import check_device, checked_cores, device_name
from .publishing import measured_before, new_record, publish
from .settings import check_counts, check_positive, check_seed, names_of, writable_folder
from .workers import one_thread, run_workers, threads

__all__ = ["bench"]

# Seconds that importing and answering may take beside the sampling.
_IMPORTS = 40
# What peers in JAX do by default, which goes without saying, and what labels say of the rest.
_STARTS = {"descents": "", "prior": ", prior starts"}
_DTYPES = {"float32": "", "float64": ", float64"}


def bench(
    seconds: float = 60,
    problems: str = "digits,mnist_vae,mnist,fashion,gan=120,faces=180",
    methods: str = ",".join(METHODS),
    baseline: str | None = None,
    images: int = 2,
    chains: int = 4,
    warmup: int | None = None,
    peer_warmup: int = 100,
    jax_warmup: int | None = None,
    jax_starts: str = "descents",
    jax_dtypes: str = "float32",
    sweep: bool = True,
    sweep_noise: str = "0.3,0.1,0.03,0.01,0.003",
    sweep_seconds: float = 20,
    again: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    cores: int | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Sample completions of images by every method that applies, side by side.

    What an earlier run with the same settings and seconds has measured is kept.

    Args:
        seconds: wall-clock seconds per method and problem, including compilation, start-up and warm-up. One that is
            late is heard until it has taken half as much again, and its rate counted over the time it took.
        problems: names, separated by commas, with other seconds as in faces=300: digits, mnist_vae, mnist, fashion,
            gan, faces; empty for the sweep alone. What is not installed is left out, and the record says why.
        methods: names, separated by commas: constrained, baseline, compiled, lifted, default, nuts, nuts_noise, pyro,
            mici, blackjax, mclmc, chees, chees_16, numpyro.
        baseline: folder of a git worktree of an earlier revision, whose constrained HMC is measured beside today's;
            null to leave it out.
        images: the first so many held-out images, sampled together.
        chains: chains per image of this project, BlackJAX and NumPyro; Pyro and Mici have one per core.
        warmup: iterations of this project that adapt a kernel, fewer where they would take more than half of the time
            after start-up; null for as many as it takes, of the earlier revision and of faces then 150.
        peer_warmup: iterations that Pyro and Mici adapt in.
        jax_warmup: iterations that BlackJAX and NumPyro adapt in; null for 500, with convolutions 100.
        jax_starts: where their chains start, separated by commas: descents, at the best of 32 descents by Adam of each
            image; prior, at prior draws.
        jax_dtypes: what they compute in, separated by commas: float32, float64.
        sweep: also sample digits by constrained and lifted HMC for several widths of output noise.
        sweep_noise: these widths, standard deviations separated by commas.
        sweep_seconds: seconds per method and width.
        again: measure again what was measured with these settings.
        device: device of this project's samplers; on a GPU they are measured alone.
        cores: processor cores; null for all of them. With 1 the peers in JAX have one thread, else all that JAX finds.
        seed: seed of all randomness.
        output: folder for ``images_cpu.json`` and ``images.md``, on a GPU ``images_cuda.json`` and ``images_cuda.md``.

    Returns:
        path of the JSON file.
    """
    check_positive(seconds=seconds, sweep_seconds=sweep_seconds)
    check_counts(images=images, peer_warmup=peer_warmup)
    check_counts(**{name: n for name, n in (("warmup", warmup), ("jax_warmup", jax_warmup)) if n is not None})
    check_counts(2, chains=chains)
    check_seed(seed)
    budgets = _budgets(problems, seconds)
    check_device(device)
    using = names_of("methods", methods, METHODS)
    if device != "cpu":
        using = [name for name in using if METHODS[name].function == METHODS["default"].function]
    forms = [
        (start, dtype)
        for start in names_of("jax_starts", jax_starts, _STARTS)
        for dtype in names_of("jax_dtypes", jax_dtypes, _DTYPES)
    ]
    widths = _widths(sweep_noise) if sweep else []
    cores = checked_cores(cores)
    earlier = None if baseline is None else revision(baseline)
    folder = writable_folder(output)
    path = folder / f"images_{device}.json"
    settings = {
        "images": images,
        "chains": chains,
        "warmup": warmup,
        "peer_warmup": peer_warmup,
        "jax_warmup": jax_warmup,
        "cores": cores,
        "seed": seed,
    } | ({} if device == "cpu" else {"device": device})
    measured = measured_before(path, settings, "problems", "sweep")
    ran = {
        "seconds": seconds,
        "problems": problems,
        "methods": None if using == [*METHODS] else methods,
        "jax_starts": jax_starts,
        "jax_dtypes": jax_dtypes,
        "baseline": None if earlier is None else f"worktree-of-{earlier}",
        **({"sweep_noise": sweep_noise, "sweep_seconds": sweep_seconds} if sweep else {"sweep": False}),
    }
    packages = ["dgm-infer", "torch", "numpy", "arviz", "pyro-ppl", "mici", "jax", "blackjax", "numpyro"]
    record = new_record("images", {**ran, **settings}, packages, device_name=device_name(device)) | measured
    task = ImageTask("", "", seconds, chains, warmup, cores, seed, device=device)
    runner = _Runner(record, path, task, peer_warmup, jax_warmup, again)
    chosen = [form for name in using for form in _forms(METHODS[name], earlier, forms)]
    for name, budget in budgets.items():
        runner.problem(PROBLEMS[name], images, budget, chosen, baseline)
    for name, problem in SWEPT.items() if sweep else ():
        for sd in widths:
            runner.width(name, problem, images, sweep_seconds, sd)
    publish(path, "images" if device == "cpu" else f"images_{device}", page(plain(record)))
    return path


def _forms(method: Method, earlier: str | None, forms: Sequence[tuple[str, str]]) -> list[Method]:
    """A method as it is measured: in JAX from every start in every dtype; the baseline only with a revision to name."""
    if method is METHODS["baseline"]:
        return [] if earlier is None else [replace(method, label=f"{method.label} {earlier}")]
    if not method.together:
        return [method]
    return [
        replace(method, label=f"{method.label}{_STARTS[start]}{_DTYPES[dtype]}", start=start, dtype=dtype)
        for start, dtype in forms
    ]


class _Runner:
    """Measures what a record does not hold yet, and writes it after every method."""

    def __init__(
        self, record: dict[str, Any], path: Path, task: ImageTask, peer_warmup: int, jax_warmup: int | None, again: bool
    ):
        self.record, self.path, self.task = record, path, task
        self.peer_warmup, self.jax_warmup, self.again = peer_warmup, jax_warmup, again

    def problem(
        self, problem: ImageProblem, n: int, seconds: float, methods: Sequence[Method], checkout: str | None
    ) -> None:
        """All methods on one problem; one line in the record if it is not here."""
        print(problem.title, flush=True)
        entry = self.record["problems"].get(problem.name, {"methods": {}})
        try:
            given = problem.conditioned(n)
        except (CheckpointError, ConfigError) as error:
            print(f"  left out: {error}", flush=True)
            self.record["problems"][problem.name] = {**entry, "title": problem.title, "left_out": str(error)}
            write_record(self.path, self.record)
            return
        entry.pop("left_out", None)
        self.record["problems"][problem.name] = entry
        entry |= {"title": problem.title, "sd": given.sd, "latents": given.latent[0]}
        # forms of a method in JAX have its label in front
        rows, others = entry["methods"], tuple(m.label for m in METHODS.values() if not m.exact)
        for method in methods:
            if not method.applies(problem.name, given):
                continue
            if method.missing is not None:
                print(f"  {method.label}, left out: {method.missing}", flush=True)
                rows.setdefault(method.label, {"left_out": method.missing, "errors": []})
            elif not self._has(rows, method.label, seconds):
                rows[method.label] = self._measure(method, given, seconds, checkout, problem)
                exact = {label: row for label, row in rows.items() if not label.startswith(others)}
                entry["agreement"] = agreement(exact)
            # after every method: what was measured survives whatever happens to the next
            write_record(self.path, self.record)

    def width(self, name: str, problem: ImageProblem, n: int, seconds: float, sd: float) -> None:
        """Constrained and lifted HMC for one width of the noise."""
        entry = self.record["sweep"].setdefault(name, {"title": problem.title, "methods": {}})
        given = problem.conditioned(n, sd)
        for method in (METHODS["constrained"], METHODS["lifted"]):
            rows = entry["methods"].setdefault(method.label, {})
            if not self._has(rows, f"{sd:g}", seconds):
                print(f"{problem.title}, noise {sd:g}", flush=True)
                row = self._measure(method, given, seconds)
                rows[f"{sd:g}"] = {key: value for key, value in row.items() if not isinstance(value, list)} | {
                    "errors": row["errors"]
                }
                write_record(self.path, self.record)

    def _has(self, rows: Mapping[str, Any], label: str, seconds: float) -> bool:
        return not self.again and rows.get(label, {}).get("budget") == seconds

    def _measure(
        self,
        method: Method,
        given: Conditioned,
        seconds: float,
        checkout: str | None = None,
        problem: ImageProblem | None = None,
    ) -> dict[str, Any]:
        print(f"  {method.label}, {seconds:g} s", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "conditioned.pt")
            given.save(file)
            outcomes = run_workers(
                method.function,
                self._tasks(method, str(file), seconds, checkout, problem),
                environment=self._environment(method),
                patience=LATE * seconds + _IMPORTS,
                report=lambda line: print(f"    {line}", flush=True),
            )
        row = summarise(outcomes, seconds)
        if given.sd is not None and "mean" in row:
            row |= reached(given, [outcome.value["z"] for outcome in outcomes if outcome.value is not None])
        return {"budget": seconds, **_reported(row)}

    def _environment(self, method: Method) -> dict[str, str]:
        if method.is_ours:
            return threads(self.task.cores)
        # JAX takes one thread or all that it finds
        return threads(self.task.cores) if method.together and self.task.cores > 1 else one_thread()

    def _tasks(
        self, method: Method, path: str, seconds: float, checkout: str | None, problem: ImageProblem | None
    ) -> list[ImageTask]:
        noise = SMALL_NOISE if method.noise is False else None
        given = problem.warmup if self.task.warmup is None and problem is not None else self.task.warmup
        task = replace(self.task, path=path, kernel=method.kernel, seconds=seconds, noise=noise, warmup=given)
        if method.function == METHODS["baseline"].function:
            return [replace(task, checkout=checkout, warmup=given or GIVEN_WARMUP)]
        if method.is_ours:
            return [task]
        if method.together:
            chains, form = method.chains or task.chains, {"start": method.start, "dtype": method.dtype}
            assert problem is not None
            return [replace(task, chains=chains, warmup=self.jax_warmup or problem.jax_warmup, **form)]
        return [replace(task, chains=1, warmup=self.peer_warmup, index=i) for i in range(self.task.cores)]


def _reported(row: dict[str, Any]) -> dict[str, Any]:
    if "mean" in row:
        print(
            f"    {row['chains']} chains x {row['draws']} draws: bulk ESS per second {row['min_ess_per_second']:.3g} "
            f"(smallest), {row['median_ess_per_second']:.3g} (median), max R-hat {row['max_r_hat']:.3f}",
            flush=True,
        )
    for error in row["errors"]:
        print(f"    failed: {error}", flush=True)
    return row


def _budgets(given: str, seconds: float) -> dict[str, float]:
    """Seconds of every problem in ``bench(problems=...)``."""
    parts = [part.partition("=") for part in given.split(",") if part.strip()]
    names = names_of("problems", ",".join(name for name, _, _ in parts), PROBLEMS)
    return dict(zip(names, (_number("problems", own, seconds) for _, _, own in parts), strict=True))


def _number(option: str, given: str, otherwise: float) -> float:
    """A positive number, or the default if none is given."""
    try:
        value = float(given) if given else otherwise
    except ValueError:
        raise ConfigError(f"{option}: {given!r} is not a number") from None
    with reported_as(ConfigError):
        return positive("bench", option, value)


def _widths(given: str) -> list[float]:
    return [_number("sweep_noise", part, 0.0) for part in given.split(",")]
