"""A model seen through an observation operator, in the input space that its structure allows, and its noise."""

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..arguments.distributions import without_validation
from ..autodiff.layers import differentiable_attention
from ..autodiff.pytrees import tree_map
from ..errors import ArgumentError
from ..models import DirectedModel, GenerativeModel, WithNoise, copied, noiseless, reference_tensor
from ..structures import Dense, Structure
from .operators import Everything, Operator, Selection

# The methods by which a directed model tells its inputs apart.
_SPLITTING = {"split", "observed", "one_step_ahead"}


# Variation, in scales of the data, below which an output is measured in units of it: the tolerance 1e-8 is then at most
# 1e-5 of what an output varies by.
_HARDLY = 1e-3
# The least unit, in rounding errors of the output per default tolerance of a kernel: solvers get no nearer.
_ROUNDING, _TOLERANCE = 64, 1e-8


def has_convolutions(network: nn.Module) -> bool:
    """Whether it has layers that are convolutions."""
    return any(isinstance(module, _ConvNd) for module in network.modules())


class ObservedModel:
    """``y = A(g_x(u))`` as a function of all inputs, and the constraint it defines.

    Args:
        model: the generative model.
        operator: A.
        structure: the part of the model's declared structure that A preserves; None for a dense Jacobian.
    """

    noise_scale: Tensor | None = None
    """``[*batch]``: local inputs are this many times their coordinates, None for 1. The density stays that of the
    coordinates, so a scale h turns output noise of standard deviation s into noise of h s."""
    unit: Tensor | None = None
    """``[*batch, Dy]``: what each constraint is measured in (math 3.3), None for 1."""

    def __init__(self, model: GenerativeModel, operator: Operator, structure: Structure | None = None):
        self.model = model
        self.operator = operator
        self._kept = structure
        self.structure = structure or Dense()
        self.dim = model.input_density.dim
        self.convolves = has_convolutions(model)
        """Whether the model has layers that are convolutions."""
        self.is_network = self.convolves or any(isinstance(module, nn.Linear) for module in model.modules())
        """Whether the model has layers of weights."""

    @property
    def data(self) -> tuple[Any, ...]:
        """The data of each problem: a tree of tensors ``[*batch, ...]``."""
        own = (() if tensor is None else (tensor,) for tensor in (self.noise_scale, self.unit))
        return self.operator.data, *own

    def with_data(self, data: tuple[Any, ...]) -> Self:
        """The same model with the data of other problems."""
        other = copy.copy(self)
        other.operator = self.operator.with_data(*data[0])
        other.noise_scale, other.unit = ((*own, None)[0] for own in data[1:3])
        return other

    def to(self, dtype: torch.dtype) -> Self:
        """A copy that computes in another type."""

        def cast(data: Tensor) -> Tensor:
            return data.to(dtype) if data.is_floating_point() else data

        other = self.with_data(tree_map(cast, self.data))
        other.operator = other.operator.of_type(dtype, reference_tensor(self.model).dtype)
        other.model = copied(self.model).to(dtype)
        return other

    def with_noise_scale(self, scale: Tensor | None) -> Self:
        """The same model with local inputs that spread ``scale`` times as wide, ``[*batch]``."""
        other = copy.copy(self)
        other.noise_scale = scale
        return other

    def measured_in(self, unit: Tensor | None) -> Self:
        """The same model with constraints in these units, ``[*batch, Dy]``: the same fibre, up to the tolerance."""
        other = copy.copy(self)
        other.unit = unit
        return other

    def in_units(self, c: Tensor) -> Tensor:
        """Differences of observed values ``[..., *batch, Dy]`` in their units."""
        return c if self.unit is None else c / self.unit

    @property
    def can_scale_noise(self) -> bool:
        """Whether local inputs are normal noise, whose standard deviation can be scaled."""
        return self.model.can_scale_noise

    @differentiable_attention
    def check_declaration(self, u: Tensor) -> None:
        """Compare the declared structure with the model.

        Args:
            u: draws of the model's inputs, ``[n, Du]``.

        Raises:
            ModelError: the model declares another structure than it has.
        """
        if self._kept is not None:
            self.model.jacobian_structure.check(self.model, u)

    def inputs(self, u: Tensor) -> Tensor:
        """The model's inputs at the coordinates of a position: ``[..., *batch, dim] -> [..., *batch, Du]``."""
        if self.noise_scale is None:
            return u
        u1, u2 = self.model.split(u)
        return torch.cat([u1, self.noise_scale.unsqueeze(-1) * u2], -1)

    @differentiable_attention
    @without_validation
    def outputs(self, u: Tensor) -> Tensor:
        """``[..., *batch, dim] -> [..., *batch, Dy]``."""
        return self.operator(self.model.observed(self.inputs(u)))

    @differentiable_attention
    @without_validation
    def residual(self, u: Tensor, values: Tensor) -> Tensor:
        """The constraint ``c(u)``, zero if and only if ``outputs(u) = values``: ``[..., *batch, Dy]``."""
        return self.in_units(self.operator(self.structure.outputs(self.model, self.inputs(u), values)) - values)

    @differentiable_attention
    @without_validation
    def noiseless_residual(self, u1: Tensor, values: Tensor) -> Tensor:
        """The constraint at global inputs ``[..., *batch, L]`` and local ones of 0: ``[..., *batch, Dy]``.

        Derivatives leave the local inputs out, which would take longer than a small network itself.
        """
        if not _Noiseless.suits(self.model):
            local = u1.new_zeros(*u1.shape[:-1], self.dim - u1.shape[-1])
            return self.residual(torch.cat([u1, local], -1), values)
        outputs = self.structure.outputs(_Noiseless(self.model), u1, values)
        return self.in_units(self.operator(outputs) - values)

    def log_prior(self, u: Tensor) -> Tensor:
        """``log p_u(u)``, the density of :meth:`sample_inputs`: ``[..., Du] -> [...]``."""
        return self.model.input_density.log_prob(u)

    @differentiable_attention
    @without_validation
    def log_density(self, u: Tensor) -> Tensor:
        """``log p_u(u)`` plus the model's log factor: ``[..., Du] -> [...]``."""
        log_prob = self.log_prior(u)
        return log_prob + self.model.log_factor(self.inputs(u)) if self.model.has_log_factor else log_prob

    def sample_inputs(self, shape: tuple[int, ...], rng: torch.Generator | None, like: Tensor) -> Tensor:
        """Draws from ``p_u``: ``[*shape, Du]``; ``shape`` ends in the batch shape."""
        return self.model.input_density.sample(shape, generator=rng, dtype=like.dtype, device=like.device)

    @without_validation
    def latents(self, u: Tensor) -> dict[str, Tensor]:
        return self.model.latents(self.inputs(u))

    def generate(self, u: Tensor, rng: torch.Generator) -> Tensor:
        """Flat outputs ``[..., *batch, Dx]`` at inputs ``u``; inputs that ``u`` omits are drawn afresh."""
        return self.model.observed(u)

    def complete(self, u: Tensor, values: Tensor, rng: torch.Generator, mean: bool = False) -> Tensor:
        """Complete outputs ``[..., *batch, *output_shape]``, with selected entries exactly as observed.

        With ``mean``, the others are without the noise that the model adds.

        Raises:
            ModelError: the model has noise that is not known to be added.
        """
        with torch.no_grad():
            x = noiseless(self.model, self.inputs(u)) if mean else self.generate(u, rng)
            x = self.operator.complete(values, x)
        return x.reshape(*x.shape[:-1], *self.model.output_shape)


