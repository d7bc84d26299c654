"""The target that is meant, and a base for it where none is given."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..arguments import numbers
from ..conditioning import Everything, Fibre, LatentPosterior
from ..errors import ArgumentError, EvidenceError, cause
from ..models import LatentVariableModel
from ..references import Gaussian
from ..references.density import Whitened
from ..target import Target, as_target

__all__ = ["Started", "started"]

# Rows of Hessians, over all problems, that Laplace's approximation may hold at once.
_ROWS = 2**16
# Dimensions up to which a fit has a full covariance.
_FULL = 100


class Started(NamedTuple):
    """A target with its base."""

    target: Target
    base: Whitened
    said: str | None
    """One line on a base that was chosen."""


def started(call: str, problem: Any, base: Whitened | None) -> Started:
    """The target of a problem, with its base: the encoder's posterior, else Laplace's approximation, else a fit.

    Args:
        call: the public function, for messages.
        problem: a target, a fibre, or ``(model, images)`` of a model with a decoder and a prior.
        base: None to choose one.

    Raises:
        ArgumentError: the problem is a pair of other things.
        ModelError: the model has no decoder or no prior.
        ObservationError: the images do not fit the decoder.
        EvidenceError: no base can be fitted.
    """
    parts, images = None, None
    if isinstance(problem, tuple | list):
        parts, images, target = _of_pair(call, problem)
    else:
        target = as_target(problem)
        if isinstance(problem, Fibre) and base is None:
            parts, images = _of_fibre(problem)
    if base is not None:
        return Started(target, base, None)
    if parts is not None and parts.encoder is not None and images is not None:
        own = Gaussian.from_encoder(parts.encode, images)
        if own.mean.shape == (*target.batch_shape, target.dim):
            like = getattr(target, "values", own.mean)
            return Started(target, own.to(like), "base: the encoder's posterior")
    why = "there are too many Hessians"
    if target.batch_shape.numel() * target.dim <= _ROWS:
        try:
            return Started(target, Gaussian.laplace(target), "base: Laplace's approximation at a mode")
        except (EvidenceError, RuntimeError) as error:
            # an energy may have no mode, or no second derivative
            why = cause(error).split(":")[0]
    kind = "full" if target.dim <= _FULL else "diagonal"
    return Started(target, Gaussian.fit(target, kind), f"base: a {kind} Gaussian fit, as {why}")


def _of_pair(call: str, problem: Any) -> tuple[LatentVariableModel, Tensor, Target]:
    if len(problem) != 2 or not isinstance(problem[0], nn.Module):
        kinds = ", ".join(type(each).__name__ for each in problem)
        raise ArgumentError(f"{call}(({kinds})): expected a target, or a pair (model, images)")
    parts, images = LatentVariableModel.of(problem[0]), numbers(call, "images", problem[1])
    size = torch.Size(parts.output_shape).numel()
    fits = [k for k in range(1, images.ndim + 1) if images.shape[-k:].numel() == size]
    # a channel of its own would look like a batch of one
    if fits and images.ndim - fits[0] > 1 and images.shape[-fits[0] - 1] == 1:
        images = images.flatten(images.ndim - fits[0] - 1)
    target = LatentPosterior(parts.decoder, images, parts.prior)
    return parts, target.images.reshape(*target.batch_shape, -1), target


def _of_fibre(fibre: Fibre) -> tuple[LatentVariableModel | None, Tensor]:
    """The parts of a model all of whose outputs are observed, and these."""
    whole = isinstance(fibre.observed.operator, Everything)
    return (LatentVariableModel.find(fibre.model) if whole else None), fibre.values
