"""Operators on flat outputs: what is observed, and its effect on a model's structure; decoders of some pixels."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Independent, Normal
from torch.nn import functional

from ..errors import ModelError
from ..models import CensoredNormal, base_distribution
from ..structures import Structure, Units, of_units


class Reduction(NamedTuple):
    """The part of a structure that an operator preserves."""

    structure: Structure
    """Structure of the observed values."""
    local: "Selection | None"
    """The local inputs that the observed values depend on; None if all inputs are kept."""


class Operator(ABC):
    """A function of flat outputs, ``y = A(x)``, for every problem of a batch.

    A subclass defines ``__call__``; by default, models of any structure become dense.
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """``[..., *batch, Dx] -> [..., *batch, Dy]``."""

    is_linear: ClassVar[bool] = False
    """Whether values are known to be linear in the outputs."""

    def reduce(self, structure: Structure) -> Reduction | None:
        """The structure that is preserved; None if models become dense."""
        return None

    def complete(self, values: Tensor, x: Tensor) -> Tensor:
        """Outputs ``x [..., *batch, Dx]`` with the observed entries replaced by the values ``[..., *batch, Dy]``."""
        return x

    @property
    def keeps_range(self) -> bool:
        """Whether the values lie in every interval that contains the outputs."""
        return False

    def of_type(self, dtype: torch.dtype, computed_in: torch.dtype) -> "Operator":
        """The same operator on outputs of another type than it computes in."""
        return self

    @property
    def data(self) -> tuple[Tensor, ...]:
        """The data of each problem, tensors ``[*batch, ...]``."""
        return ()

    def with_data(self, *data: Tensor) -> "Operator":
        """The same operator with the data of other problems."""
        return self

    def first(self) -> "Operator":
        """The operator of the first problem, for the shape of a single one."""
        return self


@dataclass(frozen=True)
class Everything(Operator):
    """All of a flat vector of ``size`` entries."""

    is_linear = True

    size: int

    @property
    def index(self) -> None:
        """The entries of a :class:`Selection`: None for all."""
        return None

    def __call__(self, x):
        return x

    def reduce(self, structure):
        return Reduction(structure, None)

    def complete(self, values, x):
        return values.expand_as(x).clone()

    @property
    def keeps_range(self):
        return True


