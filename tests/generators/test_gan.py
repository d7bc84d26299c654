"""Generators without noise of their own: their range, what conditions them, and their critics."""

import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, ModelError


@pytest.mark.parametrize("channels", [None, (8, 4)])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_it_takes_any_leading_dimensions(leading, channels):
    gan = generators.GAN(3, (2, 5, 4), (6,), channels).eval()
    assert gan(torch.randn(*leading, 3)).shape == (*leading, 40)
    critic = generators.Critic((2, 5, 4), (6,), channels)
    assert critic(torch.rand(*leading, 2, 5, 4)).shape == leading


def test_outputs_lie_inside_the_declared_range():
    torch.manual_seed(0)
    for limits in ((0.0, 1.0), (-1.0, 3.0)):
        gan = generators.GAN(3, (4, 4), channels=(8,), output_range=limits).eval()
        x = gan(10 * torch.randn(500, 3))
        assert gan.output_range == limits
        assert limits[0] < x.min() < x.max() < limits[1]
        middle = gan(torch.zeros(3)).mean()
        assert abs(middle - sum(limits) / 2) < 0.2 * (limits[1] - limits[0])
    free = generators.GAN(3, (4, 4), (), None, output_range=None)
    assert free.output_range is None
    assert free(100 * torch.randn(500, 3)).abs().max() > 1


def test_what_it_declares():
    gan = generators.GAN(3, (4, 4))
    assert gan.input_density == dgm.StandardNormal(3)
    assert gan.structure == "dense"
    assert generators.GaussianVAE(2, (4, 4)).structure == "independent"
    assert generators.GaussianVAE(2, (4, 4)).output_range is None
    assert generators.BernoulliVAE(2, (4, 4), (3,)).output_range == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("normalisation", ["none", "batch", "group"])
def test_it_is_conditioned_exactly_on_fewer_pixels_than_latents(normalisation):
    torch.manual_seed(1)
    gan = generators.GAN(4, (4, 4), channels=(8,), normalisation=normalisation)
    for _ in range(5):
        gan(torch.randn(64, 4))
    image = gan.eval()(torch.randn(4)).detach().reshape(4, 4)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[0, :2] = True
    draws = dgm.sample(
        dgm.condition(gan, image, observe=dgm.pixels(mask)), chains=4, warmup=20, draws=5, seed=1, progress=False
    )
    x = gan.double()(draws.inputs).unflatten(-1, (4, 4))
    assert (x[..., mask] - image[mask]).abs().max() < 1e-6
    assert x[..., ~mask].std(0).max() > 1e-3


def test_batch_statistics_of_training_mode_are_refused():
    gan = generators.GAN(4, (4, 4), channels=(8,))
    with pytest.raises(ModelError, match="training mode"):
        dgm.condition(gan, torch.full((4, 4), 0.5), observe=dgm.pixels(torch.eye(4).bool()))


def test_a_noisy_one_takes_more_pixels_than_latents():
    torch.manual_seed(1)
    gan = generators.GAN(2, (4, 4), channels=(8,)).eval()
    fibre = dgm.condition(generators.WithNoise(gan, 0.1), torch.full((4, 4), 0.5))
    draws = dgm.sample(fibre, chains=2, warmup=10, draws=2, seed=1, progress=False)
    assert draws.inputs.shape == (2, 2, 18)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"latent_dim": 0}, "latent_dim=0"),
        ({"output_shape": (4, 0)}, r"output_shape=\(4, 0\)"),
        ({"output_range": (1, 0)}, r"output_range=\(1, 0\)"),
        ({"normalisation": "spectral"}, "normalisation='spectral'"),
        ({"channels": ()}, r"channels=\(\)"),
        ({"output_shape": (16,)}, r"\(H, W\) or \(C, H, W\)"),
    ],
)
def test_illegal_arguments_are_named(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        generators.GAN(**{"latent_dim": 2, "output_shape": (4, 4), **arguments})
