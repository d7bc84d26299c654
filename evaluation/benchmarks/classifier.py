"""A small convolutional classifier of real images, which judges completed ones."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.data import Labelled

__all__ = ["Classifier", "train_classifier"]

_STEPS = 1500
_BATCH = 64
_LEARNING_RATE = 2e-3
# Most images that it is trained on: the first ones.
_IMAGES = 20_000
# Largest standard deviation of the noise added to half of each batch: completions have a generator's output noise.
_NOISE = 0.2


class Classifier(nn.Module):
    """Log-probabilities of classes: images ``[n, H, W]`` or ``[n, C, H, W]`` to ``[n, classes]``."""

    def __init__(self, image_shape: tuple[int, ...], classes: int):
        super().__init__()
        channels, height, width = (1, *image_shape) if len(image_shape) == 2 else image_shape
        self.shape = (channels, height, width)
        self.network = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (height // 4) * (width // 4), 64),
            nn.SiLU(),
            nn.Linear(64, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.reshape(-1, *self.shape)).log_softmax(-1)

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """``[..., *image_shape] -> [..., classes]``, in parts of bounded memory."""
        lead = images.shape[: images.ndim - (2 if self.shape[0] == 1 and images.shape[-3:] != self.shape else 3)]
        flat = images.float().reshape(-1, *self.shape)
        return torch.cat([self(part).exp() for part in flat.split(2048)]).reshape(*lead, -1)


def train_classifier(data: Labelled, seed: int, steps: int = _STEPS) -> Classifier:
    """Train on real images with Adam, its learning rate falling to zero.

    Args:
        data: images in [0, 1] and their labels.
        seed: seed of the weights, the batches and the noise.
        steps: batches of 64 images, drawn at random.
    """
    images, labels = data.images[:_IMAGES], data.labels[:_IMAGES]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = Classifier(tuple(images.shape[1:]), int(labels.max()) + 1)
        optimizer = torch.optim.Adam(classifier.parameters(), _LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for _ in range(steps):
            batch = torch.randint(len(images), (_BATCH,))
            x = images[batch]
            sd = _NOISE * torch.rand(len(x), *[1] * (x.ndim - 1)) * (torch.rand(len(x), *[1] * (x.ndim - 1)) < 0.5)
            loss = functional.nll_loss(classifier(x + sd * torch.randn_like(x)), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return classifier.eval().requires_grad_(False)
