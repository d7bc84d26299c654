"""Callbacks that show what a generator has learnt during training."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torchvision.utils import make_grid, save_image

import dgm_infer as dgm
from dgm_infer import GenerativeModel
from dgm_infer.arguments import whole_number
from dgm_infer.conditioning.pictures import PixelScale
from dgm_infer.errors import ConfigError, uninterrupted
from dgm_infer.evidence import Method
from dgm_infer.models import LatentVariableModel
from generators import LatentPosterior

from .bounds import importance_weighted, log_weights
from .export import run_folder

__all__ = ["HeldOutEvidence", "ImageGrids"]

# Seed of the latents of sample grids and the draws of held-out estimates: the same every time.
_SEED = 20270
# Fewest pixels of the shorter side of a picture in a grid.
_SIDE = 32


class _Look(Callback):
    """Runs after validation every few epochs, without affecting the random numbers of training."""

    metrics: tuple[str, ...] = ()
    """Names of what it logs."""

    def __init__(self, every_n_epochs: int):
        self.every_n_epochs = whole_number(type(self).__name__, "every_n_epochs", every_n_epochs)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        due = (trainer.current_epoch + 1) % self.every_n_epochs == 0 or last
        if trainer.sanity_checking or not due:
            return
        # all processes wait in it for the first, which alone looks
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        device = pl_module.device
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_SEED)
            self.look(trainer, pl_module, folder)

    def look(self, trainer: Trainer, pl_module: LightningModule, folder: Path) -> None:
        """What the first process alone does: nothing that waits for the others."""
        raise NotImplementedError


class ImageGrids(_Look):
    """Grids of images at prior draws and, with an encoder, of validation images above their reconstructions.

    PNGs go to ``images/`` in the run folder, and to TensorBoard if it is a logger. Outputs are shown without output
    noise; the latents are the same every time.

    Args:
        n: images per grid.
        every_n_epochs: epochs between grids, made after validation and after the last epoch.

    Raises:
        ArgumentError: a number below 1.
        ConfigError: the module has no generator when training starts.
    """

    def __init__(self, n: int = 64, every_n_epochs: int = 10):
        super().__init__(every_n_epochs)
        self.n = whole_number("ImageGrids", "n", n)
        self._originals: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _generator(self, pl_module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == dataloader_idx == 0:
            self._originals = (batch[0] if isinstance(batch, tuple | list) else batch)[: self.n]

    def look(self, trainer, pl_module, folder):
        model = _generator(self, pl_module)
        grids = {"samples": samples(model, self.n, pl_module.device)}
        parts = LatentVariableModel.find(model)
        if parts is not None and parts.encoder is not None and self._originals is not None:
            grids["reconstructions"] = reconstructions(model, self._originals)
        scale = PixelScale.of(model)
        for name, images in grids.items():
            picture = grid(scale.to_unit(images), self.n)
            (folder / "images").mkdir(parents=True, exist_ok=True)
            save_image(picture, folder / "images" / f"{name}_{trainer.current_epoch + 1:04d}.png")
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_image(name, picture, trainer.global_step)


class HeldOutEvidence(_Look):
    """Estimates log p(x) of a few held-out images by :func:`dgm_infer.log_evidence`, and two bounds on it.

    Logs means over the images, in nats: ``held_out/log_evidence`` and its standard error
    ``held_out/log_evidence_error``, ``held_out/elbo``, and ``held_out/iwae`` from ``samples`` draws. The gap between
    the bounds and log p(x) is the encoder's share of the loss.

    Args:
        n_images: number of held-out images, the first of the data module.
        every_n_epochs: epochs between estimates, made after validation and after the last epoch.
        method: evidence method by class path; null for GibbsTempering.
        chains: chains per image.
        samples: k of the importance-weighted bound.

    Raises:
        ArgumentError: a number below its range.
        ConfigError: the generator has no encoder or decoder, or the data have no held-out images, at the start.
    """

    metrics = tuple(f"held_out/{name}" for name in ("log_evidence", "log_evidence_error", "elbo", "iwae"))

    def __init__(
        self,
        n_images: int = 8,
        every_n_epochs: int = 50,
        method: Method | None = None,
        chains: int = 8,
        samples: int = 1000,
    ):
        super().__init__(every_n_epochs)
        self.n_images = whole_number("HeldOutEvidence", "n_images", n_images)
        self.method = method
        # errors come from the spread over chains
        self.chains = whole_number("HeldOutEvidence", "chains", chains, 2)
        self.samples = whole_number("HeldOutEvidence", "samples", samples)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        model = _generator(self, pl_module)
        parts = LatentVariableModel.find(model)
        if parts is None or parts.encoder is None:
            raise ConfigError(
                f"HeldOutEvidence: a {type(model).__name__} has no encoder and decoder, and so no log p(x): omit this "
                "callback"
            )
        if not hasattr(trainer.datamodule, "held_out"):  # type: ignore[attr-defined]
            raise ConfigError("HeldOutEvidence: the data module has no held_out(n): omit this callback")

    def look(self, trainer, pl_module, folder):
        model = _generator(self, pl_module)
        parts = LatentVariableModel.of(model)
        images = trainer.datamodule.held_out(self.n_images).to(pl_module.device)  # type: ignore[attr-defined]
        # flat: a separate channel dimension would look like a batch of one
        target = LatentPosterior(parts.decoder, images.flatten(1), parts.prior)
        base = dgm.Gaussian.from_encoder(parts.encode, target.images.flatten(1))
        options: dict[str, Any] = {"chains": self.chains, "seed": _SEED, "keep_draws": False, "progress": False}
        found = uninterrupted(dgm.log_evidence(target, base, self.method, **options))
        weights = log_weights(model, images, self.samples)
        error = found.std_error.double().square().sum().sqrt() / len(images)
        metrics = {
            "log_evidence": found.log_z.double().mean(),
            "log_evidence_error": error,
            "elbo": weights.mean(),
            "iwae": importance_weighted(weights).mean(),
        }
        for name, value in metrics.items():
            pl_module.log(f"held_out/{name}", value.float(), rank_zero_only=True)


def samples(model: nn.Module, n: int, device: torch.device) -> Tensor:
    """``n`` images at prior draws, without output noise: ``[n, *output_shape]``."""
    parts = LatentVariableModel.find(model)
    if parts is not None:
        return parts.decoder(parts.prior.sample((n,)).to(device)).mean.reshape(n, *parts.output_shape)
    assert isinstance(model, GenerativeModel)
    return model(model.input_density.sample((n,)).to(device)).unflatten(-1, tuple(model.output_shape))


def reconstructions(model: nn.Module, images: Tensor) -> Tensor:
    """Images alternating with their reconstructions from the encoder's means: ``[n, *shape] -> [2 n, *shape]``."""
    parts = LatentVariableModel.of(model)
    outputs = parts.decoder(parts.encode(images.flatten(1)).mean).mean
    return torch.stack([images, outputs.reshape(images.shape)], 1).flatten(0, 1)


def grid(images: Tensor, n: int) -> Tensor:
    """A picture ``[3, H, W]`` of images ``[n, H, W]`` or ``[n, C, H, W]`` in [0, 1]; in pairs if more than ``n``."""
    images = (images.unsqueeze(1) if images.ndim == 3 else images).float().clamp(0, 1).cpu()
    factor = -(-_SIDE // min(images.shape[-2:]))
    images = interpolate(images, scale_factor=factor, mode="nearest")
    columns = max(1, round(n**0.5))
    if len(images) > n:
        # images above their reconstructions: rows of images and reconstructions alternate
        rows = [part.transpose(0, 1).flatten(0, 1) for part in images.unflatten(0, (-1, 2)).split(columns)]
        images = torch.cat(rows)
    return make_grid(images, nrow=columns, pad_value=0.5)


def _generator(callback: Callback, module: LightningModule) -> nn.Module:
    generator = getattr(module, "generator", None)
    if not isinstance(generator, GenerativeModel) and LatentVariableModel.find(generator) is None:
        raise ConfigError(f"{type(callback).__name__}: a {type(module).__name__} has no generator: omit it")
    return generator  # type: ignore[return-value]
