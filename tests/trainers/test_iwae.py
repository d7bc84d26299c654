"""Training by the importance-weighted bound: what it raises, what it logs, and which epoch is kept."""

import math

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import generators
from dgm_infer.errors import ArgumentError
from trainers import DigitsData, IWAETraining, VAETraining
from trainers.bounds import importance_weighted, log_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore:.*LeafSpec:FutureWarning")

MODELS = {
    "fully connected": lambda: generators.IWAE(4, (8, 8), (32,)),
    "convolutional": lambda: generators.BernoulliVAE(4, (8, 8), (), channels=(8, 4)),
    "Gaussian": lambda: generators.GaussianVAE(4, (8, 8), (32,), sd=0.3),
}


def fit(module, folder, epochs: int = 4, *callbacks) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
    )
    binarise = None if isinstance(module.generator, generators.GaussianVAE) else "dynamic"
    trainer.fit(module, datamodule=DigitsData(batch_size=200, binarise=binarise))
    return trainer


def bound(model, k: int) -> float:
    """The bound of the binary held-out digits; those of a Gaussian model have grey levels."""
    binarise = None if isinstance(model, generators.GaussianVAE) else "static"
    torch.manual_seed(7)
    with torch.no_grad():
        return importance_weighted(log_weights(model, DigitsData(binarise=binarise).held_out(), k)).mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["plain", "doubly_reparameterised"])
@pytest.mark.parametrize("name", MODELS)
def test_training_raises_the_bound(name, gradient, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]()
    before = bound(model, 20)
    trainer = fit(IWAETraining(model, 5, gradient, learning_rate=1e-2, validation_samples=20), tmp_path)
    after = bound(model, 20)
    assert after > before + 3
    metrics = trainer.callback_metrics
    assert metrics["val/iwae"] > metrics["val/elbo"]
    assert metrics["val/iwae"] == pytest.approx(after, abs=3)


def test_the_elbo_trains_models_of_binary_pixels(tmp_path):
    torch.manual_seed(0)
    model = MODELS["fully connected"]()
    before = bound(model, 1)
    fit(VAETraining(model, learning_rate=1e-2), tmp_path)
    assert bound(model, 1) > before + 3


def test_one_draw_is_the_elbo():
    """Up to the divergence, here estimated and there in closed form."""
    torch.manual_seed(0)
    model = MODELS["fully connected"]()
    images = DigitsData(binarise="static").held_out(20)
    with torch.no_grad():
        estimates = torch.stack([importance_weighted(log_weights(model, images, 1)) for _ in range(400)])
        elbo = torch.stack([VAETraining(model).elbo(images, 20) for _ in range(100)])
    error = (estimates.var(0) / 400 + elbo.var(0) / 100).sqrt()
    assert ((estimates.mean(0) - elbo.mean(0)).abs() < 5 * error).all()


def test_the_checkpoint_of_the_highest_bound_is_kept(tmp_path):
    """The decoder is ruined after two epochs: the last bound is not the best."""

    class Ruined(IWAETraining):
        def on_train_epoch_start(self):
            if self.current_epoch == 2:
                torch.nn.init.normal_(self.generator.get_parameter("decoder.network.2.weight"), std=20.0)

    torch.manual_seed(0)
    model = MODELS["fully connected"]()
    best = ModelCheckpoint(tmp_path, filename="best", monitor="val/iwae", mode="max")
    fit(Ruined(model, 5, learning_rate=1e-2), tmp_path, 4, best)
    assert torch.load(best.best_model_path, weights_only=True)["epoch"] == 1
    assert bound(generators.load(best.best_model_path), 20) > bound(model, 20) + 10


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", 0),
        ("validation_samples", 0),
        ("gradient", "score"),
        ("learning_rate", 0),
        ("learning_rate", math.nan),
        ("warm_up", 0),
    ],
)
def test_illegal_fields_are_named(field, value):
    with pytest.raises(ArgumentError, match=rf"IWAETraining\({field}={value!r}"):
        IWAETraining(generators.IWAE(2, (8, 8), (4,)), **{field: value})
