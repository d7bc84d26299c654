"""Runs in a folder: stopped anywhere and resumed, extended, collected, in shards: the draws are those of one run."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.runs.folder import RunFolder
from dgm_infer.runs.store import Writer
from dgm_infer.sampling import course as course_module
from dgm_infer.sampling.course import Course
from tests.models import Bent
from tests.oracles import FLOAT, Ellipse, assert_agrees, correlated_gaussian

ROOT = Path(__file__).resolve().parents[3]
CHAINS, WARMUP, DRAWS = 4, 30, 20


def fibre(values=0.3):
    return dgm.condition(Bent(), torch.full((2, 5), values, dtype=FLOAT))


def run(problem=None, kernel=None, **changes):
    options = {"chains": CHAINS, "warmup": WARMUP, "draws": DRAWS, "seed": 7, "progress": False} | changes
    return dgm.sample(fibre() if problem is None else problem, kernel or dgm.ConstrainedHMC(), **options)


@pytest.fixture(scope="module")
def whole():
    return run()


class Killed(BaseException):
    """Nothing catches it, as nothing does a kill."""


def killed_at(monkeypatch, transition, path, kind=Killed, **changes):
    """A run with a checkpoint after every transition that ends while it makes this one."""
    step, made = dgm.ConstrainedHMC.step, []

    def stepped(self, problem, state, rng):
        made.append(None)
        after = step(self, problem, state, rng)
        if len(made) == transition + started[0]:
            raise kind
        return after

    started, begin = [10**9], Course.begin.__func__

    def begun(cls, *arguments):
        found = begin(cls, *arguments)
        # starting points take transitions of their own
        started[0] = len(made)
        return found

    monkeypatch.setattr(dgm.ConstrainedHMC, "step", stepped)
    monkeypatch.setattr(Course, "begin", classmethod(begun))
    try:
        return run(run=path, checkpoint_every=1e-9, **changes)
    finally:
        monkeypatch.undo()


def assert_same(draws, other):
    assert torch.equal(draws.inputs, other.inputs)
    assert draws.stats.keys() == other.stats.keys()
    for name, value in draws.stats.items():
        assert torch.equal(value, other.stats[name]), name
    assert draws.kernel == other.kernel
    assert draws.seed == other.seed
    assert draws.interrupted == other.interrupted
    assert (draws.ancestors is None) == (other.ancestors is None)
    assert draws.ancestors is None or torch.equal(draws.ancestors, other.ancestors)


def test_a_run_in_a_folder_has_the_draws_of_one_without(tmp_path, whole):
    assert_same(run(run=tmp_path / "run", checkpoint_every=1e-9), whole)
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)
    assert_same(dgm.collect(tmp_path / "run"), whole)


@pytest.mark.parametrize("transition", [1, 4, 7, 13, 29, 30, 31, 42, 50])
def test_a_run_killed_at_any_transition_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, whole, transition):
    """In start-up of the warm-up, in adaptation, at its end, in the main run, at the last draw."""
    with pytest.raises(Killed):
        killed_at(monkeypatch, transition, tmp_path / "run")
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


def test_control_other_random_numbers_after_a_stop_give_other_draws(tmp_path, monkeypatch, whole):
    with pytest.raises(Killed):
        killed_at(monkeypatch, 40, tmp_path / "run")
    resume = Course.resume

    def careless(self, *arguments):
        resume(self, *arguments)
        self._rng.manual_seed(0)

    monkeypatch.setattr(Course, "resume", careless)
    draws = dgm.resume(tmp_path / "run", progress=False)
    assert torch.equal(draws.inputs[:, :9], whole.inputs[:, :9])
    assert not torch.equal(draws.inputs[:, 10:], whole.inputs[:, 10:])


def test_a_run_may_be_stopped_again_and_again(tmp_path, monkeypatch, whole):
    with pytest.raises(Killed):
        killed_at(monkeypatch, 3, tmp_path / "run")
    for _ in range(9):
        step, made = dgm.ConstrainedHMC.step, []

        def stepped(self, problem, state, rng, step=step, made=made):
            made.append(None)
            if len(made) == 6:
                raise Killed
            return step(self, problem, state, rng)

        monkeypatch.setattr(dgm.ConstrainedHMC, "step", stepped)
        with pytest.raises(Killed):
            dgm.resume(tmp_path / "run", progress=False)
        monkeypatch.undo()
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


def test_a_stop_before_the_first_checkpoint_begins_anew(tmp_path, monkeypatch, whole):
    monkeypatch.setattr(Course, "begin", classmethod(lambda *_: (_ for _ in ()).throw(Killed)))
    with pytest.raises(Killed):
        run(run=tmp_path / "run")
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
    short = run(run=tmp_path / "run", draws=8)
    assert short.shape[1] == 8
    assert_same(dgm.extend(tmp_path / "run", draws=DRAWS - 8, progress=False), whole)
    assert dgm.extend(tmp_path / "run", draws=1, progress=False).shape[1] == DRAWS + 1


def test_a_stopped_run_is_extended_after_what_was_left(tmp_path, monkeypatch, whole):
    with pytest.raises(Killed):
        killed_at(monkeypatch, 20, tmp_path / "run", draws=8)
    assert_same(dgm.extend(tmp_path / "run", draws=DRAWS - 8, progress=False), whole)


def test_thinned_draws_of_latents_alone_go_on_within_a_draw(tmp_path, monkeypatch):
    options = {"thin": 3, "keep": "latents", "draws": 6}
    whole = run(**options)
    with pytest.raises(Killed):
        killed_at(monkeypatch, WARMUP + 8, tmp_path / "run", **options)
    assert dgm.collect(tmp_path / "run").shape[1] == 2
    draws = dgm.resume(tmp_path / "run", progress=False)
    assert draws.inputs is None
    assert torch.equal(draws.latents["z"], whole.latents["z"])


def test_draws_without_a_warm_up_and_from_given_starts(tmp_path, monkeypatch):
    initial = fibre().start(CHAINS, torch.Generator().manual_seed(3))
    options = {"warmup": 0, "initial": initial}
    whole = run(**options)
    with pytest.raises(Killed):
        killed_at(monkeypatch, 5, tmp_path / "run", **options)
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


def test_the_pick_of_the_pilot_is_kept(tmp_path, monkeypatch):
    problem = dgm.condition(dgm.WithNoise(Bent(), 0.3), torch.full((2, 5), 0.3, dtype=FLOAT))
    options = {"chains": CHAINS, "warmup": WARMUP, "draws": DRAWS, "seed": 7, "progress": False}
    whole = dgm.sample(problem, **options)
    dgm.sample(problem, run=tmp_path / "run", **{**options, "draws": 5})
    monkeypatch.setattr(course_module, "pick_kernel", None)
    assert_same(dgm.extend(tmp_path / "run", draws=DRAWS - 5, progress=False), whole)


def test_the_problem_comes_back_with_the_draws(tmp_path, whole):
    run(run=tmp_path / "run")
    draws = dgm.collect(tmp_path / "run")
    assert torch.equal(draws.generate(2), whole.generate(2))
    assert torch.equal(draws.latents["z"], whole.latents["z"])


def test_the_last_state_says_which_chains_never_moved(tmp_path):
    frozen = dgm.ConstrainedHMC(step_size=0.5, n_steps=2, tolerance=1e-15, max_iterations=1)
    with pytest.warns(UserWarning, match="never moved"):
        run(run=tmp_path / "run", kernel=frozen, warmup=0, draws=60)
    with pytest.warns(UserWarning, match="never moved"):
        dgm.extend(tmp_path / "run", draws=20, progress=False)


class TestProblemsThatCannotBeStored:
    @pytest.fixture
    def target(self):
        return dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)

    def test_are_sampled_with_a_warning_and_given_again(self, tmp_path, target):
        options = {"chains": 4, "warmup": 10, "seed": 1, "progress": False}
        whole = dgm.sample(target, dgm.HMC(), draws=9, **options)
        with pytest.warns(UserWarning, match=r"cannot be stored.*dgm\.resume\(run, problem=\.\.\.\)"):
            dgm.sample(target, dgm.HMC(), draws=4, run=tmp_path / "run", **options)
        with pytest.raises(dgm.errors.CheckpointError, match="give problem="):
            dgm.resume(tmp_path / "run", progress=False)
        draws = dgm.extend(tmp_path / "run", 5, target, progress=False)
        assert_same(draws, whole)
        assert_same(dgm.collect(tmp_path / "run", target), whole)

    def test_do_not_go_to_other_processes(self, tmp_path, target):
        with pytest.raises(dgm.errors.ArgumentError, match=r"devices=.*cannot be stored"):
            dgm.sample(target, run=tmp_path / "run", devices=["cpu", "cpu"], progress=False)
        assert not (tmp_path / "run").exists()


def test_another_problem_is_refused(tmp_path):
    run(run=tmp_path / "run")
    for call in (dgm.resume, dgm.collect):
        with pytest.raises(dgm.errors.ArgumentError, match="give the problem that was sampled"):
            call(tmp_path / "run", fibre(0.9))


def refusing(monkeypatch, refused):
    """Writes whose number, from 0 on, is refused: meanwhile the disk is full."""
    write, made = Writer.write, []

    def written(self, records):
        made.append(None)
        if refused(len(made) - 1):
            raise dgm.errors.ArgumentError(f"{self.path} cannot be written: database or disk is full")
        write(self, records)

    monkeypatch.setattr(Writer, "write", written)


def test_a_disk_that_refuses_the_last_checkpoint_costs_no_draw(tmp_path, monkeypatch, whole):
    refusing(monkeypatch, lambda n: n > 1)
    with pytest.warns(UserWarning, match=r"not all draws are in .*disk is full"):
        draws = run(run=tmp_path / "run", checkpoint_every=1000)
    assert torch.equal(draws.inputs, whole.inputs)


def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path, monkeypatch, whole):
    refusing(monkeypatch, lambda n: 10 < n < 40)
    with pytest.warns(UserWarning, match=r"no checkpoint after .* transitions: .*disk is full"):
        draws = run(run=tmp_path / "run", checkpoint_every=1e-9)
    assert_same(draws, whole)
    assert_same(dgm.collect(tmp_path / "run"), whole)


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


@pytest.mark.parametrize("more", [10**15, 2**70, 10**400])
def test_an_extension_that_no_memory_holds_is_refused_and_the_run_as_it_was(tmp_path, whole, more):
    run(run=tmp_path / "run", draws=8)
    with pytest.raises(dgm.errors.ArgumentError, match="draws"):
        dgm.extend(tmp_path / "run", more, progress=False)
    assert_same(dgm.extend(tmp_path / "run", DRAWS - 8, progress=False), whole)


def test_an_extension_that_is_stopped_before_its_first_draw_leaves_the_run_as_it_was(tmp_path, monkeypatch, whole):
    run(run=tmp_path / "run", draws=8)
    monkeypatch.setattr(dgm.ConstrainedHMC, "step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    for _ in range(2):
        with pytest.warns(UserWarning, match="interrupted"):
            dgm.extend(tmp_path / "run", 5, progress=False)
    monkeypatch.undo()
    assert dgm.resume(tmp_path / "run", progress=False).shape[1] == 8
    assert_same(dgm.extend(tmp_path / "run", DRAWS - 8, progress=False), whole)


def test_an_interrupt_right_after_any_checkpoint_repeats_no_draw(tmp_path, monkeypatch, whole):
    """The commit is the only record of what is written."""
    write = Writer.write
    for stop in range(2, 12):
        made = []

        def written(self, records, made=made, stop=stop):
            write(self, records)
            if "state" in records:
                made.append(None)
                if len(made) == 40 + stop:
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
    step, write, made = dgm.ConstrainedHMC.step, Writer.write, []

    def stepped(self, problem, state, rng):
        found = step(self, problem, state, rng)
        if threading.current_thread() is threading.main_thread() and len(made) == 1:
            made.append(None)
            raise KeyboardInterrupt
        return found

    def written(self, records):
        if len(made) == 2:
            raise KeyboardInterrupt
        write(self, records)
        if any(name.startswith("draws/") for name in records):
            made.append(None)

    monkeypatch.setattr(dgm.ConstrainedHMC, "step", stepped)
    monkeypatch.setattr(Writer, "write", written)
    with pytest.warns(UserWarning, match="interrupted while they were written"):
        draws = run(run=tmp_path / "run", checkpoint_every=1e-9)
    n = draws.shape[1]
    assert n > 0
    assert torch.equal(draws.inputs, whole.inputs[:, :n])
    monkeypatch.undo()
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


def test_a_second_run_in_the_same_folder_is_refused_and_has_changed_nothing(tmp_path, monkeypatch, whole):
    begin, second = Course.begin.__func__, []

    def begun(cls, *arguments):
        before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        with pytest.raises(dgm.errors.ArgumentError, match="there is a run in it already"):
            monkeypatch.undo()
            run(fibre(0.9), run=tmp_path / "run")
        with pytest.raises(dgm.errors.ArgumentError, match="another process goes on"):
            dgm.resume(tmp_path / "run", progress=False)
        assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        second.append(None)
        return begin(cls, *arguments)

    monkeypatch.setattr(Course, "begin", classmethod(begun))
    assert_same(run(run=tmp_path / "run"), whole)
    assert second


def test_of_two_threads_that_begin_one_run_one_is_refused(tmp_path):
    found, barrier = [], threading.Barrier(2)

    def begin(value):
        barrier.wait()
        try:
            found.append(run(fibre(value), run=tmp_path / "run", warmup=2, draws=2))
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
    with pytest.raises(dgm.errors.CheckpointError, match="no draws yet"):
        dgm.collect(tmp_path / "run")
    assert_same(dgm.resume(tmp_path / "run", progress=False), whole)


@pytest.mark.parametrize("name", ["run", "shard-0"])
def test_a_flipped_bit_is_found(tmp_path, whole, name):
    run(run=tmp_path / "run")
    path = tmp_path / "run" / f"{name}.sqlite"
    content = path.read_bytes()
    found = 0
    for place in torch.randint(8 * len(content), (40,), generator=torch.Generator().manual_seed(3)).tolist():
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            draws = dgm.collect(tmp_path / "run")
        except dgm.errors.DgmInferError as error:
            assert "\n" not in str(error)
            found += 1
        else:
            assert_same(draws, whole)
    assert found > 5


@pytest.mark.parametrize("kind", ["removed", "moved", "replaced by a file"])
def test_a_folder_that_changes_under_the_run_costs_no_draw(tmp_path, monkeypatch, whole, kind):
    folder, advance = tmp_path / "run", Course.advance

    def changed(self, bar, after_each):
        if kind == "moved":
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder)
        if kind == "replaced by a file":
            folder.write_text("a file")
        advance(self, bar, after_each)

    monkeypatch.setattr(Course, "advance", changed)
    with pytest.warns(UserWarning, match="not all draws are in") as caught:
        draws = run(run=folder, checkpoint_every=1000)
    assert all("\n" not in str(each.message) for each in caught)
    assert torch.equal(draws.inputs, whole.inputs)


class Factored(Bent):
    """The same outputs, and another log factor."""

    def log_factor(self, u):
        return -u.square().sum(-1)


OTHERS = {
    "a log factor": (
        lambda: fibre(),
        lambda: dgm.condition(Factored(), torch.full((2, 5), 0.3, dtype=FLOAT)),
    ),
    "an observation": (lambda: fibre(), lambda: fibre(0.9)),
    "a target": (lambda: fibre(), lambda: dgm.Target(lambda x: x.square().sum(-1), 7, (2,))),
    "an energy": (
        lambda: dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2),
        lambda: dgm.Target(lambda x: 0.6 * x.square().sum(-1), 2),
    ),
}


@pytest.mark.filterwarnings("ignore:.*cannot be stored")
@pytest.mark.parametrize(("make", "other"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("keep", ["inputs", "latents"])
def test_any_other_problem_is_refused(tmp_path, make, other, keep):
    problem = make()
    kernel = dgm.ConstrainedHMC() if isinstance(problem, dgm.Fibre) else dgm.HMC()
    run(problem, kernel, run=tmp_path / "run", keep=keep, warmup=2, draws=2)
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
    executor = Lossy(lost={1}, before={0, 3})
    with pytest.warns(UserWarning, match=r"the worker of .* was lost \(OSError: the node is gone\)"):
        draws = run(run=tmp_path / "run", executor=executor, shards=4)
    assert_same(draws, whole)
    assert executor.submitted[:2] == ["warmup", "warmup"]
    assert sorted(executor.submitted[2:]) == ["shard-0", "shard-1", "shard-1", "shard-2", "shard-3"]
    monkeypatch.setattr(Course, "advance", None)
    assert_same(dgm.resume(tmp_path / "run", executor=Lossy(set()), progress=False), whole)


def test_workers_that_are_lost_again_and_again_end_the_run_in_one_line(tmp_path):
    with (
        pytest.raises(dgm.errors.DgmInferError, match=r"worker of warmup was lost .*dgm\.resume") as caught,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        run(run=tmp_path / "run", executor=Lossy(set(), before=set(range(10))), shards=4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("draws", [0, 1.5, None])
def test_an_extension_has_at_least_one_draw(tmp_path, draws):
    run(run=tmp_path / "run")
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
    assert not any(torch.isclose(quarters[0], other).any() for other in quarters[1:])
    for n in (1, 2, 4):
        assert_same(gaussian(run=tmp_path / f"{n}", devices=["cpu"] * n, shards=4)[1], draws)
    with ProcessPoolExecutor(3, get_context("spawn")) as executor:
        assert_same(gaussian(run=tmp_path / "executor", executor=executor, shards=4)[1], draws)
    # without a folder, a temporary one
    assert_same(gaussian(devices=["cpu", "cpu"], shards=4)[1], draws)
    longer = dgm.extend(tmp_path / "2", 5, devices=["cpu"] * 3, progress=False)
    assert torch.equal(longer.inputs[:, :60], draws.inputs)
    assert longer.shape[1] == 65
    assert_same(dgm.extend(tmp_path / "1", 5, progress=False), longer)
    # the control: other shards have other random numbers
    assert not torch.equal(gaussian(shards=3)[1].inputs, draws.inputs)


def test_shards_stopped_anywhere_go_on(tmp_path, monkeypatch):
    whole = run(shards=3)
    assert whole.shape[:2] == (CHAINS, DRAWS)
    step, made = dgm.ConstrainedHMC.step, []

    def stepped(self, problem, state, rng):
        made.append(None)
        if len(made) % 37 == 0:
            raise Killed
        return step(self, problem, state, rng)

    monkeypatch.setattr(dgm.ConstrainedHMC, "step", stepped)
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:observed values")
def test_what_a_process_raises_is_raised_here():
    problem = dgm.condition(Ellipse(), torch.tensor([-1.0], dtype=FLOAT))
    with pytest.raises(dgm.errors.StartError, match="no inputs were found"):
        run(problem, devices=["cpu", "cpu"])


SCRIPT = """
import sys, dgm_infer as dgm
from tests.dgm_infer.runs.test_runs import fibre
if __name__ == "__main__":
    dgm.sample(fibre(), dgm.ConstrainedHMC(), chains=4, warmup=30, draws=100000, seed=7, run=sys.argv[1],
               checkpoint_every=0.2, progress=False, devices=eval(sys.argv[2]))
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
def test_a_process_killed_by_the_system_leaves_what_its_checkpoint_has(tmp_path, whole):
    """And its draws can be read while it runs."""
    process = started(tmp_path / "run", None)
    with pytest.raises(dgm.errors.ArgumentError, match="another process"):
        dgm.resume(tmp_path / "run", progress=False)
    process.kill()
    process.communicate()
    draws = dgm.collect(tmp_path / "run")
    assert draws.interrupted
    n = min(draws.shape[1], DRAWS)
    assert torch.equal(draws.inputs[:, :n], whole.inputs[:, :n])
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
    shorten(tmp_path / "run", n + 3)
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert dgm.resume(tmp_path / "run", progress=False).shape[1] >= n
            break
        except dgm.errors.ArgumentError:
            assert time.monotonic() < deadline
            time.sleep(0.5)
