"""Runs in a folder: stopped anywhere and resumed, extended, collected, in shards: the draws are those of one run."""

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.runs import drawn
from dgm_infer.runs.drawn import count_of
from dgm_infer.runs.folder import RunFolder
from dgm_infer.sampling.execution import Execution
from dgm_infer.sampling.run import SamplingRun
from tests.dgm_infer.runs.same import CHAINS, DRAWS, WARMUP, Bumps, Killed, assert_same, quick_run, run
from tests.oracles import FLOAT, Ellipse, assert_agrees, correlated_gaussian

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def whole():
    return quick_run()


@pytest.fixture(scope="module")
def whole_of_fibre():
    return run()


def killed_at(monkeypatch, transition, path, kind=Killed, run=quick_run, **changes):
    """A run with a checkpoint after every transition that ends while it makes this one."""
    step, made = Execution.step, []

    def stepped(self, *arguments, **options):
        made.append(None)
        after = step(self, *arguments, **options)
        if len(made) == transition:
            raise kind
        return after

    monkeypatch.setattr(Execution, "step", stepped)
    try:
        return run(run=path, checkpoint_every=1e-9, **changes)
    finally:
        monkeypatch.undo()


def test_a_run_in_a_folder_has_the_draws_of_one_without(tmp_path, whole_of_fibre):
    assert_same(run(run=tmp_path / "run", checkpoint_every=1e-9), whole_of_fibre)
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole_of_fibre)
    draws = dgm.collect(tmp_path / "run")
    assert_same(draws, whole_of_fibre)
    # the problem comes back with the draws
    assert torch.equal(draws.generate(2), whole_of_fibre.generate(2))
    assert torch.equal(draws.latents["z"], whole_of_fibre.latents["z"])


@pytest.mark.parametrize("transition", [1, 4, 7, 13, 29, 30, 31, 42, 50])
def test_a_run_killed_at_any_transition_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, whole, transition):
    """In start-up of the warm-up, in adaptation, at its end, in the main run, at the last draw."""
    with pytest.raises(Killed):
        killed_at(monkeypatch, transition, tmp_path / "run")
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


@pytest.mark.parametrize("transition", [12, 42])
def test_a_run_on_a_fibre_that_is_killed_goes_on(tmp_path, monkeypatch, whole_of_fibre, transition):
    """Its states hold Jacobians, and its starts are found."""
    with pytest.raises(Killed):
        killed_at(monkeypatch, transition, tmp_path / "run", Killed, run)
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole_of_fibre)


def test_control_other_random_numbers_after_a_stop_give_other_draws(tmp_path, monkeypatch, whole):
    with pytest.raises(Killed):
        killed_at(monkeypatch, 40, tmp_path / "run")
    resume = SamplingRun.resume

    def careless(self, *arguments):
        resume(self, *arguments)
        self._rng.manual_seed(0)

    monkeypatch.setattr(SamplingRun, "resume", careless)
    draws = dgm.resume(tmp_path / "run", progress=False)
    assert torch.equal(draws.inputs[:, :9], whole.inputs[:, :9])
    assert not torch.equal(draws.inputs[:, 10:], whole.inputs[:, 10:])


def test_a_run_may_be_stopped_again_and_again(tmp_path, monkeypatch, whole):
    with pytest.raises(Killed):
        killed_at(monkeypatch, 3, tmp_path / "run")
    for _ in range(9):
        step, made = Execution.step, []

        def stepped(self, *arguments, step=step, made=made, **options):
            made.append(None)
            if len(made) == 6:
                raise Killed
            return step(self, *arguments, **options)

        monkeypatch.setattr(Execution, "step", stepped)
        with pytest.raises(Killed):
            dgm.resume(tmp_path / "run", progress=False)
        monkeypatch.undo()
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


