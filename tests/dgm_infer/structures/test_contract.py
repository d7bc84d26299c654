"""One contract for every registered structure: a cheaper way to what the dense Jacobian of the same function gives."""

from typing import NamedTuple

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.structures import STRUCTURES, Dense, Diagonal, Units
from tests.additions import Additive, additive
from tests.models import Bent, BentPairs, FreeWalk, Walk
from tests.oracles import FLOAT


class Plain(Bent):
    """Five waves of two global inputs, each plus a noise of its own."""

    def __init__(self, structure="additive"):
        super().__init__(structure)

    def simulate(self, z, u2):
        return torch.tanh(z["z"] @ self.weight.mT) + u2


class Coupled(Bent):
    """The outputs share their noises."""

    def simulate(self, z, u2):
        return super().simulate(z, u2) + 0.1 * u2.sum(-1, keepdim=True)


class MixedWalk(FreeWalk):
    """The noise of a step is mixed, though its coordinates are declared to be units."""

    transition = Walk.transition


def short_pairs():
    """One local input for each pair of outputs: D D^T is singular, J J^T is not where A has enough columns."""
    return BentPairs(n_inputs=1)


# A structure's models, and one that declares it wrongly; a new structure adds a line.
EXAMPLES = {
    "independent": ([Bent, BentPairs, lambda: BentPairs(n_inputs=3)], Coupled),
    "markov": ([Walk, FreeWalk], MixedWalk),
    "dense": ([lambda: Bent("dense")], None),
    "additive": ([Plain, lambda: Plain(Additive(Units(2)))], lambda: Bent("additive")),
}
RIGHT = [
    pytest.param(make, id=f"{name} {i}") for name, (models, _) in EXAMPLES.items() for i, make in enumerate(models)
]
WRONG = [pytest.param(wrong, id=name) for name, (_, wrong) in EXAMPLES.items() if wrong is not None]


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """The line that adds a structure."""
    monkeypatch.setitem(STRUCTURES, "additive", additive)


class Case(NamedTuple):
    fibre: dgm.Fibre
    u: torch.Tensor
    """``[3, D]``, off the fibre."""


def case_of(make) -> Case:
    model = make()
    draws = torch.randn(3, model.input_density.dim, generator=torch.Generator().manual_seed(50), dtype=FLOAT)
    fibre = dgm.condition(model, model.observed(draws))
    return Case(fibre, draws + 0.1)


def numbers(*shape, seed=51):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def agree(mine, theirs, tolerance=1e-8):
    assert mine.shape == theirs.shape
    return ((mine - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1)).item()


def factorised(structure, evaluation, error):
    return structure.factorise(tuple(e * (1 + error * numbers(*e.shape)) for e in evaluation.entries))


def both(case: Case, error: float = 0.0):
    """Every operation of the map, its entries wrong by ``error``, beside that of the dense one."""
    fibre, u = case
    mine, theirs = fibre.structure.entries(fibre.constraint, u), Dense().entries(fibre.constraint, u)
    there = fibre.structure.entries(fibre.constraint, u + 0.05), Dense().entries(fibre.constraint, u + 0.05)
    assert agree(mine.value, theirs.value)
    a, b = factorised(fibre.structure, mine, error), Dense().factorise(theirs.entries)
    v, c = numbers(*u.shape), numbers(*mine.value.shape)
    damping = torch.tensor([0.0, 0.1, 2.0], dtype=FLOAT)
    yield "forward", a.forward(v), b.forward(v)
    yield "transpose", a.transpose(c), b.transpose(c)
    yield "solve", a.solve(c), b.solve(c)
    yield "pseudo_inverse", a.pseudo_inverse(c), b.pseudo_inverse(c)
    yield "log_det", a.log_det, b.log_det
    yield "tangent", a.tangent(v), b.tangent(v)
    yield "damped_step", a.damped_step(c, damping), b.damped_step(c, damping)
    yield "oblique_inverse", a.oblique_inverse(there[0].entries, c), b.oblique_inverse(there[1].entries, c)


def test_every_registered_structure_has_an_example():
    assert set(EXAMPLES) == set(STRUCTURES)


@pytest.mark.parametrize("make", RIGHT)
def test_every_operation_is_that_of_the_dense_jacobian(make):
    for name, mine, theirs in both(case_of(make)):
        assert agree(mine, theirs), name


@pytest.mark.parametrize("make", RIGHT)
def test_control_entries_wrong_by_a_thousandth_do_not_agree(make):
    for name, mine, theirs in both(case_of(make), 1e-3):
        assert not agree(mine, theirs), name


