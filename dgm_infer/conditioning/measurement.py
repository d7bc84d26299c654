"""Outputs as a noisy instrument measures them; what is asked for is the output before the noise."""

from typing import Self

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..models import GenerativeModel, WithNoise, reference_tensor
from .observed import ObservedUnits
from .operators import Everything, Operator, Selection

__all__ = ["Measurement", "NoisyMeasurement", "ObservedMeasurement"]


class Measurement(GenerativeModel):
    """``A(g_x(u))`` as a model of its own.

    Args:
        model: g.
        operator: A, the same for all problems; None for the outputs themselves.
        size: number of values.
    """

    def __init__(self, model: GenerativeModel, operator: Operator | None, size: int):
        super().__init__()
        self.model, self.operator = model, operator
        # an operator may hold tensors of this type
        self._computed_in = reference_tensor(model).dtype
        self.input_density = model.input_density
        self.output_shape = (size,) if operator is not None else model.output_shape

    def observed(self, u):
        x = self.model.observed(u)
        return x if self.operator is None else self.operator(x.to(self._computed_in)).to(x)

    def latents(self, u):
        return self.model.latents(u)

    def log_factor(self, u):
        return self.model.log_factor(u)

    @property
    def has_log_factor(self):
        return self.model.has_log_factor


class NoisyMeasurement(WithNoise):
    """``A(g_x(u)) + sd n``, of which :meth:`output` is ``g_x(u)``."""

    model: Measurement

    def output(self, u1: Tensor) -> Tensor:
        """``g_x(u)``, flat: ``[..., L] -> [..., Dx]``."""
        return self.model.model.observed(u1)

    @property
    def measured_shape(self) -> tuple[int, ...]:
        """The shape of ``g_x(u)``."""
        return self.model.model.output_shape


class ObservedMeasurement(ObservedUnits):
    """A noisy measurement, whose completions are the outputs before it."""

    @classmethod
    def of(cls, model: GenerativeModel, operator: Operator, sd: float, size: int) -> Self:
        """``size`` values of A with noise.

        Noise of selected entries is noise of all, of which the others stay hidden.

        Raises:
            ArgumentError: A differs between problems.
        """
        inner = operator
        if isinstance(operator, Everything | Selection):
            inner, size = None, operator.size
        elif operator.data:
            raise ArgumentError("condition(noise=): the operator differs between problems, condition them separately")
        else:
            operator = Everything(size)
        measured = NoisyMeasurement(Measurement(model, inner, size), sd)
        measured.to(reference_tensor(model).device).eval().requires_grad_(False)
        reduction = operator.reduce(measured.jacobian_structure)
        assert reduction is not None, "entries of independent outputs are independent"
        return cls(measured, operator, *reduction)

    def complete(self, u, values, rng):
        with torch.no_grad():
            x = self.model.output(self.model.split(u)[0])
        return x.reshape(*x.shape[:-1], *self.model.measured_shape)
