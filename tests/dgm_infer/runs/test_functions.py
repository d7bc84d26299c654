"""Evidence and ABC in a folder: stopped anywhere and resumed, the numbers are those of a run that was not."""

import time
import warnings

import pytest
import torch

import dgm_infer as dgm
from dgm_infer import likelihood_free as lf
from dgm_infer.autodiff.programs import Program
from dgm_infer.evidence.path import AnnealedPath
from dgm_infer.runs import replay
from dgm_infer.runs.store import Writer
from dgm_infer.sampling import execution
from tests.dgm_infer.runs.same import Bumps, Killed, Well, assert_same_evidence
from tests.oracles import FLOAT

pytestmark = pytest.mark.filterwarnings("ignore::dgm_infer.diagnosis.DiagnosisWarning")


TARGET = Bumps(torch.tensor([0.5, 1.0, 2.0], dtype=FLOAT))
BASE = dgm.Gaussian(torch.zeros(3, 2, dtype=FLOAT), 1.5)
METHODS = {
    "AIS": dgm.AIS(temperatures=15, pilot_temperatures=8, n_steps=2),
    "HamiltonianAIS": dgm.evidence.HamiltonianAIS(temperatures=15, pilot_temperatures=8, n_steps=2),
    "SMC": dgm.SMC(particles=8, temperatures=10, pilot_temperatures=8, n_steps=2),
    "Gibbs": dgm.GibbsTempering(draws=12, warmup=6, pilot_temperatures=8, n_steps=2),
    "barrier": dgm.GibbsTempering(draws=12, warmup=6, pilot_temperatures=8, n_steps=2, schedule="barrier"),
    "continuous": dgm.ContinuousTempering(draws=12, warmup=20, pilot_temperatures=8, n_steps=2),
    "simulated": dgm.SimulatedTempering(draws=12, warmup=6, pilot_temperatures=8, n_steps=2, temperatures=10),
    "parallel": dgm.ParallelTempering(draws=24, temperatures=4, pilot_temperatures=8, n_steps=2),
    "path": dgm.evidence.PathSampling(dgm.GibbsTempering(draws=30, warmup=6, pilot_temperatures=8, n_steps=2), parts=2),
    "Elbo": dgm.Elbo(samples=4000),
}


OPTIONS = {"chains": 4, "seed": 3, "progress": False}


def estimate(method="Gibbs", **changes):
    options = OPTIONS | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dgm.log_evidence(TARGET, BASE, METHODS[method], **options)


def bounds(**changes):
    draws = TARGET.widths.unsqueeze(-1) * torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"chains": 4, "seed": 3, "progress": False} | changes
        return dgm.bidirectional(TARGET, BASE, draws, METHODS["AIS"], **options)


@pytest.fixture
def every_step(monkeypatch):
    """A checkpoint after every step, and at the end of every loop."""
    monkeypatch.setattr(replay, "LOOPS", replay.LoopSettings(shortest=0.0, share=float("inf")))


def stopped_at_writes(monkeypatch, begin, path, apart, kind=Killed):
    """Begin a run that ends right after its ``apart``-th checkpoint, and go on so until it is through."""
    write, made, stops = Writer.write, [0], 0

    def written(self, records):
        write(self, records)
        if any(name.startswith(("loop/", "result")) for name in records):
            made[0] += 1
            if made[0] % apart == 0:
                raise kind

    monkeypatch.setattr(Writer, "write", written)
    while True:
        try:
            found = begin(run=path, checkpoint_every=1e-9) if stops == 0 else dgm.resume(path, progress=False)
            monkeypatch.undo()
            return found, stops
        except kind:
            stops += 1


@pytest.mark.parametrize(("shortest", "kept"), [(1e9, False), (0.0, True)])
def test_loops_are_kept_at_their_end_unless_they_are_short(tmp_path, monkeypatch, shortest, kept):
    monkeypatch.setattr(replay, "LOOPS", replay.LoopSettings(shortest=shortest))
    write, names = Writer.write, set()

    def written(self, records):
        write(self, records)
        names.update(records)

    monkeypatch.setattr(Writer, "write", written)
    estimate("AIS", run=tmp_path / "run", checkpoint_every=1000)
    assert any(name.startswith("loop/") for name in names) == kept


