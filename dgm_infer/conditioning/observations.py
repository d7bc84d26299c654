"""Observations, as the user specifies them: pixels, block means, a blur, any matrix or function of the output."""

import functools
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..arguments import array, boolean_mask, digits, finite, numbers, whole_number
from ..arguments.values import shown
from ..errors import ConfigError, ObservationError, cause, reported_as
from ..models import GenerativeModel
from ..probe import WRITES
from .operators import DisjointSums, Function, OfImages, Operator, blurred, select, times
from .pictures import COLOURS, batch_shape, is_picture, permutation, read_picture, warn_of_colours

# Grey level of 8 bits above which a pixel of a mask is white.
_HALF = 127
# Standard deviation of a blur, in pixels, beyond which no image is.
_WIDEST = 1000


class Observation(ABC):
    """What was measured: turns the user's ``y`` into flat values and an operator on flat outputs."""

    @abstractmethod
    def bind(self, y: Tensor, model: GenerativeModel) -> "Bound":
        """Check ``y`` against the model and flatten it."""

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{name}={shown(value)}' for name, value in vars(self).items())})"


class Bound(NamedTuple):
    """An observation matched to a model: ``operator(x) = values`` with ``values [*batch, Dy]``."""

    operator: Operator
    values: Tensor


class Pixels(Observation):
    """The entries of the output where ``mask`` is True; ``mask=None`` observes all of them.

    ``mask`` has the output's shape, or ``[*batch, *output_shape]`` with the same number of observed entries in
    every problem; one of ``[H, W]`` holds for all channels. A picture, by path or Pillow's, observes where it is white.
    The data are complete outputs ``[*batch, *output_shape]`` whose hidden entries are ignored.
    """

    def __init__(self, mask=None):
        if is_picture(mask):
            try:
                # edges between black and white may be grey
                grey = read_picture(mask, colour=False)
                if 0 < (most := int(grey.max())) <= _HALF:
                    raise ConfigError(
                        f"its brightest pixel is {most}: observed is what is white, 255, or above {_HALF}"
                    )
                mask = grey > _HALF
            except ConfigError as error:
                raise ObservationError(f"pixels(mask={shown(mask)}): {error}") from error
        if mask is not None:
            with reported_as(ObservationError):
                mask = boolean_mask("pixels", "mask", mask)
        self.mask = mask

    def __call__(self, image) -> Tensor:
        """Images with NaN in the place of their hidden entries, the data of :func:`condition`.

        Raises:
            ObservationError: the image has another shape than the mask.
        """
        with reported_as(ObservationError):
            values = numbers("pixels", "image", image)
        if self.mask is None:
            return values
        mask = self.mask.to(values.device)
        if tuple(values.shape[-mask.ndim :]) != tuple(mask.shape):
            raise ObservationError(
                f"pixels: the mask has shape {tuple(mask.shape)}; the image's is {tuple(values.shape)}"
            )
        return values.masked_fill(~mask, torch.nan)

    def bind(self, y, model):
        shape, size = model.output_shape, torch.Size(model.output_shape).numel()
        # a flat output, as the model's forward returns it, is reshaped to an image
        flat_given = y.ndim > 0 and y.shape[-1] == size and tuple(y.shape[-len(shape) :]) != shape
        batch = tuple(y.shape[:-1]) if flat_given else batch_shape(y, shape)
        if len(shape) == 2 and batch in COLOURS:
            warn_of_colours(y)
        flat = y.reshape(*batch, size)
        index = self.index(shape, batch).to(y.device)
        selection = select(index, size)
        values = selection(flat)
        bad = ~values.isfinite()
        if bad.any():
            where = bad.nonzero()[0].tolist()
            entry = index.expand(*batch, -1)[tuple(where)].item()
            position = tuple(i.item() for i in torch.unravel_index(torch.tensor(entry), shape))
            problem = f" of problem {tuple(where[:-1])}" if batch else ""
            remedy = "hide these entries with the mask (False) or repair the data"
            if self.mask is None and bool(values[bad].isnan().all()):
                remedy = "to leave them out observe=pixels(~observed.isnan()), for all problems as many"
            raise ObservationError(
                f"{int(bad.sum())} observed value(s) are not finite, the first is {values[tuple(where)].item()} at "
                f"{position}{problem}: {remedy}"
            )
        return Bound(selection, values)

    def index(self, shape: tuple[int, ...], batch: tuple[int, ...] = ()) -> Tensor:
        """The observed entries of a flat output, ``[n]`` or ``[*batch, n]``."""
        size = torch.Size(shape).numel()
        if self.mask is None:
            return torch.arange(size)
        mask = self._of_shape(tuple(shape), batch)
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

    def _of_shape(self, shape: tuple[int, ...], batch: tuple[int, ...]) -> Tensor:
        """The mask in the shape of the image, ``[*shape]`` or ``[*batch, *shape]``: ``[H, W]`` for all channels.

        Raises:
            ObservationError: it has another shape.
        """
        assert self.mask is not None
        given = tuple(self.mask.shape)
        if given in (shape, (*batch, *shape)):
            return self.mask
        if len(shape) == 3:
            for lead in ((), batch):
                if given == (*lead, *shape[1:]):
                    return self.mask.unsqueeze(-3).expand(*lead, *shape)
                if given == (*lead, 1, *shape[1:]):
                    return self.mask.expand(*lead, *shape)
        if given in ((1, *shape), (*shape, 1)):
            return self.mask.reshape(shape)
        expected = f"{shape}" + (f" or {(*batch, *shape)}" if batch else "")
        same = f", or {shape[1:]} for all channels" if len(shape) == 3 else ""
        remedy = f": {permutation('mask', given, shape)}" if sorted(given) == sorted(shape) else ""
        raise ObservationError(f"the mask has shape {given}; the image's is {expected}{same}{remedy}")


