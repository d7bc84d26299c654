"""Learning rate schedules."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import LambdaLR

from dgm_infer.arguments import fraction, positive

__all__ = ["adam", "check_schedule", "one_cycle"]


def check_schedule(module: object, learning_rate: float, warm_up: float) -> None:
    """Raise :class:`ArgumentError` for a rate that is not positive, or a share of the run that is none."""
    positive(type(module).__name__, "learning_rate", learning_rate)
    fraction(type(module).__name__, "warm_up", warm_up)


def adam(parameters: Iterable, trainer: Trainer, learning_rate: float, warm_up: float) -> Any:
    """Adam on a one-cycle schedule over all steps of a run, as ``configure_optimizers`` returns it.

    Args:
        parameters: parameters to optimise.
        trainer: trainer of the run.
        learning_rate: largest learning rate of the schedule.
        warm_up: fraction of all steps in which it rises, in (0, 1).
    """
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    n_steps = trainer.estimated_stepping_batches
    # not torch's OneCycleLR, which stores its length in the checkpoint, so that a longer resumed run fails
    schedule = LambdaLR(optimizer, lambda step: one_cycle(step, n_steps, warm_up))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def one_cycle(step: int, n_steps: float, warm_up: float, start: float = 0.04) -> float:
    """Learning rate relative to its largest: a cosine from ``start`` up to 1, then down to 0 (Smith and Topin 2019).

    Args:
        step: steps taken.
        n_steps: steps of the whole run; infinite to keep the largest rate.
        warm_up: fraction of the steps in which the rate rises.
        start: rate at the first step.
    """
    if math.isinf(n_steps):
        return 1.0
    progress = min(step / n_steps, 1.0)
    if progress < warm_up:
        return start + (1 - start) * (1 - math.cos(math.pi * progress / warm_up)) / 2
    return (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))) / 2
