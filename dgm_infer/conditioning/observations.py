"""Observations: which function of the output is observed, as the user says it."""

import functools
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from ..arguments import boolean_mask, numbers, whole_number
from ..errors import ObservationError, cause, reported_as
from ..models import GenerativeModel
from .operators import DisjointSums, Function, Operator, select

__all__ = [
    "Blur",
    "Downsample",
    "Linear",
    "Observation",
    "Pixels",
    "Transform",
    "blur",
    "downsample",
    "linear",
    "observe",
    "pixels",
]


# Standard deviation of a blur, in pixels, beyond which no image is.
_WIDEST = 1000


class Observation(ABC):
    """What was measured: turns ``y`` as the user has it into flat values and an operator on flat outputs."""

    @abstractmethod
    def bind(self, y: Tensor, model: GenerativeModel) -> "Bound":
        """Check ``y`` against the model and flatten it."""


class Bound(NamedTuple):
    """An observation matched to a model: ``operator(x) = values`` with ``values [*batch, Dy]``."""

    operator: Operator
    values: Tensor


class Pixels(Observation):
    """The entries of the output where ``mask`` is True; ``mask=None`` observes all of them.

    ``mask`` has the output's shape, or ``[*batch, *output_shape]`` with the same number of observed entries in
    every problem. The data are complete outputs ``[*batch, *output_shape]`` whose hidden entries are ignored.
    """

    def __init__(self, mask=None):
        if mask is not None:
            with reported_as(ObservationError):
                mask = boolean_mask("pixels", "mask", mask)
        self.mask = mask

    def bind(self, y, model):
        shape, size = model.output_shape, torch.Size(model.output_shape).numel()
        # a flat output, as the model's forward returns it, is taken for the image it is
        flat_given = y.ndim > 0 and y.shape[-1] == size and tuple(y.shape[-len(shape) :]) != shape
        batch = tuple(y.shape[:-1]) if flat_given else _batch_shape(y, shape)
        flat = y.reshape(*batch, size)
        index = self._index(shape, batch).to(y.device)
        selection = select(index, size)
        values = selection(flat)
        bad = ~values.isfinite()
        if bad.any():
            where = bad.nonzero()[0].tolist()
            entry = index.expand(*batch, -1)[tuple(where)].item()
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
        batch = _batch_shape(y, self._checked(y, shape))

        def operator(x: Tensor) -> Tensor:
            lead = x.shape[:-1]
            return function(x.reshape(*lead, *shape)).reshape(*lead, -1)

        return Bound(Function(operator), _finite(y).reshape(*batch, -1))

    def _checked(self, y: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is observed of one output.

        Raises:
            ObservationError: the function fails, does not treat leading dimensions as independent, or is not
                differentiable.
        """
        x = y.new_zeros(2, *shape).requires_grad_()
        try:
            with torch.enable_grad():
                one, two = self.function(x[0]), self.function(x)
        except Exception as error:
            raise ObservationError(f"observe fails for outputs of shape {shape}: {cause(error)}") from error
        if not isinstance(one, Tensor) or not isinstance(two, Tensor):
            raise ObservationError(f"observe returns a {type(one).__name__}: must return a tensor of observed values")
        if two.shape != (2, *one.shape):
            raise ObservationError(
                f"observe maps outputs of shape {tuple(x.shape)} to {tuple(two.shape)}: expected {(2, *one.shape)}, "
                "with leading dimensions as they are (index from the right: x[..., 0, :])"
            )
        if not two.requires_grad:
            raise ObservationError("observe has no derivative: compute with torch's functions, without detach()")
        return tuple(one.shape)


class Flat(Observation):
    """An :class:`Operator` on flat outputs, which says itself what it leaves of a structure: ``y [*batch, Dy]``."""

    def __init__(self, operator: Operator):
        self.operator = operator

    def bind(self, y, model):
        with torch.no_grad():
            n_values = self.operator(y.new_zeros(torch.Size(model.output_shape).numel())).shape[-1]
        _batch_shape(y, (n_values,))
        return Bound(self.operator, _finite(y))


class Downsample(Observation):
    """Means over ``factor x factor`` blocks of an image: ``[..., H, W] -> [..., H / factor, W / factor]``."""

    def __init__(self, factor: int):
        with reported_as(ObservationError):
            self.factor = whole_number("downsample", "factor", factor)

    def bind(self, y, model):
        shape, k = model.output_shape, self.factor
        if len(shape) < 2 or shape[-2] % k or shape[-1] % k:
            raise ObservationError(
                f"downsample({k}): the model's output {shape} has no height and width of whole blocks"
            )
        batch = _batch_shape(y, (*shape[:-2], shape[-2] // k, shape[-1] // k))
        size = torch.Size(shape).numel()
        blocks = torch.arange(size, device=y.device).reshape(shape).unfold(-2, k, k).unfold(-2, k, k)
        index = blocks.reshape(-1, k * k)
        operator = DisjointSums(index, torch.full_like(index, 1 / k**2, dtype=y.dtype), size)
        return Bound(operator, _finite(y).reshape(*batch, -1))


class Linear(Observation):
    """Linear functions of the flat output: ``y = M x``, ``[..., *output_shape] -> [..., Dy]``.

    Rows of M that share no entry of x, with equally many each, keep the model's structure; others make it dense.
    """

    def __init__(self, matrix):
        with reported_as(ObservationError):
            numbers("linear", "matrix", matrix)
        matrix = torch.as_tensor(matrix).detach()
        if matrix.ndim != 2 or not matrix.is_floating_point():
            raise ObservationError(
                f"linear(matrix of shape {tuple(matrix.shape)}, {_name(matrix.dtype)}): expected [Dy, Dx] of floats"
            )
        if not (matrix != 0).any(1).all():
            raise ObservationError("linear(matrix): a row of zeros observes nothing, leave it out")
        self.matrix = matrix

    def bind(self, y, model):
        matrix, size = self.matrix.to(y), torch.Size(model.output_shape).numel()
        if matrix.shape[1] != size:
            raise ObservationError(
                f"linear(matrix of shape {tuple(matrix.shape)}): the model has {size} outputs, {model.output_shape}"
            )
        batch = _batch_shape(y, (len(matrix),))
        support = matrix != 0
        counts = support.sum(1)
        if (support.sum(0) <= 1).all() and (counts == counts[0]).all():
            index = support.nonzero()[:, 1].reshape(len(matrix), -1)
            operator = DisjointSums(index, matrix.gather(1, index), size)
        else:
            operator = Function(functools.partial(_times, matrix))
        return Bound(operator, _finite(y).reshape(*batch, -1))


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return x @ matrix.mT


class Blur(Observation):
    """Convolution of an image with a kernel, of the same size: beyond its edges the image is reflected."""

    def __init__(self, kernel):
        with reported_as(ObservationError):
            numbers("blur", "kernel", kernel)
        kernel = torch.as_tensor(kernel).detach()
        if kernel.ndim == 0:
            sd = float(kernel)
            if not 0 < sd <= _WIDEST:
                raise ObservationError(
                    f"blur(kernel={sd:g}): must be a positive standard deviation in pixels, at most {_WIDEST}"
                )
            reach = math.ceil(3 * sd)
            profile = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=torch.float64) / sd).square())
            kernel = profile[:, None] * profile
            kernel = kernel / kernel.sum()
        if kernel.ndim != 2 or not all(side % 2 for side in kernel.shape) or not kernel.is_floating_point():
            raise ObservationError(
                f"blur(kernel of shape {tuple(kernel.shape)}): expected a standard deviation, or a kernel of floating "
                "point with odd height and width"
            )
        self.kernel = kernel

    def bind(self, y, model):
        shape, kernel = model.output_shape, self.kernel.to(y)
        up, left = kernel.shape[0] // 2, kernel.shape[1] // 2
        if len(shape) < 2 or shape[-2] <= up or shape[-1] <= left:
            raise ObservationError(
                f"blur: the kernel {tuple(kernel.shape)} is too large for the model's output {shape}"
            )
        batch = _batch_shape(y, shape)

        def operator(x: Tensor) -> Tensor:
            images = x.reshape(-1, 1, *shape[-2:])
            padded = functional.pad(images, (left, left, up, up), mode="reflect")
            return functional.conv2d(padded, kernel.flip(0, 1)[None, None]).reshape(x.shape)

        return Bound(Function(operator), _finite(y).reshape(*batch, -1))


def _finite(y: Tensor) -> Tensor:
    if not y.isfinite().all():
        raise ObservationError(f"{int((~y.isfinite()).sum())} observed value(s) are not finite: repair the data")
    return y


def pixels(mask) -> Pixels:
    """Observe the entries of the output where ``mask`` is True (a boolean array or tensor of the image's shape)."""
    return Pixels(mask)


def downsample(factor: int) -> Downsample:
    """Observe the means over ``factor x factor`` blocks of an image: super-resolution."""
    return Downsample(factor)


def linear(matrix) -> Linear:
    """Observe ``M x``, with a matrix ``[Dy, Dx]`` on the flat output."""
    return Linear(matrix)


def blur(kernel) -> Blur:
    """Observe an image convolved with a kernel ``[h, w]`` of odd sides, or a Gaussian of this sd in pixels."""
    return Blur(kernel)


def observe(observation) -> Observation:
    """An :class:`Observation` from what ``condition(observe=...)`` accepts.

    That is None, an Observation, an :class:`Operator` on flat outputs, or a callable on outputs.
    """
    if observation is None:
        return Pixels()
    if isinstance(observation, Observation):
        return observation
    if isinstance(observation, Operator):
        return Flat(observation)
    if callable(observation):
        return Transform(cast(Callable[[Tensor], Tensor], observation))
    raise ObservationError(
        f"observe={' '.join(reprlib.repr(observation).split())} is neither an operator (pixels, "
        "downsample, linear, blur) nor a function of the output: pixels(mask) observes the entries where mask is True"
    )


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
