"""Linear observations of outputs: means over blocks, a blur, any matrix."""

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from ..arguments import numbers, whole_number
from ..errors import ObservationError, reported_as
from .observations import Bound, Observation, OfImages, batch_shape, finite
from .operators import DisjointSums, Function

__all__ = ["Blur", "Downsample", "Linear", "blur", "downsample", "linear"]

# Standard deviation of a blur, in pixels, beyond which no image is.
_WIDEST = 1000


class Downsample(Observation):
    """Means over ``factor x factor`` blocks of an image: ``[..., H, W] -> [..., H / factor, W / factor]``."""

    def __init__(self, factor: int):
        with reported_as(ObservationError):
            self.factor = whole_number("downsample", "factor", factor)

    def __call__(self, image) -> Tensor:
        """The means of images: ``[..., H, W] -> [..., H / factor, W / factor]``.

        Raises:
            ObservationError: the image does not divide into whole blocks.
        """
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
        return Bound(operator, finite(y).reshape(*batch, -1))


class Linear(Observation):
    """Linear functions of the flat output: ``y = M x``, ``[..., *output_shape] -> [..., Dy]``.

    Rows of M with disjoint entries of x, equally many per row, keep the model's structure; others make it dense.
    """

    def __init__(self, matrix):
        with reported_as(ObservationError):
            numbers("linear", "matrix", matrix)
        matrix = torch.as_tensor(matrix).detach()
        if matrix.ndim != 2 or not matrix.is_floating_point():
            kind = str(matrix.dtype).removeprefix("torch.")
            raise ObservationError(
                f"linear(matrix of shape {tuple(matrix.shape)}, {kind}): expected [Dy, Dx] of floats"
            )
        if not (matrix != 0).any(1).all():
            raise ObservationError("linear(matrix): a row of zeros observes nothing, omit it")
        self.matrix = matrix

    def __call__(self, image) -> Tensor:
        """What is observed of outputs: flat ``[..., Dx]``, or images of Dx entries, ``-> [..., Dy]``.

        Raises:
            ObservationError: they have another number of entries.
        """
        image = _given("linear", image)
        size = self.matrix.shape[1]
        for k in range(1, image.ndim + 1):
            if image.shape[-k:].numel() == size:
                return _times(self.matrix, image.flatten(-k))
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
            operator = Function(functools.partial(_times, matrix))
        return Bound(operator, finite(y).reshape(*batch, -1))


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return x @ matrix.to(x).mT


class Blur(Observation):
    """Convolution of an image with a kernel, preserving its size: the image is reflected beyond its edges."""

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

    def __call__(self, image) -> Tensor:
        """Blurred images: ``[..., H, W] -> [..., H, W]``.

        Raises:
            ObservationError: the kernel is too large for them.
        """
        image = _given("blur", image)
        self._check_size(tuple(image.shape), "an image of shape")
        return _blurred(image, self.kernel)

    def _check_size(self, shape: tuple[int, ...], what: str) -> None:
        up, left = self.kernel.shape[0] // 2, self.kernel.shape[1] // 2
        if len(shape) < 2 or shape[-2] <= up or shape[-1] <= left:
            raise ObservationError(f"blur: the kernel {tuple(self.kernel.shape)} is too large for {what} {shape}")

    def bind(self, y, model):
        shape, kernel = tuple(model.output_shape), self.kernel.to(y)
        self._check_size(shape, "the model's output")
        batch = batch_shape(y, shape)

        blurring = functools.partial(_blurred, kernel=kernel)
        return Bound(Function(OfImages(blurring, shape)), finite(y).reshape(*batch, -1))


def _blurred(x: Tensor, kernel: Tensor) -> Tensor:
    """Images ``[..., H, W]`` convolved with ``kernel``."""
    up, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    images = x.reshape(-1, 1, *x.shape[-2:])
    padded = functional.pad(images, (left, left, up, up), mode="reflect")
    return functional.conv2d(padded, kernel.to(x).flip(0, 1)[None, None]).reshape(x.shape)


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
