"""Training against a critic: what a few steps change, the moving average, and what checkpoints hold."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

import generators
from dgm_infer.errors import ArgumentError, CheckpointError, ConfigError
from trainers import DigitsData, GANTraining
from trainers.adversarial import energy_distance
from trainers.data import Labelled, Split

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore:.*LeafSpec:FutureWarning")


def module(**options: Any) -> GANTraining:
    torch.manual_seed(0)
    generator = generators.GAN(4, (8, 8), channels=(8, 4))
    return GANTraining(generator, generators.Critic((8, 8), channels=(4, 8)), **{"learning_rate": 2e-3, **options})


def trainer(folder, epochs: int = 1, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings = {"accelerator": "cpu", "max_epochs": epochs, "default_root_dir": folder, "logger": False, **quiet}
    return Trainer(**{**settings, **options})


def weights(network: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


@pytest.mark.parametrize(
    "options", [{}, {"gradient_penalty": 1.0}, {"objective": "wasserstein", "critic_steps": 3}], ids=str
)
def test_a_few_steps_move_both_networks_and_log_their_losses(options, tmp_path):
    training = module(**options)
    before = {name: weights(getattr(training, name)) for name in ("trained", "critic", "generator")}
    run = trainer(tmp_path)
    run.fit(training, datamodule=DigitsData(batch_size=200))
    for name, old in before.items():
        assert (weights(getattr(training, name)) - old).abs().max() > 1e-4
    assert {"train/critic", "train/generator", "val/energy_distance"} <= run.callback_metrics.keys()
    assert all(value.isfinite() for value in run.callback_metrics.values())
    assert training.steps == 7
    # critic and generator: each batch is a step of the one, every third of the other
    assert run.global_step == 7 + 7 // training.critic_steps


@pytest.mark.slow
def test_the_critic_learns_to_tell_and_a_trained_generator_is_nearer_than_an_untrained_one(tmp_path):
    training = module()
    torch.manual_seed(1)
    trainer(tmp_path, 15).fit(training, datamodule=DigitsData(batch_size=100))
    real = DigitsData().held_out().flatten(1)
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        found = [
            energy_distance(real, training.eval().sample(200, gan.eval(), rng).flatten(1)).item()
            for gan in (module().generator, training.generator)
        ]
    assert found[1] < 0.6 * found[0]


def test_the_generator_is_the_average_of_those_it_has_been(tmp_path):
    training = module(decay=0.5)
    seen, expected = [], copy.deepcopy(training.generator)
    step = training.training_step

    def recorded(batch, batch_idx):
        step(batch, batch_idx)
        seen.append(copy.deepcopy(training.trained.state_dict()))

    training.training_step = recorded  # type: ignore[method-assign]
    trainer(tmp_path).fit(training, datamodule=DigitsData(batch_size=200))
    state = expected.state_dict()
    for n, new in enumerate(seen):
        decay = min(0.5, (1 + n) / (10 + n))
        for name, value in state.items():
            state[name] = decay * value + (1 - decay) * new[name] if value.is_floating_point() else new[name]
    for name, value in training.generator.state_dict().items():
        torch.testing.assert_close(value, state[name])
    assert not torch.allclose(weights(training.generator), weights(training.trained))


def test_checkpoints_hold_the_average_and_go_on_where_they_ended(tmp_path):
    training = module()
    run = trainer(tmp_path)
    run.fit(training, datamodule=DigitsData(batch_size=200))
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = generators.load(tmp_path / "a.ckpt")
    assert isinstance(loaded, generators.GAN)
    assert torch.equal(weights(loaded), weights(training.generator))
    assert not torch.equal(weights(loaded), weights(training.trained))
    longer = module()
    trainer(tmp_path, 2).fit(longer, datamodule=DigitsData(batch_size=200), ckpt_path=tmp_path / "a.ckpt")
    assert longer.steps == 14
    other = GANTraining(generators.GAN(3, (8, 8)), generators.Critic((8, 8)))
    with pytest.raises(CheckpointError, match=r"latent_dim=4.*latent_dim=3"):
        trainer(tmp_path, 2).fit(other, datamodule=DigitsData(), ckpt_path=tmp_path / "a.ckpt")


def test_a_critic_of_another_shape_in_a_checkpoint_is_one_line(tmp_path):
    run, training = trainer(tmp_path), module()
    run.fit(training, datamodule=DigitsData(batch_size=700))
    run.save_checkpoint(tmp_path / "a.ckpt")
    other = GANTraining(copy.deepcopy(training.trained), generators.Critic((8, 8), channels=(4, 6)))
    with pytest.raises(CheckpointError, match="critic") as caught:
        trainer(tmp_path, 2).fit(other, datamodule=DigitsData(), ckpt_path=tmp_path / "a.ckpt")
    assert "\n" not in str(caught.value)


def test_one_image_for_validation_has_no_energy_distance(tmp_path):
    training = module()
    training._compared = [torch.rand(1, 64)]
    with pytest.raises(ConfigError, match="needs 2 images for validation, not 1"):
        training.on_validation_epoch_end()


@pytest.mark.parametrize(("n", "steps"), [(9, 2), (10, 3), (8, 2)])
def test_a_last_batch_of_a_single_image_is_left_out(n, steps):
    data = DigitsData(batch_size=4)
    part = Labelled(torch.rand(n, 8, 8), torch.zeros(n))
    data.split = Split(part, part, part)
    assert len(list(data.train_dataloader())) == steps
    assert sum(len(images) for images, _ in data.val_dataloader()) == n


def test_mixed_precision_trains(tmp_path):
    training = module(objective="wasserstein")
    run = trainer(tmp_path, precision="bf16-mixed")
    run.fit(training, datamodule=DigitsData(batch_size=200))
    assert weights(training.generator).isfinite().all()
    assert weights(training.generator).dtype == torch.float32
    assert run.callback_metrics["val/energy_distance"].isfinite()


def distance_from_held_out_digits(images: torch.Tensor) -> float:
    return energy_distance(DigitsData().held_out().flatten(1), images).item()


def test_the_shipped_generators_images_are_near_held_out_digits_and_no_copies():
    gan = generators.load("digits_gan")
    z = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        images = gan(z)
    # as stated in configs/train/digits_gan.yaml
    assert distance_from_held_out_digits(images) < 0.015
    training = DigitsData().training.images.flatten(1)
    own, others = (torch.cdist(x, training).min(1).values.mean() for x in (images, DigitsData().held_out().flatten(1)))
    assert own > others


def test_control_another_generators_images_are_farther():
    vae = generators.load("digits_vae")
    u = vae.input_density.sample((2000,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert distance_from_held_out_digits(vae(u)) > 0.02


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "hinge"}, "objective='hinge'"),
        ({"gradient_penalty": -1}, "gradient_penalty=-1"),
        ({"critic_steps": 0}, "critic_steps=0"),
        ({"learning_rate": 0}, "learning_rate=0"),
        ({"betas": (0.5, 1)}, r"betas=\(0.5, 1\)"),
        ({"decay": 1}, "decay=1"),
    ],
)
def test_illegal_fields_are_named(options, words):
    with pytest.raises(ArgumentError, match=words):
        module(**options)


def test_critics_that_do_not_fit_are_refused():
    gan = generators.GAN(4, (8, 8))
    with pytest.raises(ArgumentError, match=r"critic of images \(8, 9\)"):
        GANTraining(gan, generators.Critic((8, 9)))
    with pytest.raises(ArgumentError, match="excludes batch statistics"):
        GANTraining(gan, generators.Critic((8, 8), normalisation="batch"), "wasserstein")
