"""deepinv's physics as observations of flat images: which pixels, which matrix or which function, and which noise."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..conditioning.observations import linear, pixels
from ..errors import ArgumentError, ModelError, ObservationError, cause, extra

with extra("deepinv"):
    from deepinv.physics import Denoising, GaussianNoise, Inpainting, LinearPhysics, Physics, ZeroNoise

# Entries of a matrix up to which a linear operator becomes one.
_ENTRIES = 2**22
_IMAGES = 512
# Singular values below this share of the largest are those of rounding, in the 32 bits of most measurements.
_RANK = 1e-6


class Measurement(NamedTuple):
    """``A(x) = y`` for flat images x of Dx entries: all of them, or those of a mask, a matrix, or a function."""

    values: Tensor
    """``[B, Dy]``; with a mask images ``[B, Dx]`` whose hidden entries do not matter."""
    mask: Tensor | None = None
    """``[Dx]`` or ``[B, Dx]``, True where observed."""
    matrix: Tensor | None = None
    """``[Dy, Dx]``."""
    function: Callable[[Tensor], Tensor] | None = None
    """``[..., Dx] -> [..., Dy]``."""

    @property
    def is_of_pixels(self) -> bool:
        return self.matrix is None and self.function is None

    def observe(self, shape: tuple[int, ...]) -> Any:
        """The observation of outputs of this shape, for :func:`dgm_infer.condition`."""
        if self.mask is not None:
            return pixels(self.mask.reshape(*self.mask.shape[:-1], *shape))
        if self.matrix is not None:
            return linear(self.matrix)
        function = self.function
        return None if function is None else lambda x: function(x.flatten(-len(shape)))


def noise_sd(physics: Physics) -> float | None:
    """The standard deviation of a physics' noise; None without noise.

    Raises:
        ModelError: the noise is not Gaussian of one sigma, or the sensor changes what was measured.
    """
    probe = 10 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    if not torch.equal(torch.as_tensor(physics.sensor(probe)), probe):
        raise ModelError(f"the sensor of {_name(physics)} is not mapped: only measurements without a sensor model are")
    noise: Any = physics.noise_model
    if isinstance(noise, ZeroNoise):
        return None
    if type(noise) is not GaussianNoise:
        raise ModelError(f"{_name(noise)} of {_name(physics)} is not mapped: only GaussianNoise and ZeroNoise are")
    sigma = torch.as_tensor(noise.sigma).double()
    low, high = float(sigma.min()), float(sigma.max())
    if low != high or not 0 <= low < torch.inf:
        raise ModelError(
            f"the sigma of {_name(physics)}'s GaussianNoise is from {low:g} to {high:g}: must be one number >= 0 for "
            "all measurements"
        )
    return low or None


def measurement(y: Tensor, physics: Physics, image_shape: tuple[int, ...], *, is_exact: bool) -> Measurement:
    """What measurements say of flat images of this shape.

    Args:
        y: ``[B, *y_shape]``.
        physics: their operator.
        image_shape: ``(C, H, W)``.
        is_exact: whether there is no noise, so that no row of a matrix may follow from the others.

    Raises:
        ArgumentError: y does not have the shape that the physics gives.
        ModelError: the operator fails for such images, or differs between them, or is not the function it claims to be.
        ObservationError: exact measurements repeat themselves.
    """
    mask = _mask(physics, len(y), image_shape)
    if mask is not None:
        _check_shape(y, image_shape, physics)
        return Measurement(y.flatten(1), mask=mask.to(y.device))
    apply = _applied(physics, image_shape, y)
    x = torch.randn(1, *image_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(y.device)
    one = apply(x)
    _check_shape(y, tuple(one.shape[1:]), physics)
    if isinstance(physics, Denoising) and torch.equal(one, x):
        return Measurement(y.flatten(1))
    n_values, n_pixels = one.numel(), x.numel()
    if isinstance(physics, LinearPhysics) and n_values * n_pixels <= _ENTRIES:
        matrix = _matrix(apply, image_shape, y.device)
        wrong = (x.flatten(1) @ matrix.mT - one.flatten(1)).abs().max() / one.abs().max().clamp_min(1e-30)
        if wrong > 1e-4:
            raise ModelError(f"{_name(physics)} is not linear: A(x) differs from its matrix times x by {wrong:.2g}")
        seen = (matrix != 0).any(1)
        matrix, values = matrix[seen], y.flatten(1)[:, seen]
        if is_exact:
            _check_rank(matrix, physics)
        return Measurement(values, matrix=matrix)

    def function(flat: Tensor) -> Tensor:
        images = flat.reshape(-1, *image_shape)
        return apply(images.double()).to(flat).reshape(*flat.shape[:-1], n_values)

    return Measurement(y.flatten(1), function=function)


def _mask(physics: Physics, n: int, image_shape: tuple[int, ...]) -> Tensor | None:
    """The flat mask of an inpainting, ``[Dx]``, or ``[n, Dx]`` if it differs; None if it is not one of 0 and 1."""
    mask = getattr(physics, "mask", None)
    if not isinstance(physics, Inpainting) or mask is None or mask.ndim != 4 or len(mask) not in (1, n):
        return None
    x = torch.randn(n, *image_shape, generator=torch.Generator().manual_seed(0)).to(mask.device)
    try:
        with torch.no_grad():
            mask = mask.expand(-1, *image_shape)
            if not ((mask == 0) | (mask == 1)).all() or not torch.equal(physics.A(x), mask * x):
                return None
    except RuntimeError:
        # of other images: its function says so
        return None
    flat = mask.bool().flatten(1)
    return flat[0] if len(flat) == 1 else flat


def _applied(physics: Physics, image_shape: tuple[int, ...], y: Tensor) -> Callable[[Tensor], Tensor]:
    """A of images in float64, ``[n, C, H, W] -> [n, *y_shape]``; in the physics' own type where it cannot."""
    device = y.device

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float64 if tensor.is_floating_point() else tensor.dtype)

    wide = _copy(physics)._apply(cast)
    zero = torch.zeros(1, *image_shape, dtype=torch.float64, device=device)
    try:
        with torch.no_grad():
            if isinstance(found := wide.A(zero), Tensor) and found.dtype == torch.float64 and len(found) == 1:
                return wide.A
    except Exception:
        # some compute in 32 bits only
        pass
    own = _copy(physics)._apply(lambda tensor: tensor.to(device))
    try:
        with torch.no_grad():
            found = own.A(zero.float())
    except Exception as error:
        if _takes(own, zero.float().expand(len(y), *image_shape)):
            raise _differs(physics) from error
        raise ModelError(f"{_name(physics)} fails for images of shape {image_shape}: {cause(error)}") from error
    if not isinstance(found, Tensor) or found.is_complex():
        what = f"a {type(found).__name__}" if not isinstance(found, Tensor) else "complex numbers"
        raise ModelError(f"{_name(physics)} gives {what}: only one tensor of real numbers is mapped")
    if len(found) != 1:
        raise _differs(physics)
    return lambda x: own.A(x.float()).double()


