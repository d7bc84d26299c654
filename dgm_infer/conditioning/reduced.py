"""A model seen through an observation operator, in the input space that its structure allows."""

import torch
from torch import Tensor

from ..models import DirectedModel, GenerativeModel, Units
from .operators import DisjointSums, Operator, Selection

__all__ = ["ObservedModel", "ObservedSteps", "ObservedUnits", "observed_model"]


class ObservedModel:
    """``y = A(g_x(u))`` as a function of all the inputs, and the constraint it makes."""

    units: Units | None = None
    """Structure of the constraint's Jacobian; None where it is dense."""
    heat: Tensor | None = None
    """``[*batch]``: local inputs are this many times their coordinates, None for 1. The density stays that of the
    coordinates, so heat h turns output noise of standard deviation s into noise of h s."""

    def __init__(self, model: GenerativeModel, operator: Operator | None):
        self.model = model
        self.operator = operator
        self.dim = model.input_density.dim

    @property
    def index(self) -> Tensor | None:
        """Indices ``[*batch, Dy]`` of the entries observed, where every problem has its own."""
        operator = self.operator
        return operator.index if isinstance(operator, Selection) and operator.index.ndim > 1 else None

    def with_data(self, index: Tensor | None, heat: Tensor | None) -> "ObservedModel":
        """The same with the indices and heats of other problems."""
        if index is None and heat is None and self.heat is None:
            return self
        operator = self.operator
        if index is not None:
            assert isinstance(operator, Selection)
            operator = Selection(index, operator.size)
        other = type(self)(self.model, operator)  # type: ignore[arg-type]
        other.heat = heat
        return other

    @property
    def can_be_heated(self) -> bool:
        """Whether local inputs are normal noise, whose standard deviation heat multiplies."""
        model = self.model
        return isinstance(model, DirectedModel) and model.units is not None and model.local_density.is_standard_normal

    def inputs(self, u: Tensor) -> Tensor:
        """The model's inputs at the coordinates of a position: ``[..., *batch, dim] -> [..., *batch, Du]``."""
        if self.heat is None:
            return u
        assert isinstance(self.model, DirectedModel)
        u1, u2 = self.model.split(u)
        return torch.cat([u1, self.heat.unsqueeze(-1) * u2], -1)

    def outputs(self, u: Tensor) -> Tensor:
        """``[..., *batch, dim] -> [..., *batch, Dy]``."""
        x = self.model.observed(self.inputs(u))
        return x if self.operator is None else self.operator(x)

    def residual(self, u: Tensor, values: Tensor) -> Tensor:
        """The constraint ``c(u)``, zero exactly where ``outputs(u) = values``: ``[..., *batch, Dy]``."""
        return self.outputs(u) - values

    def log_density(self, u: Tensor) -> Tensor:
        """``log p_u(u)`` plus the model's log factor: ``[..., Du] -> [...]``."""
        log_prob = self.model.input_density.log_prob(u)
        return log_prob + self.model.log_factor(self.inputs(u)) if self.model.has_log_factor else log_prob

    def sample_inputs(self, shape: tuple[int, ...], rng: torch.Generator, like: Tensor) -> Tensor:
        """Draws from ``p_u``: ``[*shape, Du]``; ``shape`` ends in the batch shape."""
        return self.model.input_density.sample(shape, generator=rng, dtype=like.dtype, device=like.device)

    def latents(self, u: Tensor) -> dict[str, Tensor]:
        return self.model.latents(self.inputs(u))

    def generate(self, u: Tensor, rng: torch.Generator) -> Tensor:
        """Flat outputs ``[..., *batch, Dx]`` at inputs ``u``, what ``u`` leaves open drawn afresh."""
        return self.model.observed(u)

    def complete(self, u: Tensor, values: Tensor, rng: torch.Generator) -> Tensor:
        """Complete outputs ``[..., *batch, *output_shape]``, selected entries exactly as observed."""
        with torch.no_grad():
            x = self.generate(u, rng)
            if self.operator is None:
                x = values.expand_as(x).clone()
            elif isinstance(self.operator, Selection):
                x = self.operator.scatter(values, x)
        return x.reshape(*x.shape[:-1], *self.model.output_shape)


