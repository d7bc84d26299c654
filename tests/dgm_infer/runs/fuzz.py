"""Stops at random moments, and at every statement of the store: ``python -m tests.dgm_infer.runs.fuzz [STOPS [SEED]]``.

Every run is stopped again and again until it ends, by SIGKILL, SIGTERM, Ctrl-C or two Ctrl-C; then it is collected and
extended, and has to equal to the bit the run that was never stopped. A stop takes a forked process, not a new one.
"""

import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch

import dgm_infer as dgm
from dgm_infer.runs.store import Writer
from tests.dgm_infer.runs.same import Well, assert_same

DRAWS, MORE = 40, 5
KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "two SIGINT", "SIGKILL at a statement")


def sampled(draws, **where):
    return dgm.sample(Well(1.0), dgm.HMC(n_steps=2), chains=4, warmup=15, draws=draws, seed=7, progress=False, **where)


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


def make(path, shards, statements):
    """What a stopped process does."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if statements:
        write, left = Writer.write, [statements]

        def written(self, records):
            if not isinstance(self._connection, Deadly):
                self._connection = Deadly(self._connection, left)
            write(self, records)

        Writer.write = written
    try:
        draws = dgm.resume(path, progress=False)
    except dgm.errors.CheckpointError:
        draws = sampled(DRAWS, run=path, shards=shards, checkpoint_every=0.003)
    return not draws.interrupted


def stopped(path, shards, kind, random_numbers):
    """Whether a process that is stopped so was through before."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            statements = random_numbers.randrange(1, 200) if kind.endswith("statement") else 0
            code = 0 if make(path, shards, statements) else 2
        except BaseException:
            path.with_name("error").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    if not kind.endswith("statement"):
        time.sleep(random_numbers.uniform(0, 0.6))
        for _ in range(2 if kind.startswith("two") else 1):
            os.kill(child, getattr(signal, kind.split()[-1]))
            time.sleep(random_numbers.uniform(0, 0.01))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fuzz(stops, seed, seconds=float("inf")):
    """Make so many stops, or as many as fit; how many of each kind met a running process."""
    torch.set_num_threads(1)
    random_numbers, met, end = random.Random(seed), dict.fromkeys(KINDS, 0), time.monotonic() + seconds
    wholes = {shards: (sampled(DRAWS, shards=shards), sampled(DRAWS + MORE, shards=shards)) for shards in (1, 3)}
    while sum(met.values()) < stops and time.monotonic() < end:
        shards = random_numbers.choice([1, 3])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            for _ in range(random_numbers.randrange(1, 6)):
                kind = random_numbers.choice(KINDS)
                code = stopped(path, shards, kind, random_numbers)
                met[kind] += code != 0
                if code == 1 and not kind.endswith("SIGINT"):
                    raise AssertionError(f"{kind}: {path.with_name('error').read_text()}")
                if code == 0:
                    break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    draws = dgm.resume(path, progress=False)
                except dgm.errors.CheckpointError:
                    # the run had not begun
                    draws = sampled(DRAWS, run=path, shards=shards)
            assert_same(draws, wholes[shards][0])
            assert_same(dgm.collect(path), wholes[shards][0])
            assert_same(dgm.extend(path, MORE, progress=False), wholes[shards][1])
            assert {each.suffix for each in path.iterdir()} - {".html"} == {".sqlite"}
    return met


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    print(fuzz(given[0] if given else 300, given[1] if len(given) > 1 else 1))