class Transform(Observation):
    """Any differentiable function of the output: ``[..., *output_shape] -> [..., *y_shape]``."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function

    def bind(self, y, model):
        shape = tuple(model.output_shape)
        batch = batch_shape(y, self._checked(y, shape))
        return Bound(Function(OfImages(self.function, shape)), finite_values(y).reshape(*batch, -1))

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
            why = f"observe {WRITES}" if "in-place" in str(error) else cause(error)
            raise ObservationError(f"observe fails for outputs of shape {shape}: {why}") from error
        if not isinstance(one, Tensor) or not isinstance(two, Tensor):
            raise ObservationError(f"observe returns a {type(one).__name__}: must return a tensor of observed values")
        if two.shape != (2, *one.shape):
            raise ObservationError(
                f"observe maps outputs of shape {tuple(x.shape)} to {tuple(two.shape)}: expected {(2, *one.shape)}, "
                "with leading dimensions as they are (count dimensions from the right: x[..., 0, :], "
                "x.mean(-3, keepdim=True) over channels)"
            )
        if not two.requires_grad:
            raise ObservationError("observe has no derivative: compute with torch's functions, without detach()")
        return tuple(one.shape)


class Flat(Observation):
    """An :class:`Operator` on flat outputs, which knows its own effect on a structure: ``y [*batch, Dy]``."""

    def __init__(self, operator: Operator):
        self.operator = operator

    def bind(self, y, model):
        with torch.no_grad():
            n_values = self.operator(y.new_zeros(torch.Size(model.output_shape).numel())).shape[-1]
        batch_shape(y, (n_values,))
        return Bound(self.operator, finite_values(y))


def finite_values(y: Tensor) -> Tensor:
    """The values.

    Raises:
        ObservationError: some are infinite or NaN.
    """
    if not y.isfinite().all():
        raise ObservationError(f"{int((~y.isfinite()).sum())} observed value(s) are not finite: repair the data")
    return y


def pixels(mask) -> Pixels:
    """Observe the entries of the output where ``mask`` is True.

    Args:
        mask: a boolean array or tensor of the image's shape, or ``[H, W]`` for all channels; or a picture, the path of
            a file or Pillow's, which observes where it is white.
    """
    return Pixels(mask)


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


class Downsample(Observation):
    """Means over ``factor x factor`` blocks of an image: ``[..., H, W] -> [..., H / factor, W / factor]``."""

    def __init__(self, factor: int):
        with reported_as(ObservationError):
            self.factor = whole_number("downsample", "factor", factor)

    def __call__(self, image) -> Tensor:
        """The means of images that divide into whole blocks."""
        image = _given("downsample", image)
        k = self.factor
        if image.ndim < 2 or image.shape[-2] % k or image.shape[-1] % k:
            raise ObservationError(f"downsample({k}): {tuple(image.shape)} does not divide into whole blocks")
        blocks = image.unfold(-2, k, k).unfold(-2, k, k)
        return blocks.mean((-2, -1))

    def bind(self, y, model):
        shape, k = model.output_shape, self.factor
        if len(shape) < 2 or shape[-2] % k or shape[-1] % k:
            raise ObservationError(f"downsample({k}): the model's output {shape} does not divide into whole blocks")
        if k > 1 and tuple(y.shape[-len(shape) :]) == tuple(shape):
            raise ObservationError(
                f"downsample({k}): observed has shape {tuple(y.shape)}, that of complete images, and not of their "
                f"means, {(*shape[:-2], shape[-2] // k, shape[-1] // k)}: with op = downsample({k}), op(image) "
                "computes these"
            )
        batch = batch_shape(y, (*shape[:-2], shape[-2] // k, shape[-1] // k))
        size = torch.Size(shape).numel()
        blocks = torch.arange(size, device=y.device).reshape(shape).unfold(-2, k, k).unfold(-2, k, k)
        index = blocks.reshape(-1, k * k)
        operator = DisjointSums(index, torch.full_like(index, 1 / k**2, dtype=y.dtype), size)
        return Bound(operator, finite_values(y).reshape(*batch, -1))


class Linear(Observation):
    """Linear functions of the flat output: ``y = M x``, ``[..., *output_shape] -> [..., Dy]``.

    Rows of M with disjoint entries of x, equally many per row, keep the model's structure; others make it dense.
    """

    def __init__(self, matrix):
        with reported_as(ObservationError):
            finite("linear", "matrix", matrix)
            matrix = array("linear", "matrix", matrix, digits(matrix))
        if matrix.ndim != 2 or not matrix.is_floating_point():
            kind = str(matrix.dtype).removeprefix("torch.")
            raise ObservationError(
                f"linear(matrix of shape {tuple(matrix.shape)}, {kind}): expected [Dy, Dx] of floats"
            )
        if not (matrix != 0).any(1).all():
            raise ObservationError("linear(matrix): a row of zeros observes nothing, omit it")
        self.matrix = matrix

    def __call__(self, image) -> Tensor:
        """What is observed of outputs: flat ``[..., Dx]``, or images of Dx entries, ``-> [..., Dy]``."""
        image = _given("linear", image)
        size = self.matrix.shape[1]
        for k in range(1, image.ndim + 1):
            if image.shape[-k:].numel() == size:
                return times(self.matrix, image.flatten(-k))
        raise ObservationError(
            f"linear(matrix of shape {tuple(self.matrix.shape)}): {tuple(image.shape)} does not end in {size} entries"
        )

    def bind(self, y, model):
        matrix, size = self.matrix.to(y), torch.Size(model.output_shape).numel()
        if matrix.shape[1] != size:
            raise ObservationError(
                f"linear(matrix of shape {tuple(matrix.shape)}): the model has {size} outputs, {model.output_shape}"
            )
        batch = batch_shape(y, (len(matrix),))
        support = matrix != 0
        counts = support.sum(1)
        if (support.sum(0) <= 1).all() and (counts == counts[0]).all():
            index = support.nonzero()[:, 1].reshape(len(matrix), -1)
            operator = DisjointSums(index, matrix.gather(1, index), size)
        else:
            operator = Function(functools.partial(times, matrix))
        return Bound(operator, finite_values(y).reshape(*batch, -1))


class Blur(Observation):
    """Convolution of an image with a kernel, preserving its size: the image is reflected beyond its edges."""

    def __init__(self, kernel):
        with reported_as(ObservationError):
            finite("blur", "kernel", kernel)
            kernel = array("blur", "kernel", kernel, digits(kernel))
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
        if not kernel.any():
            raise ObservationError(f"blur(kernel of shape {tuple(kernel.shape)}): is zero, so that nothing is observed")
        self.kernel = kernel

    def __call__(self, image) -> Tensor:
        """Blurred images: ``[..., H, W] -> [..., H, W]``."""
        image = _given("blur", image)
        self._check_size(tuple(image.shape), "an image of shape")
        return blurred(image, self.kernel)

    def _check_size(self, shape: tuple[int, ...], what: str) -> None:
        up, left = self.kernel.shape[0] // 2, self.kernel.shape[1] // 2
        if len(shape) < 2 or shape[-2] <= up or shape[-1] <= left:
            raise ObservationError(f"blur: the kernel {tuple(self.kernel.shape)} is too large for {what} {shape}")

    def bind(self, y, model):
        shape, kernel = tuple(model.output_shape), self.kernel.to(y)
        self._check_size(shape, "the model's output")
        batch = batch_shape(y, shape)
        blurring = functools.partial(blurred, kernel=kernel)
        return Bound(Function(OfImages(blurring, shape)), finite_values(y).reshape(*batch, -1))


def _given(call: str, image) -> Tensor:
    """An image to apply an operator to: a tensor with its history, other numbers as a tensor."""
    with reported_as(ObservationError):
        values = numbers(call, "image", image)
    return image if isinstance(image, Tensor) and image.is_floating_point() else values


def downsample(factor: int) -> Downsample:
    """Observe the means over ``factor x factor`` blocks of an image: super-resolution."""
    return Downsample(factor)


def linear(matrix) -> Linear:
    """Observe ``M x``, with a matrix ``[Dy, Dx]`` on the flat output."""
    return Linear(matrix)


def blur(kernel) -> Blur:
    """Observe an image convolved with a kernel ``[h, w]`` of odd sides, or a Gaussian of this sd in pixels."""
    return Blur(kernel)
