"""Network bodies shared by the models: between vectors and images, fully connected or convolutional."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from dgm_infer.arguments import allocatable, choice, sizes
from dgm_infer.errors import ArgumentError

__all__ = [
    "Normalisation",
    "Sizes",
    "checked_sizes",
    "image_channels",
    "mirrored",
    "mlp",
    "single",
    "to_image",
    "to_vector",
    "with_channels",
]

Normalisation = Literal["none", "batch", "group", "spectral"]
# Fewest channels per group, if there are that many.
_GROUP = 4


class Sizes(NamedTuple):
    """What networks between vectors and images are made of."""

    output_shape: tuple[int, ...]
    """Shape of an image."""
    hidden: tuple[int, ...]
    """Widths of the fully connected layers."""
    channels: tuple[int, ...] | None
    """Channels of convolutions; None for none."""


def checked_sizes(call: str, output_shape: Any, hidden: Any, channels: Any) -> Sizes:
    """The arguments that image models share, checked.

    Raises:
        ArgumentError: one of them is not a sequence of integers >= 1.
    """
    return Sizes(
        sizes(call, "output_shape", output_shape),
        sizes(call, "hidden", hidden, empty=True),
        None if channels is None else sizes(call, "channels", channels),
    )


def mlp(widths: Sequence[int], activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Fully connected layers ``widths[0] -> ... -> widths[-1]``, with the activation after all but the last.

    The default is smooth: Hamiltonian dynamics follow gradients of the network's own derivatives.

    Raises:
        ArgumentError: no memory holds their weights.
    """
    n_weights = sum(n_in * n_out for n_in, n_out in pairwise(widths))
    allocatable("mlp", "widths", list(widths), n_weights, "use narrower layers", like=torch.empty(0))
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])


def to_vector(
    image_shape: Sequence[int],
    n_outputs: int,
    hidden: Sequence[int],
    channels: Sequence[int] | None = None,
    normalisation: Normalisation = "none",
) -> nn.Sequential:
    """From flat images ``[..., Dx]`` to vectors ``[..., n_outputs]``.

    Args:
        image_shape: (H, W) or (C, H, W); any shape if the network is fully connected.
        n_outputs: length of the vector.
        hidden: widths of the fully connected layers before the last.
        channels: channels of convolutions before these, each of which halves height and width; None for none.
        normalisation: normalisation of all convolutions but the first.

    Raises:
        ArgumentError: the shape is not that of an image, or a width is illegal.
    """
    if channels is None:
        return mlp([torch.Size(image_shape).numel(), *hidden, n_outputs])
    return _Convolutions(image_shape, n_outputs, hidden, channels, normalisation)


def to_image(
    n_inputs: int,
    image_shape: Sequence[int],
    hidden: Sequence[int],
    channels: Sequence[int] | None = None,
    normalisation: Normalisation = "none",
) -> nn.Sequential:
    """From vectors ``[..., n_inputs]`` to flat images ``[..., Dx]``: the mirror of :func:`to_vector`.

    Args:
        n_inputs: length of the vector.
        image_shape: (H, W) or (C, H, W); any shape if the network is fully connected.
        hidden: widths of the fully connected layers after the vector.
        channels: channels of transposed convolutions after these, each of which doubles height and width; None for
            none.
        normalisation: normalisation of their inputs.

    Raises:
        ArgumentError: the shape is not that of an image, or a width is illegal.
    """
    if channels is None:
        return mlp([n_inputs, *hidden, torch.Size(image_shape).numel()])
    return _TransposedConvolutions(n_inputs, image_shape, hidden, channels, normalisation)


def image_channels(shape: Sequence[int]) -> tuple[int, int, int]:
    """(C, H, W) of an image's shape, which may omit a single channel.

    Raises:
        ArgumentError: it has neither two nor three dimensions, or one of them is empty.
    """
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise ArgumentError(f"convolutions need images of shape (H, W) or (C, H, W), not {tuple(shape)}")
    channels, height, width = shape if len(shape) == 3 else (1, *shape)
    return channels, height, width


def mirrored(widths: Sequence[int] | None) -> list[int] | None:
    """The widths of the reverse network; None stays None."""
    return None if widths is None else list(reversed(widths))


def with_channels(config: dict[str, Any], channels: Sequence[int] | None) -> dict[str, Any]:
    """The configuration of a model, which names channels only if there are any.

    Descriptions stored before convolutions existed stay those of fully connected models.
    """
    return config if channels is None else config | {"channels": list(channels)}


