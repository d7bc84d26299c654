"""Stops at random moments, and at every statement of the store: ``python -m tests.dgm_infer.runs.fuzz [STOPS [SEED]]``.

Runs of chains and of evidence, by one process and by four, are stopped again and again until they end: by SIGKILL of
the process or of a worker, SIGTERM, Ctrl-C or two Ctrl-C. Then they are collected and extended, and have to equal to
the bit the run that was never stopped. Processes are forked, so that a stop takes no start of Python.
"""

import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

import dgm_infer as dgm
from dgm_infer.runs import replay
from dgm_infer.runs.store import Writer
from tests.dgm_infer.runs.same import Bumps, Well, assert_same, assert_same_evidence

DRAWS, MORE = 40, 5
# Seconds in which a process that was told to end ends, or is through.
PATIENCE = 15.0
KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "two SIGINT", "SIGKILL at a statement", "SIGKILL of a worker")
BASE = dgm.Gaussian(torch.zeros(3, 2, dtype=torch.float64), 1.5)
TARGET = Bumps(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
METHOD = dgm.GibbsTempering(draws=60, warmup=20, pilot_temperatures=15, n_steps=2)


class Case(NamedTuple):
    """A run: of what, in how many parts, by how many processes."""

    name: str
    parts: int
    processes: int

    def begin(self, draws=DRAWS, **where):
        options = {"chains": 4, "seed": 7, "progress": False, **where}
        if self.name == "evidence":
            return dgm.log_evidence(TARGET, BASE, METHOD, chunk=1 if self.parts > 1 else None, **options)
        shards = self.parts if self.parts > 1 or where else None
        return dgm.sample(Well(1.0), dgm.HMC(n_steps=2), warmup=15, draws=draws, shards=shards, **options)

    def pool(self):
        return nullcontext() if self.processes == 1 else ProcessPoolExecutor(self.processes, get_context("fork"))

    def check(self, path, wholes):
        """Raise unless the run at the path is the one that was not stopped."""
        same = assert_same_evidence if self.name == "evidence" else assert_same
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = dgm.resume(path, progress=False)
            except dgm.errors.CheckpointError:
                # the run had not begun
                found = self.begin(run=path)
            same(found, wholes[0])
            same(dgm.collect(path), wholes[0])
            if self.name == "sample":
                same(dgm.extend(path, MORE, progress=False), wholes[1])
        assert {each.suffix for each in path.iterdir()} - {".html"} == {".sqlite"}


CASES = [Case(name, parts, n) for name in ("sample", "evidence") for parts, n in ((1, 1), (3, 1), (3, 4))]


class Deadly:
    """A connection that ends the process after so many statements."""

    def __init__(self, connection, left):
        self.connection, self.left = connection, left

    def execute(self, *arguments):
        found = self.connection.execute(*arguments)
        self.left[0] -= 1
        if self.left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def __getattr__(self, name):
        return getattr(self.connection, name)


def make(path, case, statements):
    """What a stopped process does."""
    warnings.simplefilter("ignore")
    # a job in the background ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if statements:
        write, left = Writer.write, [statements]

        def written(self, records):
            if not isinstance(self._connection, Deadly):
                self._connection = Deadly(self._connection, left)
            write(self, records)

        Writer.write = written
    with case.pool() as pool:
        try:
            found = dgm.resume(path, executor=pool, progress=False)
        except dgm.errors.CheckpointError:
            found = case.begin(run=path, executor=pool, checkpoint_every=0.003)
    return not found.interrupted


def stopped(path, case, kind, random_numbers):
    """Whether a process that is stopped so was through before."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # with its workers it is a group
            os.setsid()
            statements = random_numbers.randrange(1, 200) if kind.endswith("statement") else 0
            code = 0 if make(path, case, statements) else 2
        except BaseException as error:
            lost = isinstance(error, dgm.errors.DgmInferError) and "was lost" in str(error)
            code = 3 if lost or isinstance(error, KeyboardInterrupt) else 1
            path.with_name("error").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    if not kind.endswith("statement"):
        time.sleep(random_numbers.uniform(0, 0.6 if case.processes == 1 else 1.5))
        target = random_numbers.choice(workers(child) or [child]) if kind.endswith("worker") else child
        for _ in range(2 if kind.startswith("two") else 1):
            with suppress(ProcessLookupError):
                os.kill(target, getattr(signal, kind.removeprefix("two ").split()[0]))
            time.sleep(random_numbers.uniform(0, 0.01))
    code = ended(child)
    # workers that outlive their process
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return code


def ended(child):
    """The exit code of a process; of one that does not end, because a Ctrl-C has hit a pool of the standard library
    between two of its locks, that of SIGKILL, by which its user ends it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def workers(process):
    """The processes that a process has started."""
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def fuzz(stops, seed, seconds=float("inf")):
    """Make so many stops, or as many as fit; how many of each kind met a running process, and in which cases."""
    torch.set_num_threads(1)
    replay.LOOPS = replay.LoopSettings(shortest=0.0, share=float("inf"))
    random_numbers, end = random.Random(seed), time.monotonic() + seconds
    met = dict.fromkeys([*KINDS, *CASES], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wholes = {case: [case.begin(), case.begin(DRAWS + MORE)] for case in CASES if case.processes == 1}
    while sum(met[kind] for kind in KINDS) < stops and time.monotonic() < end:
        case = random_numbers.choice(CASES)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            for _ in range(random_numbers.randrange(1, 6)):
                kind = random_numbers.choice(KINDS if case.processes > 1 else KINDS[:-1])
                code = stopped(path, case, kind, random_numbers)
                met[kind] += code != 0
                met[case] += code != 0
                if code == 1:
                    raise AssertionError(f"{case}, {kind}: {path.with_name('error').read_text()}")
                if code == 0:
                    break
            case.check(path, wholes[case._replace(processes=1)])
    return met


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    for each, count in fuzz(given[0] if given else 300, given[1] if len(given) > 1 else 1).items():
        print(count, each if isinstance(each, str) else f"{each.name}, {each.parts} parts, {each.processes} processes")
