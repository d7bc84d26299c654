"""Conditioning: what is observed, in what space it is sampled, and that the user's model stays as it was."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

import dgm_infer as dgm
from generators import LinearGaussian, WithNoise
from tests.models import MASK, Bent, Images, image
from tests.oracles import FLOAT, Circle, Ellipse, linear_gaussian_model


@pytest.fixture
def images():
    return Images().eval()


# ----------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)], ids=str)
def test_the_batch_comes_from_the_observation(images, batch):
    fibre = dgm.condition(images, image(*batch), observe=dgm.pixels(MASK))
    assert isinstance(fibre, dgm.Fibre)
    assert fibre.batch_shape == batch
    # two latents and the noise of the three observed pixels
    assert fibre.dim == 2 + 3
    assert fibre.values.shape == (*batch, 3)
    u = torch.zeros(7, *batch, fibre.dim, dtype=FLOAT)
    assert fibre.constraint(u).shape == (7, *batch, 3)


def test_the_constraint_is_the_observed_part_of_the_output_minus_the_data(images):
    y = image(4)
    fibre = dgm.condition(images, y, observe=dgm.pixels(MASK))
    u = torch.randn(4, 5, generator=torch.Generator().manual_seed(72), dtype=FLOAT)
    noise = torch.zeros(4, 6, dtype=FLOAT)
    noise[:, MASK.flatten()] = u[:, 2:]
    x = copy.deepcopy(images).double().observed(torch.cat([u[:, :2], noise], -1)).detach()
    torch.testing.assert_close(fibre.constraint(u), (x - y.double().flatten(1))[:, MASK.flatten()])


def test_every_problem_may_have_its_own_mask(images):
    masks = torch.stack([MASK, ~MASK, MASK.flip(-1)])
    y = image(3)
    fibre = dgm.condition(images, y, observe=dgm.pixels(masks))
    for problem in range(3):
        alone = dgm.condition(images, y[problem], observe=dgm.pixels(masks[problem]))
        u = torch.randn(5, 3, 5, generator=torch.Generator().manual_seed(73), dtype=FLOAT)
        torch.testing.assert_close(fibre.constraint(u)[:, problem], alone.constraint(u[:, problem]))


def test_hidden_entries_are_ignored_whatever_they_hold(images):
    y = image()
    plain = dgm.condition(images, y, observe=dgm.pixels(MASK))
    for junk in (math.nan, math.inf, 1e30):
        assert torch.equal(
            dgm.condition(images, y.masked_fill(~MASK, junk), observe=dgm.pixels(MASK)).values, plain.values
        )


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, torch.Tensor.tolist], ids=["NumPy", "lists"])
def test_data_and_masks_may_be_arrays_or_lists(images, convert):
    fibre = dgm.condition(images, convert(image()), observe=dgm.pixels(convert(MASK)))
    assert torch.equal(fibre.values, image()[MASK].double())


def test_flat_data_are_taken_for_the_images_they_are(images):
    flat, shaped = dgm.condition(images, image(4).flatten(1)), dgm.condition(images, image(4))
    assert flat.batch_shape == (4,)
    assert torch.equal(flat.values, shaped.values)


def test_without_an_operator_the_complete_output_is_observed(images):
    fibre = dgm.condition(images, image())
    assert torch.equal(fibre.values, image().double().flatten())
    assert fibre.dim == 8


def test_structure_is_used_where_it_is_declared_and_pays():
    model = linear_gaussian_model()
    y = torch.zeros(6)
    assert dgm.condition(model, y).units is not None
    few = torch.tensor([True, True, False, False, False, False])
    # two outputs, three latents: dense is cheaper
    assert dgm.condition(model, y, observe=dgm.pixels(few)).units is None
    assert dgm.condition(model, y[:4], observe=lambda x: x[..., :4]).units is None
    assert dgm.condition(Bent("dense"), torch.zeros(5)).units is None


def test_a_function_of_the_output_sees_images(images):
    seen = []

    def column_means(x):
        seen.append(x.shape)
        return x.mean(-2)

    fibre = dgm.condition(images, torch.zeros(4, 3), observe=column_means)
    assert fibre.batch_shape == (4,)
    assert fibre.dim == 8
    assert fibre.constraint(torch.zeros(5, 4, 8, dtype=FLOAT)).shape == (5, 4, 3)
    assert {shape[-2:] for shape in seen} == {Images.output_shape}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_computation_is_in_the_dtype_asked_for(images, dtype):
    fibre = dgm.condition(images, image(), observe=dgm.pixels(MASK), dtype=dtype)
    draws = dgm.sample(fibre, chains=2, warmup=5, draws=3, seed=0, progress=False)
    assert draws.inputs.dtype == dtype
    assert draws.generate().dtype == dtype


# ----------------------------------------------------------------------------------- the user's model is the user's


def snapshot(model):
    return {
        "tensors": {k: (id(v), v.dtype, v.clone()) for k, v in model.state_dict(keep_vars=True).items()},
        "requires_grad": {k: v.requires_grad for k, v in model.named_parameters()},
        "grad": {k: v.grad for k, v in model.named_parameters()},
        "training": {k: m.training for k, m in model.named_modules()},
    }


def assert_unchanged(model, before):
    after = snapshot(model)
    for name, (identity, dtype, value) in before["tensors"].items():
        assert after["tensors"][name][:2] == (identity, dtype)
        assert torch.equal(after["tensors"][name][2], value)
    for what in ("requires_grad", "grad", "training"):
        assert after[what] == before[what]


def test_conditioning_and_sampling_change_nothing_about_the_model(images):
    before = snapshot(images)
    state = torch.get_rng_state()
    fibre = dgm.condition(images, image(2), observe=dgm.pixels(MASK))
    dgm.sample(fibre, chains=2, warmup=5, draws=3, seed=0, progress=False).generate()
    target = dgm.condition(images, image(2), tolerance=0.1)
    dgm.sample(target, chains=2, warmup=5, draws=3, seed=0, progress=False)
    assert_unchanged(images, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_refused_model_in_training_mode_is_not_changed_either():
    model = Images().train()
    before = snapshot(model)
    state = torch.get_rng_state()
    with pytest.raises(dgm.errors.ModelError):
        dgm.condition(model, image())
    assert_unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_the_model_afterwards_does_not_change_the_problem(images):
    fibre = dgm.condition(images, image())
    u = torch.ones(8, dtype=FLOAT)
    before = fibre.constraint(u)
    with torch.no_grad():
        images.network[0].weight.add_(1)
    assert torch.equal(fibre.constraint(u), before)


def test_training_mode_alone_is_no_error_where_it_makes_no_difference():
    model = linear_gaussian_model()
    assert model.training
    assert dgm.condition(model, torch.zeros(6)).dim == 9
    assert model.training


# --------------------------------------------------------------------------------------------------------- energies


def normal_energy(u):
    return 0.5 * u.square().sum(-1) + 0.5 * u.shape[-1] * math.log(2 * math.pi)


def test_with_a_tolerance_the_energy_is_prior_plus_squared_misfit():
    target = dgm.condition(Ellipse(), [[2.0], [3.0]], tolerance=0.3)
    assert isinstance(target, dgm.Target)
    assert target.batch_shape == (2,)
    u = torch.randn(5, 2, 2, generator=torch.Generator().manual_seed(74), dtype=FLOAT)
    misfit = u[..., 0] ** 2 + 4 * u[..., 1] ** 2 - torch.tensor([2.0, 3.0], dtype=FLOAT)
    torch.testing.assert_close(target.energy(u), normal_energy(u) + misfit**2 / (2 * 0.3**2))


def test_exactly_the_energy_is_prior_plus_half_the_log_determinant():
    fibre = dgm.condition(Ellipse(), [2.0])
    u = torch.randn(5, 2, generator=torch.Generator().manual_seed(75), dtype=FLOAT)
    gram = 4 * u[..., 0] ** 2 + 64 * u[..., 1] ** 2
    torch.testing.assert_close(fibre.linearise(u).energy, normal_energy(u) + 0.5 * gram.log())


def test_what_a_fibre_evaluates_carries_no_gradients():
    fibre, u = dgm.condition(Ellipse(), [2.0]), torch.ones(3, 2, dtype=FLOAT, requires_grad=True)
    constraint = fibre.evaluate(lambda fibre, u: fibre.constraint(u), u)
    assert torch.equal(constraint, fibre.constraint(u))
    assert not constraint.requires_grad
    assert fibre.constraint(u).requires_grad


def test_non_normal_inputs_and_log_factors_enter_the_energy():
    class Tilted(Circle):
        input_density = dgm.Logistic(2)

        def log_factor(self, u):
            return 0.7 * u[..., 1]

    u = torch.randn(5, 2, generator=torch.Generator().manual_seed(76), dtype=FLOAT)
    expected = -dgm.Logistic(2).log_prob(u) - 0.7 * u[..., 1] + 0.5 * (4 * u.square().sum(-1)).log()
    fibre = dgm.condition(Tilted(), [1.0])
    torch.testing.assert_close(fibre.linearise(u).energy, expected)
    expected = -dgm.Logistic(2).log_prob(u) - 0.7 * u[..., 1] + (u.square().sum(-1) - 1) ** 2 / 2
    torch.testing.assert_close(dgm.condition(Tilted(), [1.0], tolerance=1.0).energy(u), expected)


def test_noise_of_hidden_outputs_is_left_out_of_energy_and_inputs():
    model, y = linear_gaussian_model(), torch.zeros(6)
    mask = torch.tensor([True, False, True, True, False, True])
    fibre = dgm.condition(model, y, observe=dgm.pixels(mask))
    smaller = LinearGaussian(model.weight[mask], model.bias[mask], model.sd)
    alone = dgm.condition(smaller, y[mask])
    u = torch.randn(5, 7, generator=torch.Generator().manual_seed(77), dtype=FLOAT)
    torch.testing.assert_close(fibre.linearise(u).energy, alone.linearise(u).energy)
    torch.testing.assert_close(fibre.linearise(u).gradient, alone.linearise(u).gradient)


def test_a_log_factor_of_the_noise_keeps_the_noise_of_hidden_outputs():
    class Soft(LinearGaussian):
        def log_factor(self, u):
            return -u.square().sum(-1)

    model = linear_gaussian_model()
    mask = torch.tensor([True, False, True, True, False, True])
    fibre = dgm.condition(Soft(model.weight, model.bias, 0.5), torch.zeros(6), observe=dgm.pixels(mask))
    assert fibre.dim == 9
    u = torch.randn(5, 9, generator=torch.Generator().manual_seed(78), dtype=FLOAT)
    gram = fibre.linearise(u).jacobian.log_det
    torch.testing.assert_close(fibre.linearise(u).energy, normal_energy(u) + u.square().sum(-1) + 0.5 * gram)


# ------------------------------------------------------------------------------------------------------------- noise


def test_noise_is_added_to_the_outputs_and_latents_are_the_models_own():
    model = WithNoise(Circle(), sd=0.1)
    u = torch.randn(5, 3, generator=torch.Generator().manual_seed(79))
    torch.testing.assert_close(model.observed(u), Circle().observed(u[:, :2]) + 0.1 * u[:, 2:])
    assert torch.equal(model.latents(u)["angle"], Circle().latents(u[:, :2])["angle"])
    assert model.output_shape == (1,)
    assert dgm.condition(model, [1.0]).dim == 3


def test_noise_may_differ_between_outputs():
    model = WithNoise(Bent("dense"), sd=torch.linspace(0.1, 0.5, 5))
    u = torch.randn(3, 12, generator=torch.Generator().manual_seed(80), dtype=FLOAT)
    expected = Bent("dense").observed(u[:, :7]) + torch.linspace(0.1, 0.5, 5) * u[:, 7:]
    torch.testing.assert_close(model.observed(u), expected)
    assert dgm.condition(model, np.zeros(5)).dim == 12


@pytest.mark.slow
def test_noise_makes_an_impossible_observation_possible():
    with pytest.raises(dgm.errors.StartError):
        dgm.condition(Circle(), [-1.0]).start(2, torch.Generator().manual_seed(0))
    fibre = dgm.condition(WithNoise(Circle(), sd=0.5), [-1.0])
    u = fibre.start(2, torch.Generator().manual_seed(0))
    assert fibre.constraint_error(u).max() < 1e-8
    # additive noise is exact at once
    torch.testing.assert_close(u[:, 2], (-1 - u[:, :2].square().sum(-1)) / 0.5)


# ------------------------------------------------------------------------------------------------------------- models


def test_operators_and_noise_of_models_without_weights_are_computed_in_64_bits():
    class Inputs(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(3)

        def observed(self, u):
            return u

    fibre = dgm.condition(Inputs(), torch.zeros(2), observe=lambda x: x[..., :2].exp(), noise=0.1)
    u = torch.full((5,), 1 / 3, dtype=FLOAT)
    expected = u[:2].exp() + 0.1 * u[3:]
    # the rounding of 32 bits is 1e-7
    torch.testing.assert_close(fibre.constraint(u), expected, rtol=0, atol=1e-15)


def test_a_directed_model_splits_its_inputs():
    model = Bent()
    u = torch.randn(4, 7, generator=torch.Generator().manual_seed(81), dtype=FLOAT)
    u1, u2 = model.split(u)
    assert torch.equal(torch.cat([u1, u2], -1), u)
    assert torch.equal(model(u), model.simulate(model.global_latents(u1), u2))
    assert torch.equal(model.latents(u)["z"], u1)
    assert model.input_density.dim == 7


def test_output_shapes_are_flat_unless_declared(images):
    assert Circle().output_shape == (1,)
    assert Bent().output_shape == (5,)
    assert images.output_shape == (2, 3)
    assert linear_gaussian_model().output_shape == (6,)


# ----------------------------------------------------------------------------------- what a subclass may do differently


class Sinh(LinearGaussian):
    """Overrides ``observed`` itself, on top of what ``simulate`` gives."""

    def observed(self, u):
        return torch.sinh(super().observed(u))


class LocalLatents(LinearGaussian):
    """Reports what its noise inputs make, the hidden ones too."""

    def latents(self, u):
        return {"x": self.observed(u)}


def test_an_override_of_observed_is_what_is_conditioned():
    model = Sinh(torch.ones(3, 2, dtype=FLOAT))
    observe = dgm.pixels(torch.tensor([True, True, False]))
    draws = dgm.sample(
        dgm.condition(model, [5.0, 3.0, 0.0], observe=observe),
        dgm.ConstrainedHMC(0.3, n_steps=2),
        chains=2,
        warmup=0,
        draws=5,
        seed=0,
        progress=False,
    )
    z, n = draws.inputs[..., :2], draws.inputs[..., 2:]
    reached = torch.sinh(z.sum(-1, keepdim=True) + n)
    torch.testing.assert_close(reached, torch.tensor([5.0, 3.0], dtype=FLOAT).expand_as(reached), atol=1e-7, rtol=0)


def test_latents_of_hidden_noise_vary_as_the_model_says():
    model = LocalLatents(torch.zeros(4, 1, dtype=FLOAT), sd=1.0)
    fibre = dgm.condition(model, torch.zeros(4), observe=dgm.pixels(torch.tensor([True, True, False, False])))
    draws = dgm.sample(fibre, chains=50, warmup=30, draws=20, seed=0, progress=False)
    spread = draws.latents["x"].flatten(0, 1).std(0)
    assert spread[:2].max() < 1e-6
    assert (spread[2:] - 1).abs().max() < 0.2


def test_an_operator_module_is_cast_and_left_as_it_is():
    operator = torch.nn.Linear(3, 1)
    fibre = dgm.condition(Images().eval(), torch.zeros(2, 1), observe=operator)
    assert fibre.constraint(fibre.start(2, torch.Generator().manual_seed(0))).abs().max() < 1e-8
    assert operator.weight.dtype == torch.float32
    assert operator.training


def test_a_list_as_output_shape_is_a_shape():
    model: Any = Images().eval()
    model.output_shape = [2, 3]
    assert dgm.condition(model, image(), observe=dgm.pixels(MASK)).model.output_shape == (2, 3)


@pytest.mark.slow
def test_outputs_of_32_bits_keep_well_conditioned_chains_moving():
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(100, 5, generator=rng) @ torch.randn(5, 20, generator=rng) / 10

    class Narrow(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(100)

        def __init__(self):
            super().__init__()
            self.register_buffer("weight", weight)

        def observed(self, u):
            return torch.tanh(u @ self.weight)

    fibre = dgm.condition(dgm.WithNoise(Narrow(), sd=0.03), torch.zeros(20), dtype=torch.float32)
    draws = dgm.sample(fibre, dgm.ConstrainedHMC(), chains=8, warmup=40, draws=20, seed=0, progress=False)
    assert draws.stats["diverging"].double().mean() < 0.02
    assert draws.stats["acceptance_rate"].mean() > 0.5