def single(outputs: Tensor) -> Tensor:
    """Outputs in 32 bits if mixed precision made them 16 bits, in which sums over pixels would lose whole nats."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


class _Convolutions(nn.Sequential):
    """Strided convolutions, then fully connected layers: ``[..., Dx] -> [..., n_outputs]``."""

    def __init__(
        self,
        image_shape: Sequence[int],
        n_outputs: int,
        hidden: Sequence[int],
        channels: Sequence[int],
        normalisation: Normalisation,
    ):
        _check(channels, normalisation)
        self.image_shape = image_channels(image_shape)
        sides = _halved(self.image_shape, len(channels))
        layers: list[nn.Module] = []
        for i, (n_in, n_out) in enumerate(pairwise([self.image_shape[0], *channels])):
            odd = (sides[i][0] % 2, sides[i][1] % 2)
            layers += [
                # includes the last pixels of an odd side
                *([nn.ZeroPad2d((0, odd[1], 0, odd[0]))] if any(odd) else []),
                _spectral(nn.Conv2d(n_in, n_out, 4, stride=2, padding=1), normalisation),
                *(_normalised(n_out, normalisation) if i else []),
                nn.SiLU(),
            ]
        n_features = channels[-1] * sides[-1][0] * sides[-1][1]
        layers.append(nn.Flatten())
        for n_in, n_out in pairwise([n_features, *hidden]):
            layers += [_spectral(nn.Linear(n_in, n_out), normalisation), nn.SiLU()]
        last = nn.Linear(hidden[-1] if len(hidden) else n_features, n_outputs)
        super().__init__(*layers, _spectral(last, normalisation))

    def forward(self, input: Tensor) -> Tensor:
        # convolutions take a single leading dimension
        outputs = super().forward(input.reshape(-1, *self.image_shape))
        return outputs.reshape(*input.shape[:-1], outputs.shape[-1])


class _TransposedConvolutions(nn.Sequential):
    """Fully connected layers, then transposed convolutions: ``[..., n_inputs] -> [..., Dx]``."""

    def __init__(
        self,
        n_inputs: int,
        image_shape: Sequence[int],
        hidden: Sequence[int],
        channels: Sequence[int],
        normalisation: Normalisation,
    ):
        _check(channels, normalisation)
        shape = image_channels(image_shape)
        sides = _halved(shape, len(channels))[::-1]
        layers: list[nn.Module] = []
        widths = [n_inputs, *hidden, channels[0] * sides[0][0] * sides[0][1]]
        for i, (n_in, n_out) in enumerate(pairwise(widths)):
            layers += [*([nn.SiLU()] if i else []), _spectral(nn.Linear(n_in, n_out), normalisation)]
        layers.append(nn.Unflatten(-1, (channels[0], *sides[0])))
        for (n_in, n_out), size in zip(pairwise([*channels, shape[0]]), sides[1:], strict=True):
            odd = (size[0] % 2, size[1] % 2)
            # twice the size, or one less if the target is odd
            convolution = nn.ConvTranspose2d(
                n_in, n_out, 4, stride=2, padding=(1 + odd[0], 1 + odd[1]), output_padding=odd
            )
            layers += [*_normalised(n_in, normalisation), nn.SiLU(), _spectral(convolution, normalisation)]
        super().__init__(*layers, nn.Flatten())

    def forward(self, input: Tensor) -> Tensor:
        images = super().forward(input.reshape(-1, input.shape[-1]))
        return images.reshape(*input.shape[:-1], images.shape[-1])


def _check(channels: Sequence[int], normalisation: str) -> None:
    sizes("convolutions", "channels", channels)
    choice("convolutions", "normalisation", normalisation, get_args(Normalisation))


def _halved(image_shape: tuple[int, int, int], n_halvings: int) -> list[tuple[int, int]]:
    """Heights and widths from the image down, each half the previous one, rounded up."""
    sides = [image_shape[1:]]
    for _ in range(n_halvings):
        height, width = sides[-1]
        sides.append(((height + 1) // 2, (width + 1) // 2))
    return sides


def _normalised(n_channels: int, normalisation: str) -> list[nn.Module]:
    if normalisation == "batch":
        return [nn.BatchNorm2d(n_channels)]
    if normalisation == "group":
        groups = max(1, n_channels // _GROUP)
        while n_channels % groups:
            groups -= 1
        return [nn.GroupNorm(groups, n_channels)]
    return []


def _spectral(layer: nn.Module, normalisation: str) -> nn.Module:
    """The layer, with its weight divided by its largest singular value (Miyato et al. 2018) if asked for."""
    return nn.utils.parametrizations.spectral_norm(layer) if normalisation == "spectral" else layer
