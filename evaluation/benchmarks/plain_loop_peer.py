"""The peer of the training benchmark: both bounds written out in plain PyTorch, in a ``for`` loop."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from generators import BernoulliVAE

from .workers import Clock

__all__ = ["one_epoch", "plain_loss", "synchronise"]


def one_epoch(
    model: BernoulliVAE,
    images: Tensor,
    samples: int | None,
    batch_size: int,
    learning_rate: float,
    device: str,
) -> tuple[float, float]:
    """One epoch by hand: seconds, and those of the processor.

    Args:
        model: changed by the training.
        images: grey levels ``[n, *shape]``, made binary again for every batch.
        samples: draws of the importance-weighted bound; None for the ELBO.
        batch_size: images per step.
        learning_rate: learning rate of Adam.
        device: that the model is on.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    synchronise(device)
    clock = Clock(math.inf)
    for chosen in torch.randperm(len(images)).split(batch_size):
        x = torch.bernoulli(images[chosen].to(device)).flatten(1)
        optimizer.zero_grad()
        plain_loss(model, x, samples).backward()
        optimizer.step()
    synchronise(device)
    return clock.elapsed, clock.cpu


def plain_loss(model: BernoulliVAE, x: Tensor, samples: int | None) -> Tensor:
    """Minus the ELBO for None, or the importance-weighted bound with its doubly reparameterised gradient, by hand."""
    mean, log_sd = model.encoder.network(x).chunk(2, -1)
    noise = torch.randn(samples or 1, *mean.shape, device=x.device)
    z = mean + log_sd.exp() * noise
    logits = model.decoder.network(z)
    likelihood = -F.binary_cross_entropy_with_logits(logits, x.expand_as(logits), reduction="none").sum(-1)
    if samples is None:
        divergence = 0.5 * (mean.square() + (2 * log_sd).exp() - 2 * log_sd - 1).sum(-1)
        return (divergence - likelihood.mean(0)).mean()
    deviation = (z - mean.detach()) / log_sd.detach().exp()
    weights = likelihood + (0.5 * deviation.square() + log_sd.detach() - 0.5 * z.square()).sum(-1)
    share = weights.detach().softmax(0).unsqueeze(-1)
    z.register_hook(lambda slope: slope * share)
    return math.log(samples) - weights.logsumexp(0).mean()


def synchronise(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