class _Noiseless:
    """A directed model as a function of its global inputs alone, in the methods that :class:`Structure` asks for."""

    def __init__(self, model: Any):
        self._model = model

    @staticmethod
    def suits(model: Any) -> bool:
        """Whether the model tells its inputs apart by the methods of :class:`DirectedModel`, none of them its own."""
        own = vars(model).keys() & _SPLITTING
        return not own and all(getattr(type(model), name, None) is getattr(DirectedModel, name) for name in _SPLITTING)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def split(self, u1: Tensor) -> tuple[Tensor, Tensor]:
        return u1, u1.new_zeros(*u1.shape[:-1], self._model.local_density.dim)

    observed: Any = DirectedModel.observed
    one_step_ahead: Any = DirectedModel.one_step_ahead


class ObservedUnits(ObservedModel):
    """A model of independent units, some of them observed: ``u = [u1, u2 of those units]`` (math 4.6, J 8.2).

    Unobserved units do not restrict z, so their local inputs are omitted, and drawn afresh on completion.

    Args:
        model: the generative model, a :class:`DirectedModel`.
        operator: A.
        structure: structure of the observed values.
        local: the local inputs that they depend on; None for all.
    """

    def __init__(self, model: Any, operator: Operator, structure: Structure, local: Selection | None):
        super().__init__(model, operator, structure)
        self.model: Any = model
        self._local = local
        self.dim = model.global_density.dim + (model.local_density.dim if local is None else local.index.shape[-1])

    @property
    def data(self):
        return *super().data, () if self._local is None else self._local.data

    def with_data(self, data):
        other = super().with_data(data)
        other._local = self._local and self._local.with_data(*data[3])
        return other

    def inputs(self, u):
        return self._full(super().inputs(u))

    def _full(self, u: Tensor) -> Tensor:
        if self._local is None:
            return u
        u1, u2 = self.model.split(u)
        # values at hidden positions do not affect observed outputs
        return torch.cat([u1, self._local.complete(u2, u2.new_zeros(*u2.shape[:-1], self._local.size))], -1)

    def _shown(self, v: Tensor) -> Tensor:
        """Select, from one value per local input, those of the inputs that are kept."""
        return v if self._local is None else self._local(v)

    def log_prior(self, u):
        u1, u2 = self.model.split(self._full(u))
        local = self._shown(self.model.local_density.coordinate_log_prob(u2)).sum(-1)
        return self.model.global_density.log_prob(u1) + local

    def sample_inputs(self, shape, rng, like):
        u1, u2 = self.model.split(super().sample_inputs(shape, rng, like))
        return torch.cat([u1, self._shown(u2)], -1)

    def generate(self, u, rng):
        u1, u2 = self.model.split(u)
        fresh = self.model.local_density.sample(tuple(u1.shape[:-1]), generator=rng, dtype=u1.dtype, device=u1.device)
        local = u2 if self._local is None else self._local.complete(u2, fresh)
        return self.model.observed(torch.cat([u1, local], -1))


