"""What every latent variable model gives: the right problem, log p(x), generated images, training, a description.

The shipped decoders, and two modules that only offer the attributes and inherit from nothing of this project.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Independent, Normal

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, CheckpointError, ModelError, ObservationError
from dgm_infer.models import base_distribution, is_discrete
from generators.checkpoints import CHECKPOINT_KEY, describe
from trainers import IWAETraining, VAETraining

SHAPE = (3, 4)
MASK = torch.zeros(SHAPE, dtype=torch.bool)
MASK[0] = True


class Linear(nn.Module):
    """``family(W z + b)``, one event of the shape of an image."""

    def __init__(self, family, latent_dim: int):
        super().__init__()
        self.layer, self.family = nn.Linear(latent_dim, math.prod(SHAPE)), family

    def forward(self, z):
        return Independent(self.family(self.layer(z).unflatten(-1, SHAPE)), len(SHAPE))


class Encoder(nn.Module):
    def __init__(self, latent_dim: int):
        super().__init__()
        self.layer = nn.Linear(math.prod(SHAPE), latent_dim)

    def forward(self, x):
        mean = self.layer(x)
        return Independent(Normal(mean, torch.full_like(mean, 1.2)), 1)


class ToyBinary(nn.Module):
    """A model of a user's own, of binary images."""

    def __init__(self, latent_dim: int = 2):
        super().__init__()
        self.config = {"latent_dim": latent_dim}
        self.prior = dgm.StandardNormal(latent_dim)
        self.decoder = Linear(lambda a: Bernoulli(logits=a), latent_dim)
        self.encoder = Encoder(latent_dim)


class ToyNormal(ToyBinary):
    """Likewise, of grey images."""

    def __init__(self, latent_dim: int = 2):
        super().__init__(latent_dim)
        self.decoder = Linear(lambda a: Normal(a, 0.3), latent_dim)