def test_a_stop_before_the_first_checkpoint_begins_anew(tmp_path, monkeypatch, whole):
    monkeypatch.setattr(SamplingRun, "begin", classmethod(lambda *_: (_ for _ in ()).throw(Killed)))
    with pytest.raises(Killed):
        quick_run(run=tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(dgm.errors.CheckpointError, match="no draws yet, 0 of 30"):
        dgm.collect(tmp_path / "run")
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


def test_an_interrupt_returns_the_draws_and_leaves_them_in_the_folder(tmp_path, monkeypatch, whole):
    with pytest.warns(UserWarning, match=r"interrupted \(dgm\.resume.* goes on\): 11 of 20 draws"):
        draws = killed_at(monkeypatch, WARMUP + 12, tmp_path / "run", KeyboardInterrupt)
    assert draws.interrupted
    assert torch.equal(draws.inputs, whole.inputs[:, :11])
    assert_same(dgm.collect(tmp_path / "run"), draws)
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


def test_an_interrupt_within_warm_up_passes_and_costs_at_most_what_came_after_the_checkpoint(
    tmp_path, monkeypatch, whole
):
    with pytest.raises(KeyboardInterrupt):
        killed_at(monkeypatch, 12, tmp_path / "run", KeyboardInterrupt)
    with pytest.raises(dgm.errors.CheckpointError, match="no draws yet, 11 of 30"):
        dgm.collect(tmp_path / "run")
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


def test_an_extended_run_is_a_longer_run(tmp_path, whole):
    short = quick_run(run=tmp_path / "run", draws=8)
    assert short.shape[1] == 8
    assert_same(dgm.extend(tmp_path / "run", draws=DRAWS - 8, progress=False), whole)
    assert dgm.extend(tmp_path / "run", draws=1, progress=False).shape[1] == DRAWS + 1


@pytest.mark.parametrize("transition", [31, 36, 42, 48])
def test_draws_that_memory_does_not_hold_are_streamed(tmp_path, monkeypatch, streamed, whole, transition):
    with pytest.raises(Killed):
        killed_at(monkeypatch, transition, tmp_path / "run", draws=DRAWS - 2)
    resumed = dgm.extend(tmp_path / "run", 2, progress=False)
    assert_same(resumed, whole)
    assert_same(dgm.collect(tmp_path / "run"), whole)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.sqlite", "shard-0.sqlite", "index.html"}
    # the control: so many blocks are in the folder
    with RunFolder.open("collect", tmp_path / "run").shard("shard-0").reading() as reader:
        assert len(reader.names("draws/")) > 5


def test_streamed_shards_are_those_of_memory(tmp_path, streamed):
    whole = quick_run(shards=3)
    assert_same(quick_run(run=tmp_path / "run", shards=3), whole)


def test_streamed_draws_come_back_from_a_folder_that_vanished(tmp_path, monkeypatch, streamed, whole):
    forget, made = SamplingRun.forget, []

    def forgotten(self):
        forget(self)
        made.append(None)
        if len(made) == 3:
            shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(SamplingRun, "forget", forgotten)
    with pytest.warns(UserWarning, match=r"not all draws are in|no checkpoint after"):
        draws = quick_run(run=tmp_path / "run", checkpoint_every=1000)
    assert torch.equal(draws.inputs, whole.inputs)


def test_a_disk_without_room_for_the_draws_is_said_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**30, 2**10))
    with pytest.raises(dgm.errors.ArgumentError, match=r"draws=20\): needs .* GiB free at .*: make fewer draws"):
        quick_run(run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


MANY = """
import sys, threading, time, warnings
import dgm_infer as dgm
from tests.dgm_infer.runs.same import Well

class Wide(Well):
    def __init__(self):
        super().__init__(1.0)
        self.dim = 50

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024

def sampled(draws, run):
    # a compiler would take memory of its own
    kernel = dgm.HMC(n_steps=1, step_size=0.5, compile=False)
    return dgm.sample(Wide(), kernel, chains=100, warmup=0, draws=draws, seed=1, progress=False, run=run)

def watch():
    while True:
        peak[0] = max(peak[0], held())
        time.sleep(0.003)

warnings.simplefilter("ignore")
sampled(500, sys.argv[1] + "/first")
before, peak = held(), [0]
threading.Thread(target=watch, daemon=True).start()
draws = sampled(int(sys.argv[2]), sys.argv[1] + "/run")
assert draws.inputs.shape == (100, int(sys.argv[2]), 50)
print(peak[0] - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process of Linux")
def test_a_million_draws_take_the_memory_of_some_blocks(tmp_path):
    """207 MiB of draws, in the MiB of anonymous memory beyond that of a short run; mapped files are not of it."""
    command = [sys.executable, "-c", MANY, str(tmp_path), "10000"]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 8 * drawn.MEMORY.block / 2**20


def test_a_stopped_run_is_extended_after_what_was_left(tmp_path, monkeypatch, whole):
    with pytest.raises(Killed):
        killed_at(monkeypatch, 20, tmp_path / "run", draws=8)
    assert_same(dgm.extend(tmp_path / "run", draws=DRAWS - 8, progress=False), whole)


def test_thinned_draws_of_latents_alone_go_on_within_a_draw(tmp_path, monkeypatch):
    options = {"thin": 3, "keep": "latents", "draws": 4, "warmup": 5}
    whole = run(**options)
    with pytest.raises(Killed):
        killed_at(monkeypatch, 5 + 8, tmp_path / "run", Killed, run, **options)
    assert dgm.collect(tmp_path / "run").shape[1] == 2
    draws = dgm.resume(tmp_path / "run", progress=False)
    assert draws.inputs is None
    assert torch.equal(draws.latents["z"], whole.latents["z"])


def test_draws_without_a_warm_up_and_from_given_starts(tmp_path, monkeypatch):
    options = {"warmup": 0, "initial": torch.zeros(CHAINS, 2, 2)}
    whole = quick_run(**options)
    with pytest.raises(Killed):
        killed_at(monkeypatch, 5, tmp_path / "run", **options)
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


def test_the_last_state_says_which_chains_never_moved(tmp_path):
    frozen = dgm.ConstrainedHMC(step_size=0.5, n_steps=2, tolerance=1e-15, max_iterations=1)
    with pytest.warns(UserWarning, match="never moved"):
        run(run=tmp_path / "run", kernel=frozen, warmup=0, draws=60)
    with pytest.warns(UserWarning, match="never moved"):
        dgm.extend(tmp_path / "run", draws=20, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run": 3}, "run=3"),
        ({"checkpoint_every": 0, "run": "x"}, "checkpoint_every=0"),
        ({"devices": []}, "devices="),
        ({"devices": 2}, "'auto' or a list of devices"),
        ({"devices": ["nowhere"]}, "nowhere"),
        ({"shards": 0}, "shards=0"),
        ({"executor": 3, "run": "x"}, r"executor=3.*submit"),
        ({"executor": ProcessPoolExecutor}, "needs run="),
    ],
)
def test_bad_arguments_are_named(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        run(**options)
    assert not any(tmp_path.iterdir())


def test_an_extension_has_at_least_one_draw(tmp_path):
    quick_run(run=tmp_path / "run")
    for draws in 0, 1.5, None:
        with pytest.raises(dgm.errors.ArgumentError, match="extend\\(draws="):
            dgm.extend(tmp_path / "run", draws=draws)


# --------------------------------------------------------------------------------------------------------------- shards


def gaussian(chains=200, **changes):
    oracle = correlated_gaussian()
    options = {"chains": chains, "warmup": 60, "draws": 60, "seed": 5, "progress": False} | changes
    return oracle, dgm.sample(oracle.problem, dgm.HMC(), **options)


@pytest.mark.slow
def test_draws_of_shards_have_the_law_and_do_not_depend_on_who_makes_them(tmp_path):
    oracle, draws = gaussian(shards=4)
    assert draws.shape[:2] == (200, 60)
    assert_agrees(oracle, draws)
    quarters = draws.inputs.split(50)
    assert not any((quarters[0] == other).any() for other in quarters[1:])
    # by this process, and by two that make two each
    for n, devices in (1, None), (2, ["cpu", "cpu"]):
        assert_same(gaussian(run=tmp_path / f"{n}", devices=devices, shards=4)[1], draws)
    longer = dgm.extend(tmp_path / "2", 5, devices=["cpu"] * 2, progress=False)
    assert torch.equal(longer.inputs[:, :60], draws.inputs)
    assert longer.shape[1] == 65
    assert_same(dgm.extend(tmp_path / "1", 5, progress=False), longer)
    # the control: other shards have other random numbers
    assert not torch.equal(gaussian(shards=3)[1].inputs, draws.inputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:observed values")
def test_what_a_process_raises_is_raised_here():
    problem = dgm.condition(Ellipse(), torch.tensor([-1.0], dtype=FLOAT))
    with pytest.raises(dgm.errors.StartError, match="no inputs were found"):
        run(problem, devices=["cpu", "cpu"])


SCRIPT = """
import sys, dgm_infer as dgm
from tests.dgm_infer.runs.same import fibre
if __name__ == "__main__":
    devices = eval(sys.argv[2])
    # a run so long would be compiled at once, and the same up to rounding
    kernel = dgm.ConstrainedHMC(compile=False)
    dgm.sample(fibre(), kernel, chains=4, warmup=30, draws=100000, seed=7, run=sys.argv[1],
               checkpoint_every=0.2, progress=False, devices=devices, shards=devices and 2)
"""


def started(path, devices):
    script = path.parent / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(path), repr(devices)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
        try:
            if dgm.collect(path).shape[1] >= 5:
                return process
        except dgm.errors.CheckpointError:
            continue
    process.kill()
    raise AssertionError(process.communicate()[1])


@pytest.mark.slow
def test_a_process_killed_by_the_system_leaves_what_its_checkpoint_has(tmp_path, whole_of_fibre):
    """And its draws can be read while it runs."""
    process = started(tmp_path / "run", None)
    with pytest.raises(dgm.errors.ArgumentError, match="another process"):
        dgm.resume(tmp_path / "run", progress=False)
    process.kill()
    process.communicate()
    draws = dgm.collect(tmp_path / "run")
    assert draws.interrupted
    n = min(draws.shape[1], DRAWS)
    assert torch.equal(draws.inputs[:, :n], whole_of_fibre.inputs[:, :n])
    shorten(tmp_path / "run", draws.shape[1] + 3)
    assert torch.equal(dgm.resume(tmp_path / "run", progress=False).inputs[:, : draws.shape[1]], draws.inputs)


def shorten(path, draws):
    deadline = time.monotonic() + 60
    while True:
        try:
            folder = RunFolder.open("resume", path)
            with folder.writing() as writer:
                folder.change(writer, plan={**folder.plan, "draws": draws})
            return
        except dgm.errors.ArgumentError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_processes_of_shards_end_with_their_parent(tmp_path, stop):
    process = started(tmp_path / "run", ["cpu", "cpu"])
    process.send_signal(stop)
    error = process.communicate(timeout=60)[1]
    if stop == signal.SIGINT:
        assert "interrupted" in error
    # none holds the folder any longer
    deadline = time.monotonic() + 60
    n = dgm.collect(tmp_path / "run").shape[1]
    shorten(tmp_path / "run", count_of(RunFolder.open("resume", tmp_path / "run")))
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert dgm.resume(tmp_path / "run", progress=False).shape[1] >= n
            break
        except dgm.errors.ArgumentError:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_draws_have_the_digits_of_the_density(tmp_path):
    """Starts have those of torch's default; a run that goes on has the draws of one that was not stopped."""
    target = Bumps(torch.tensor([0.5, 2.0], dtype=FLOAT))
    whole = run(target, dgm.HMC(), draws=2 * DRAWS)
    assert whole.inputs.dtype == FLOAT
    run(target, dgm.HMC(), run=tmp_path / "run")
    assert torch.equal(dgm.extend(tmp_path / "run", draws=DRAWS, progress=False).inputs, whole.inputs)
