"""Compiled programs on disk: loaded by the next process, never instead of another program, never in the way."""

import os
import subprocess
import sys

import jax
import pytest
import torch

from dgm_infer.autodiff import xla
from dgm_infer.autodiff.programs import Program

FLOAT = torch.float64
X = torch.linspace(-1, 1, 7, dtype=FLOAT)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(xla.FOLDER, str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture
def compilations(monkeypatch):
    made, own = [], jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, *a, **k: made.append(self) or own(self, *a, **k))
    return made


def value(weights=2.0):
    # constants of a program are its inputs or its text
    program = Program(lambda x, source: (x * weights).exp().cumsum(-1), X)
    program.compile()
    return program(X, torch.Generator())


def expected(weights=2.0):
    return (X * weights).exp().cumsum(-1)


def test_what_was_compiled_is_loaded_and_computes_the_same(folder, compilations):
    first = value()
    (file,) = folder.iterdir()
    n = len(compilations)
    assert n >= 1
    torch.testing.assert_close(first, expected())
    assert torch.equal(value(), first)
    assert len(compilations) == n
    assert list(folder.iterdir()) == [file]


@pytest.mark.slow
def test_another_process_loads_it(folder):
    code = (
        "import jax; own = jax.stages.Lowered.compile; made = []\n"
        "jax.stages.Lowered.compile = lambda self, *a, **k: made.append(self.as_text()) or own(self, *a, **k)\n"
        "from tests.dgm_infer.autodiff.test_xla_store import value\n"
        "print(value().sum().item().hex(), sum('exponential' in text for text in made))"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    calls = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    (number, compiled), (again, loaded) = (call.stdout.split() for call in calls)
    assert number == again
    assert (compiled, loaded) == ("1", "0")


@pytest.mark.parametrize("weights", [3.0, torch.linspace(1, 2, 7, dtype=FLOAT), torch.linspace(1, 3, 7, dtype=FLOAT)])
def test_other_constants_are_another_program(folder, weights):
    value()
    torch.testing.assert_close(value(weights), expected(weights))


def test_large_constants_within_are_part_of_the_key(folder):
    def program(weights):
        made = jax.jit(lambda x: x @ weights).lower(jax.numpy.ones(200))
        return made.as_text()

    weights = jax.random.normal(jax.random.key(0), (200, 200))
    assert program(weights) == program(weights + 0.0)
    assert program(weights) != program(weights.at[99, 99].add(1.0))


@pytest.mark.parametrize(
    "damage", [lambda code: code[:-100], lambda code: code[:40] + b"0" + code[41:], lambda code: b""]
)
def test_a_damaged_file_is_compiled_anew(folder, damage):
    value()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    torch.testing.assert_close(value(), expected())
    assert len(file.read_bytes()) > 1000


def test_an_empty_name_keeps_nothing(folder, monkeypatch):
    monkeypatch.setenv(xla.FOLDER, "")
    torch.testing.assert_close(value(), expected())
    assert not folder.exists()


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_write_to_is_not_used(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    torch.testing.assert_close(value(), expected())
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_made_is_not_needed(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(xla.FOLDER, str(tmp_path / "file" / "programs"))
    torch.testing.assert_close(value(), expected())


def test_those_that_were_used_last_are_kept(folder, monkeypatch):
    monkeypatch.setattr(xla, "_KEPT", 2)
    made = []
    for k, weights in enumerate((1.0, 2.0, 3.0)):
        before = set(folder.iterdir()) if k else set()
        value(weights)
        made += set(folder.iterdir()) - before
        os.utime(made[-1], (k + 1, k + 1))
        if k == 1:
            # used again
            value(1.0)
    assert made[0].exists()
    assert not made[1].exists()
