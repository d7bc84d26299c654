"""One contract for every operator: what it completes, carries from problem to problem, and leaves of a structure."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.conditioning import DisjointSums, Everything, Function, Operator, Selection
from dgm_infer.structures import STRUCTURES, Units
from tests.additions import Differences, additive
from tests.models import Bent, Walk
from tests.oracles import FLOAT

SIZE, BATCH = 5, 2

# Operators on five outputs, and the units that they leave of scalar ones; a new operator adds a line.
OPERATORS = {
    "everything": (Everything(SIZE), Units(2)),
    "selection": (Selection(torch.tensor([0, 3, 4]), SIZE), Units(2)),
    "permutation": (Selection(torch.tensor([4, 1, 0, 3, 2]), SIZE), Units(2)),
    "selections per problem": (Selection(torch.tensor([[0, 3, 4], [1, 2, 3]]), SIZE), Units(2)),
    "sums": (
        DisjointSums(torch.tensor([[0, 3], [1, 4]]), torch.tensor([[0.5, 0.5], [2.0, -1.0]], dtype=FLOAT), SIZE),
        Units(2, 2, 1),
    ),
    "means": (DisjointSums(torch.tensor([[0, 3], [1, 4]]), torch.full((2, 2), 0.5, dtype=FLOAT), SIZE), Units(2, 2, 1)),
    "function": (Function(lambda x: x[..., :2].sin()), None),
    "added differences": (Differences(torch.tensor([0, 1]), torch.tensor([3, 4]), SIZE), Units(2, 2, 1)),
}
PLACING = ["everything", "selection", "permutation", "selections per problem"]


@pytest.fixture(params=OPERATORS)
def name(request):
    return request.param


@pytest.fixture
def operator(name) -> Operator:
    return OPERATORS[name][0]


def numbers(*shape, seed=60):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def test_values_have_a_row_per_row(operator):
    x = numbers(3, BATCH, SIZE)
    values = operator(x)
    assert values.shape[:-1] == (3, BATCH)
    torch.testing.assert_close(operator(x[1]), values[1])


def test_what_is_completed_is_observed_as_it_was_and_nothing_else_changes(name, operator):
    x = numbers(3, BATCH, SIZE)
    values = operator(numbers(BATCH, SIZE, seed=61))
    completed = operator.complete(values, x)
    assert completed.shape == x.shape
    if name not in PLACING:
        assert torch.equal(completed, x)
        return
    assert torch.equal(operator(completed), values.expand_as(operator(x)))
    assert torch.equal(operator.complete(values, completed), completed)
    assert torch.equal(operator.complete(operator(x), x), x)
    # completing zeros is the adjoint of picking: <A x, v> = <x, A^T v>
    adjoint = operator.complete(values, torch.zeros_like(x))
    torch.testing.assert_close((operator(x) * values).sum(-1), (x * adjoint).sum(-1))


def test_data_of_other_problems_make_the_operator_of_these(operator):
    x, problems = numbers(3, SIZE), torch.tensor([1, 0, 1])
    same = operator.with_data(*operator.data)
    torch.testing.assert_close(same(numbers(BATCH, SIZE)), operator(numbers(BATCH, SIZE)))
    taken = operator.with_data(*(data[problems] for data in operator.data))
    for row, problem in enumerate(problems):
        torch.testing.assert_close(taken(x)[row], operator(x[row].expand(BATCH, -1))[problem])


def test_the_first_is_that_of_the_first_problem(operator):
    x = numbers(SIZE)
    torch.testing.assert_close(operator.first()(x), operator(x.expand(BATCH, -1))[0])


def test_a_range_is_kept_where_the_operator_says_so(name, operator):
    values = operator(torch.full((BATCH, SIZE), 0.9, dtype=FLOAT))
    assert operator.keeps_range == (name in [*PLACING, "means"])
    if operator.keeps_range:
        torch.testing.assert_close(values, torch.full_like(values, 0.9))


def test_the_reduced_problem_is_the_dense_one_in_fewer_inputs(name, operator):
    model, units = Bent(), OPERATORS[name][1]
    y = operator(model.observed(numbers(BATCH, 7, seed=62)))
    fibre = dgm.condition(model, y, observe=operator)
    dense = dgm.condition(model, y, observe=Function(operator))
    assert fibre.units == units
    assert dense.units is None
    u = numbers(4, BATCH, fibre.dim, seed=63)
    whole = fibre.observed.inputs(u)
    assert whole.shape[-1] == dense.dim
    torch.testing.assert_close(fibre.constraint(u), dense.constraint(whole))
    mine = fibre.rows(4).linearise(u.flatten(0, 1)).jacobian.log_det.reshape(4, BATCH)
    torch.testing.assert_close(mine, dense.linearise(whole).jacobian.log_det, rtol=0, atol=1e-8)


def test_completions_agree_with_what_was_observed(operator):
    model = Bent()
    y = operator(model.observed(numbers(BATCH, 7, seed=62)))
    fibre = dgm.condition(model, y, observe=operator)
    u = fibre.start(6, torch.Generator().manual_seed(64))
    x = fibre.complete(u, torch.Generator().manual_seed(65))
    torch.testing.assert_close(operator(x), y.expand(6, *y.shape), rtol=0, atol=1e-7)


def test_only_everything_keeps_the_steps_of_a_walk():
    walk = Walk().jacobian_structure
    kept = Everything(8).reduce(walk)
    assert kept is not None
    assert kept.structure == walk
    assert Selection(torch.tensor([0, 1]), 8).reduce(walk) is None
    assert Differences(torch.tensor([0, 1]), torch.tensor([2, 3]), 8).reduce(walk) is None


def test_an_added_operator_reduces_an_added_structure(monkeypatch):
    monkeypatch.setitem(STRUCTURES, "additive", additive)
    structure = additive(Bent())
    selected = Selection(torch.tensor([3, 1]), SIZE).reduce(structure)
    assert selected is not None
    assert selected.structure == structure
    # sums scale local inputs, so that their derivative is no longer one
    weights = torch.full((2, 1), 3.0, dtype=FLOAT)
    scaled = DisjointSums(torch.tensor([[0], [3]]), weights, SIZE).reduce(structure)
    assert scaled is not None
    assert scaled.structure == Bent().jacobian_structure
