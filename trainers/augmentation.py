"""Random changes to training images that preserve what they show."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from dgm_infer.arguments import within
from dgm_infer.errors import ArgumentError

__all__ = ["Augmentation"]


@dataclass(frozen=True)
class Augmentation:
    """A small affine map of some images and Gaussian noise on all, drawn again for every batch.

    An image is resampled at ``R(a) [[s1, h], [0, s2]] p + t`` for the pixel at ``p``, with the angle ``a``, the
    stretches ``s``, the shear ``h`` and the shift ``t`` uniform; values are clipped to [0, 1] before the noise.

    Args:
        probability: probability that an image is mapped, in [0, 1]; the others keep their sharp pixels.
        rotation: largest angle, degrees.
        stretch: largest relative change of height and width, and largest shear; in [0, 1).
        shift: largest translation in each direction, pixels.
        noise: standard deviation of the noise, in units of the pixels.

    Raises:
        ArgumentError: a value outside its range.
    """

    probability: float = 0.5
    rotation: float = 10.0
    stretch: float = 0.1
    shift: float = 0.3
    noise: float = 0.05

    def __post_init__(self):
        for name, upper in (("probability", 1), ("rotation", 180), ("stretch", 0.99), ("shift", math.inf)):
            within("Augmentation", name, getattr(self, name), 0, upper)
        within("Augmentation", "noise", self.noise, 0)

    def __call__(self, images: Tensor) -> Tensor:
        """``[n, H, W] -> [n, H, W]``, or ``[n, C, H, W]`` of which all channels are mapped alike."""
        if images.ndim not in (3, 4):
            raise ArgumentError(
                f"Augmentation(images of shape {tuple(images.shape)}): expected [n, H, W] or [n, C, H, W]"
            )
        if self.probability > 0:
            each = (images.shape[0],) + (1,) * (images.ndim - 1)
            mapped = torch.rand(*each, device=images.device) < self.probability
            images = torch.where(mapped, self._map(images), images)
        return images + self.noise * torch.randn_like(images) if self.noise > 0 else images

    def _map(self, images: Tensor) -> Tensor:
        n, height, width = images.shape[0], *images.shape[-2:]
        unit = 2 * torch.rand(6, n, device=images.device, dtype=images.dtype) - 1
        angle = math.radians(self.rotation) * unit[0]
        stretch, shear = 1 + self.stretch * unit[1:3], self.stretch * unit[3]
        cos, sin = angle.cos(), angle.sin()
        # the grid spans [-1, 1] in each direction
        shift = (2 * self.shift / width * unit[4], 2 * self.shift / height * unit[5])
        affine = torch.stack(
            [
                torch.stack([cos * stretch[0], cos * shear - sin * stretch[1], shift[0]], -1),
                torch.stack([sin * stretch[0], sin * shear + cos * stretch[1], shift[1]], -1),
            ],
            -2,
        )
        grid = affine_grid(affine, [n, 1, height, width], align_corners=False)
        # bicubic: bilinear interpolation would blur strokes that are one pixel wide
        channels = images.reshape(n, -1, height, width)
        warped = grid_sample(channels, grid, mode="bicubic", padding_mode="zeros", align_corners=False)
        return warped.reshape(images.shape).clamp(0, 1)