def _copy(physics: Physics) -> Physics:
    try:
        return copy.deepcopy(physics)
    except (RuntimeError, TypeError):
        # deepinv's own way copies random generators too, and takes longer
        return physics.clone()


def _takes(physics: Physics, x: Tensor) -> bool:
    try:
        with torch.no_grad():
            return len(physics.A(x)) == len(x)
    except Exception:
        return False


def _differs(physics: Physics) -> ModelError:
    return ModelError(f"{_name(physics)} has another operator for each measurement: reconstruct them one by one")


def _matrix(apply: Callable[[Tensor], Tensor], image_shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The matrix of a linear operator, ``[Dy, Dx]``, from the images of single pixels."""
    size = torch.Size(image_shape).numel()
    columns = []
    with torch.no_grad():
        for first in range(0, size, _IMAGES):
            some = torch.arange(first, min(first + _IMAGES, size), device=device)
            images = torch.nn.functional.one_hot(some, size).double().reshape(-1, *image_shape)
            columns.append(apply(images).flatten(1))
    matrix = torch.cat(columns).mT.contiguous()
    # what Fourier transforms leave where there is nothing
    return torch.where(matrix.abs() < 1e-12 * matrix.abs().max(), 0.0, matrix)


def _check_shape(y: Tensor, shape: tuple[int, ...], physics: Physics) -> None:
    if y.ndim == 0 or tuple(y.shape[1:]) != shape:
        raise ArgumentError(f"y has shape {tuple(y.shape)}: {_name(physics)} gives [B, {str(shape)[1:-1].rstrip(',')}]")


def _check_rank(matrix: Tensor, physics: Physics) -> None:
    if len(matrix) and bool(((matrix != 0).sum(0) <= 1).all()):
        return
    rank = int(torch.linalg.matrix_rank(matrix, rtol=_RANK)) if len(matrix) else 0
    if rank < len(matrix) or rank == 0:
        raise ObservationError(
            f"{_name(physics)} without noise: its {len(matrix)} measurements have rank {rank}, the others repeat "
            "these: give it noise, physics.noise_model = GaussianNoise(sigma)"
        )


def _name(part: Any) -> str:
    return type(part).__name__
