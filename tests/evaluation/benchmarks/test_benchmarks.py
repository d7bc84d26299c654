"""Benchmarks beside peers: the peer's models are ours, every process is heard, results and tables say what happened."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dgm_infer.errors import ConfigError
from evaluation.benchmarks import BENCHMARKS, comparison, fibre, load, scaling
from evaluation.benchmarks.problems import Problem
from evaluation.benchmarks.workers import WorkerResult, run_workers, threads
from evaluation.commands.cli import main
from evaluation.reports.records import plain

PROBLEMS = [Problem("generalised_lambda"), Problem("lotka_volterra"), Problem("lotka_volterra", 10)]


def name_of(problem):
    return f"{problem.name}-{problem.n_outputs}"


def result(values, seconds=10.0, **changes):
    """What one process sends: ``values [chains, draws]`` of two latents."""
    stats = {
        name: np.full(values.shape, value) for name, value in (("acceptance", 0.8), ("failed", 0.0), ("n_steps", 4))
    }
    times = {"seconds": seconds, "cpu_seconds": seconds, "warmup_seconds": 1.0, "warmup_iterations": 50}
    return {"latents": {"z1": values, "z2": 2 * values}, **stats, **times, "step_size": 0.5, **changes}


def independent(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.fixture
def mici():
    """The peer's package, with the one that it takes derivatives by."""
    pytest.importorskip("jax")
    return pytest.importorskip("mici")


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
def test_generating_inputs_generate_the_observations(problem):
    torch.testing.assert_close(
        problem.model().observed(problem.generating_inputs()), problem.observations(), rtol=1e-12, atol=1e-10
    )


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
def test_the_peers_models_are_this_projects(problem, mici):
    from evaluation.benchmarks import mici_peer

    model, rng = problem.model(), torch.Generator().manual_seed(1)
    u = problem.generating_inputs() + 0.1 * torch.randn(20, 4 + problem.n_outputs, generator=rng, dtype=torch.float64)
    outputs = np.stack([mici_peer.generator(problem)(row) for row in u.numpy()])
    np.testing.assert_allclose(outputs, model.observed(u).numpy(), rtol=1e-10)
    energy = np.array([mici_peer.negative_log_density(problem)(row) for row in u.numpy()])
    density = model.input_density.log_prob(u).numpy()
    np.testing.assert_allclose(np.diff(energy), -np.diff(density), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["generator", "residual"])
def test_the_peer_has_the_same_posterior(form, mici):
    """Energy and gradient on the fibre are those of this project, whatever form the constraint has."""
    from evaluation.benchmarks import mici_peer

    problem = Problem("lotka_volterra", 10)
    fibre_of_it, system = problem.fibre(), mici_peer.system(problem, form)
    rng = torch.Generator().manual_seed(0)
    points = problem.generating_inputs().repeat(3, 1)
    points[:, :4] += 0.2 * torch.randn(3, 4, generator=rng, dtype=torch.float64)
    # the noise is additive
    points[:, 4:] -= fibre_of_it.constraint(points)
    assert fibre_of_it.constraint_error(points).max() < 1e-10
    here = fibre_of_it.linearise(points)
    tangents = here.jacobian.tangent(here.gradient)
    energies = []
    for point, tangent in zip(points.numpy(), tangents.numpy(), strict=True):
        state = mici.states.ChainState(pos=point, mom=None, dir=1)
        energies.append(system.h1(state))
        np.testing.assert_allclose(
            system.project_onto_cotangent_space(system.dh1_dpos(state).copy(), state), tangent, rtol=1e-6, atol=1e-6
        )
    np.testing.assert_allclose(np.diff(energies), here.energy.diff().numpy(), rtol=1e-8)


def test_the_rate_counts_the_time_really_used():
    values = independent(4, 500)
    on_time = comparison.summarise([WorkerResult(result(values))], 10, 2)
    late = comparison.summarise([WorkerResult(result(values, seconds=20.0))], 10, 2)
    assert on_time["min_ess"] == pytest.approx(2000, rel=0.2)
    assert on_time["min_ess_per_second"] == pytest.approx(on_time["min_ess"] / 10)
    assert late["min_ess_per_second"] == pytest.approx(on_time["min_ess_per_second"] / 2)
    assert on_time["converged"]
    assert on_time["cpu_share"] == pytest.approx(0.5)


def test_processes_of_different_speed_count_with_all_their_draws():
    results = [WorkerResult(result(independent(1, n, seed=n))) for n in (300, 500)]
    summary = comparison.summarise(results, 10, 2)
    assert summary["chains"] == 2
    assert summary["draws"] == 300
    assert summary["min_ess"] == pytest.approx(800, rel=0.25)


