"""What callbacks show while a generator is trained: pictures, bounds and log p(x), without disturbing the training."""

import math
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from torch.distributions import MultivariateNormal

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, ConfigError
from tests.models import linear_vae
from trainers import DigitsData, GANTraining, HeldOutEvidence, ImageGrids, IWAETraining, VAETraining, monitoring
from trainers.data import Labelled
from trainers.monitoring import grid, reconstructions, samples

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore:.*LeafSpec:FutureWarning")


QUICK = dgm.evidence.ImportanceSampling()


def fit(folder, module, callbacks, epochs=2, logger=True, data=None):
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        logger=[CSVLogger(folder, "", ""), TensorBoardLogger(folder, "", "board")] if logger else False,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data or DigitsData(batch_size=700))
    return trainer


def vae(seed=0):
    torch.manual_seed(seed)
    return VAETraining(generators.GaussianVAE(3, (8, 8), (16,), sd=0.3))


class Signed(DigitsData):
    """The digits with pixels from -1 to 1."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        images, labels = super().on_after_batch_transfer(batch, dataloader_idx)
        return Labelled(2 * images - 1, labels)


def signed_gan():
    torch.manual_seed(0)
    generator = generators.GAN(4, (8, 8), hidden=[16], channels=None, output_range=(-1, 1))
    return GANTraining(generator, generators.Critic((8, 8), hidden=[16], channels=None))


def test_grids_of_a_generator_from_minus_one_to_one_are_black_where_it_is(tmp_path):
    module = signed_gan()
    fit(tmp_path, module, [ImageGrids(n=4, every_n_epochs=1)], epochs=1, data=Signed(batch_size=700))
    with torch.random.fork_rng():
        torch.manual_seed(monitoring._SEED)
        images = samples(module.generator, 4, torch.device("cpu"))
    assert images.min() < -0.01
    with Image.open(tmp_path / "images" / "samples_0001.png") as picture:
        shown = torch.tensor(picture.convert("L").getdata()).reshape(70, 70)
    # every pixel is a square of four
    expected = 255 * (images[0].detach() + 1) / 2
    torch.testing.assert_close(shown[2:34:4, 2:34:4].float(), expected, rtol=0, atol=1)


def test_data_on_another_scale_than_the_generators_are_refused_at_the_first_batch(tmp_path):
    with pytest.raises(ArgumentError, match=r"GAN makes pixels from -1 to 1, those of the data are in \[0, 1\]: set"):
        fit(tmp_path, signed_gan(), [], epochs=1, logger=False)


def test_grids_are_pictures_in_the_run_folder_and_on_the_board(tmp_path):
    fit(tmp_path, vae(), [ImageGrids(n=9, every_n_epochs=2)], epochs=3)
    names = sorted(path.name for path in (tmp_path / "images").iterdir())
    # the second epoch, and the last
    assert names == [f"{kind}_000{n}.png" for kind in ("reconstructions", "samples") for n in (2, 3)]
    with Image.open(tmp_path / "images" / "samples_0002.png") as picture:
        assert picture.size == (3 * 32 + 4 * 2, 3 * 32 + 4 * 2)
        assert picture.convert("L").getextrema()[1] > 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert set(board.Tags()["images"]) == {"samples", "reconstructions"}


def test_an_image_is_above_its_reconstruction():
    originals = torch.arange(1, 6)[:, None, None].expand(5, 4, 4) / 10
    pairs = torch.stack([originals, originals / 2], 1).flatten(0, 1)
    picture = grid(pairs, 5)[0]
    centres = picture[18::34, 18::34]
    # two columns for five images: rows of originals and of reconstructions in turns
    expected = [[0.1, 0.2], [0.05, 0.1], [0.3, 0.4], [0.15, 0.2], [0.5, 0.25]]
    torch.testing.assert_close(centres, torch.tensor(expected))


def test_reconstructions_of_an_exact_auto_encoder_are_the_images():
    model, weight = linear_vae(sd=1e-3)
    images = torch.randn(4, 2) @ weight.T
    with torch.no_grad():
        pairs = reconstructions(model, images)
    torch.testing.assert_close(pairs[1::2], pairs[::2], atol=1e-3, rtol=1e-3)


def test_generators_of_all_kinds_show_samples():
    for model in (
        generators.GAN(3, (8, 8), channels=[4]),
        generators.IWAE(3, (8, 8), [5]),
        generators.GaussianVAE(3, (2, 8, 8), [5]),
    ):
        with torch.no_grad():
            images = samples(model.eval(), 4, torch.device("cpu"))
        assert images.shape == (4, *model.output_shape)
        assert grid(images[:, :1] if images.ndim == 4 else images, 4).shape[0] == 3


def log_evidence(model, weight, callback, images):
    """The callback's log for a linear model, and the exact mean."""
    logged = {}
    module = SimpleNamespace(
        generator=model, device=torch.device("cpu"), log=lambda name, value, **_: logged.update({name: float(value)})
    )
    trainer = SimpleNamespace(
        datamodule=SimpleNamespace(held_out=lambda n: images[:n]),
        current_epoch=0,
        max_epochs=1,
        sanity_checking=False,
        is_global_zero=True,
        log_dir=None,
        default_root_dir=".",
    )
    callback.on_validation_epoch_end(trainer, module)
    exact = MultivariateNormal(torch.zeros(4), weight @ weight.T + 0.25 * torch.eye(4)).log_prob(images)
    return logged, exact[: callback.n_images].mean().item()


