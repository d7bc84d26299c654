"""Starting points of generators without noise: the misfit annealed from prior draws."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.conditioning import start_points
from dgm_infer.conditioning.start_points import annealed_search, towards
from dgm_infer.errors import ArgumentError, StartError
from tests.oracles import FLOAT, Circle

INPUTS, OUTPUTS = 20, 8


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


class Linear(dgm.GenerativeModel):
    """Outputs whose standard deviations range over three orders of magnitude."""

    input_density = dgm.StandardNormal(INPUTS)

    def __init__(self):
        super().__init__()
        q = torch.linalg.qr(torch.randn(INPUTS, OUTPUTS, generator=rng(1), dtype=FLOAT)).Q
        mixing = torch.linalg.qr(torch.randn(OUTPUTS, OUTPUTS, generator=rng(2), dtype=FLOAT)).Q
        self.register_buffer("matrix", mixing * torch.logspace(0, -3, OUTPUTS, dtype=FLOAT) @ q.mT)

    def observed(self, u):
        return u @ self.matrix.mT


class Curved(Linear):
    """Such outputs, bent."""

    def observed(self, u):
        return super().observed(u + 0.5 * torch.tanh(2 * u.flip(-1)))


@pytest.fixture(scope="module")
def problem():
    model = Curved()
    return dgm.condition(model, model(torch.randn(3, INPUTS, generator=rng(4), dtype=FLOAT)))


class Counted:
    """A fibre that counts the rows of Jacobians that are evaluated."""

    constraint, jacobian = dgm.Fibre.constraint, dgm.Fibre.jacobian

    def __init__(self, fibre, counts):
        self._fibre, self.counts = fibre, counts

    def take(self, rows):
        return Counted(self._fibre.take(rows), self.counts)

    def evaluate(self, function, *arguments, often=False):
        self.counts["jacobians" if function.__name__ != "constraint" else "values"] += len(arguments[0])
        return self._fibre.evaluate(function, *arguments)


def test_of_a_linear_model_it_moves_prior_draws_to_draws_of_the_posterior():
    model = Linear()
    fibre = dgm.condition(model, model(torch.randn(INPUTS, generator=rng(5), dtype=FLOAT)))
    start = torch.randn(30, INPUTS, generator=rng(6), dtype=FLOAT)
    rows = fibre.rows(30)
    point, residual = annealed_search(rows, start, tolerance=torch.full((30,), 1e-10, dtype=FLOAT))
    assert residual.max() < 1e-10
    matrix = fibre.model.matrix
    exact = start - rows.constraint(start) @ torch.linalg.pinv(matrix).mT
    torch.testing.assert_close(point, exact, atol=1e-6, rtol=0)


def test_badly_conditioned_models_start_from_every_prior_draw_with_few_jacobians(problem):
    chains = 8
    rows = problem.rows(chains)
    start = torch.randn(3 * chains, INPUTS, generator=rng(7), dtype=FLOAT)
    tolerance = torch.full((3 * chains,), 1e-8, dtype=FLOAT)
    counts = {"jacobians": 0, "values": 0}
    point, residual = annealed_search(Counted(rows, counts), start, tolerance=tolerance)
    assert (residual < tolerance).all()
    torch.testing.assert_close(rows.constraint_error(point), residual)
    assert point.norm(dim=-1).median() < 1.5 * INPUTS**0.5
    assert counts["jacobians"] < 20 * len(start)


def test_chains_start_on_the_fibre_and_a_line_of_progress_moves(problem):
    lines = []
    position = problem.start(4, rng(8), report=lines.append)
    assert position.shape == (4, 3, INPUTS)
    assert (problem.constraint_error(position) < 1e-8 * problem.scale).all()
    found = [int(line.split()[1]) for line in lines]
    assert found == sorted(found)
    assert len(set(lines)) > 5
    assert "of 12 chains found, misfit" in lines[0]


def test_what_no_input_reaches_ends_with_the_nearest_misfit():
    fibre = dgm.condition(Circle(), torch.tensor([-0.5], dtype=FLOAT))
    with pytest.raises(StartError, match=r"nearest outputs of 1 attempts per chain miss it by 0\.5 ") as caught:
        fibre.start(3, rng(), attempts=1)
    assert "\n" not in str(caught.value)


def test_given_points_near_the_fibre_are_moved_onto_it_and_others_refused():
    fibre = dgm.condition(Circle(), torch.tensor([1.0], dtype=FLOAT))
    angle = torch.linspace(0, 6, 5, dtype=FLOAT)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    kernel = dgm.ConstrainedHMC(step_size=1e-6, n_steps=1)
    options = {"chains": 5, "warmup": 0, "draws": 1, "seed": 0, "progress": False}
    draws = dgm.sample(fibre, kernel, initial=1.05 * circle, **options)
    assert (draws.stats["constraint_error"] < 1e-8).all()
    torch.testing.assert_close(draws.inputs[:, 0], circle, atol=1e-4, rtol=0)
    with pytest.raises(ArgumentError, match="initial violates the constraint at 5 of 5 points"):
        dgm.sample(fibre, kernel, initial=3 * circle, **options)


def test_moves_along_the_fibre_end_nearest_to_their_goals():
    model = Linear()
    fibre = dgm.condition(model, model(torch.randn(INPUTS, generator=rng(4), dtype=FLOAT))).rows(6)
    goal, far = torch.randn(2, 6, INPUTS, generator=rng(5), dtype=FLOAT)
    least = torch.linalg.pinv(model.matrix)
    on = goal - (goal @ model.matrix.mT - fibre.values) @ least.mT
    along = far - far @ model.matrix.mT @ least.mT
    start = on + 4 * along / along.norm(dim=-1, keepdim=True)
    active = torch.tensor([True] * 5 + [False])
    tolerance = torch.full((6,), 1e-8, dtype=FLOAT)
    end = towards(fibre, start, goal, tolerance=tolerance, active=active)
    assert (fibre.constraint_error(end) < 1e-8).all()
    torch.testing.assert_close(end[:5], on[:5], rtol=0, atol=1e-4)
    torch.testing.assert_close(end[5], start[5], rtol=0, atol=0)


def test_starts_are_nearer_to_prior_draws_than_where_the_search_ended(problem, monkeypatch):
    def energies():
        u = problem.start(20, rng(3))
        assert (problem.constraint_error(u) < 1e-8).all()
        return problem.rows(20).linearise(u.reshape(-1, INPUTS)).energy.reshape(20, 3).mean(0)

    moved = energies()
    monkeypatch.setattr(start_points, "SETTINGS", start_points.SearchSettings(moves=0))
    assert (moved < energies()).all()
