"""One contract for every Jacobian map, against the matrix it stands for."""

import math
from typing import NamedTuple

import pytest
import torch

from dgm_infer.jacobian import DenseJacobian, JacobianMap, LowRankPlusDiagonal
from tests.oracles import FLOAT

N_COLUMNS, N_OUTPUTS = 3, 7
BATCHES = [(), (5,), (2, 4)]


class Case(NamedTuple):
    map: JacobianMap
    matrix: torch.Tensor
    entries: tuple[torch.Tensor, ...]
    """Raw entries, from which ``dense(*entries)`` makes the matrix."""


def assemble(columns, diagonal):
    return torch.cat([columns, torch.diag_embed(diagonal)], -1)


def random_structured(batch, seed):
    """``[A | diag(d)]`` with ``|d|`` log-uniform on [0.01, 1] times the largest entry of A, of either sign."""
    rng = torch.Generator().manual_seed(seed)
    columns = torch.randn(*batch, N_OUTPUTS, N_COLUMNS, generator=rng, dtype=FLOAT)
    largest = columns.abs().amax((-2, -1)).unsqueeze(-1)
    uniform = torch.rand(*batch, N_OUTPUTS, generator=rng, dtype=FLOAT)
    sign = torch.randn(*batch, N_OUTPUTS, generator=rng, dtype=FLOAT).sign()
    return columns, sign * largest * 10 ** (-2 * uniform)


def dense(batch, seed=0):
    matrix = torch.randn(*batch, N_OUTPUTS, 10, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)
    return Case(DenseJacobian.factorise(matrix), matrix, (matrix,))


def dense_of_structured(batch, seed=0):
    matrix = assemble(*random_structured(batch, seed))
    return Case(DenseJacobian.factorise(matrix), matrix, (matrix,))


def low_rank(batch, seed=0):
    entries = random_structured(batch, seed)
    return Case(LowRankPlusDiagonal.factorise(*entries), assemble(*entries), entries)


MAKERS = [dense, dense_of_structured, low_rank]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def make(request):
    return request.param


@pytest.fixture(params=BATCHES, ids=str)
def batch(request):
    return request.param