@pytest.mark.parametrize("make", RIGHT)
def test_the_gradient_of_the_log_determinant_is_that_of_autograd(make):
    fibre, u = case_of(make)
    u = u.requires_grad_()
    entries = fibre.structure.entries(fibre.constraint, u).entries
    cotangents = fibre.structure.factorise(tuple(e.detach() for e in entries)).log_det_cotangent()
    (mine,) = torch.autograd.grad(
        torch.stack([(w * e).sum() for w, e in zip(cotangents, entries, strict=True)]).sum(), u
    )
    (matrix,) = Dense().entries(fibre.constraint, u).entries
    (theirs,) = torch.autograd.grad(0.5 * torch.linalg.slogdet(matrix @ matrix.mT).logabsdet.sum(), u)
    assert theirs.abs().max() > 1e-2
    assert agree(mine, theirs)


@pytest.mark.parametrize("make", RIGHT)
def test_a_row_costs_as_many_numbers_as_the_structure_says(make):
    fibre, u = case_of(make)
    value, entries = fibre.structure.entries(fibre.constraint, u)
    said = fibre.structure.row_size(value.shape[-1], u.shape[-1])
    assert sum(e[0].numel() for e in entries) == said
    assert said <= Dense().row_size(value.shape[-1], u.shape[-1])


class Forced(dgm.Fibre):
    """The same constraint without the structure of its Jacobian."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.structure = Dense()


@pytest.mark.parametrize("make", RIGHT)
def test_the_chains_are_those_of_a_dense_jacobian(make):
    fibre, _ = case_of(make)
    kernel = dgm.ConstrainedHMC(0.2, n_steps=2, n_geodesic=1, solver="newton", tolerance=1e-12)
    start = fibre.start(4, torch.Generator().manual_seed(52), tolerance=1e-12)
    assert fibre.constraint_error(start).max() < 1e-10
    mine, theirs = (
        dgm.sample(f, kernel, chains=4, warmup=0, draws=3, seed=1, initial=start, progress=False).inputs
        for f in (fibre, Forced(fibre.observed, fibre.values))
    )
    assert mine.diff(dim=1).abs().max() > 0.01
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("make", RIGHT)
def test_full_rank_is_claimed_only_where_it_is(make):
    fibre, u = case_of(make)
    (matrix,) = Dense().entries(fibre.constraint, u).entries
    has_full_rank = bool((torch.linalg.matrix_rank(matrix) == matrix.shape[-2]).any())
    assert has_full_rank >= fibre.structure.has_full_rank(fibre.constraint, u, 1e-6)
    assert not fibre.structure.has_full_rank(lambda v: 0 * fibre.constraint(v), u, 1e-6)


@pytest.mark.parametrize("make", RIGHT)
def test_a_structure_that_the_model_has_is_accepted(make):
    model = make()
    model.jacobian_structure.check(model, numbers(8, model.input_density.dim))


@pytest.mark.parametrize("make", WRONG)
def test_a_structure_that_the_model_lacks_is_refused_in_one_line(make):
    model = make()
    with pytest.raises(dgm.errors.ModelError, match="directional derivatives differ") as caught:
        dgm.condition(model, torch.zeros(model.output_shape))
    assert "\n" not in str(caught.value)


def test_a_structure_object_must_have_the_sizes_of_its_model():
    with pytest.raises(dgm.errors.ModelError, match="3 global inputs, but global_density has 2"):
        dgm.condition(Bent(Diagonal(Units(3))), torch.zeros(5))
    assert dgm.condition(Bent(Diagonal(Units(2))), torch.zeros(5)).structure == Bent().jacobian_structure


@pytest.mark.parametrize("structure", ["sparse", None, ["dense"]])
def test_what_is_no_structure_is_named(structure):
    with pytest.raises(dgm.errors.ModelError, match="not one of independent, markov, dense, additive"):
        dgm.condition(Bent(structure), torch.zeros(5))


def test_units_of_fewer_inputs_than_outputs_do_not_pay():
    model = short_pairs()
    seen = torch.tensor([True, True, False, False, False, False])
    fibre = dgm.condition(model, model.observed(torch.zeros(5, dtype=FLOAT)), observe=dgm.pixels(seen))
    assert model.units == Units(2, 1, 2)
    assert fibre.structure == Dense()
    assert fibre.start(3, torch.Generator().manual_seed(0)).isfinite().all()
    # the control: where units have as many inputs
    full = BentPairs()
    x = full.observed(torch.zeros(8, dtype=FLOAT))
    assert dgm.condition(full, x, observe=dgm.pixels(seen)).structure == full.jacobian_structure
