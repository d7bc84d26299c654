"""Markov models observed at every step: independent units by the conditional residual (math 4.7)."""

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ModelError, cause
from .independent import of_units
from .structure import Units
from .units import UnitStructure, View

__all__ = ["OneStepAhead", "markov"]


@dataclass(frozen=True)
class OneStepAhead(View):
    """Every state as one step from the previous observed state.

    ``c_t(u) = f(y_{t-1}, z(u1), u2_t) - y_t`` has the zeros of ``g_x(u) - y`` and, at these, the same ``|J J^T|`` and
    row space of J; but its steps are independent units.
    """

    names = "steps"
    is_separable = False

    def outputs(self, model, u, observed):
        return model.one_step_ahead(u, observed)

    def check(self, model, u, x):
        """Steps from the simulated states must reproduce the simulated states."""
        name = type(model).__name__
        try:
            miss = (model.one_step_ahead(u, x) - x).abs().max() / x.abs().max().clamp_min(1)
        except Exception as error:
            raise ModelError(
                f"{name} declares structure 'markov', but transition() fails for all steps at once: "
                f"{cause(error)} (states have one shape, and leading dimensions broadcast)"
            ) from error
        if miss > torch.finfo(x.dtype).eps ** 0.75:
            raise ModelError(
                f"{name} declares structure 'markov', but its transitions from the observed states differ from the "
                f"simulated ones (by {miss.item():.3g} of the largest): derive simulate() from transition(), or "
                "declare structure = 'dense'"
            )


def markov(model: Any) -> UnitStructure:
    """Whole steps, or the components of a step if ``unit_inputs`` and ``unit_outputs`` declare them.

    Raises:
        ModelError: the model has no local inputs.
    """
    if model.n_steps == 0:
        raise ModelError(
            f"{type(model).__name__} declares structure 'markov' without local inputs: give local_density a dimension, "
            "or declare structure = 'dense'"
        )
    state = torch.Size(model.output_shape).numel() // model.n_steps
    sizes = Units(model.global_density.dim, model.unit_inputs or model.step_inputs, model.unit_outputs or state)
    return of_units(sizes, OneStepAhead())