@pytest.mark.parametrize("share", [0.02, float("inf")])
def test_slow_checkpoints_are_made_less_often_than_asked_for(tmp_path, monkeypatch, share):
    """Of 0.05 s each, they are 2.5 s apart, and one ends every loop of a second; the control makes one a step."""
    monkeypatch.setattr(replay, "LOOPS", replay.LoopSettings(share=share))
    write, made = Writer.write, []

    def written(self, records):
        write(self, records)
        if any(name.startswith("loop/") and content is not None for name, content in records.items()):
            made.append(None)
            time.sleep(0.05)

    monkeypatch.setattr(Writer, "write", written)
    began = time.monotonic()
    estimate("AIS", run=tmp_path / "run", checkpoint_every=1e-9)
    most = 1 + (time.monotonic() - began) * (1 / 2.5 + 1)
    assert (0 < len(made) <= most) == (share < 1)


@pytest.mark.parametrize("method", METHODS)
def test_evidence_stopped_at_any_checkpoint_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, every_step, method):
    whole = estimate(method)
    found, stops = stopped_at_writes(monkeypatch, lambda **where: estimate(method, **where), tmp_path / "run", 7)
    assert stops > 0
    assert_same_evidence(found, whole)
    assert_same_evidence(dgm.collect(tmp_path / "run"), whole)
    assert_same_evidence(dgm.resume(tmp_path / "run", progress=False), whole)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["AIS", "HamiltonianAIS"])
def test_temperatures_that_are_computed_at_once_go_on_as_they_would_have(tmp_path, monkeypatch, every_step, method):
    """What is compiled, and how many temperatures are one call, does not change with a stop."""
    settings = execution.CompilationSettings(compiles=1e-3, each=0.0, block=4)
    monkeypatch.setattr(execution, "_SETTINGS", settings)
    made, compiled = [], Program.compile
    monkeypatch.setattr(
        Program, "compile", lambda self, *most, **last: (made.append(most), compiled(self, *most, **last))
    )

    def begin(**where):
        return dgm.log_evidence(TARGET, BASE, METHODS[method].replace(temperatures=40), **OPTIONS, **where)

    whole = begin()
    assert (4,) in made
    # its own changes are undone at the end
    with monkeypatch.context() as context:
        found, stops = stopped_at_writes(context, begin, tmp_path / "run", 7)
    assert stops > 1
    assert_same_evidence(found, whole)


def test_the_default_run_with_its_checks_and_refinement_goes_on(tmp_path, monkeypatch, every_step):
    """A base that misses a mode: the cross-check, refined bases and their runs are made again, or taken up."""

    def begin(**where):
        base = dgm.Gaussian(torch.full((3, 2), 4.0, dtype=FLOAT), 0.2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"chains": 4, "seed": 3, "progress": False, "refine": True, **where}
            return dgm.log_evidence(TARGET, base, dgm.GibbsTempering(draws=30, warmup=10), **options)

    whole = begin()
    assert whole.diagnostics["refinements"].sum() > 0
    found, stops = stopped_at_writes(monkeypatch, begin, tmp_path / "run", 97)
    assert stops > 1
    assert_same_evidence(found, whole)


def test_chunks_of_problems_are_shards_that_anybody_may_make(tmp_path, monkeypatch, every_step):
    whole = estimate("Gibbs", chunk=1)
    found, stops = stopped_at_writes(monkeypatch, lambda **run: estimate("Gibbs", chunk=1, **run), tmp_path / "run", 9)
    assert stops > 2
    assert len(list((tmp_path / "run").glob("shard-*.sqlite"))) == 3
    assert_same_evidence(found, whole)
    # chunks have random numbers of their own: the control is that two of them differ
    assert not torch.equal(whole.draws[:, :, 0] / 0.5, whole.draws[:, :, 1])