@dataclass(frozen=True)
class Selection(Operator):
    """Entries of a flat vector: ``index`` is ``[Dy]``, or ``[*batch, Dy]`` if it differs between problems."""

    is_linear = True

    index: Tensor
    size: int

    def __call__(self, x):
        if self.index.ndim == 1:
            return x.index_select(-1, self.index)
        lead = torch.broadcast_shapes(x.shape[:-1], self.index.shape[:-1])
        return x.expand(*lead, x.shape[-1]).gather(-1, self.index.expand(*lead, -1))

    def reduce(self, structure):
        """Whole units keep their structure, without the local inputs of the other units."""
        units = structure.units
        if units is None or not structure.is_separable or not self._selects_whole(units.outputs):
            return None
        first = self.index[..., :: units.outputs] // units.outputs * units.inputs
        inputs = first.unsqueeze(-1) + torch.arange(units.inputs, device=first.device)
        return Reduction(structure, Selection(inputs.flatten(-2), self.size // units.outputs * units.inputs))

    def complete(self, values, x):
        lead = x.shape[:-1]
        return x.scatter(-1, self.index.expand(*lead, -1), values.expand(*lead, -1))

    @property
    def keeps_range(self):
        return True

    @property
    def data(self):
        return (self.index,) if self.index.ndim > 1 else ()

    def with_data(self, *data):
        return Selection(data[0], self.size) if data else self

    def first(self):
        return Selection(self.index.reshape(-1, self.index.shape[-1])[0], self.size)

    def _selects_whole(self, outputs: int) -> bool:
        """Whether it selects all outputs of whole units of ``outputs`` each, in order."""
        if outputs == 1:
            return True
        if self.index.shape[-1] % outputs:
            return False
        grouped = self.index.unflatten(-1, (-1, outputs))
        first = grouped[..., :1]
        consecutive = grouped == first + torch.arange(outputs, device=first.device)
        return bool((first % outputs == 0).all() and consecutive.all())


@dataclass(frozen=True)
class DisjointSums(Operator):
    """``y_j = sum_k weights_jk x_{index_jk}``, with no entry of x used twice; index and weights ``[Dy, K]``."""

    is_linear = True

    index: Tensor
    weights: Tensor
    size: int

    def __call__(self, x):
        return (x.index_select(-1, self.index.flatten()).unflatten(-1, self.index.shape) * self.weights).sum(-1)

    def reduce(self, structure):
        """Sums of scalar units are units of one output and as many local inputs as the sum has terms."""
        units = structure.units
        if units is None or not structure.is_separable or not units.is_scalar:
            return None
        sums = Units(units.n_global, inputs=self.index.shape[-1], outputs=1)
        return Reduction(of_units(sums), Selection(self.index.flatten(), self.size))

    @property
    def keeps_range(self):
        """Means do, other sums do not."""
        return bool((self.weights >= 0).all() and (self.weights.sum(-1) - 1).abs().max() < 1e-6)


@dataclass(frozen=True)
class Function(Operator):
    """Any function of flat outputs, ``[..., Dx] -> [..., Dy]``."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x):
        return self.function(x)

    def of_type(self, dtype, computed_in):
        # it may hold tensors of the type that it was given for
        return Function(lambda x: self.function(x.to(computed_in)).to(dtype))


@dataclass(frozen=True)
class OfImages:
    """A function of outputs of a shape, ``[..., *shape]``, as one of flat outputs: ``[..., Dx] -> [..., Dy]``."""

    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        lead = x.shape[:-1]
        return self.function(x.reshape(*lead, *self.shape)).reshape(*lead, -1)


def select(index: Tensor, size: int) -> Everything | Selection:
    """The selection of some entries of a vector; :class:`Everything` if these are all entries in order."""
    whole = index.ndim == 1 and torch.equal(index, torch.arange(size, device=index.device))
    return Everything(size) if whole else Selection(index, size)


def times(matrix: Tensor, x: Tensor) -> Tensor:
    return x @ matrix.to(x).mT


def blurred(x: Tensor, kernel: Tensor) -> Tensor:
    """Images ``[..., H, W]`` convolved with ``kernel``."""
    up, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    images = x.reshape(-1, 1, *x.shape[-2:])
    padded = functional.pad(images, (left, left, up, up), mode="reflect")
    return functional.conv2d(padded, kernel.to(x).flip(0, 1)[None, None]).reshape(x.shape)


class ObservedPixels(nn.Module):
    """``p(x_i : i observed | z)`` of a decoder whose pixels are independent given z; the others integrate to one.

    Args:
        decoder: ``decoder(z)`` is a Bernoulli, Normal or CensoredNormal distribution over images of Dx pixels.
        index: the observed pixels of a flat image, ``[n]``, or ``[*batch, n]`` if they differ between problems.

    Raises:
        ModelError: when called, the decoder returns another distribution.
    """

    index: Tensor

    def __init__(self, decoder: nn.Module, index: Tensor):
        super().__init__()
        self.decoder = decoder
        self.register_buffer("index", index)

    def forward(self, z: Tensor) -> Independent:
        base = self._pixels(z)
        parameters = {name: getattr(base, name).flatten(z.ndim - 1) for name in _PARAMETERS[type(base)]}
        seen = {name: Selection(self.index, value.shape[-1])(value) for name, value in parameters.items()}
        return Independent(type(base)(**seen, validate_args=False), 1, validate_args=False)

    def complete(self, z: Tensor, observed: Tensor, rng: torch.Generator, mean: bool = False) -> Tensor:
        """Flat images ``[..., Dx]`` drawn from the decoder, or their means, with the observed pixels ``[..., n]``."""
        base = self._pixels(z)
        if mean:
            x = base.mean
        elif isinstance(base, Bernoulli):
            x = torch.bernoulli(base.probs, generator=rng)
        else:
            loc = base.loc
            x = loc + base.scale * torch.randn(loc.shape, generator=rng, dtype=loc.dtype, device=loc.device)
            x = x.clamp(0, 1) if isinstance(base, CensoredNormal) else x
        x = x.flatten(z.ndim - 1)
        return Selection(self.index, x.shape[-1]).complete(observed.to(x.dtype), x)

    def take(self, problems: Tensor) -> Self:
        """The decoder for the problems with these indices into the flat batch."""
        if self.index.ndim == 1:
            return self
        return type(self)(self.decoder, self.index.flatten(0, -2)[problems.to(self.index.device)])

    def _pixels(self, z: Tensor) -> Bernoulli | Normal | CensoredNormal:
        base = base_distribution(self.decoder(z))
        if type(base) not in _PARAMETERS:
            name = type(self.decoder).__name__
            known = "Bernoulli, Normal or CensoredNormal"
            raise ModelError(f"{name} returns a {type(base).__name__}: a mask needs independent {known} pixels")
        return base  # type: ignore[return-value]


_PARAMETERS = {Bernoulli: ("logits",), Normal: ("loc", "scale"), CensoredNormal: ("loc", "scale")}
