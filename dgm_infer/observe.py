"""Observation operators: which function of the output is observed, and what that leaves of the model's structure."""

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .errors import ObservationError
from .model import DirectedModel, GenerativeModel

__all__ = ["Observation", "Pixels", "Transform", "observe", "pixels"]


@dataclass(frozen=True)
class Selection:
    """Entries of a flat vector: ``index`` is ``[Dy]``, or ``[*batch, Dy]`` when every problem has its own."""

    index: Tensor
    size: int

    @property
    def is_everything(self) -> bool:
        return self.index.ndim == 1 and len(self.index) == self.size

    def take(self, problems: Tensor) -> "Selection":
        """The selection of the listed problems (flat indices), one row each."""
        if self.index.ndim == 1:
            return self
        return Selection(self.index.flatten(0, -2)[problems], self.size)

    def gather(self, x: Tensor) -> Tensor:
        """``[..., *batch, Dx] -> [..., *batch, Dy]``."""
        if self.is_everything:
            return x
        if self.index.ndim == 1:
            return x.index_select(-1, self.index)
        lead = torch.broadcast_shapes(x.shape[:-1], self.index.shape[:-1])
        return x.expand(*lead, x.shape[-1]).gather(-1, self.index.expand(*lead, -1))

    def scatter(self, values: Tensor, into: Tensor) -> Tensor:
        """``into [..., *batch, Dx]`` with the selected entries replaced by ``values [..., *batch, Dy]``."""
        if self.is_everything:
            return values.expand_as(into).clone()
        lead = into.shape[:-1]
        return into.scatter(-1, self.index.expand(*lead, -1), values.expand(*lead, -1))


class Observation(ABC):
    """What was measured: turns ``y`` as the user has it into flat values and an operator on flat outputs."""

    @abstractmethod
    def bind(self, y: Tensor, model: GenerativeModel) -> "Bound":
        """Check ``y`` against the model and flatten it."""


class Bound(NamedTuple):
    """An observation matched to a model: ``operator(x) = values`` with ``values [*batch, Dy]``."""

    operator: "Selection | Callable[[Tensor], Tensor]"
    values: Tensor


class Pixels(Observation):
    """The entries of the output where ``mask`` is True; ``mask=None`` observes all of them.

    ``mask`` has the output's shape, or ``[*batch, *output_shape]`` with the same number of observed entries in
    every problem. The data are complete outputs ``[*batch, *output_shape]`` whose hidden entries are ignored.
    """

    def __init__(self, mask=None):
        if mask is not None:
            try:
                mask = torch.as_tensor(mask)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ObservationError(f"the mask, a {type(mask).__name__}, is no boolean array: {error}") from error
            if mask.dtype != torch.bool:
                raise ObservationError(
                    f"pixels(mask of dtype {_name(mask.dtype)}): expected a boolean mask, True = observed "
                    "(mask.bool() converts 0 and 1)"
                )
        self.mask = mask

    def bind(self, y, model):
        shape, size = model.output_shape, torch.Size(model.output_shape).numel()
        # a flat output, as the model's forward returns it, is taken for the image it is
        flat_given = y.ndim > 0 and y.shape[-1] == size and tuple(y.shape[-len(shape) :]) != shape
        batch = tuple(y.shape[:-1]) if flat_given else _batch_shape(y, shape)
        flat = y.reshape(*batch, size)
        selection = Selection(self._index(shape, batch).to(y.device), size)
        values = selection.gather(flat)
        bad = ~values.isfinite()
        if bad.any():
            where = bad.nonzero()[0].tolist()
            entry = selection.index.expand(*batch, -1)[tuple(where)].item()
            position = tuple(i.item() for i in torch.unravel_index(torch.tensor(entry), shape))
            problem = f" of problem {tuple(where[:-1])}" if batch else ""
            raise ObservationError(
                f"{int(bad.sum())} observed value(s) are not finite, the first is {values[tuple(where)].item()} at "
                f"{position}{problem}: hide these entries with the mask (False) or repair the data"
            )
        return Bound(selection, values)

    def _index(self, shape, batch) -> Tensor:
        size = torch.Size(shape).numel()
        if self.mask is None:
            return torch.arange(size)
        mask = self.mask
        if tuple(mask.shape) not in (shape, (*batch, *shape)):
            expected = f"{shape}" + (f" or {(*batch, *shape)}" if batch else "")
            raise ObservationError(f"the mask has shape {tuple(mask.shape)}; the image's is {expected}")
        flat = mask.reshape(*mask.shape[: mask.ndim - len(shape)], size)
        counts = flat.sum(-1)
        if counts.min() == 0:
            raise ObservationError("the mask observes no entry: set True where the image is known")
        if counts.min() != counts.max():
            raise ObservationError(
                f"the masks observe between {counts.min().item()} and {counts.max().item()} entries: a batch needs "
                "equal counts, condition the problems separately"
            )
        return flat.nonzero()[:, -1].reshape(*flat.shape[:-1], -1)