@pytest.mark.slow
def test_two_processes_make_the_same_evidence(tmp_path):
    whole = estimate("Gibbs", chunk=1)
    assert_same_evidence(estimate("Gibbs", chunk=1, run=tmp_path / "run", devices=["cpu", "cpu"]), whole)


def test_both_bounds_go_on(tmp_path, monkeypatch, every_step):
    whole = bounds()
    found, stops = stopped_at_writes(monkeypatch, bounds, tmp_path / "run", 11)
    assert stops > 1
    assert_same_evidence(found, whole)


def test_an_interrupted_estimate_is_returned_and_the_folder_goes_on(tmp_path, monkeypatch, every_step):
    whole, move, made = estimate(), AnnealedPath.move, []

    def moved(self, *arguments):
        made.append(None)
        if len(made) == 28:
            import signal

            signal.raise_signal(signal.SIGINT)
        return move(self, *arguments)

    monkeypatch.setattr(AnnealedPath, "move", moved)
    with (
        pytest.warns(UserWarning, match="interrupted: estimates of 3 of 3 problems are kept"),
        pytest.warns(UserWarning, match=r"interrupted \(dgm.resume\(.*\) goes on\)"),
    ):
        part = dgm.log_evidence(TARGET, BASE, METHODS["Gibbs"], chains=4, seed=3, progress=False, run=tmp_path / "run")
    monkeypatch.undo()
    assert part.interrupted
    n = part.log_weights.shape[1]
    assert 0 < n < 12
    assert torch.equal(part.log_weights, whole.log_weights[:, :n])
    with pytest.raises(dgm.errors.CheckpointError, match="no result yet"):
        dgm.collect(tmp_path / "run")
    assert_same_evidence(dgm.resume(tmp_path / "run", progress=False), whole)


def test_what_is_no_run_of_chains_is_not_extended_and_another_problem_is_refused(tmp_path):
    estimate(run=tmp_path / "run")
    with pytest.raises(dgm.errors.ArgumentError, match=r"is a run of log_evidence\(\), to which no draws are added"):
        dgm.extend(tmp_path / "run", 5)
    with pytest.raises(dgm.errors.ArgumentError, match="give the problem that was sampled"):
        dgm.resume(tmp_path / "run", Bumps(torch.tensor([0.5, 1.0, 2.1], dtype=FLOAT)))
    with pytest.raises(dgm.errors.ArgumentError, match="there is a run in it already"):
        estimate(run=tmp_path / "run")
    with pytest.raises(dgm.errors.ArgumentError, match="there is a run in it already"):
        dgm.sample(Well(1.0), run=tmp_path / "run", progress=False)
    assert_same_evidence(dgm.resume(tmp_path / "run", TARGET, progress=False), estimate())


def simulate(z, rng):
    return z + torch.randn(z.shape, generator=rng, dtype=z.dtype)


SIMULATION = lf.Simulation(simulate, dgm.StandardNormal(1), torch.tensor([0.7], dtype=FLOAT), memory=2**13)
ABC = {
    "rejection": lf.ABCRejection(tolerance=0.2),
    "importance": lf.ABCImportance(tolerance=0.5),
    "chains": lf.ABCMCMC(tolerance=0.3, chains=10, warmup=5),
    "sequential": lf.ABCSMC(tolerance=0.3),
}


@pytest.mark.parametrize("method", ABC)
def test_abc_stopped_at_any_checkpoint_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, every_step, method):
    def begin(**where):
        return lf.sample_abc(SIMULATION, ABC[method], draws=100, seed=1, **where)

    whole = begin()
    found, stops = stopped_at_writes(monkeypatch, begin, tmp_path / "run", 3)
    assert stops > 0
    for each in (found, dgm.collect(tmp_path / "run")):
        assert torch.equal(each.parameters, whole.parameters)
        assert torch.equal(each.distances, whole.distances)
        assert (each.simulations, each.seed, each.tolerance) == (whole.simulations, whole.seed, whole.tolerance)
    assert SIMULATION.progress.loops is None