def observed_model(model: GenerativeModel, operator: Operator) -> ObservedModel:
    """The input space that conditioning works in: reduced to the observed units where the structure allows it."""
    reduction = operator.reduce(model.jacobian_structure)
    if reduction is None or (reduction.local is not None and not model.can_omit_local_inputs):
        return ObservedModel(model, operator)
    structure, local = reduction
    if structure.is_separable:
        return ObservedUnits(model, operator, structure, local)
    return ObservedModel(model, operator, structure)


def magnitude(values: Tensor) -> Tensor:
    """``max(1, |y|_max)`` per problem: ``[*batch, Dy] -> [*batch]``."""
    return values.abs().amax(-1).clamp_min(1)


def made_by(operator: Operator, values: Tensor, x: Tensor) -> Tensor:
    """What is observed of outputs ``x [n, Dx]``: ``[n, *batch, Dy]``, or with dimensions of 1 for the batch."""
    # an operator may have data of each problem, with which draws broadcast
    return operator(x.reshape(len(x), *[1] * (values.ndim - 1), -1))


@torch.no_grad()
def constraint_units(operator: Operator, values: Tensor, x: Tensor) -> Tensor | None:
    """What the constraints are measured in, ``[*batch, Dy]``, so that one tolerance suits all; None if all by 1.

    An output whose range r over prior draws is small beside the scale ``s = max(1, |y|_max)`` has the unit ``r / s``
    (math 3.3), others have 1.

    Args:
        operator: A.
        values: ``[*batch, Dy]``.
        x: outputs at prior draws, ``[n, Dx]``.
    """
    made = made_by(operator, values, x)
    # a simulator may overflow at some prior draws
    lost = ~made.isfinite()
    high, low = made.masked_fill(lost, -torch.inf).amax(0), made.masked_fill(lost, torch.inf).amin(0)
    scale = magnitude(values).unsqueeze(-1)
    size = torch.maximum(values.abs(), torch.maximum(high.abs(), low.abs()))
    least = _ROUNDING * torch.finfo(values.dtype).eps / _TOLERANCE * size / scale
    ratio = torch.maximum((high - low) / scale, least)
    # an output that does not vary at all is named where the search for a start fails
    hardly = (high > low) & (ratio < _HARDLY)
    return torch.where(hardly, ratio, 1.0).expand_as(values).clone() if hardly.any() else None


class MeasuredOutputs(GenerativeModel):
    """``A(g_x(u))`` as a model of its own.

    Args:
        model: g.
        operator: A, the same for all problems; None for the outputs themselves.
        size: number of values.
        dtype: that of the operator's tensors.
    """

    def __init__(self, model: GenerativeModel, operator: Operator | None, size: int, dtype: torch.dtype):
        super().__init__()
        self.model, self.operator, self._computed_in = model, operator, dtype
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

    model: MeasuredOutputs

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
    def of(cls, model: GenerativeModel, operator: Operator, sd: float, like: Tensor) -> Self:
        """The values ``like [..., Dy]`` of A with noise.

        Noise of selected entries is noise of all, of which the others stay hidden.

        Raises:
            ArgumentError: A differs between problems.
        """
        inner, size = operator, like.shape[-1]
        if isinstance(operator, Everything | Selection):
            inner, size = None, operator.size
        elif operator.data:
            raise ArgumentError("condition(noise=): the operator differs between problems, condition them separately")
        else:
            operator = Everything(size)
        measured = NoisyMeasurement(MeasuredOutputs(model, inner, size, like.dtype), sd)
        measured.to(device=like.device, dtype=like.dtype).eval().requires_grad_(False)
        measured.sd.fill_(sd)
        reduction = operator.reduce(measured.jacobian_structure)
        assert reduction is not None, "entries of independent outputs are independent"
        return cls(measured, operator, *reduction)

    def complete(self, u, values, rng, mean=False):
        u1 = self.model.split(u)[0]
        with torch.no_grad():
            x = noiseless(self.model.model.model, u1) if mean else self.model.output(u1)
        return x.reshape(*x.shape[:-1], *self.model.measured_shape)
