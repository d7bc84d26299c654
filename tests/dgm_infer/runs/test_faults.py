"""Whatever happens to a run's folder, its process or its workers: the same draws, or one line, and nothing made up."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.runs.folder import RunFolder
from dgm_infer.runs.store import Writer
from dgm_infer.sampling.run import SamplingRun
from tests.dgm_infer.runs.same import Killed, Well, assert_same
from tests.models import Bent
from tests.oracles import FLOAT

ROOT = Path(__file__).resolve().parents[3]
CHAINS, WARMUP, DRAWS = 4, 6, 20


def target(width=1.0):
    return Well(width)


def run(problem=None, kernel=None, **changes):
    options = {"chains": CHAINS, "warmup": WARMUP, "draws": DRAWS, "seed": 7, "progress": False} | changes
    kernel = dgm.HMC(n_steps=2) if kernel is None else kernel
    return dgm.sample(target() if problem is None else problem, kernel, **options)


@pytest.fixture(scope="module")
def whole():
    return run()


def refusing(monkeypatch, refused, read_only=False):
    """Writes whose number, from 0 on, is refused: meanwhile the disk is full, or read-only."""
    write, made = Writer.write, []

    def written(self, records):
        made.append(None)
        if read_only:
            self._connection.execute(f"PRAGMA query_only = {refused(len(made) - 1):d}")
        elif refused(len(made) - 1):
            raise dgm.errors.ArgumentError(f"{self.path} cannot be written: database or disk is full")
        write(self, records)

    monkeypatch.setattr(Writer, "write", written)


@pytest.mark.parametrize(("read_only", "why"), [(False, "disk is full"), (True, "a readonly database")])
def test_a_disk_that_refuses_the_last_checkpoint_costs_no_draw(tmp_path, monkeypatch, whole, read_only, why):
    refusing(monkeypatch, lambda n: n > 1, read_only)
    with pytest.warns(UserWarning, match=f"not all draws are in .*{why}"):
        draws = run(run=tmp_path / "run", checkpoint_every=1000)
    assert torch.equal(draws.inputs, whole.inputs)


def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path, monkeypatch, whole):
    refusing(monkeypatch, lambda n: 4 < n < 15)
    with pytest.warns(UserWarning, match=r"no checkpoint after .* transitions: .*disk is full"):
        draws = run(run=tmp_path / "run", checkpoint_every=1e-9)
    assert_same(draws, whole)
    assert_same(dgm.collect(tmp_path / "run"), whole)


def test_shards_stopped_anywhere_go_on(tmp_path, monkeypatch):
    whole = run(shards=3)
    assert whole.shape[:2] == (CHAINS, DRAWS)
    step, made = dgm.HMC.step, []

    def stepped(self, problem, state, rng):
        made.append(None)
        if len(made) % 11 == 0:
            raise Killed
        return step(self, problem, state, rng)

    monkeypatch.setattr(dgm.HMC, "step", stepped)
    draws, stops = None, 0
    while draws is None:
        try:
            if stops == 0:
                draws = run(run=tmp_path / "run", checkpoint_every=1e-9, shards=3)
            else:
                draws = dgm.resume(tmp_path / "run", progress=False)
        except Killed:
            stops += 1
    assert stops > 2
    assert_same(draws, whole)
    assert_same(dgm.collect(tmp_path / "run"), whole)


@pytest.mark.parametrize("more", [10**15, 2**70, 10**400])
def test_an_extension_that_no_memory_holds_is_refused_and_the_run_as_it_was(tmp_path, whole, more):
    run(run=tmp_path / "run", draws=8)
    with pytest.raises(dgm.errors.ArgumentError, match="draws"):
        dgm.extend(tmp_path / "run", more, progress=False)
    assert_same(dgm.extend(tmp_path / "run", DRAWS - 8, progress=False), whole)


def test_an_extension_that_is_stopped_before_its_first_draw_leaves_the_run_as_it_was(tmp_path, monkeypatch, whole):
    run(run=tmp_path / "run", draws=8)
    monkeypatch.setattr(dgm.HMC, "step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    for _ in range(2):
        with pytest.warns(UserWarning, match="interrupted"):
            dgm.extend(tmp_path / "run", 5, progress=False)
    monkeypatch.undo()
    assert dgm.resume(tmp_path / "run", progress=False).shape[1] == 8
    assert_same(dgm.extend(tmp_path / "run", DRAWS - 8, progress=False), whole)


def test_an_interrupt_right_after_any_checkpoint_repeats_no_draw(tmp_path, monkeypatch, whole):
    """The commit is the only record of what is written."""
    write = Writer.write
    for stop in range(2, 20, 4):
        made = []

        def written(self, records, made=made, stop=stop):
            write(self, records)
            if "state" in records:
                made.append(None)
                if len(made) == WARMUP + stop:
                    raise KeyboardInterrupt

        monkeypatch.setattr(Writer, "write", written)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(run=tmp_path / f"{stop}", checkpoint_every=1e-9)
        monkeypatch.undo()
        n = dgm.collect(tmp_path / f"{stop}").shape[1]
        assert torch.equal(dgm.collect(tmp_path / f"{stop}").inputs, whole.inputs[:, :n])
        assert_same(dgm.resume(tmp_path / f"{stop}", progress=False), whole)


def test_two_interrupts_of_which_the_second_meets_the_last_write_return_the_draws(tmp_path, monkeypatch, whole):
    step, write, made = dgm.HMC.step, Writer.write, []

    def stepped(self, problem, state, rng):
        made.append(None)
        if len(made) == WARMUP + 10:
            raise KeyboardInterrupt
        return step(self, problem, state, rng)

    def written(self, records):
        if len(made) == WARMUP + 10:
            raise KeyboardInterrupt
        write(self, records)

    monkeypatch.setattr(dgm.HMC, "step", stepped)
    monkeypatch.setattr(Writer, "write", written)
    with pytest.warns(UserWarning, match="interrupted while they were written"):
        draws = run(run=tmp_path / "run", checkpoint_every=1000)
    n = draws.shape[1]
    assert n > 0
    assert torch.equal(draws.inputs, whole.inputs[:, :n])
    monkeypatch.undo()
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


def test_a_second_run_in_the_same_folder_is_refused_and_has_changed_nothing(tmp_path, monkeypatch, whole):
    begin, second = SamplingRun.begin.__func__, []

    def begun(cls, *arguments):
        before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        monkeypatch.undo()
        with pytest.raises(dgm.errors.ArgumentError, match="there is a run in it already"):
            run(target(0.9), run=tmp_path / "run")
        with pytest.raises(dgm.errors.ArgumentError, match="another process goes on"):
            dgm.resume(tmp_path / "run", progress=False)
        assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        second.append(None)
        return begin(cls, *arguments)

    monkeypatch.setattr(SamplingRun, "begin", classmethod(begun))
    assert_same(run(run=tmp_path / "run"), whole)
    assert second


def test_of_two_threads_that_begin_one_run_one_is_refused(tmp_path):
    found, barrier = [], threading.Barrier(2)

    def begin(value):
        barrier.wait()
        try:
            found.append(run(target(value), run=tmp_path / "run", warmup=2, draws=2))
        except dgm.errors.ArgumentError as error:
            found.append(error)

    threads = [threading.Thread(target=begin, args=(value,)) for value in (0.3, 0.9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (draws,) = [each for each in found if not isinstance(each, Exception)]
    assert torch.equal(dgm.resume(tmp_path / "run", progress=False).inputs, draws.inputs)


def user_files(folder):
    (folder / "shard-0").mkdir(parents=True)
    (folder / "problem.pt").write_text("mine")
    (folder / "shard-0" / "notes.txt").write_text("mine")


def linked_file(folder):
    folder.mkdir()
    (folder.parent / "other").write_text("mine")
    (folder / "shard-0.sqlite").symlink_to(folder.parent / "other")


def link(folder):
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("make", [user_files, linked_file, link, lambda folder: folder.write_text("mine")])
def test_what_is_not_a_run_is_refused_and_nothing_touched(tmp_path, make):
    make(tmp_path / "run")

    def contents():
        return {str(p): p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}

    before = contents()
    with pytest.raises(dgm.errors.ArgumentError, match=r"not a run|symbolic link"):
        run(run=tmp_path / "run")
    for call in (dgm.resume, dgm.collect, lambda path: dgm.extend(path, 3)):
        with pytest.raises(dgm.errors.DgmInferError):
            call(tmp_path / "run")
    assert contents() == before


@pytest.mark.parametrize("path", ["/", "a\0b", "x" * 5000])
def test_paths_that_cannot_be_a_run_are_one_line(path):
    for call in (lambda: run(run=path), lambda: dgm.collect(path)):
        with pytest.raises(dgm.errors.DgmInferError) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_the_home_folder_is_expanded(tmp_path, monkeypatch, whole):
    monkeypatch.setenv("HOME", str(tmp_path))
    run(run="~/run")
    assert (tmp_path / "run").is_dir()
    assert_same(dgm.collect("~/run"), whole)


def test_an_empty_folder_takes_a_run(tmp_path, whole):
    (tmp_path / "run").mkdir()
    assert_same(run(run=tmp_path / "run"), whole)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_shard_that_is_missing_is_never_made_up(tmp_path, shards):
    run(run=tmp_path / "run", shards=shards)
    whole = dgm.collect(tmp_path / "run")
    (tmp_path / "run" / "shard-0.sqlite").unlink()
    if shards == 1:
        with pytest.raises(dgm.errors.CheckpointError, match="no draws yet"):
            dgm.collect(tmp_path / "run")
    else:
        rest = dgm.collect(tmp_path / "run")
        assert rest.interrupted
        assert torch.equal(rest.inputs, whole.inputs[2:])
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


@pytest.mark.parametrize("name", ["shard-0", "run"])
def test_a_process_killed_as_it_made_a_file_is_as_one_that_had_not_begun_it(tmp_path, whole, name):
    run(run=tmp_path / "run")
    for path in (tmp_path / "run").iterdir():
        if name == "run":
            path.unlink()
    (tmp_path / "run" / f"{name}.sqlite").write_bytes(b"")
    with pytest.raises(dgm.errors.CheckpointError, match=r"no draws yet|not of a run"):
        dgm.collect(tmp_path / "run")
    again = run(run=tmp_path / "run") if name == "run" else dgm.resume(tmp_path / "run", progress=False)
    assert_same(again, whole)


def one_line(error):
    return "\n" not in str(error)


@pytest.mark.parametrize("name", ["run", "shard-0"])
def test_a_flipped_bit_is_found(tmp_path, whole, name):
    run(run=tmp_path / "run")
    path = tmp_path / "run" / f"{name}.sqlite"
    content = path.read_bytes()
    found = 0
    for place in torch.randint(8 * len(content), (100,), generator=torch.Generator().manual_seed(3)).tolist():
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            draws = dgm.collect(tmp_path / "run")
        except dgm.errors.DgmInferError as error:
            found += one_line(error)
        else:
            assert_same(draws, whole)
    assert found >= 5


@pytest.mark.parametrize("kind", ["removed", "moved", "replaced by a file"])
def test_a_folder_that_changes_under_the_run_costs_no_draw(tmp_path, monkeypatch, whole, kind):
    folder, advance = tmp_path / "run", SamplingRun.advance

    def changed(self, bar, after_each):
        if kind == "moved":
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder)
        if kind == "replaced by a file":
            folder.write_text("a file")
        advance(self, bar, after_each)

    monkeypatch.setattr(SamplingRun, "advance", changed)
    with pytest.warns(UserWarning, match="not all draws are in") as caught:
        draws = run(run=folder, checkpoint_every=1000)
    assert all("\n" not in str(each.message) for each in caught)
    assert torch.equal(draws.inputs, whole.inputs)


class Factored(Bent):
    """The same outputs, and another log factor."""

    def log_factor(self, u):
        return -u.square().sum(-1)


def fibre(values=0.3, model=Bent):
    return dgm.condition(model(), torch.full((2, 5), values, dtype=FLOAT))


OTHERS = {
    "a log factor": (fibre, lambda: fibre(model=Factored)),
    "an observation": (fibre, lambda: fibre(0.9)),
    "a target": (fibre, lambda: dgm.Target(lambda x: x.square().sum(-1), 7, (2,))),
    "an energy": (lambda: dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2), lambda: target(0.9)),
}


@pytest.mark.filterwarnings("ignore:.*cannot be stored")
@pytest.mark.parametrize(("make", "other"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("keep", ["inputs", "latents"])
def test_any_other_problem_is_refused(tmp_path, make, other, keep):
    problem = make()
    kernel = dgm.ConstrainedHMC(step_size=0.1) if isinstance(problem, dgm.Fibre) else dgm.HMC()
    initial = problem.start(CHAINS, torch.Generator().manual_seed(3))
    run(problem, kernel, initial=initial, run=tmp_path / "run", keep=keep, warmup=2, draws=2)
    for call in (dgm.resume, dgm.collect, lambda path, problem: dgm.extend(path, 5, problem)):
        with pytest.raises(dgm.errors.ArgumentError, match="give the problem that was sampled"):
            call(tmp_path / "run", other())
    assert dgm.extend(tmp_path / "run", 1, make(), progress=False).shape[1] == 3


def test_a_run_of_a_device_that_is_not_here_goes_on_on_the_cpu_when_asked(tmp_path, whole):
    run(run=tmp_path / "run", draws=8)
    folder = RunFolder.open("resume", tmp_path / "run")
    with folder.writing() as writer:
        folder.change(writer, device="cuda:7")
    with pytest.raises(dgm.errors.CheckpointError, match=r"of cuda:7, which is not here: devices=\['cpu'\]"):
        dgm.extend(tmp_path / "run", 2, progress=False)
    draws = dgm.extend(tmp_path / "run", 2, devices=["cpu"], progress=False)
    assert torch.equal(draws.inputs[:, :8], whole.inputs[:, :8])
    assert draws.shape[1] == 10


class Lossy:
    """An executor in this process that loses the workers of these submissions, some after they have worked."""

    def __init__(self, lost, before=()):
        self.lost, self.before, self.submitted = lost, before, []

    def submit(self, function, *arguments):
        number, future = len(self.submitted), Future()
        self.submitted.append(arguments[1])
        try:
            found = None if number in self.before else function(*arguments)
            if number in self.lost or number in self.before:
                raise OSError("the node is gone")
            future.set_result(found)
        except OSError as error:
            future.set_exception(error)
        return future


def test_shards_of_lost_workers_are_made_by_others_and_finished_ones_once(tmp_path, monkeypatch):
    whole = run(shards=4)
    executor, advance, advanced = Lossy(lost={1}, before={0, 3}), SamplingRun.advance, []
    monkeypatch.setattr(SamplingRun, "advance", lambda *arguments: advanced.append(None) or advance(*arguments))
    with pytest.warns(UserWarning, match=r"the worker of .* was lost \(OSError: the node is gone\)"):
        draws = run(run=tmp_path / "run", executor=executor, shards=4)
    assert_same(draws, whole)
    assert executor.submitted[:3] == ["warmup"] * 3
    assert sorted(executor.submitted[3:]) == ["shard-0", "shard-0", "shard-1", "shard-2", "shard-3"]
    assert len(advanced) == 5
    monkeypatch.setattr(SamplingRun, "advance", None)
    assert_same(dgm.resume(tmp_path / "run", executor=Lossy(set()), progress=False), whole)


def test_workers_have_eight_shards_and_one_process_has_one_unless_another_number_is_asked_for(tmp_path):
    few = {"chains": 9, "warmup": 2, "draws": 2}
    run(run=tmp_path / "workers", executor=Lossy(set()), **few)
    run(run=tmp_path / "alone", **few)
    run(run=tmp_path / "asked", shards=3, **few)
    counts = [len(RunFolder.open("watch", tmp_path / name).names) for name in ("workers", "alone", "asked")]
    assert counts == [8, 1, 3]


@pytest.mark.filterwarnings("ignore:the worker of")
def test_workers_that_are_lost_again_and_again_end_the_run_in_one_line(tmp_path):
    with pytest.raises(dgm.errors.DgmInferError, match=r"worker of warmup was lost .*dgm\.resume") as caught:
        run(run=tmp_path / "run", executor=Lossy(set(), before=set(range(10))), shards=4)
    assert "\n" not in str(caught.value)


def test_a_pool_that_breaks_between_two_submissions_ends_the_run_in_one_line_and_the_run_goes_on(tmp_path):
    class Broken(Lossy):
        def submit(self, function, *arguments):
            if len(self.submitted) == 3:
                raise BrokenProcessPool("a child process terminated abruptly")
            return super().submit(function, *arguments)

    with pytest.raises(dgm.errors.DgmInferError, match=r"was lost .*dgm\.resume") as caught:
        run(run=tmp_path / "run", executor=Broken(set()), shards=4)
    assert "\n" not in str(caught.value)
    assert_same(dgm.resume(tmp_path / "run", progress=False), run(shards=4))


@pytest.mark.slow
def test_runs_stopped_at_random_moments_equal_one_that_was_not():
    """Twenty of them, or as many as fit into 40 seconds; ``python -m tests.dgm_infer.runs.fuzz 300`` makes 300."""
    code = "from tests.dgm_infer.runs.fuzz import KINDS, fuzz; print(sum(map(fuzz(20, 1, 40).get, KINDS)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 10


class Threaded(Well):
    """An energy that torch's threads share."""

    def energy(self, x):
        return super().energy(x) + 0 * torch.ones(2**16, dtype=x.dtype).exp().sum()


