"""One contract for every Jacobian map, against the matrix it stands for."""

import math
from typing import NamedTuple

import pytest
import torch

from dgm_infer.structures import (
    Blocks,
    Dense,
    DenseJacobian,
    Diagonal,
    JacobianMap,
    LowRankPlusBlocks,
    LowRankPlusDiagonal,
    Units,
)
from tests.oracles import FLOAT

N_COLUMNS, N_OUTPUTS = 3, 6
BATCHES = [(), (5,), (2, 4)]
# outputs and inputs of a unit
UNITS = [(1, 1), (1, 3), (2, 2), (2, 3)]


class Case(NamedTuple):
    map: JacobianMap
    entries: tuple[torch.Tensor, ...]
    """Raw entries, of which ``matrix_of`` makes the matrix."""

    @property
    def matrix(self):
        return matrix_of(self.entries)


def matrix_of(entries):
    """The matrix of raw entries: its own, ``(A^T, d)``, or ``(A^T, D)`` with blocks ``[..., U, m, k]``."""
    if len(entries) == 1:
        return entries[0]
    columns, local = entries
    if local.shape == columns[..., 0, :].shape:
        return torch.cat([columns.mT, torch.diag_embed(local)], -1)
    n_units, m, k = local.shape[-3:]
    block_diagonal = local.new_zeros(*local.shape[:-3], n_units, m, n_units, k)
    for i in range(n_units):
        block_diagonal[..., i, :, i, :] = local[..., i, :, :]
    return torch.cat([columns.mT, block_diagonal.flatten(-4, -3).flatten(-2)], -1)


def draw(*shape, seed=9):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def random_diagonal(batch, seed):
    """``A^T`` and ``d`` with ``|d|`` log-uniform on [0.01, 1] times the largest entry of A, of either sign."""
    columns, (size, sign) = draw(*batch, N_COLUMNS, N_OUTPUTS, seed=seed), draw(2, *batch, N_OUTPUTS, seed=seed + 100)
    largest = columns.abs().amax((-2, -1)).unsqueeze(-1)
    return columns, sign.sign() * largest * 10 ** (-2 * torch.special.ndtr(size))