def test_chains_that_died_or_hang_are_named_and_left_out():
    alive, stunted = result(independent(2, 400)), result(independent(2, 20))
    summary = comparison.summarise(
        [WorkerResult(alive), WorkerResult(stunted), WorkerResult(error="MemoryError: none left")], 10, 3
    )
    assert summary["chains"] == 2
    assert summary["errors"] == ["MemoryError: none left", "a process made only 20 draws per chain in the time"]
    hurried = comparison.summarise([WorkerResult(result(independent(512, 5)))], 10, 1)
    assert hurried == {"errors": ["a process made only 5 draws per chain in the time"]}
    nothing = comparison.summarise([WorkerResult(error="died")], 10, 1)
    assert comparison.compare(summary, nothing)["ratio"] is None


def test_chains_apart_are_not_converged():
    values = independent(4, 400) + 10 * np.arange(4)[:, None]
    assert not comparison.summarise([WorkerResult(result(values))], 10, 1)["converged"]


def test_one_chain_is_compared_with_itself():
    steady = independent(1, 400)
    assert comparison.summarise([WorkerResult(result(steady))], 10, 1)["converged"]
    assert not comparison.summarise([WorkerResult(result(steady + np.linspace(0, 5, 400)))], 10, 1)["converged"]


def test_chains_that_stand_still_have_no_effective_draws():
    summary = comparison.summarise([WorkerResult(result(np.ones((2, 100))))], 10, 1)
    assert np.isnan(summary["min_ess"])
    assert not summary["converged"]


def test_ratio_and_difference_of_means():
    first = comparison.summarise([WorkerResult(result(independent(4, 1000)))], 10, 1)
    second = comparison.summarise([WorkerResult(result(independent(4, 1000, seed=1), seconds=30.0))], 10, 1)
    compared = comparison.compare(first, second)
    assert compared["ratio"] == pytest.approx(3, rel=0.3)
    assert compared["largest_mean_difference"] < 4
    shifted = comparison.summarise([WorkerResult(result(independent(4, 1000, seed=1) + 1))], 10, 1)
    assert comparison.compare(first, shifted)["largest_mean_difference"] > 10


def record(device, seconds=10.0):
    own = comparison.summarise([WorkerResult(result(independent(4, 300)))], seconds, 2)
    other = comparison.summarise([WorkerResult(result(independent(2, 100))), WorkerResult(error="died")], seconds, 2)
    return {
        "command": "dgm-infer bench fibre",
        "date": "2026-01-01",
        "processor": "some processor",
        "device_name": "some GPU" if device == "cuda" else None,
        "versions": {"torch": "2", "mici": None},
        "settings": {"cores": 2},
        "problems": {"generalised_lambda": comparison.compare(own, other)},
    }


def test_the_table_says_what_was_not_measured(tmp_path):
    (tmp_path / "fibre_cpu.json").write_text(json.dumps(plain(record("cpu"))))
    text = comparison.table(tmp_path)
    (row,) = [line for line in text.splitlines() if line.startswith("| generalised_lambda")][:1]
    assert row.count("not measured") == 2
    assert "some GPU" not in text
    assert "mici: died" in text
    (tmp_path / "fibre_cuda.json").write_text(json.dumps(plain(record("cuda"))))
    text = comparison.table(tmp_path)
    assert "not measured" not in text
    assert "some GPU" in text


def test_a_table_without_the_peer(tmp_path):
    own = comparison.summarise([WorkerResult(result(independent(4, 300)))], 10, 2)
    alone = {**record("cpu"), "problems": {"lotka_volterra": comparison.compare(own, None)}}
    (tmp_path / "fibre_cpu.json").write_text(json.dumps(plain(alone)))
    assert "| lotka_volterra | not measured |" in comparison.table(tmp_path)


def test_json_holds_no_numbers_that_are_none():
    value = {"a": np.float64("nan"), "b": [np.int64(3), float("inf")], "c": True}
    assert json.dumps(plain(value), allow_nan=False) == '{"a": null, "b": [3, null], "c": true}'


@pytest.mark.slow
def test_every_process_is_heard_whatever_becomes_of_the_others(capfd):
    lines = []
    tasks, echo = ["run", "fail", "die", "hang"], "tests.evaluation.benchmarks.echo:echo"
    results = run_workers(echo, tasks, environment=threads(3), patience=4, report=lines.append)
    assert results[0] == WorkerResult("3")
    assert results[1] == WorkerResult(error="ValueError: two lines")
    assert "died" in (results[2].error or "")
    assert "still running" in (results[3].error or "")
    assert lines == ["got run"]
    assert "Traceback" in capfd.readouterr().err