MODELS = {
    "GaussianVAE": lambda: generators.GaussianVAE(2, SHAPE, (5,), sd=0.3),
    "GaussianVAE, learned sd": lambda: generators.GaussianVAE(2, SHAPE, (5,)),
    "BernoulliVAE": lambda: generators.BernoulliVAE(2, SHAPE, (5,)),
    "BernoulliVAE, convolutions": lambda: generators.BernoulliVAE(2, SHAPE, (), channels=(3,)),
    "IWAE": lambda: generators.IWAE(2, SHAPE, (5,)),
    "toy, binary": ToyBinary,
    "toy, normal": ToyNormal,
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def parts_of(model) -> dgm.models.LatentVariableModel:
    return dgm.models.LatentVariableModel.of(model)


def images(model, n: int = 3) -> torch.Tensor:
    return parts_of(model).generate(n, seed=1).images


def test_the_parts_are_those_of_the_module(model):
    parts = parts_of(model)
    assert parts.prior.dim == 2
    assert parts.decoder is model.decoder
    assert parts.encoder is model.encoder
    assert parts.output_shape == SHAPE


def test_outputs_are_discrete_where_the_support_of_the_decoder_is(model):
    support = base_distribution(model.decoder(torch.zeros(2))).support
    assert parts_of(model).discrete == is_discrete(model) == support.is_discrete


def test_generated_images_repeat_come_from_their_latents_and_leave_random_numbers_alone(model):
    state = torch.get_rng_state()
    x, z = parts_of(model).generate(400, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.shape == (400, *SHAPE)
    assert torch.equal(parts_of(model).generate(400, seed=3).images, x)
    with torch.no_grad():
        likelihood = model.decoder(z)
    mean, variance = (part.reshape(400, -1) for part in (likelihood.mean, likelihood.variance))
    score = (x.flatten(1) - mean).sum(0) / variance.sum(0).sqrt()
    assert score.abs().max() < 5
    # the noise of the pixels is not made of the numbers that the latents are
    noise = ((x.flatten(1) - mean) / variance.sqrt()).flatten()[: z.numel()]
    assert (noise * z.flatten()[: len(noise)]).mean().abs() < 5 / len(noise) ** 0.5


def test_conditioning_gives_the_problem_that_fits_the_outputs(model):
    x = images(model)
    problem = dgm.condition(model, x.masked_fill(~MASK, math.nan), observe=dgm.pixels(MASK))
    assert isinstance(problem, generators.LatentPosterior if is_discrete(model) else dgm.Fibre)
    assert problem.batch_shape == (3,)
    sizes = {"chains": 2, "warmup": 3, "draws": 3, "seed": 1, "progress": False}
    draws = dgm.sample(problem, **sizes)
    assert draws.latents["z"].shape == (2, 3, 3, 2)
    completed = draws.generate()
    assert completed.shape == (2, 3, 3, *SHAPE)
    torch.testing.assert_close(completed[..., MASK].float(), x[..., MASK].expand(2, 3, 3, -1).float())
    assert not torch.equal(completed[..., ~MASK].float(), x[..., ~MASK].expand(2, 3, 3, -1).float())


@pytest.fixture(params=[name for name in MODELS if is_discrete(MODELS[name]())])
def discrete(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def test_a_posterior_of_latents_computes_as_the_decoder_does_unless_told_otherwise(discrete):
    x, z = images(discrete), torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(2))
    problem = dgm.condition(discrete, x, observe=dgm.pixels(MASK))
    assert problem.values.dtype == torch.float32
    by_hand = generators.LatentPosterior(discrete.decoder, x, parts_of(discrete).prior, MASK)
    assert torch.equal(problem.energy(z), by_hand.energy(z))
    double = dgm.condition(discrete, x, observe=dgm.pixels(MASK), dtype=torch.float64)
    torch.testing.assert_close(double.energy(z.double()), by_hand.energy(z).double(), rtol=1e-5, atol=1e-5)
    assert next(discrete.parameters()).dtype == torch.float32


def test_every_problem_may_have_a_mask_of_its_own(discrete):
    x = images(discrete)
    masks = torch.stack([MASK.roll(i, 0) for i in range(3)])
    together = dgm.condition(discrete, x, observe=dgm.pixels(masks))
    z = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(1)
    assert torch.equal(together.complete(z, rng)[:, masks], x[masks].expand(4, -1))
    for i in range(3):
        alone = dgm.condition(discrete, x[i], observe=dgm.pixels(masks[i])).energy(z[:, i])
        torch.testing.assert_close(together.energy(z)[:, i], alone)
        torch.testing.assert_close(together.take(torch.tensor([i])).energy(z[:, [i]])[:, 0], alone)
        # control: another problem's mask is another posterior
        other = dgm.condition(discrete, x[i], observe=dgm.pixels(masks[i - 1])).energy(z[:, i])
        assert (other - alone).abs().max() > 1e-3


def test_log_evidence_from_the_encoder_lies_above_its_own_bound(model):
    x, parts = images(model, 4), parts_of(model)
    target = generators.LatentPosterior(parts.decoder, x, parts.prior)
    base = dgm.Gaussian.from_encoder(parts.encoder, x.flatten(1))
    options = {"chains": 8, "seed": 0, "progress": False}
    bound = dgm.log_evidence(target, base, dgm.Elbo(), **options)
    found = dgm.log_evidence(target, base, dgm.evidence.ImportanceSampling(2000), **options)
    assert found.log_z.isfinite().all()
    assert (found.log_z > bound.log_z - 5 * (found.std_error + bound.std_error)).all()
    # by quadrature over the two latents
    grid = torch.linspace(-7, 7, 281)
    z = torch.cartesian_prod(grid, grid)
    with torch.no_grad():
        log_joint = parts.decoder(z.unsqueeze(1)).log_prob(x.reshape(4, *parts.outputs.event_shape))
        log_joint = log_joint + parts.prior.log_prob(z).unsqueeze(1)
    exact = log_joint.double().logsumexp(0) + 2 * math.log(float(grid[1] - grid[0]))
    assert ((found.log_z - exact).abs() < 5 * found.std_error + 1e-3).all()
    # control: the wrong images have another evidence
    assert ((found.log_z - exact.roll(1)).abs() > 5 * found.std_error + 1e-3).any()


TRAININGS = {"vae": VAETraining, "iwae": lambda generator: IWAETraining(generator, samples=4)}


@pytest.fixture
def toys_registered(monkeypatch):
    for toy in (ToyBinary, ToyNormal):
        monkeypatch.setitem(generators.registry.CLASSES, toy.__name__, toy)


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.usefixtures("toys_registered")
def test_a_training_step_has_a_gradient_for_encoder_and_decoder(model, training):
    module: Any = TRAININGS[training](model.train())
    module.log = lambda *arguments, **options: None
    module.on_train_batch_start(images(model), 0)
    module.training_step(images(model), 0).backward()
    for part in (model.encoder, model.decoder):
        assert max(p.grad.abs().max() for p in part.parameters() if p.grad is not None) > 0


@pytest.mark.usefixtures("toys_registered")
def test_its_description_rebuilds_it_from_a_file_and_from_a_checkpoint(model, tmp_path):
    loaded: Any = generators.load(generators.save(model, tmp_path / "mine"))
    assert type(loaded) is type(model)
    z = torch.randn(5, 2)
    assert torch.equal(loaded.decoder(z).mean, model.decoder(z).mean)
    state = {f"generator.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({CHECKPOINT_KEY: describe(model), "state_dict": state}, tmp_path / "mine.ckpt")
    loaded = generators.load(tmp_path / "mine.ckpt")
    assert torch.equal(loaded.decoder(z).mean, model.decoder(z).mean)


def test_a_class_that_is_not_registered_is_neither_trained_nor_stored():
    for use in (VAETraining, describe):
        with pytest.raises(CheckpointError, match=r"ToyBinary cannot be stored.*generators\.register"):
            use(ToyBinary())
    with pytest.raises(ArgumentError, match="has this name already"):
        generators.register(type("GaussianVAE", (nn.Module,), {}))
    with pytest.raises(ArgumentError, match="expected a subclass"):
        generators.register(ToyBinary())  # type: ignore[type-var]
    assert "ToyBinary" not in generators.registry.CLASSES


def test_what_a_model_of_discrete_outputs_cannot_do_is_said_in_one_line():
    model = generators.IWAE(2, SHAPE, (5,)).eval()
    x = images(model)
    condition: Any = dgm.condition
    for error, words, options in (
        (ArgumentError, r"tolerance=0\.1.*IWAE are discrete", {"tolerance": 0.1}),
        (ObservationError, "observe=downsample.*IWAE are discrete.*pixels", {"observe": dgm.downsample(1)}),
        (ObservationError, "observe=transform.*only pixels", {"observe": lambda x: x.sum(-1)}),
        (ObservationError, r"mask has shape \(4, 3\)", {"observe": dgm.pixels(MASK.T)}),
        (ArgumentError, "dtype=torch.float16", {"dtype": torch.float16}),
        (ArgumentError, "gpu7", {"device": "gpu7"}),
    ):
        with pytest.raises(error, match=words) as caught:
            condition(model, x, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ObservationError, match=r"not 0\.5: binarise"):
        dgm.condition(model, x / 2)
    with pytest.raises(ObservationError, match="not finite"):
        dgm.condition(model, x.masked_fill(MASK, math.nan), observe=dgm.pixels(MASK))


def test_dropout_in_training_mode_is_refused_for_discrete_outputs_too():
    model = generators.BernoulliVAE(2, SHAPE, (5,))
    model.decoder.network.append(nn.Dropout(0.5))
    with pytest.raises(ModelError, match=r"training mode.*model\.eval"):
        dgm.condition(model.train(), torch.zeros(SHAPE))
    assert isinstance(dgm.condition(model.eval(), torch.zeros(SHAPE)), generators.LatentPosterior)


class Mean(dgm.GenerativeModel):
    """A generative model whose outputs are the means of a discrete decoder."""

    def __init__(self):
        super().__init__()
        self.input_density, self.decoder = dgm.StandardNormal(12), generators.BernoulliDecoder(12, SHAPE, ())

    def observed(self, u):
        return self.decoder(u).mean


class Unfinished(Mean):
    def observed(self, u):
        raise ModelError("the pixels are discrete")


def test_a_model_that_computes_its_outputs_is_continuous_whatever_its_decoder():
    torch.manual_seed(0)
    assert isinstance(dgm.condition(Mean().eval(), torch.full((12,), 0.5)), dgm.Fibre)
    assert isinstance(dgm.condition(Unfinished().eval(), torch.ones(12)), generators.LatentPosterior)


class Letters(nn.Module):
    """Two letters of three kinds."""

    prior = dgm.StandardNormal(2)

    def __init__(self):
        super().__init__()
        self.decoder = self.Decoder()

    class Decoder(nn.Linear):
        def __init__(self):
            super().__init__(2, 6)

        def forward(self, z):
            return Independent(Categorical(logits=super().forward(z).unflatten(-1, (2, 3))), 1)


def test_discrete_outputs_other_than_bits_are_conditioned_on_as_a_whole():
    torch.manual_seed(0)
    target: Any = dgm.condition(Letters(), torch.tensor([[0, 2], [1, 1]]))
    assert target.batch_shape == (2,)
    z = torch.randn(3, 2, 2)
    expected = -target.decoder(z).log_prob(torch.tensor([[0.0, 2.0], [1.0, 1.0]]))
    torch.testing.assert_close(target.log_likelihood(z), -expected)


def test_what_has_no_decoder_or_prior_is_said():
    with pytest.raises(ModelError, match="GAN has no decoder"):
        dgm.models.LatentVariableModel.of(generators.GAN(2, (4, 4), channels=(4,)))
    toy = ToyBinary()
    del toy.prior
    with pytest.raises(ModelError, match=r"ToyBinary\.prior is not set"):
        dgm.models.LatentVariableModel.of(toy)
    with pytest.raises(ModelError, match="expected a GenerativeModel, got ToyBinary"):
        dgm.condition(toy, torch.zeros(SHAPE))
