"""Where evidence begins: the target of a problem, and its base."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..arguments import context, digits, numbers
from ..conditioning import Everything, Fibre, LatentPosterior, condition
from ..errors import ArgumentError, EvidenceError, cause
from ..models import GenerativeModel, LatentVariableModel, reference_tensor
from ..probe import refuse_shapes
from ..references import Gaussian
from ..references.density import Whitened, origin
from ..target import Target, as_target

__all__ = ["EvidenceProblem", "Started"]


@dataclass(frozen=True)
class BaseSettings:
    """Sizes by which bases are chosen."""

    hessians: int = 2**16
    """Rows of Hessians, over all problems, that Laplace's approximation may hold at once."""
    full: int = 100
    """Dimensions up to which a fit has a full covariance."""
    rows: int = 8
    """Positions of a trial: a search evaluates several at once."""


_SETTINGS = BaseSettings()


class Started(NamedTuple):
    """A target with its base."""

    target: Target
    base: Whitened
    said: str | None
    """One line on a base that was chosen."""


class EvidenceProblem(NamedTuple):
    """A target, and the model and images that it is of, if it is of any."""

    call: str
    """The public function, for messages."""
    target: Target
    parts: LatentVariableModel | None = None
    images: Tensor | None = None

    @classmethod
    def of(cls, call: str, problem: Any, *, has_base: bool = False) -> Self:
        """What a user gives.

        Args:
            problem: a target, a fibre, or ``(model, images)`` of a model with a decoder and a prior, or with noise
                of its own.
            has_base: whether the user gives a base, so that the parts of a fibre are not needed.

        Raises:
            ArgumentError: the problem is a pair of other things.
            ModelError: the model has no decoder or no prior.
            ObservationError: the images do not fit the decoder.
        """
        context(call)
        if isinstance(problem, tuple | list):
            return cls(call, *_of_pair(call, problem))
        target = as_target(problem)
        if has_base or not isinstance(problem, Fibre):
            return cls(call, target)
        return cls(call, target, *_of_fibre(problem))

    def trial(self) -> None:
        """Energies and gradients at a few positions, as a search for a base evaluates at once."""
        x = origin(self.target, torch.float64)
        if x.device.type == "cpu" and self.target.has_gradient:
            self.target.energy_and_gradient(x.expand(_SETTINGS.rows, *x.shape))

    def started(self, base: Whitened | None, report: Callable[[str], None] = lambda _: None) -> Started:
        """The target with its base: the encoder's posterior, else Laplace's approximation, else a fit.

        Args:
            base: None to choose one.
            report: told what is looked for, which may take minutes.

        Raises:
            EvidenceError: no base can be fitted.
        """
        call, target, parts, images = self
        if base is not None:
            return Started(target, base, None)
        if parts is not None and parts.encoder is not None and images is not None:
            own = Gaussian.from_encoder(parts.encode, images)
            if own.mean.shape == (*target.batch_shape, target.dim):
                return Started(target, own.to(getattr(target, "values", own.mean)), "base: the encoder's posterior")
        refuse_shapes(call, target, origin(target, torch.float64))
        why = "there are too many Hessians"
        if target.batch_shape.numel() * target.dim <= _SETTINGS.hessians:
            report("start-up, looking for the mode of every problem")
            try:
                return Started(target, Gaussian.laplace(target), "base: Laplace's approximation at a mode")
            except (EvidenceError, RuntimeError) as error:
                # an energy may have no mode, or no second derivative
                why = cause(error).split(":")[0]
        kind = "full" if target.dim <= _SETTINGS.full else "diagonal"
        report("start-up, fitting a Gaussian to every problem")
        said = f"base: a {kind} Gaussian fit, as {why}; nothing to do: std_error includes what a base costs"
        return Started(target, Gaussian.fit(target, kind), said)


def _of_pair(call: str, problem: Any) -> tuple[Target, LatentVariableModel | None, Tensor]:
    if len(problem) != 2 or not isinstance(problem[0], nn.Module):
        kinds = ", ".join(type(each).__name__ for each in problem)
        raise ArgumentError(f"{call}(({kinds})): expected a target, or a pair (model, images)")
    images = numbers(call, "images", problem[1], digits(problem[1]))
    if LatentVariableModel.find(problem[0]) is None and isinstance(problem[0], GenerativeModel):
        # without a decoder, the density is that of its own noise
        return as_target(condition(problem[0], images)), None, images
    parts = LatentVariableModel.of(problem[0])
    images = images.to(reference_tensor(parts.decoder)) if digits(problem[1]) else images
    size = torch.Size(parts.output_shape).numel()
    fits = [k for k in range(1, images.ndim + 1) if images.shape[-k:].numel() == size]
    # a channel of its own would look like a batch of one
    if fits and images.ndim - fits[0] > 1 and images.shape[-fits[0] - 1] == 1:
        images = images.flatten(images.ndim - fits[0] - 1)
    target = LatentPosterior(parts.decoder, images, parts.prior)
    return target, parts, target.images.reshape(*target.batch_shape, -1)


def _of_fibre(fibre: Fibre) -> tuple[LatentVariableModel | None, Tensor]:
    """The parts of a model all of whose outputs are observed, and these."""
    whole = isinstance(fibre.observed.operator, Everything)
    return (LatentVariableModel.find(fibre.model) if whole else None), fibre.values
