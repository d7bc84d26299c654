"""The ABC benchmark: its exact posterior, its measurements, and what is said of peers that are missing."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dgm_infer.errors import ConfigError
from evaluation.benchmarks import abc, abc_chains, abc_sequential
from evaluation.benchmarks.abc_problem import ABCTask, NormalData, effective_draws
from evaluation.benchmarks.workers import WorkerResult
from tests.oracles import FLOAT

TASK = ABCTask(NormalData(), 0.5, 100, 4, 1)


def test_the_exact_posterior_is_that_of_rejection():
    rng = torch.Generator().manual_seed(1)
    problem, tolerance = NormalData(n=5), 0.4
    z = torch.randn(200_000, 2, generator=rng, dtype=FLOAT)
    distance = (problem.simulate(z, rng) - torch.tensor(problem.observed, dtype=FLOAT)).norm(dim=-1)
    kept = z[distance <= tolerance]
    mean, sd = problem.posterior(tolerance)
    assert ((kept.mean(0) - mean).abs() < 5 * sd / len(kept) ** 0.5).all()
    # a standard deviation is known to about sd / sqrt(2 n)
    assert ((kept.std(0) / sd - 1).abs() < 5 / (2 * len(kept)) ** 0.5 * 1.5).all()
    # the control: of another tolerance it is not
    other, _ = problem.posterior(3 * tolerance)
    assert ((kept.mean(0) - other).abs() > 5 * sd / len(kept) ** 0.5).any()


def test_both_forms_of_the_simulator_have_one_law():
    problem, rng = NormalData(), np.random.default_rng(1)
    alone = torch.from_numpy(np.stack([problem.simulate_one(0.5, -0.3, rng) for _ in range(1000)]))
    z = torch.tensor([[0.5, -0.3]], dtype=FLOAT).expand(1000, 2)
    together = problem.simulate(z, torch.Generator().manual_seed(1))
    error = ((alone.var(0) + together.var(0)) / 1000).sqrt()
    assert ((alone.mean(0) - together.mean(0)).abs() < 5 * error).all()


def test_effective_draws_are_those_of_independent_ones():
    means = torch.randn(4000, 2, 25, generator=torch.Generator().manual_seed(1), dtype=FLOAT).mean(-1)
    mean, sd = torch.zeros(2, dtype=FLOAT), torch.ones(2, dtype=FLOAT)
    assert effective_draws(means, mean, sd) == pytest.approx(25, rel=0.1)


def test_runs_of_ours_are_about_the_exact_mean():
    rows = abc_sequential.ours(TASK, lambda line: None)
    assert len(rows) == TASK.repetitions
    assert all(row["tolerance"] == TASK.tolerance for row in rows)
    mean, sd = TASK.problem.posterior(TASK.tolerance)
    assert 20 < effective_draws([row["mean"] for row in rows], mean, sd) < 5000


@pytest.mark.parametrize("package", ["pyabc", "sbi"])
def test_a_peer_that_is_installed_is_given_the_same_problem(package):
    pytest.importorskip(package)
    peer = pytest.importorskip(f"evaluation.benchmarks.{package}_peer")
    rows = peer.run(ABCTask(NormalData(), 0.5, 60, 2, 1), lambda line: None)
    mean, sd = TASK.problem.posterior(TASK.tolerance)
    assert all(row["tolerance"] == 0.5 for row in rows)
    assert effective_draws([row["mean"] for row in rows], mean, sd) > 3


def test_many_chains_and_single_ones_are_timed(monkeypatch):
    monkeypatch.setattr(abc_chains, "_SPREAD", 1)
    found = abc_chains.measure(chains=4, transitions=1, repetitions=1, seed=0)
    assert len(found["seconds_together"]) == 1
    assert len(found["seconds_alone"]) == 3
    alone = sorted(found["seconds_alone"])[1]
    assert found["ratio"] == pytest.approx(4 * alone / found["seconds_together"][0])


def test_peers_that_are_missing_are_left_out_with_a_line(monkeypatch):
    monkeypatch.setattr(abc_sequential, "find_spec", lambda name: None)
    assert abc_sequential.left_out() == [
        "pyABC is left out: it is not installed (pip install pyabc)",
        "sbi is left out: it is not installed (pip install sbi)",
    ]


@pytest.fixture
def measured(monkeypatch):
    """Workers that answer at once, one of which fails."""
    run = {"mean": [1.0, 0.5], "ess": 9.0, "tolerance": 0.1, "simulations": 100, "seconds": 2.0}
    calls = []

    def workers(function, tasks, **options):
        calls.append((function, *tasks))
        failed = function.endswith("pyabc_peer:run")
        return [WorkerResult(error="no luck") if failed else WorkerResult([run, {**run, "mean": [0.9, 0.4]}])]

    monkeypatch.setattr(abc_sequential, "run_workers", workers)
    monkeypatch.setattr(abc_sequential, "find_spec", lambda name: SimpleNamespace())
    chains = {"tolerance": 10.0, "chains": 1000, "transitions": 20, "ratio": 60.0}
    times = {"seconds_together": [2.0, 2.0], "seconds_alone": [0.12, 0.12]}
    counts = {"evaluations": {"together": 10.0, "alone": 11.0, "most": 30.0}}
    monkeypatch.setattr(abc_chains, "measure", lambda **options: {**chains, **times, **counts})
    return calls


def test_a_record_has_both_comparisons_and_what_failed(measured, tmp_path):
    path = abc.bench(particles=10, repetitions=2, output=str(tmp_path))
    record = json.loads(path.read_text())
    assert [name for name, *_ in measured] == [
        "evaluation.benchmarks.abc_sequential:ours",
        "evaluation.benchmarks.abc_sequential:ours",
        "evaluation.benchmarks.pyabc_peer:run",
        "evaluation.benchmarks.sbi_peer:run",
    ]
    assert [task.particles for _, task in measured] == [10, 500, 10, 10]
    row = record["sequential"]["sbi"]
    assert row["seconds_per_1000"] == pytest.approx(1000 * 2.0 * row["rms_error"] ** 2)
    page = (tmp_path / "abc.md").read_text()
    assert page == abc.page(record)
    assert "| one chain, 1000 times | 0.12 | 120 | 11.0 | 60 |" in page
    assert "- pyABC failed: no luck" in page


def test_no_peers_are_run_unless_asked_for(measured, tmp_path):
    abc.bench(particles=10, repetitions=2, peers=False, output=str(tmp_path))
    assert len(measured) == 2


@pytest.mark.parametrize("options", [{"chains": 1}, {"tolerance": 0.0}, {"repetitions": 1}, {"seed": -1}])
def test_bad_options_are_named(options, tmp_path):
    with pytest.raises(ConfigError, match=next(iter(options))):
        abc.bench(**options, output=str(tmp_path))