def made_by(path, shard):
    """Draws of a shard that the folder has."""
    if not (path / f"{shard}.sqlite").exists():
        return 0
    return (RunFolder.open("watch", path).progress(shard) or {"count": 0})["count"]


FORKED = """
import sys, torch, dgm_infer as dgm
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tests.dgm_infer.runs.test_faults import Threaded
torch.set_num_threads(2)
torch.ones(2**22).exp().sum()
with ProcessPoolExecutor(2, get_context("fork")) as executor:
    draws = dgm.sample(Threaded(1.0), dgm.HMC(n_steps=2, compile=False), chains=4, warmup=6, draws=500000, seed=7,
                       progress=False, run=sys.argv[1], shards=4, checkpoint_every=0.1, executor=executor)
print("interrupted", draws.interrupted, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_a_forked_pool_whose_workers_compute_with_one_thread_each(tmp_path, presses):
    """A fork has torch's threads as names only: work for them would wait for ever."""
    (tmp_path / "script.py").write_text(FORKED)
    path = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, str(tmp_path / "script.py"), str(path)]
    # a terminal sends Ctrl-C to all processes of the command
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while not all(made_by(path, f"shard-{i}") for i in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        if presses == 2:
            # two that come at once are one
            assert process.stderr is not None
            while "stopping after this transition" not in process.stderr.readline():
                pass
            os.killpg(process.pid, signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if presses == 1:
        assert said == "interrupted True\n", errors
        # by the process that began the run, not by its workers
        assert errors.count("stopping after this transition") == 1
    else:
        assert process.returncode != 0
        assert errors.rstrip().endswith("KeyboardInterrupt")
    counts = [made_by(path, f"shard-{i}") for i in range(4)]
    # half a million take minutes
    assert 0 < max(counts) < 500000
    made = dgm.collect(path).inputs
    assert made is not None
    # of the same roundings, however many there are
    whole = run(Threaded(1.0), dgm.HMC(n_steps=2, compile=False), draws=made.shape[1], shards=4).inputs
    assert whole is not None
    assert all(any(torch.equal(one, other) for other in whole) for one in made)
