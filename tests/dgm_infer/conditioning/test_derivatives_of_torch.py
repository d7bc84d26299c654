"""Derivatives that torch itself has wrong, or not at all, are taken otherwise, or refused with what to use instead."""

import pytest
import torch
from torch import distributions as td
from torch.nn import functional

import dgm_infer as dgm
from dgm_infer.errors import ModelError
from tests.mistakes import WrongForward
from tests.models import Function

FLOAT = torch.float64
FIRST = dgm.pixels(torch.tensor([True, False]))


def inverse(z, function):
    factor = torch.linalg.cholesky(2 * torch.eye(3) + 0.1 * z.exp() * torch.ones(3, 3))
    return function(factor)[0] + z + torch.randn(3)


def test_a_wrong_forward_derivative_of_torch_is_refused_with_what_to_use():
    if torch.__version__.startswith("2.14.1"):
        with pytest.raises(ModelError, match=r"forward-mode .* differ.*cholesky_inverse.*torch\.linalg\.inv"):
            dgm.from_simulator(inverse, td.Normal(0.0, 1.0), torch.cholesky_inverse)
    dgm.from_simulator(inverse, td.Normal(0.0, 1.0), lambda factor: torch.linalg.inv(factor @ factor.mT))


class Products(dgm.GenerativeModel):
    """Products of inputs by ``scatter_reduce``, whose forward derivative is zero in torch 2.14.1."""

    input_density = dgm.StandardNormal(4)

    def observed(self, u):
        index = torch.tensor([0, 1, 0, 1]).expand_as(u)
        return torch.ones_like(u[..., :2]).scatter_reduce(-1, index, u, "prod")


class Inverses(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(3)

    def observed(self, u):
        whole = 2 * torch.eye(3, dtype=u.dtype) + 0.1 * u[..., None, None, 0].exp() * torch.ones(3, 3, dtype=u.dtype)
        factor = torch.linalg.cholesky(whole, upper=True)
        return torch.cholesky_inverse(factor, upper=True)[..., 0] + u


@pytest.mark.skipif(not torch.__version__.startswith("2.14.1"), reason="faults of one version of torch")
@pytest.mark.parametrize(
    ("model", "words"), [(Products(), "scatter_reduce.*use"), (Inverses(), r"cholesky_inverse.*torch\.linalg\.inv")]
)
def test_other_wrong_forward_derivatives_of_torch_are_refused(model, words):
    with pytest.raises(ModelError, match=f"reverse- and forward-mode derivatives of .* differ.*{words}"):
        dgm.condition(model, torch.ones(torch.Size(model.output_shape)))


class Rooted(dgm.GenerativeModel):
    """A slope without bound where half of the inputs are."""

    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return torch.relu(u).sqrt()


def test_slopes_without_bound_are_named_as_such():
    with pytest.raises(ModelError, match=r"not finite at some of its inputs: a slope without bound"):
        dgm.condition(Rooted(), torch.ones(2), noise=0.1)


class Doubled(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return WrongForward.apply(u)


def test_condition_compares_forward_with_reverse_mode():
    with pytest.raises(ModelError, match="reverse- and forward-mode derivatives of Doubled differ"):
        dgm.condition(Doubled(), torch.zeros(2))


def matrices(u):
    return 2 * torch.eye(3, dtype=u.dtype) + 0.2 * (u.unsqueeze(-1) * u.roll(1, -1).unsqueeze(-2)).sin()


def first_and(value, u):
    return torch.cat([value.unsqueeze(-1), u[..., 1:]], -1)


MISDIFFERENTIATED = {
    "layer_norm": lambda u: functional.layer_norm(torch.cat([u.sin(), u * u], -1), (6,)).tanh(),
    "layer_norm, scaled": lambda u: functional.layer_norm(
        torch.cat([u.sin(), u * u], -1), [6], torch.arange(1, 7).to(u), torch.ones(6).to(u)
    ).tanh(),
    "instance_norm": lambda u: (
        functional.instance_norm(torch.stack([u.sin(), u * u], -2).reshape(-1, 2, 3)).reshape(*u.shape[:-1], 6).tanh()
    ),
    "linalg.solve": lambda u: torch.linalg.solve(matrices(u), u.unsqueeze(-1)).squeeze(-1),
    "linalg.det": lambda u: first_and(torch.linalg.det(matrices(u)), u),
    "slogdet": lambda u: first_and(torch.linalg.slogdet(matrices(u))[1], u),
    # the control
    "tanh": lambda u: u.tanh(),
}


def test_what_torch_cannot_differentiate_in_batches_is_named():
    def basis(u):
        return torch.linalg.householder_product(matrices(u), u).flatten(-2)

    with pytest.raises(ModelError, match=r"Function has no derivative by torch \(vmap: .*as_strided") as caught:
        dgm.condition(Function(basis, 3), torch.zeros(9), noise=0.3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [3, 3000], ids=["reverse", "forward"])
@pytest.mark.parametrize("function", MISDIFFERENTIATED.values(), ids=MISDIFFERENTIATED)
def test_gradients_of_energies_are_right_where_torch_differentiates_twice_wrongly(function, rows):
    """LayerNorm in both modes, and linear algebra in forward mode: wrong in torch 2.14.1, without a word."""
    size = function(torch.zeros(1, 3, dtype=FLOAT)).shape[-1]
    fibre = dgm.condition(Function(function, 3), torch.zeros(size), noise=0.3).rows(rows)
    rng = torch.Generator().manual_seed(0)
    u, v = 0.5 * torch.randn(2, rows, fibre.dim, generator=rng, dtype=FLOAT)

    def energy(x):
        return fibre.evaluate(type(fibre).linearise, x)

    step = 1e-5
    differences = (energy(u + step * v).energy - energy(u - step * v).energy) / (2 * step)
    slopes = torch.linalg.vecdot(energy(u).gradient, v)
    assert ((slopes - differences).abs() / differences.abs().clamp_min(1)).quantile(0.9) < 1e-6


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda u: torch.where(u > 0, u.sqrt(), 0 * u) + u, "derivatives of Function are not finite .* torch.where"),
        (lambda u: torch.fft.fft(u), "give real numbers, as torch.view_as_real"),
    ],
    ids=["the branch not taken", "complex numbers"],
)
def test_outputs_without_usable_derivatives_have_their_own_remedy(function, words):
    with pytest.raises(ModelError, match=words):
        dgm.condition(Function(function, 3), torch.ones(3))