@pytest.mark.slow
def test_the_estimate_agrees_with_the_evidence_where_it_is_known_and_bounds_lie_below():
    model, weight = linear_vae()
    # an encoder that is twice as wide as the posterior
    with torch.no_grad():
        model.encoder.network[0].bias[2:] += math.log(2)
    images = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    logged, exact = log_evidence(model, weight, HeldOutEvidence(n_images=5, chains=8, samples=2000), images)
    error = logged["held_out/log_evidence_error"]
    assert 0 < error < 0.05
    assert abs(logged["held_out/log_evidence"] - exact) < 5 * error
    assert logged["held_out/elbo"] < logged["held_out/iwae"] + 1e-3
    # two latents with twice the sd each: KL = 2 (-log 2 + (4 - 1) / 2)
    gap = exact - logged["held_out/elbo"]
    assert gap == pytest.approx(2 * (1.5 - math.log(2)), abs=0.1)
    # control: the bound fails the test that the estimate passes
    assert abs(logged["held_out/elbo"] - exact) > 5 * error


def test_metrics_of_held_out_images_are_logged_with_their_error(tmp_path):
    fit(tmp_path, vae(), [HeldOutEvidence(2, 2, QUICK, chains=4, samples=20)])
    header, *lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert {f"held_out/{name}" for name in ("log_evidence", "log_evidence_error", "elbo", "iwae")} <= {
        *header.split(",")
    }
    column = header.split(",").index("held_out/log_evidence")
    values = [float(line.split(",")[column]) for line in lines if line.split(",")[column]]
    assert len(values) == 1
    assert math.isfinite(values[0])


@pytest.mark.parametrize("make", [vae, lambda: IWAETraining(generators.IWAE(3, (8, 8), [8]), samples=3)])
def test_looking_does_not_change_the_training(make, tmp_path):
    states = []
    for callbacks in ([], [ImageGrids(4, 1), HeldOutEvidence(2, 1, QUICK, chains=2, samples=5)]):
        torch.manual_seed(0)
        module = make()
        torch.manual_seed(1)
        data = DigitsData(batch_size=700, binarise="dynamic" if isinstance(module, IWAETraining) else None)
        fit(tmp_path / str(len(callbacks)), module, callbacks, logger=bool(callbacks), data=data)
        states.append(module.state_dict())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ImageGrids(n=0), "n=0"),
        (lambda: ImageGrids(every_n_epochs=0), "every_n_epochs=0"),
        (lambda: HeldOutEvidence(n_images=0), "n_images=0"),
        (lambda: HeldOutEvidence(chains=1), "chains=1"),
        (lambda: HeldOutEvidence(samples=0), "samples=0"),
    ],
)
def test_illegal_fields_are_named(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_a_generator_without_likelihood_is_refused_before_training(tmp_path):
    module = GANTraining(generators.GAN(3, (8, 8), channels=[4]), generators.Critic((8, 8), channels=[4]))
    with pytest.raises(ConfigError, match="a GAN has no encoder"):
        fit(tmp_path, module, [HeldOutEvidence()])


def test_callbacks_are_named_in_the_shipped_configurations():
    from pathlib import Path

    paths = (Path(__file__).parents[2] / "configs" / "train").glob("*_vae.yaml")
    # censored ones are the ground of a latent flow
    for path in (path for path in paths if "censored" not in path.stem):
        callbacks = yaml.safe_load(path.read_text())["trainer"]["callbacks"]
        assert {"trainers.ImageGrids", "trainers.HeldOutEvidence"} <= {c["class_path"] for c in callbacks}
