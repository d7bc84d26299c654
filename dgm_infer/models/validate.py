"""Checks of what a model must declare before it can be conditioned."""

from torch import nn

from ..errors import ModelError
from ..structures import validate_structure
from .densities import InputDensity
from .directed import DirectedModel
from .model import GenerativeModel

__all__ = ["validate"]


def validate(model: object) -> None:
    """Raise :class:`ModelError` if a model lacks what conditioning needs."""
    if not isinstance(model, GenerativeModel):
        name = type(model).__name__
        if isinstance(model, nn.Module):
            raise ModelError(
                f"expected a GenerativeModel, got {name}, a network that does not say what its inputs are: wrap it, "
                "generators.from_module(net.eval(), latent=D), or subclass dgm_infer.GenerativeModel"
            )
        raise ModelError(
            f"expected a GenerativeModel, got {name}: subclass dgm_infer.GenerativeModel and define input_density and "
            "observed(u)"
        )
    if isinstance(model, DirectedModel):
        for name in ("global_density", "local_density"):
            if not isinstance(getattr(model, name, None), InputDensity):
                raise ModelError(f"{type(model).__name__}.{name} is not set: give it an InputDensity")
        validate_structure(model)
        _validate_sizes(model)
    elif not isinstance(getattr(model, "input_density", None), InputDensity):
        raise ModelError(f"{type(model).__name__}.input_density is not set: for example StandardNormal(D)")


def _validate_sizes(model: DirectedModel) -> None:
    name = type(model).__name__
    for field in ("step_inputs", "unit_inputs", "unit_outputs"):
        value = getattr(model, field)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ModelError(f"{name}.{field} = {value!r}: must be an integer >= 1")
    # raises if they do not split into steps
    _ = model.n_steps
