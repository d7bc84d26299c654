"""Observation operators are the functions of the output that they say, and structure survives those that allow it."""

import math
import pickle
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import dgm_infer as dgm
from dgm_infer.conditioning.observations import Pixels
from dgm_infer.structures import Units
from tests.oracles import FLOAT, linear_gaussian_model


class Pictures(dgm.DirectedModel):
    """Images ``[2, 6, 4]`` (channels first) of two latents, every pixel with noise of its own."""

    structure = "independent"
    output_shape = (2, 6, 4)

    def __init__(self, structure="independent"):
        super().__init__()
        self.structure = structure
        self.global_density, self.local_density = dgm.StandardNormal(2), dgm.StandardNormal(48)
        self.register_buffer("weight", torch.randn(48, 2, generator=torch.Generator().manual_seed(110), dtype=FLOAT))

    def global_latents(self, u1):
        return {"z": u1}

    def simulate(self, z, u2):
        return torch.tanh(z["z"] @ self.weight.mT) + 0.1 * u2


def pictures(*lead, seed=111):
    return torch.randn(*lead, 2, 6, 4, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def means_of_blocks(x):
    return F.avg_pool2d(x.reshape(-1, 2, 6, 4), 2).reshape(*x.shape[:-3], 2, 3, 2)


KERNEL = torch.tensor([[0.0, 1.0, 0.0], [0.5, 2.0, -1.0], [0.25, 0.0, 0.5]], dtype=FLOAT)


def convolved(x):
    """By the sum that defines it, the image reflected at its edges."""
    result = torch.zeros_like(x)
    for row in range(6):
        for column in range(4):
            for i in range(3):
                for j in range(3):
                    r, c = row - (i - 1), column - (j - 1)
                    r, c = 10 - r if r > 5 else abs(r), 6 - c if c > 3 else abs(c)
                    result[..., row, column] += KERNEL[i, j] * x[..., r, c]
    return result


MATRIX = torch.randn(3, 48, generator=torch.Generator().manual_seed(112), dtype=FLOAT)

OPERATORS = {
    "downsample": (dgm.downsample(2), means_of_blocks),
    "linear": (dgm.linear(MATRIX), lambda x: x.flatten(-3) @ MATRIX.mT),
    "blur": (dgm.blur(KERNEL), convolved),
    "a function": (lambda x: x.mean(-1), lambda x: x.mean(-1)),
}


@pytest.mark.parametrize(("observe", "function"), OPERATORS.values(), ids=OPERATORS.keys())
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_an_operator_is_the_function_it_says(observe, function, batch):
    y = function(pictures(*batch))
    fibre = dgm.condition(Pictures("dense"), y, observe=observe)
    assert fibre.batch_shape == batch
    u = torch.randn(5, *batch, 50, generator=torch.Generator().manual_seed(113), dtype=FLOAT)
    x = Pictures().observed(u).reshape(5, *batch, 2, 6, 4)
    expected = (function(x) - y).reshape(5, *batch, -1)
    torch.testing.assert_close(fibre.constraint(u), expected, rtol=0, atol=1e-12)


def test_a_gaussian_blur_keeps_constants_and_spreads_a_point_by_its_standard_deviation():
    observation = dgm.blur(1.0)
    assert observation.kernel.shape == (7, 7)
    offsets = torch.arange(-3, 4, dtype=FLOAT)
    assert observation.kernel.sum().item() == pytest.approx(1)
    assert (observation.kernel.sum(0) @ offsets.square()).sqrt().item() == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(observation.kernel, observation.kernel.mT)


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_means_of_blocks_keep_the_structure(batch):
    y = 0.3 * means_of_blocks(pictures(*batch))
    fibre = dgm.condition(Pictures(), y, observe=dgm.downsample(2))
    dense = dgm.condition(Pictures("dense"), y, observe=dgm.downsample(2))
    assert fibre.units == Units(2, 4, 1)
    assert dense.units is None
    # the local inputs in the order of their blocks
    order = torch.arange(48).reshape(2, 3, 2, 2, 2).transpose(-3, -2).flatten()
    u = torch.randn(5, *batch, 50, generator=torch.Generator().manual_seed(114), dtype=FLOAT)
    whole = torch.cat([u[..., :2], torch.zeros_like(u[..., 2:]).index_copy(-1, order, u[..., 2:])], -1)
    torch.testing.assert_close(fibre.constraint(u), dense.constraint(whole))
    torch.testing.assert_close(fibre.linearise(u).energy, dense.linearise(whole).energy)


@pytest.mark.slow
def test_an_image_can_be_completed_from_its_means_of_blocks():
    model = Pictures()
    y = means_of_blocks(model.observed(torch.zeros(2, 50, dtype=FLOAT)).reshape(2, 2, 6, 4) + 0.1)
    fibre = dgm.condition(model, y, observe=dgm.downsample(2))
    draws = dgm.sample(fibre, chains=8, warmup=20, draws=10, seed=0, progress=False)
    assert draws.stats["acceptance_rate"].mean() > 0.5
    x = draws.generate(seed=1)
    assert x.shape == (8, 10, 2, 2, 6, 4)
    torch.testing.assert_close(means_of_blocks(x), y.expand(8, 10, 2, 2, 3, 2), rtol=0, atol=1e-7)
    assert x.std((0, 1)).min() > 0.02


@pytest.mark.parametrize("observe", [dgm.linear(MATRIX), dgm.blur(KERNEL)], ids=["overlapping rows", "blur"])
def test_operators_that_mix_all_outputs_make_the_problem_dense(observe):
    y = torch.zeros(3) if isinstance(observe, type(dgm.linear(MATRIX))) else torch.zeros(2, 6, 4)
    fibre = dgm.condition(Pictures(), y, observe=observe)
    assert fibre.units is None
    u = fibre.start(2, torch.Generator().manual_seed(115))
    assert fibre.constraint_error(u).max() < 1e-8


WRONG = {
    "blocks that do not fit": (
        lambda: condition(dgm.downsample(4), torch.zeros(2, 1, 1)),
        ["downsample(4)", "(2, 6, 4)"],
    ),
    "half a block": (lambda: dgm.downsample(1.5), ["1.5"]),
    "no block": (lambda: dgm.downsample(0), ["factor=0"]),
    "means of another shape": (lambda: condition(dgm.downsample(2), torch.zeros(2, 2, 3)), ["(2, 2, 3)", "(2, 3, 2)"]),
    "means that are NaN": (
        lambda: condition(dgm.downsample(2), torch.full((2, 3, 2), math.nan)),
        ["12 observed", "not finite"],
    ),
    "an image with holes": (
        lambda: dgm.condition(Pictures(), torch.zeros(2, 6, 4).index_fill(1, torch.tensor([0]), math.nan)),
        ["8 observed", "not finite", "observe=pixels(~observed.isnan())"],
    ),
    "a hole where the mask is True": (
        lambda: condition(dgm.pixels(torch.ones(2, 6, 4).bool()), torch.full((2, 6, 4), math.nan)),
        ["48 observed", "the mask (False)"],
    ),
    "blocks of what has no width": (lambda: condition(dgm.downsample(2), torch.zeros(1), Flat()), ["(4,)"]),
    "matrix of another width": (lambda: condition(dgm.linear(torch.ones(2, 5)), torch.zeros(2)), ["(2, 5)", "48"]),
    "matrix of whole numbers": (lambda: dgm.linear(torch.ones(2, 5, dtype=torch.int64)), ["int64"]),
    "a vector for a matrix": (lambda: dgm.linear(torch.ones(5)), ["(5,)"]),
    "a row of zeros": (lambda: dgm.linear([[1.0, 0.0], [0.0, 0.0]]), ["zeros"]),
    "values that do not fit the matrix": (lambda: condition(dgm.linear(MATRIX), torch.zeros(4)), ["(4,)", "(3,)"]),
    "no blur": (lambda: dgm.blur(0.0), ["blur(kernel=0)"]),
    "a kernel without a centre": (lambda: dgm.blur(torch.ones(2, 3)), ["(2, 3)", "odd"]),
    "a kernel larger than the image": (
        lambda: condition(dgm.blur(2.0), torch.zeros(2, 6, 4)),
        ["(13, 13)", "(2, 6, 4)"],
    ),
}


class Flat(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(4)

    def observed(self, u):
        return u


def condition(observe, y, model=None):
    return dgm.condition(model or Pictures(), y, observe=observe)


@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_with_an_operator_is_said_in_one_line(wrong, words):
    with pytest.raises(dgm.errors.ObservationError) as caught:
        wrong()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def functional_mean(x):
    return x.mean(-1)


IMAGE_OPERATORS = {"downsample": dgm.downsample(2), "linear": dgm.linear(MATRIX), "blur": dgm.blur(KERNEL)}


@pytest.mark.parametrize("observe", IMAGE_OPERATORS.values(), ids=IMAGE_OPERATORS.keys())
def test_an_operator_on_a_tensor_has_its_derivative(observe):
    x = pictures(3).requires_grad_()
    (gradient,) = torch.autograd.grad(observe(x).sum(), x)
    assert gradient.abs().max() > 0.01


@pytest.mark.parametrize("observe", [*IMAGE_OPERATORS.values(), functional_mean], ids=[*IMAGE_OPERATORS, "a function"])
def test_operators_come_back_from_a_pickle(observe):
    fibre = dgm.condition(Pictures("dense"), observe(pictures()), observe=observe, noise=0.1)
    measurement: Any = fibre.observed.model.model
    back = pickle.loads(pickle.dumps(measurement.operator))
    x = pictures(3, seed=118).flatten(-3)
    assert torch.equal(back(x), measurement.operator(x))


def test_the_pixels_of_an_image_are_the_data_of_which_the_rest_is_hidden():
    mask = torch.rand(2, 6, 4, generator=torch.Generator().manual_seed(2)) < 0.5
    observation, image = dgm.pixels(mask), pictures(3)
    data = observation(image)
    assert torch.equal(data.isnan(), ~mask.expand(3, 2, 6, 4))
    assert torch.equal(data[:, mask], image[:, mask])
    assert torch.equal(
        dgm.condition(Pictures(), data, observe=observation).values,
        dgm.condition(Pictures(), image, observe=observation).values,
    )
    assert torch.equal(Pixels()(image), image)
    with pytest.raises(dgm.errors.ObservationError, match=r"the mask has shape \(2, 6, 4\); the image's is \(6, 4\)"):
        observation(image[0, 0])


@pytest.mark.parametrize("observe", [*IMAGE_OPERATORS.values(), lambda x: x.flatten(-3) @ MATRIX.mT])
def test_derivatives_in_float32_leave_the_operator_its_own_type(observe):
    fibre = dgm.condition(Pictures("dense"), observe(pictures()), observe=observe)
    u = torch.randn(3, 50, generator=torch.Generator().manual_seed(116), dtype=FLOAT)
    exact, coarse = fibre.rows(3).jacobian(u), fibre.computed(float32=True).rows(3).jacobian(u)
    torch.testing.assert_close(coarse.log_det, exact.log_det, rtol=1e-3, atol=1e-3)


class Means(torch.nn.Module):
    """Means of images, after a linear map with weights of 32 bits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.map = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.map(x).mean(-2)


@pytest.mark.parametrize(
    "observe",
    [
        *IMAGE_OPERATORS.values(),
        dgm.pixels(torch.rand(2, 6, 4, generator=torch.Generator().manual_seed(2)) < 0.5),
        Means(),
    ],
    ids=[*IMAGE_OPERATORS, "pixels", "a network"],
)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_noise_of_the_measurement_comes_after_the_operator(observe, batch):
    # the model's own noise is at its own width, before the operator
    model, y = Pictures(), pictures(*batch)
    if not isinstance(observe, type(dgm.pixels(torch.ones(1, dtype=torch.bool)))):
        y = observe.double()(y).detach() if isinstance(observe, Means) else observe(y)
    exact = dgm.condition(Pictures("dense"), y, observe=observe)
    fibre = dgm.condition(model, y, observe=observe, noise=0.3)
    n = exact.values.shape[-1]
    assert fibre.observed.structure.units == Units(50, 1, 1)
    u = torch.randn(5, *batch, 50 + n, generator=torch.Generator().manual_seed(117), dtype=FLOAT)
    expected = exact.observed.outputs(u[..., :50]) + 0.3 * u[..., 50:] - exact.values
    torch.testing.assert_close(fibre.constraint(u), expected, rtol=0, atol=1e-6)
    # completions are the model's outputs
    found = fibre.complete(u, torch.Generator())
    torch.testing.assert_close(found, model.observed(u[..., :50]).reshape(5, *batch, 2, 6, 4), rtol=0, atol=1e-6)
    assert fibre.latents(u).keys() == exact.latents(u[..., :50]).keys()
    assert fibre.marginal is not None


def test_the_posterior_under_noise_of_a_blurred_measurement_is_exact():
    # outputs linear in standard normal inputs: the posterior is normal
    model = linear_gaussian_model()
    blurring = torch.tril(torch.ones(6, 6, dtype=FLOAT)).triu(-2) / 3
    y = torch.randn(6, generator=torch.Generator().manual_seed(3), dtype=FLOAT)
    fibre = dgm.condition(model, y, observe=dgm.linear(blurring), noise=0.5)
    jacobian = torch.func.jacrev(lambda u: blurring @ model.observed(u))(
        torch.zeros(model.input_density.dim, dtype=FLOAT)
    )
    offset = blurring @ model.observed(torch.zeros(model.input_density.dim, dtype=FLOAT))
    precision = torch.eye(jacobian.shape[1], dtype=FLOAT) + jacobian.mT @ jacobian / 0.25
    mean = torch.linalg.solve(precision, jacobian.mT @ (y - offset) / 0.25)
    draws = dgm.sample(fibre, dgm.LiftedHMC(), chains=64, warmup=40, draws=40, seed=1, progress=False)
    u = draws.inputs[..., : len(mean)]
    error = u.mean(1).std(0) / 8
    assert ((u.mean((0, 1)) - mean).abs() < 5 * error).all()
    torch.testing.assert_close(u.flatten(0, 1).std(0), torch.linalg.inv(precision).diagonal().sqrt(), rtol=0.1, atol=0)
    # the control: noise of another width has another posterior
    assert ((u.mean((0, 1)) - mean * 0.5).abs() > 5 * error).any()


def test_noise_of_what_has_none_is_refused():
    with pytest.raises(dgm.errors.ArgumentError, match=r"noise=0.1\): tolerance= is the width of such noise"):
        dgm.condition(Pictures(), pictures(), noise=0.1, tolerance=0.1)
    with pytest.raises(dgm.errors.ArgumentError, match=r"noise=-1"):
        dgm.condition(Pictures(), pictures(), noise=-1)