class ObservedSteps(ObservedModel):
    """A Markov model observed at every step, by the conditional residual (math 4.7).

    ``c_t(u) = f(y_{t-1}, z(u1), u2_t) - y_t`` has the zeros of ``g_x(u) - y``, and where it is zero the same
    ``|J J^T|`` and the same row space of J; but its steps are independent units.
    """

    model: DirectedModel

    def __init__(self, model: DirectedModel, operator: None = None):
        super().__init__(model, operator)
        self.units = model.units

    def residual(self, u, values):
        return self.model.one_step_ahead(self.inputs(u), values) - values


class ObservedUnits(ObservedModel):
    """A model of independent units of which some are observed: ``u = [u1, u2 of those units]`` (J 8.2).

    Units that are not observed do not restrict z, so their local inputs are left out and drawn afresh on completion.
    An operator that adds up outputs of scalar units makes larger units of them.
    """

    model: DirectedModel

    def __init__(self, model: DirectedModel, operator: "Selection | DisjointSums | None"):
        super().__init__(model, operator)
        units = model.units
        assert units is not None
        if isinstance(operator, DisjointSums):
            units = Units(units.n_global, inputs=operator.index.shape[-1], outputs=1)
            self._local = Selection(operator.index.flatten(), operator.size)
        elif operator is None:
            self._local = None
        else:
            # the local inputs of the units whose outputs are selected
            first = operator.index[..., :: units.outputs] // units.outputs * units.inputs
            inputs = first.unsqueeze(-1) + torch.arange(units.inputs, device=first.device)
            self._local = Selection(inputs.flatten(-2), model.local_density.dim)
        self.units = units
        n_local = model.local_density.dim if self._local is None else self._local.index.shape[-1]
        self.dim = units.n_global + n_local

    def inputs(self, u):
        return self._full(super().inputs(u))

    def _full(self, u: Tensor) -> Tensor:
        if self._local is None:
            return u
        u1, u2 = self.model.split(u)
        # what stands in the hidden places changes no observed output
        return torch.cat([u1, self._local.scatter(u2, u2.new_zeros(*u2.shape[:-1], self._local.size))], -1)

    def log_density(self, u):
        u1, u2 = self.model.split(self._full(u))
        local = self.model.local_density.coordinate_log_prob(u2)
        local = (local if self._local is None else self._local(local)).sum(-1)
        log_prob = self.model.global_density.log_prob(u1) + local
        return log_prob + self.model.log_factor(self.inputs(u)) if self.model.has_log_factor else log_prob

    def sample_inputs(self, shape, rng, like):
        u = super().sample_inputs(shape, rng, like)
        if self._local is None:
            return u
        u1, u2 = self.model.split(u)
        return torch.cat([u1, self._local(u2)], -1)

    def generate(self, u, rng):
        u1, u2 = self.model.split(u)
        fresh = self.model.local_density.sample(tuple(u1.shape[:-1]), generator=rng, dtype=u1.dtype, device=u1.device)
        if isinstance(self.operator, DisjointSums) and self._local is not None:
            # the parts of an observed sum are not observed themselves
            fresh = self._local.scatter(u2, fresh)
        return self.model.observed(torch.cat([u1, fresh], -1))


def observed_model(model: GenerativeModel, operator: Operator) -> ObservedModel:
    """The input space that conditioning works in: reduced to the observed units where the structure allows it."""
    if isinstance(operator, Selection) and operator.is_everything:
        operator = None  # type: ignore[assignment]
    units = model.units if isinstance(model, DirectedModel) else None
    if units is None:
        return ObservedModel(model, operator)
    assert isinstance(model, DirectedModel)
    if operator is None:
        return ObservedSteps(model) if model.structure == "markov" else ObservedUnits(model, None)
    # a factor or a latent variable of hidden noise inputs forbids to leave them out
    reducible = model.structure == "independent" and not (model.has_log_factor or model.has_local_latents)
    if isinstance(operator, Selection):
        reducible = reducible and _selects_whole_units(operator.index, units.outputs)
    else:
        reducible = reducible and isinstance(operator, DisjointSums) and units.is_scalar
    return ObservedUnits(model, operator) if reducible else ObservedModel(model, operator)  # type: ignore[arg-type]


def _selects_whole_units(index: Tensor, outputs: int) -> bool:
    if outputs == 1:
        return True
    if index.shape[-1] % outputs:
        return False
    grouped = index.unflatten(-1, (-1, outputs))
    first = grouped[..., :1]
    return bool((first % outputs == 0).all() and (grouped == first + torch.arange(outputs, device=index.device)).all())