def random_blocks(m, k):
    def entries(batch, seed):
        """The same with blocks ``m x k`` whose singular values are log-uniform on [0.01, 1] times the largest of A."""
        columns = draw(*batch, N_COLUMNS, N_OUTPUTS, seed=seed)
        left, _, right = torch.linalg.svd(draw(*batch, N_OUTPUTS // m, m, k, seed=seed + 100), full_matrices=False)
        size = columns.abs().amax((-2, -1))[..., None, None]
        values = size * 10 ** (-2 * torch.special.ndtr(draw(*batch, N_OUTPUTS // m, m, seed=seed + 200)))
        return columns, left * values.unsqueeze(-2) @ right

    return entries


def dense(batch, seed=0):
    matrix = draw(*batch, N_OUTPUTS, 10, seed=seed)
    return Case(DenseJacobian.factorise(matrix), (matrix,))


def as_dense(entries):
    matrix = matrix_of(entries)
    return Case(DenseJacobian.factorise(matrix), (matrix,))


def low_rank(batch, seed=0):
    entries = random_diagonal(batch, seed)
    return Case(LowRankPlusDiagonal.factorise(*entries), entries)


def blocks_of(m, k):
    def make(batch, seed=0):
        entries = random_blocks(m, k)(batch, seed)
        return Case(LowRankPlusBlocks.factorise(*entries), entries)

    make.__name__ = f"blocks {m} x {k}"
    return make


STRUCTURED = [low_rank, *(blocks_of(m, k) for m, k in UNITS)]
MAKERS = [dense, *STRUCTURED]


def name(make):
    return make.__name__


@pytest.fixture(params=MAKERS, ids=name)
def make(request):
    return request.param


@pytest.fixture(params=BATCHES, ids=str)
def batch(request):
    return request.param


def nearby(case, seed=1):
    """Entries as after a Newton step: each changed by up to a tenth, those of a block column by column."""

    def factor(e, seed):
        is_block = e.ndim == case.map.log_det.ndim + 3
        shape = (*e.shape[:-2], 1, e.shape[-1]) if is_block else e.shape
        return 1 + 0.1 * draw(*shape, seed=seed).tanh()

    return tuple(e * factor(e, seed + i) for i, e in enumerate(case.entries))


def mv(matrix, vector):
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def same(actual, expected, tolerance=1e-8):
    """Equal to ``tolerance`` of the largest entry."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


def test_products_are_those_of_the_matrix(make, batch):
    case = make(batch)
    v, c = draw(*batch, case.matrix.shape[-1]), draw(*batch, N_OUTPUTS)
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
    dim = case.matrix.shape[-1]
    p, q = draw(*batch, dim), draw(*batch, dim, seed=10)
    tangent = case.map.tangent(p)
    same(case.map.forward(tangent), torch.zeros(*batch, N_OUTPUTS, dtype=FLOAT))
    same(case.map.tangent(tangent), tangent)
    same((tangent * q).sum(-1), (p * case.map.tangent(q)).sum(-1))


def test_log_det_is_of_the_gram_matrix(make, batch):
    case = make(batch)
    assert case.map.log_det.shape == batch
    same(case.map.log_det, torch.linalg.slogdet(case.matrix @ case.matrix.mT).logabsdet)


def test_oblique_inverse_is_along_the_rows_and_inverts_another_jacobian(make, batch):
    here = make(batch)
    there = nearby(here)
    matrix, c = matrix_of(there), draw(*batch, N_OUTPUTS)
    v = here.map.oblique_inverse(there, c)
    same(mv(matrix, v), c)
    same(v, mv(here.matrix.mT, torch.linalg.solve(matrix @ here.matrix.mT, c)))
    same(here.map.tangent(v), torch.zeros_like(v))
    # of itself it is the pseudo-inverse
    same(here.map.oblique_inverse(here.entries, c), here.map.pseudo_inverse(c))


def test_damped_step_regularises_the_gram_matrix(make, batch):
    case = make(batch)
    c, damping = draw(*batch, N_OUTPUTS), draw(*batch, 1).squeeze(-1).exp()
    gram = case.matrix @ case.matrix.mT + damping[..., None, None] * torch.eye(N_OUTPUTS, dtype=FLOAT)
    same(case.map.damped_step(c, damping), mv(case.matrix.mT, torch.linalg.solve(gram, c)))
    same(case.map.damped_step(c, torch.zeros(batch, dtype=FLOAT)), case.map.pseudo_inverse(c))


def test_log_det_cotangent_is_the_derivative_of_half_the_log_determinant(make, batch):
    case = make(batch)
    entries = tuple(e.clone().requires_grad_() for e in case.entries)
    matrix = matrix_of(entries)
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
    assert damaged.is_deficient().tolist() == [False, True, True, False]
    c, one = draw(4, N_OUTPUTS), torch.ones(4, dtype=FLOAT)
    good = torch.tensor([0, 3])
    same(damaged.solve(c)[good], case.map.solve(c)[good])
    same(damaged.damped_step(c, one)[good], case.map.damped_step(c, one)[good])
    same(damaged.oblique_inverse(entries, c)[good], case.map.oblique_inverse(case.entries, c)[good])


def disagreements(structured: Case, plain: Case, other: tuple[torch.Tensor, ...]):
    """Every operation of a map beside that of the dense one, ``plain``; ``other`` for Newton steps."""
    shape = structured.map.log_det.shape
    v, c, damping = draw(*shape, structured.matrix.shape[-1]), draw(*shape, N_OUTPUTS), draw(*shape).exp()
    yield structured.map.forward(v), plain.map.forward(v)
    yield structured.map.transpose(c), plain.map.transpose(c)
    yield structured.map.solve(c), plain.map.solve(c)
    yield structured.map.pseudo_inverse(c), plain.map.pseudo_inverse(c)
    yield structured.map.tangent(v), plain.map.tangent(v)
    yield structured.map.log_det, plain.map.log_det
    yield structured.map.damped_step(c, damping), plain.map.damped_step(c, damping)
    yield structured.map.oblique_inverse(other, c), plain.map.oblique_inverse((matrix_of(other),), c)
    # of the dense cotangent, the entries that the structure has
    present = matrix_of(tuple(torch.ones_like(e) for e in structured.entries))
    yield matrix_of(structured.map.log_det_cotangent()), present * plain.map.log_det_cotangent()[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", STRUCTURED, ids=name)
def test_structured_and_dense_agree_on_random_problems(make, seed):
    structured = make((20,), seed)
    for mine, theirs in disagreements(structured, as_dense(structured.entries), nearby(structured, seed)):
        same(mine, theirs)


@pytest.mark.parametrize("make", STRUCTURED, ids=name)
def test_control_another_diagonal_does_not_agree(make):
    structured = make((20,))
    columns, local = structured.entries
    plain = as_dense((columns, 1.001 * local))
    for mine, theirs in disagreements(structured, plain, nearby(structured)):
        with pytest.raises(AssertionError):
            same(mine, theirs)


def test_blocks_of_one_output_and_one_input_are_a_diagonal():
    columns, diagonal = random_diagonal((20,), 0)
    one = Case(LowRankPlusBlocks.factorise(columns, diagonal[..., None, None]), (columns, diagonal[..., None, None]))
    other = Case(LowRankPlusDiagonal.factorise(columns, diagonal), (columns, diagonal))
    c = draw(20, N_OUTPUTS)
    same(one.matrix, other.matrix, 0)
    same(one.map.log_det, other.map.log_det)
    same(one.map.pseudo_inverse(c), other.map.pseudo_inverse(c))
    for mine, theirs in zip(one.map.log_det_cotangent(), other.map.log_det_cotangent(), strict=True):
        same(mine.reshape(theirs.shape), theirs)


# ------------------------------------------------------------------------------------------- entries by torch.func


WEIGHT = draw(4, 3, seed=3)


def wavy(u):
    """``[..., 3 + 4] -> [..., 4]``, output i through the first three inputs and its own."""
    return torch.sin(u[..., :3] @ WEIGHT.mT) + u[..., 3:] * torch.exp(0.3 * u[..., :1]) + 0.1 * u[..., 3:] ** 3


def wavy_units(m, k):
    """``[..., 3 + 2 k] -> [..., 2 m]``: two units of m outputs, each through three global and k inputs of its own."""
    mix, weight = draw(2, m, k, seed=6), draw(2 * m, 3, seed=7)

    def function(u):
        own = u[..., 3:].unflatten(-1, (2, k))
        local = mv(mix, own + 0.1 * own**3 * torch.exp(0.3 * u[..., None, :1]))
        return torch.sin(u[..., :3] @ weight.mT) + local.flatten(-2)

    return function


def tall(u):
    """``[..., 3] -> [..., 3]``: no fewer outputs than inputs."""
    return torch.stack([u[..., 0] * u[..., 1], u[..., 1].sin(), u[..., 2] ** 2 + u[..., 0]], -1)


def jacobians(function, u):
    """``[..., N, D]`` by a backward pass an output, row by row."""
    rows = [torch.autograd.functional.jacobian(function, row) for row in u.reshape(-1, u.shape[-1])]
    return torch.stack(rows).reshape(*u.shape[:-1], *rows[0].shape)


@pytest.mark.parametrize("lead", BATCHES, ids=str)
@pytest.mark.parametrize(("function", "dim"), [(wavy, 7), (tall, 3)], ids=["wide", "square"])
def test_dense_entries_are_the_jacobian(function, dim, lead):
    u = draw(*lead, dim)
    value, entries = Dense().entries(function, u)
    same(value, function(u))
    same(matrix_of(entries), jacobians(function, u))


@pytest.mark.parametrize("lead", BATCHES, ids=str)
def test_low_rank_entries_are_the_jacobian(lead):
    u = draw(*lead, 7)
    value, entries = Diagonal(Units(3)).entries(wavy, u)
    same(value, wavy(u))
    same(matrix_of(entries), jacobians(wavy, u))


@pytest.mark.parametrize("lead", BATCHES, ids=str)
@pytest.mark.parametrize(("m", "k"), UNITS)
def test_block_entries_are_the_jacobian(lead, m, k):
    function, u = wavy_units(m, k), draw(*lead, 3 + 2 * k)
    value, entries = Blocks(Units(3, k, m)).entries(function, u)
    assert entries[1].shape == (*lead, 2, m, k)
    same(value, function(u))
    same(matrix_of(entries), jacobians(function, u))


def gradients_through_entries(function, u, structured):
    """Of a weighted sum of the entries, by the structured map and by the dense one."""
    _, entries = structured(u)
    weights = tuple(draw(*e.shape, seed=4 + i) for i, e in enumerate(entries))
    (mine,) = torch.autograd.grad(torch.stack([(w * e).sum() for w, e in zip(weights, entries, strict=True)]).sum(), u)
    _, (matrix,) = Dense().entries(function, u)
    (theirs,) = torch.autograd.grad((matrix_of(weights) * matrix).sum(), u)
    return mine, theirs


@pytest.mark.parametrize(("m", "k"), UNITS)
def test_block_entries_are_differentiable(m, k):
    function, u = wavy_units(m, k), draw(6, 3 + 2 * k).requires_grad_()
    mine, theirs = gradients_through_entries(function, u, lambda u: Blocks(Units(3, k, m)).entries(function, u))
    same(mine, theirs)
    assert mine.abs().max() > 0.1


def test_low_rank_entries_are_differentiable():
    u = draw(6, 7).requires_grad_()
    mine, theirs = gradients_through_entries(wavy, u, lambda u: Diagonal(Units(3)).entries(wavy, u))
    same(mine, theirs)
    assert mine.abs().max() > 0.1