def test_growth_is_relative_to_linear():
    rows = [
        {"path": "structured", "n": 100, "seconds_per_chain_step": 1.0},
        {"path": "structured", "n": 1000, "seconds_per_chain_step": 12.0},
        {"path": "structured", "n": 9999, "error": "died"},
        {"path": "dense", "n": 10, "seconds_per_chain_step": 1e3},
    ]
    assert scaling.growth(rows) == pytest.approx(1.2)
    assert scaling.growth(rows[:1]) is None


@pytest.mark.parametrize("path", ["structured", "dense"])
def test_a_step_is_measured(path):
    row = scaling.measure(scaling.Task(path, 20, 4, 2, 2, False, torch.get_num_threads(), 0))
    assert row["seconds_per_chain_step"] > 0
    assert row["peak_bytes"] >= row["base_bytes"] > 1e7
    assert row["acceptance"] > 0.1


@pytest.mark.slow
def test_scaling_writes_results(tmp_path, capsys, monkeypatch):
    def here(function, tasks, **_):
        """What processes of their own would do, without the seconds that one takes to start."""
        module, name = function.split(":")
        return [WorkerResult(getattr(importlib.import_module(module), name)(task)) for task in tasks]

    monkeypatch.setattr(scaling, "run_workers", here)
    options = ["--sizes", "10,20", "--dense_sizes", "", "--chains", "2", "--cores", "1", "--output", str(tmp_path)]
    assert main(["bench", "scaling", *options]) == 0
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert [(row["path"], row["n"], row["chains"]) for row in written["rows"]] == [
        ("structured", 10, 4),
        ("structured", 20, 2),
    ]
    assert written["growth"] > 0
    assert "--sizes 10,20" in written["command"]
    assert (tmp_path / "scaling.md").read_text() in capsys.readouterr().out


def test_fibre_measures_both_sides(tmp_path, capsys, mici):
    options = ["--seconds", "5", "--problems", "lotka_volterra", "--n_observed", "4", "--chains", "8", "--warmup", "20"]
    options += ["--compile", "false", "--cores", "1", "--output", str(tmp_path)]
    assert main(["bench", "fibre", *options]) == 0
    written = json.loads((tmp_path / "fibre_cpu.json").read_text())
    (entry,) = written["problems"].values()
    for method, chains in (("dgm-infer", 8), ("mici", 1)):
        side = entry[method]
        # on a busy machine either may still warm up or compile when its time is up
        if side["errors"]:
            assert side["errors"][0].endswith("draws per chain in the time")
        else:
            assert side["chains"] == chains
            assert set(side["latents"]) == {"z1", "z2", "z3", "z4"}
    assert written["versions"]["mici"] is not None
    assert (tmp_path / "fibre.md").read_text() in capsys.readouterr().out


BAD = {
    "misspelt name": (["fibr"], "did you mean 'fibre'"),
    "misspelt option": (["fibre", "--secs", "3"], "--secs"),
    "word for a number": (["fibre", "--seconds", "many"], "many"),
    "no time": (["fibre", "--seconds", "0"], "seconds: 0"),
    "no chains": (["fibre", "--chains", "0"], "chains: 0"),
    "unknown problem": (["fibre", "--problems", "pose"], "lotka_volterra"),
    "half a step": (["fibre", "--problems", "lotka_volterra", "--n_observed", "3"], "multiple of 2"),
    "too many cores": (["fibre", "--cores", "100000"], "cores: 100000"),
    "negative seed": (["fibre", "--seed", "-1"], "seed: -1"),
    "output that is a file": (["fibre", "--peer", "false", "--output", __file__], "output"),
    "sizes that are none": (["scaling", "--sizes", "2500,many"], "2500,many"),
    "no sizes": (["scaling", "--sizes", ","], "sizes"),
    "no repeats": (["scaling", "--repeats", "0"], "repeats: 0"),
}


@pytest.mark.parametrize(("arguments", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_code_2(arguments, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert named in message
    assert list(tmp_path.iterdir()) == []


def test_without_the_peers_packages_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(fibre, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"mici and jax not installed: pip install 'dgm-infer\[bench\]'"):
        fibre.bench(output=str(tmp_path))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_command(name, capsys):
    assert callable(load(name))
    assert main(["bench", name, "--help"]) == 0
    assert "--output" in capsys.readouterr().out


def test_without_a_name_all_benchmarks_are_listed(capsys):
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in BENCHMARKS)


def test_published_results_are_valid():
    folder = Path(__file__).parents[3] / "evaluation" / "results"
    assert (folder / "fibre.md").read_text() == comparison.table(folder)
