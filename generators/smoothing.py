"""Smooth copies of networks: activations with kinks become smooth ones, batch statistics part of the layers before."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from dgm_infer.arguments import positive, within
from dgm_infer.errors import ArgumentError, ModelError
from dgm_infer.models import copied

__all__ = ["SmoothHardtanh", "SmoothReLU", "Smoothing", "smooth_copy"]

_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Smoothing:
    """What :func:`smooth_copy` changed."""

    beta: float
    activations: int
    """Number of activation modules replaced."""
    folded: int
    """Number of batch normalisations that became part of the layer before."""
    difference: float = math.nan
    """Largest difference in the images of 16 prior draws."""
    spread: float = math.nan
    """Range of these images, largest less least value."""

    def measured(self, images: Tensor, smooth_images: Tensor) -> "Smoothing":
        """The same with the differences between images of the network and of its copy, ``[n, *shape]``."""
        difference = (images - smooth_images).abs().max().item()
        return replace(self, difference=difference, spread=(images.max() - images.min()).item())

    def __str__(self) -> str:
        return (
            f"smoothed with beta {self.beta:g}: {self.activations} activation modules replaced, {self.folded} "
            f"batch normalisations folded; images differ by at most {self.difference:.2g}, on a range of "
            f"{self.spread:.2g}"
        )


class SmoothReLU(nn.Module):
    """``s x + (1 - s) softplus_beta(x)``, which tends to the (leaky) ReLU as ``beta`` grows; s: negative slope."""

    def __init__(self, beta: float, slope: float | Tensor = 0.0):
        super().__init__()
        self.beta = beta
        self.slope: float | Tensor
        if isinstance(slope, Tensor):
            self.register_buffer("slope", slope.detach().clone())
        else:
            self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        soft = functional.softplus(x, self.beta)
        if isinstance(self.slope, Tensor):
            slope = self.slope if self.slope.numel() == 1 else self.slope.reshape(-1, *[1] * (x.ndim - 2))
        elif self.slope == 0:
            return soft
        else:
            slope = self.slope
        return slope * x + (1 - slope) * soft

    def extra_repr(self) -> str:
        return f"beta={self.beta:g}"


class SmoothHardtanh(nn.Module):
    """``low + softplus_beta(x - low) - softplus_beta(x - high)``, which tends to ``clamp(x, low, high)``."""

    def __init__(self, beta: float, low: float, high: float):
        super().__init__()
        self.beta, self.low, self.high = beta, low, high

    def forward(self, x: Tensor) -> Tensor:
        rising, falling = functional.softplus(x - self.low, self.beta), functional.softplus(x - self.high, self.beta)
        return self.low + rising - falling

    def extra_repr(self) -> str:
        return f"beta={self.beta:g}, low={self.low:g}, high={self.high:g}"


class SmoothHardsigmoid(nn.Module):
    """The smooth counterpart of ``clamp(x / 6 + 1/2, 0, 1)``, or of x times that, as ``Hardswish`` is."""

    def __init__(self, beta: float, *, gates: bool = False):
        super().__init__()
        self.gates, self.clamped = gates, SmoothHardtanh(beta, -3.0, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.clamped(x) / 6 + 0.5
        return x * gate if self.gates else gate


def smooth_copy(net: Any, beta: float) -> tuple[nn.Module, Smoothing]:
    """A copy in evaluation mode without kinks, and what was changed.

    ReLU, LeakyReLU, PReLU, RReLU, ReLU6, Hardtanh, Hardsigmoid and Hardswish modules become combinations of
    ``softplus_beta(x) = log(1 + exp(beta x)) / beta``. Batch normalisations in evaluation mode are linear: each becomes
    part of the convolution or linear layer before it.

    Raises:
        ArgumentError: ``beta`` is not positive, or the network is not a module.
        ModelError: there is no module to replace.
    """
    if not isinstance(net, nn.Module):
        raise ArgumentError(f"from_module(smooth={beta!r}): replaces modules, and the network is a function")
    beta = within("from_module", "smooth", positive("from_module", "smooth", beta), 0, torch.finfo(torch.float32).max)
    net = copied(net).eval()
    folded = _fold(net)
    count = 0
    # a module used in several places is replaced in all of them
    for name, module in list(net.named_modules(remove_duplicate=False)):
        if (smooth := _smooth(module, beta)) is not None:
            if name == "":
                return smooth, Smoothing(beta, 1, folded)
            net.set_submodule(name, smooth)
            count += 1
    if count == 0:
        raise ModelError(
            f"from_module(smooth={beta:g}): this {type(net).__name__} has no ReLU, LeakyReLU, PReLU, RReLU, ReLU6, "
            "Hardtanh, Hardsigmoid or Hardswish module to replace; omit smooth=, or use modules in place of functions "
            "such as torch.relu"
        )
    return net, Smoothing(beta, count, folded)


def _smooth(module: nn.Module, beta: float) -> nn.Module | None:
    """The smooth counterpart of an activation; None for other modules."""
    if isinstance(module, nn.Hardtanh):  # nn.ReLU6 is one
        return SmoothHardtanh(beta, module.min_val, module.max_val)
    if isinstance(module, nn.Hardsigmoid | nn.Hardswish):
        return SmoothHardsigmoid(beta, gates=isinstance(module, nn.Hardswish))
    if isinstance(module, nn.ReLU):
        return SmoothReLU(beta)
    if isinstance(module, nn.LeakyReLU):
        return SmoothReLU(beta, module.negative_slope)
    if isinstance(module, nn.PReLU):
        return SmoothReLU(beta, module.weight)
    if isinstance(module, nn.RReLU):
        return SmoothReLU(beta, (module.lower + module.upper) / 2)
    return None


def _fold(net: nn.Module) -> int:
    """Makes batch normalisations part of the layers before them, in place; the number of these."""
    modules = dict(net.named_modules())
    count = 0
    for before, norm in _followed_by_norm(net):
        layer, statistics = modules[before], modules[norm]
        assert isinstance(statistics, _BATCH_NORMS)
        if isinstance(layer, nn.Linear):
            folded = fuse_linear_bn_eval(layer, statistics)
        else:
            folded = fuse_conv_bn_eval(layer, statistics, transpose="Transpose" in type(layer).__name__)  # type: ignore[type-var]
        net.set_submodule(before, folded)
        net.set_submodule(norm, nn.Identity())
        count += 1
    return count


def _followed_by_norm(net: nn.Module) -> list[tuple[str, str]]:
    """Names of layers, each used once, and of the batch normalisation that alone takes their outputs."""
    try:
        nodes = list(fx.symbolic_trace(net).graph.nodes)
    except Exception:
        # a forward that branches on its inputs: batch normalisations stay, which is right but slower
        return []
    modules = dict(net.named_modules())
    uses = [node.target for node in nodes if node.op == "call_module"]

    def is_used_once(node: fx.Node, kinds: tuple[type, ...]) -> bool:
        return node.op == "call_module" and type(modules[str(node.target)]) in kinds and uses.count(node.target) == 1

    pairs = []
    for node in nodes:
        if not is_used_once(node, _BATCH_NORMS) or modules[node.target].running_mean is None:
            continue
        (before,) = node.all_input_nodes
        if not is_used_once(before, _LAYERS) or len(before.users) > 1:
            continue
        layer = modules[str(before.target)]
        # the channels of transposed groups lie in two dimensions of the weight
        if "Transpose" not in type(layer).__name__ or layer.groups == 1:
            pairs.append((str(before.target), node.target))
    return pairs
