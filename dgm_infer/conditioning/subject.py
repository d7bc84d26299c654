"""What the checks look at: a model, perhaps with data, at prior draws; what several checks need is computed once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..arguments import interval, sizes
from ..errors import ModelError, reported_as
from ..models import GenerativeModel, frozen_copy
from ..settings import Settings
from .faults import evaluated, has_passed, passes
from .observed import ObservedMeasurement, ObservedModel, observed_model
from .operators import Everything, Operator


@dataclass(frozen=True)
class Limits(Settings):
    """Where a difference counts as a fault."""

    draws: int = 16
    """Prior draws that data and a declared structure are compared with; of a simulator that overflows, some survive."""
    derivatives: int = 8
    """Prior draws at which derivatives are compared with differences: a branch taken at an eighth of them is seen."""
    second: int = 4
    """Prior draws at which second derivatives are."""
    atoms: int = 2**20
    """Observed values up to which they are compared with outputs that repeat."""
    blind: float = 1e3
    """Largest misfits at prior draws beyond which an ABC kernel tells no inputs apart."""


LIMITS = Limits()


@dataclass
class Subject:
    """A model, perhaps with data, and what several checks need of it."""

    given: GenerativeModel
    """The model in its own mode."""
    model: GenerativeModel
    """Its frozen copy."""
    u: Tensor
    """Two prior draws ``[2, Du]``, or more."""
    operator: Operator
    needs_gradient: bool = True
    """Whether outputs without derivatives are an error."""
    thorough: bool = False
    """Whether a forward mode that is not defined is an error, too."""
    values: Tensor | None = None
    """``[*batch, Dy]``; None for no data."""
    noise: float | None = None
    """Standard deviation of the measurement."""
    gradient_error: str = ""
    """What was raised where derivatives were to be recorded."""
    source: tuple[nn.Module, Any] | None = None
    """The user's module and operator, whose derivatives are looked at once; None to look at them in any case."""

    @classmethod
    def of(cls, given: GenerativeModel, dtype: torch.dtype, device: torch.device, n: int = 2, **options: Any) -> Self:
        """A model without data.

        Raises:
            ModelError: it cannot be copied, or declares no shape or range of its outputs.
        """
        frozen = frozen_copy(given, dtype, device)
        name = type(frozen).__name__
        with reported_as(ModelError):
            frozen.output_shape = sizes(name, "output_shape", frozen.output_shape, empty=True)
            if frozen.output_range is not None:
                frozen.output_range = interval(name, "output_range", frozen.output_range)
        size = torch.Size(frozen.output_shape).numel()
        return cls(given, frozen, prior_draws(frozen, n, dtype, device), Everything(size), **options)

    def observe(self, operator: Operator, values: Tensor, noise: float | None) -> Self:
        """With data: what is known of the model stays known."""
        self.operator, self.values, self.noise = operator, values, noise
        return self

    def has_passed(self, stage: str) -> bool:
        """Whether the user's module and operator have passed a check as they are now."""
        return self.source is not None and has_passed(self.source[0], stage, self.source[1])

    def passes(self, stage: str) -> None:
        if self.source is not None:
            passes(self.source[0], stage, self.source[1])

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @cached_property
    def x(self) -> Tensor:
        """Outputs at the prior draws."""
        # a model that writes into its inputs must not move the draws
        (x,) = evaluated(self.model.observed, self.u.clone())
        return x

    @cached_property
    def has_gradient(self) -> bool:
        """Whether outputs have derivatives."""
        try:
            with torch.enable_grad():
                return self.model.observed(self.u.detach().clone().requires_grad_()).requires_grad
        except RuntimeError as error:
            # as of a simulator in NumPy, which takes no tensor that records derivatives
            self.gradient_error = str(error)
            return False

    @cached_property
    def reduced(self) -> ObservedModel:
        """The model through its operator, with the noise of the measurement."""
        if self.noise is None or self.values is None:
            return observed_model(self.model, self.operator)
        return ObservedMeasurement.of(self.model, self.operator, self.noise, self.values)

    @cached_property
    def many(self) -> Tensor:
        """More prior draws, of the inputs of :attr:`reduced`'s model."""
        return prior_draws(self.reduced.model, LIMITS.draws, self.u.dtype, self.u.device)

    @cached_property
    def made(self) -> Tensor:
        """Outputs there, ``[n, Dx]``."""
        with torch.no_grad():
            return self.reduced.model.observed(self.many)

    @property
    def first(self) -> tuple[ObservedModel, Tensor | None]:
        """The observed model of the first problem, which stands for all, and its data."""
        if self.values is None:
            return self.reduced, None
        values = self.values.reshape(-1, self.values.shape[-1])[0]
        if self.noise is not None:
            return self.reduced, values
        return observed_model(self.model, self.operator.first()), values

    @property
    def n_batch(self) -> int:
        return 0 if self.values is None else self.values.ndim - 1


def prior_draws(model: GenerativeModel, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same ``n`` draws of ``p_u`` at every call, ``[n, Du]``."""
    rng = torch.Generator(device).manual_seed(0)
    return model.input_density.sample((n,), generator=rng, dtype=dtype, device=device)