class Transform(Observation):
    """Any differentiable function of the output: ``[..., *output_shape] -> [..., *y_shape]``."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function

    def bind(self, y, model):
        shape, function = model.output_shape, self.function
        with torch.no_grad():
            y_shape = tuple(function(y.new_zeros(shape)).shape)
        batch = _batch_shape(y, y_shape)
        if not y.isfinite().all():
            raise ObservationError(f"{int((~y.isfinite()).sum())} observed value(s) are not finite: repair the data")

        def operator(x: Tensor) -> Tensor:
            lead = x.shape[:-1]
            return function(x.reshape(*lead, *shape)).reshape(*lead, -1)

        return Bound(operator, y.reshape(*batch, -1))


def pixels(mask) -> Pixels:
    """Observe the entries of the output where ``mask`` is True (a boolean array or tensor of the image's shape)."""
    return Pixels(mask)


def observe(observation) -> Observation:
    """An :class:`Observation` from what ``condition(observe=...)`` accepts: None, an Observation, or a callable."""
    if observation is None:
        return Pixels()
    if isinstance(observation, Observation):
        return observation
    if callable(observation):
        return Transform(cast(Callable[[Tensor], Tensor], observation))
    raise ObservationError(
        f"observe={' '.join(reprlib.repr(observation).split())} is neither pixels(mask) nor a function of the output: "
        "pixels(mask) observes the entries where mask is True"
    )


class ObservedModel:
    """A model seen through an observation operator: ``y = A(g_x(u))`` as a function of all the inputs."""

    n_global: int | None = None
    """L where the Jacobian is ``[A | diag(d)]`` with ``A`` of L columns, else None."""

    def __init__(self, model: GenerativeModel, operator: "Selection | Callable[[Tensor], Tensor]"):
        self.model = model
        self.operator = operator
        self.dim = model.input_density.dim

    def take(self, problems: Tensor):
        """The same for the listed problems (flat indices), one row each."""
        if isinstance(self.operator, Selection):
            return type(self)(self.model, self.operator.take(problems))
        return self

    def outputs(self, u: Tensor) -> Tensor:
        """``[..., *batch, Du] -> [..., *batch, Dy]``."""
        x = self.model.observed(u)
        return self.operator.gather(x) if isinstance(self.operator, Selection) else self.operator(x)

    def log_density(self, u: Tensor) -> Tensor:
        """``log p_u(u)`` plus the model's log factor: ``[..., Du] -> [...]``."""
        log_prob = self.model.input_density.log_prob(u)
        return log_prob + self.model.log_factor(u) if self.model.has_log_factor else log_prob

    def sample_inputs(self, shape: tuple[int, ...], rng: torch.Generator, like: Tensor) -> Tensor:
        """Draws from ``p_u``: ``[*shape, Du]``; ``shape`` ends in the batch shape."""
        return self.model.input_density.sample(shape, generator=rng, dtype=like.dtype, device=like.device)

    def latents(self, u: Tensor) -> dict[str, Tensor]:
        return self.model.latents(u)

    def generate(self, u: Tensor, rng: torch.Generator) -> Tensor:
        """Flat outputs ``[..., *batch, Dx]`` at inputs ``u``, what ``u`` leaves open drawn afresh."""
        return self.model.observed(u)

    def complete(self, u: Tensor, values: Tensor, rng: torch.Generator) -> Tensor:
        """Complete outputs ``[..., *batch, *output_shape]``, the selected entries exactly as observed."""
        with torch.no_grad():
            x = self.generate(u, rng)
            x = self.operator.scatter(values, x) if isinstance(self.operator, Selection) else x
        return x.reshape(*x.shape[:-1], *self.model.output_shape)


class ObservedUnits(ObservedModel):
    """An independent-structure model of which some outputs are selected: ``u = [u1, u2 of those outputs]``.

    Hidden outputs do not restrict z, so their noise inputs are left out and drawn afresh on completion (J 8.2).
    """

    model: DirectedModel
    operator: Selection

    def __init__(self, model: DirectedModel, operator: Selection):
        super().__init__(model, operator)
        self.n_global = model.global_density.dim
        self.dim = self.n_global + operator.index.shape[-1]

    def _full(self, u: Tensor) -> tuple[Tensor, Tensor]:
        u1, u2 = self.model.split(u)
        if self.operator.is_everything:
            return u1, u2
        # output i depends on u2_i alone: what stands in the hidden places changes no observed output
        return u1, self.operator.scatter(u2, u2.new_zeros(*u2.shape[:-1], self.operator.size))

    def outputs(self, u):
        return self.operator.gather(self.model.observed(torch.cat(self._full(u), -1)))

    def log_density(self, u):
        u1, u2 = self._full(u)
        local = self.operator.gather(self.model.local_density.coordinate_log_prob(u2)).sum(-1)
        log_prob = self.model.global_density.log_prob(u1) + local
        return log_prob + self.model.log_factor(u) if self.model.has_log_factor else log_prob

    def sample_inputs(self, shape, rng, like):
        def draw(density):
            return density.sample(shape, generator=rng, dtype=like.dtype, device=like.device)

        u1, u2 = draw(self.model.global_density), draw(self.model.local_density)
        return torch.cat([u1, self.operator.gather(u2)], -1)

    def latents(self, u):
        return self.model.latents(torch.cat(self._full(u), -1))

    def generate(self, u, rng):
        u1, _ = self.model.split(u)
        u2 = self.model.local_density.sample(tuple(u1.shape[:-1]), generator=rng, dtype=u1.dtype, device=u1.device)
        return self.model.observed(torch.cat([u1, u2], -1))


def observed_model(model: GenerativeModel, operator) -> ObservedModel:
    """The input space that conditioning works in: reduced to the observed units where the structure allows it."""
    reducible = (
        isinstance(model, DirectedModel)
        and model.structure == "independent"
        and isinstance(operator, Selection)
        # a factor or a latent variable of hidden noise inputs forbids to leave them out
        and (operator.is_everything or not (model.has_log_factor or model.has_local_latents))
    )
    return ObservedUnits(model, operator) if reducible else ObservedModel(model, operator)  # type: ignore[arg-type]


def _batch_shape(y: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    lead = y.ndim - len(shape)
    if lead >= 0 and tuple(y.shape[lead:]) == tuple(shape):
        return tuple(y.shape[:lead])
    raise ObservationError(
        f"observed has shape {tuple(y.shape)}; the model's output has shape {tuple(shape)}, after any batch "
        "dimensions: reshape the data"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
