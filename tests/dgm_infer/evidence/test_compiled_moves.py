"""Moves along the path as machine code: the same estimates, the same counts, also after a stop."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.autodiff.programs import Program
from dgm_infer.evidence.path import AnnealedPath
from dgm_infer.sampling import execution
from dgm_infer.sampling.execution import CompilationSettings
from tests.known_evidence import known_linear_gaussian
from tests.oracles import FLOAT

COMPILED = CompilationSettings(compiles=1e-3, each=0.0)
NEVER = CompilationSettings(compiles=1e9)
# tempering and particles move by the code of annealing
METHODS = {
    "annealing": dgm.AIS(temperatures=60, pilot_temperatures=20),
    "steps with one momentum": dgm.evidence.HamiltonianAIS(temperatures=120, pilot_temperatures=20),
    "replicas": dgm.evidence.ParallelTempering(draws=40),
}


@pytest.fixture
def made(monkeypatch):
    """The programs that are compiled."""
    programs, compiled = [], Program.compile
    monkeypatch.setattr(
        Program, "compile", lambda self, *most, **last: (programs.append(self), compiled(self, *most, **last))[1]
    )
    return programs


def estimate(method, settings, monkeypatch):
    monkeypatch.setattr(execution, "_SETTINGS", settings)
    known = known_linear_gaussian()
    return dgm.log_evidence(known.target, known.base, method, chains=4, seed=3, coverage=False, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_estimates_are_those_of_moves_as_they_stand(name, made, monkeypatch):
    plain = estimate(METHODS[name], NEVER, monkeypatch)
    assert not made
    compiled = estimate(METHODS[name], COMPILED, monkeypatch)
    assert made
    torch.testing.assert_close(compiled.log_z, plain.log_z, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled.std_error, plain.std_error, rtol=1e-4, atol=1e-6)
    assert compiled.diagnostics["gradient_evaluations"] == plain.diagnostics["gradient_evaluations"]


def test_only_what_is_called_often_is_compiled(made):
    known = known_linear_gaussian()
    path, rng = AnnealedPath(known.target, known.base), torch.Generator().manual_seed(0)
    point = path.at(path.draws(4, rng))
    beta = torch.full(point.energy.shape, 0.5, dtype=FLOAT)
    for _ in range(3):
        point, _ = path.move(point, beta, 0.3 * torch.ones_like(beta), 5, rng)
    assert not made
    assert path.evaluations == 16


def test_what_is_known_to_be_called_often_is_compiled_at_once_and_for_good(made, monkeypatch):
    """For good: a run that was stopped knows of fewer calls to come."""
    known = known_linear_gaussian()
    path, rng = AnnealedPath(known.target, known.base), torch.Generator().manual_seed(0)
    point = path.at(path.draws(4, rng))
    beta = torch.full(point.energy.shape, 0.5, dtype=FLOAT)
    path.move(point, beta, 0.3 * beta, 5, rng, times=100_000)
    assert len(made) == 1
    again = AnnealedPath(known.target, known.base)
    vars(again).update(path.__getstate__())
    again.move(point, beta, 0.3 * beta, 5, rng, times=1)
    assert len(made) == 2


def test_a_run_that_goes_on_compiles_where_it_would_have(made, monkeypatch):
    """What was counted is kept with the path: otherwise a run that was stopped would round differently."""
    known = known_linear_gaussian()
    rng = torch.Generator().manual_seed(0)
    whole, beta = AnnealedPath(known.target, known.base), 0.5 * torch.ones(4, *known.target.batch_shape, dtype=FLOAT)
    point = whole.at(whole.draws(4, rng))
    for _ in range(2):
        whole.move(point, beta, 0.3 * beta, 5, rng)
    (seconds,) = whole.__getstate__()["_spent"].values()
    monkeypatch.setattr(execution, "_SETTINGS", CompilationSettings(compiles=0.75 * seconds, each=0.0))
    again = AnnealedPath(known.target, known.base)
    # the second of its own calls knows of one
    for _ in range(2):
        again.move(point, beta, 0.3 * beta, 5, rng)
    assert not made
    again = AnnealedPath(known.target, known.base)
    vars(again).update(whole.__getstate__())
    again.move(point, beta, 0.3 * beta, 5, rng)
    assert len(made) == 1


@pytest.mark.slow
def test_code_of_one_base_is_not_used_with_another(monkeypatch):
    monkeypatch.setattr(execution, "_SETTINGS", COMPILED)
    known = known_linear_gaussian()
    path, rng = AnnealedPath(known.target, known.base), torch.Generator()
    other = dgm.Gaussian(known.base.mean + 1, known.base.covariance_diagonal.sqrt())
    beta = 0.5 * torch.ones(4, *known.target.batch_shape, dtype=FLOAT)

    def moved(path):
        rng.manual_seed(1)
        point = path.at(torch.ones(4, *known.base.mean.shape, dtype=FLOAT))
        for _ in range(3):
            point = path.move(point, beta, 0.3 * beta, 5, rng).point
        return point.energy

    before = moved(path)
    path._start_from(other)
    torch.testing.assert_close(moved(path), moved(AnnealedPath(known.target, other)))
    assert not torch.allclose(before, moved(path))


def test_an_energy_that_cannot_be_captured_is_evaluated_as_it_stands(made, monkeypatch):
    monkeypatch.setattr(execution, "_SETTINGS", COMPILED)
    known = known_linear_gaussian()

    def energy(x):
        # Python decides by a value
        return known.target.energy(x) if bool((x < 1e6).any()) else x.sum(-1)

    target = dgm.Target(energy, known.target.dim, tuple(known.target.batch_shape))
    settings = {"chains": 4, "seed": 3, "coverage": False, "progress": False}
    found = dgm.log_evidence(target, known.base, METHODS["annealing"], **settings)
    assert not made
    monkeypatch.setattr(execution, "_SETTINGS", NEVER)
    expected = dgm.log_evidence(known.target, known.base, METHODS["annealing"], **settings)
    torch.testing.assert_close(found.log_z, expected.log_z, rtol=1e-6, atol=1e-6)
