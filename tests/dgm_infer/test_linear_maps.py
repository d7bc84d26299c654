"""Linear maps: a map, its transpose and their inverses are of one matrix, whose square is the covariance."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dgm_infer.autodiff.loops import capturing
from dgm_infer.linear_maps import DiagonalMap, LowRankMap, TriangularMap
from tests.oracles import FLOAT

DIM = 4


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=FLOAT)


def maps(*batch):
    sd = numbers(*batch, DIM).exp()
    directions = torch.linalg.qr(numbers(*batch, DIM, 2))[0]
    factor = numbers(*batch, DIM, DIM).tril(-1) + torch.diag_embed(sd)
    return {
        "diagonal": DiagonalMap(sd),
        "full": TriangularMap(factor),
        "low_rank": LowRankMap(sd, directions, numbers(*batch, 2).exp()),
        "of a factor": LowRankMap.of(sd, numbers(*batch, DIM, 3)),
        "of more columns than rows": LowRankMap.of(sd, numbers(*batch, DIM, 6)),
        "of a precision": TriangularMap.of_precision(factor @ factor.mT, FLOAT),
    }


def matrix(linear, *batch):
    """Of a map of vectors ``[..., *batch, D]`` with two leading dimensions."""
    basis = torch.eye(DIM, dtype=FLOAT).reshape(2, 2, *[1] * len(batch), DIM).expand(2, 2, *batch, DIM)
    return linear(basis).flatten(0, 1).movedim(0, -1)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", maps())
def test_a_map_is_one_matrix(name, batch):
    given = maps(*batch)[name]
    mine = matrix(given.apply, *batch)
    torch.testing.assert_close(matrix(given.transpose, *batch), mine.mT)
    torch.testing.assert_close(matrix(given.solve, *batch), torch.linalg.inv(mine))
    torch.testing.assert_close(matrix(given.solve_transpose, *batch), torch.linalg.inv(mine).mT)
    torch.testing.assert_close(given.log_det(), torch.linalg.slogdet(mine).logabsdet)
    torch.testing.assert_close(given.covariance(), mine @ mine.mT)
    torch.testing.assert_close(given.covariance_diagonal(), (mine @ mine.mT).diagonal(dim1=-2, dim2=-1))
    # one leading dimension is a short way
    torch.testing.assert_close(given.apply(numbers(5, *batch, DIM)), given.apply(numbers(5, *batch, DIM)[None])[0])
    assert given.remade(given.parts) == given


@pytest.mark.parametrize("columns", [3, 6])
def test_a_low_rank_map_has_the_covariance_of_its_factor(columns):
    sd, factor = numbers(2, DIM).exp(), numbers(2, DIM, columns)
    given = LowRankMap.of(sd, factor)
    torch.testing.assert_close(given.covariance(), torch.diag_embed(sd.square()) + factor @ factor.mT)
    torch.testing.assert_close(given.factor @ given.factor.mT, factor @ factor.mT)


def test_a_map_is_shown_by_its_shapes():
    assert repr(maps(3)["full"]) == "TriangularMap(factor of shape (3, 4, 4))"


def test_in_compiled_code_many_vectors_are_multiplied_by_a_matrix_product():
    """Written as a sum of products, XLA stores them all: 16 times as slow for 400 x 20 vectors of 50 numbers."""
    linear = maps(3)["full"]
    for n, is_product in ((2, False), (1000, True)):
        v = numbers(n, 3, DIM)
        # it counts those of matrix products alone
        with capturing("rehearsal"), FlopCounterMode(display=False) as counted:
            found = linear.apply(v)
        assert (counted.get_total_flops() > 0) == is_product
        torch.testing.assert_close(found, linear.apply(v))