def draw(*shape, seed=9):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def mv(matrix, vector):
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def same(actual, expected, tolerance=1e-8):
    """Equal to ``tolerance`` of the largest entry."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


def test_products_are_those_of_the_matrix(make, batch):
    case = make(batch)
    v, c = draw(*batch, 10), draw(*batch, N_OUTPUTS)
    same(case.map.forward(v), mv(case.matrix, v))
    same(case.map.transpose(c), mv(case.matrix.mT, c))


def test_solve_inverts_the_gram_matrix(make, batch):
    case = make(batch)
    c = draw(*batch, N_OUTPUTS)
    same(mv(case.matrix @ case.matrix.mT, case.map.solve(c)), c)


def test_pseudo_inverse_is_the_shortest_preimage(make, batch):
    case = make(batch)
    c = draw(*batch, N_OUTPUTS)
    v = case.map.pseudo_inverse(c)
    same(case.map.forward(v), c)
    same(v, mv(torch.linalg.pinv(case.matrix), c))


def test_tangent_is_an_orthogonal_projection_onto_the_null_space(make, batch):
    case = make(batch)
    p, q = draw(*batch, 10), draw(*batch, 10, seed=10)
    tangent = case.map.tangent(p)
    same(case.map.forward(tangent), torch.zeros(*batch, N_OUTPUTS, dtype=FLOAT))
    same(case.map.tangent(tangent), tangent)
    same((tangent * q).sum(-1), (p * case.map.tangent(q)).sum(-1))


def test_log_det_is_of_the_gram_matrix(make, batch):
    case = make(batch)
    assert case.map.log_det.shape == batch
    same(case.map.log_det, torch.linalg.slogdet(case.matrix @ case.matrix.mT).logabsdet)


def test_cross_solve_inverts_the_product_with_another_jacobian(make, batch):
    here, there = make(batch), make(batch, seed=1)
    # near enough for a Newton step, on either side of the same entries
    nearby = tuple(a + 0.1 * a.abs() * b.tanh() for a, b in zip(here.entries, there.entries, strict=True))
    other = type(here.map).factorise(*nearby)
    matrix = nearby[0] if len(nearby) == 1 else assemble(*nearby)
    c = draw(*batch, N_OUTPUTS)
    same(mv(matrix @ here.matrix.mT, here.map.cross_solve(other, c)), c)


def test_damped_step_regularises_the_gram_matrix(make, batch):
    case = make(batch)
    c, damping = draw(*batch, N_OUTPUTS), draw(*batch, 1).squeeze(-1).exp()
    gram = case.matrix @ case.matrix.mT + damping[..., None, None] * torch.eye(N_OUTPUTS, dtype=FLOAT)
    same(case.map.damped_step(c, damping), mv(case.matrix.mT, torch.linalg.solve(gram, c)))
    same(case.map.damped_step(c, torch.zeros(batch, dtype=FLOAT)), case.map.pseudo_inverse(c))


def test_log_det_cotangent_is_the_derivative_of_half_the_log_determinant(make, batch):
    case = make(batch)
    entries = tuple(e.clone().requires_grad_() for e in case.entries)
    matrix = entries[0] if len(entries) == 1 else assemble(*entries)
    (0.5 * torch.linalg.slogdet(matrix @ matrix.mT).logabsdet).sum().backward()
    for cotangent, entry in zip(case.map.log_det_cotangent(), entries, strict=True):
        same(cotangent, entry.grad)


def test_indexing_and_where_act_on_rows(make):
    one, other = make((5,)), make((5,), seed=1)
    rows, mask = torch.tensor([4, 0, 0]), torch.tensor([True, False, True, False, False])
    c = draw(5, N_OUTPUTS)
    same(one.map[rows].solve(c[rows]), one.map.solve(c)[rows])
    same(one.map[rows].log_det, one.map.log_det[rows])
    mixed = one.map.where(mask, other.map)
    same(mixed.solve(c), torch.where(mask.unsqueeze(-1), one.map.solve(c), other.map.solve(c)))
    same(mixed.log_det, torch.where(mask, one.map.log_det, other.map.log_det))


def test_a_singular_or_non_finite_row_is_data_and_leaves_the_others_alone(make):
    case = make((4,))
    entries = tuple(e.clone() for e in case.entries)
    for entry in entries:
        entry[1] = 0
        entry[2] = math.nan
    damaged = type(case.map).factorise(*entries)
    assert damaged.log_det.isfinite().tolist() == [True, False, False, True]
    c = draw(4, N_OUTPUTS)
    good = torch.tensor([0, 3])
    same(damaged.solve(c)[good], case.map.solve(c)[good])
    same(damaged.damped_step(c, torch.ones(4, dtype=FLOAT))[good], case.map.damped_step(c, torch.ones(4))[good])
    same(damaged.cross_solve(damaged, c)[good], case.map.cross_solve(case.map, c)[good])


@pytest.mark.parametrize("seed", range(5))
def test_low_rank_and_dense_agree_on_random_problems(seed):
    batch = (20,)
    structured, plain = low_rank(batch, seed).map, dense_of_structured(batch, seed).map
    nearby = random_structured(batch, seed)
    nearby = nearby[0] + 0.1 * nearby[0].abs() * draw(*nearby[0].shape).tanh(), 1.05 * nearby[1]
    v, c, damping = draw(*batch, 10), draw(*batch, N_OUTPUTS), draw(*batch).exp()
    same(structured.forward(v), plain.forward(v))
    same(structured.transpose(c), plain.transpose(c))
    same(structured.solve(c), plain.solve(c))
    same(structured.pseudo_inverse(c), plain.pseudo_inverse(c))
    same(structured.tangent(v), plain.tangent(v))
    same(structured.log_det, plain.log_det)
    same(structured.damped_step(c, damping), plain.damped_step(c, damping))
    other, other_plain = LowRankPlusDiagonal.factorise(*nearby), DenseJacobian.factorise(assemble(*nearby))
    same(structured.cross_solve(other, c), plain.cross_solve(other_plain, c))
    (matrix,) = plain.log_det_cotangent()
    columns, diagonal = structured.log_det_cotangent()
    same(columns, matrix[..., :N_COLUMNS])
    same(diagonal, matrix[..., N_COLUMNS:].diagonal(dim1=-2, dim2=-1))


def test_control_another_diagonal_does_not_agree():
    columns, diagonal = random_structured((20,), 0)
    plain, other = dense_of_structured((20,)).map, LowRankPlusDiagonal.factorise(columns, 1.001 * diagonal)
    c = draw(20, N_OUTPUTS)
    for mine, theirs in ((plain.solve(c), other.solve(c)), (plain.log_det, other.log_det)):
        with pytest.raises(AssertionError):
            same(mine, theirs)


# ------------------------------------------------------------------------------------------- entries by torch.func


WEIGHT = draw(4, 3, seed=3)


def wavy(u):
    """``[..., 3 + 4] -> [..., 4]``, output i through the first three inputs and its own."""
    return torch.sin(u[..., :3] @ WEIGHT.mT) + u[..., 3:] * torch.exp(0.3 * u[..., :1]) + 0.1 * u[..., 3:] ** 3


def tall(u):
    """``[..., 3] -> [..., 3]``: no fewer outputs than inputs."""
    return torch.stack([u[..., 0] * u[..., 1], u[..., 1].sin(), u[..., 2] ** 2 + u[..., 0]], -1)


@pytest.mark.parametrize("lead", BATCHES, ids=str)
@pytest.mark.parametrize(("function", "dim"), [(wavy, 7), (tall, 3)], ids=["wide", "square"])
def test_dense_entries_are_the_jacobian(function, dim, lead):
    u = draw(*lead, dim)
    value, (matrix,) = DenseJacobian.entries(function, u)
    same(value, function(u))
    rows = [torch.autograd.functional.jacobian(function, row) for row in u.reshape(-1, dim)]
    same(matrix.reshape(-1, *matrix.shape[-2:]), torch.stack(rows))


@pytest.mark.parametrize("lead", BATCHES, ids=str)
def test_low_rank_entries_are_the_jacobian(lead):
    u = draw(*lead, 7)
    value, entries = LowRankPlusDiagonal.entries(wavy, u, 3)
    same(value, wavy(u))
    rows = [torch.autograd.functional.jacobian(wavy, row) for row in u.reshape(-1, 7)]
    same(assemble(*entries).reshape(-1, 4, 7), torch.stack(rows))


def test_entries_are_differentiable():
    u = draw(6, 7).requires_grad_()
    weights = draw(6, 4, 3, seed=4), draw(6, 4, seed=5)
    _, entries = LowRankPlusDiagonal.entries(wavy, u, 3)
    (structured,) = torch.autograd.grad(sum((w * e).sum() for w, e in zip(weights, entries, strict=True)), u)
    _, (matrix,) = DenseJacobian.entries(wavy, u)
    (plain,) = torch.autograd.grad((assemble(*weights) * matrix).sum(), u)
    same(structured, plain)
    assert structured.abs().max() > 0.1
