"""The Jacobian of a model at prior draws: its rank and size, and kinks that its slope does not show (math 5.6)."""

import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from ..settings import Settings
from .observed import ObservedModel


@dataclass(frozen=True)
class JacobianSettings(Settings):
    """At which points a Jacobian is looked at, and what counts."""

    rank: float = 1e-6
    """Singular values below this, relative to the largest, count as zero: normalisation adds a small number to a norm,
    which leaves the direction that it removes with a derivative of about that size."""
    shown: int = 4
    """Most operations with kinks that a message names: more do not fit a line."""
    entries: int = 2**25
    """Entries of derivatives held at once: 256 MiB."""
    duration: float = 0.3
    """Duration of the lines along which kinks are looked for, that of a short trajectory: they move by this times a
    standard normal momentum."""
    lines: int = 5
    intervals: int = 6
    """Intervals of a line, and with half of their length twice as many: the error of a smooth model falls by 4."""
    rows: int = 16
    """Combinations of outputs whose volume is followed."""
    chunk: int = 256
    """Rows times derivatives of each that are evaluated at once."""
    harmless: float = 0.9
    """Acceptance that jumps must leave attainable for them to matter."""
    nodes: int = 9
    """Points of a line whose slopes are compared first."""
    halvings: int = 20
    """Times that the interval of the largest change is halved, to a millionth."""
    large: float = 0.3
    """Share of a gradient by which it jumps from which a jump is said."""


SETTINGS = JacobianSettings()


def tame_draws(
    reduced: ObservedModel,
    draws: int,
    data: Tensor | None,
    like: Tensor,
    function: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Up to ``draws`` prior draws without overflow, ``[n, D]``.

    Args:
        function: what must not overflow, ``[n, D] -> [n, N]``; None for the constraint of the data.
    """
    rng = torch.Generator(like.device).manual_seed(2)

    def size(u: Tensor) -> Tensor:
        with torch.no_grad():
            return (function or _constraint(reduced, u, data))(u + 1e-3).abs().amax(-1).nan_to_num(torch.inf, torch.inf)

    u = reduced.sample_inputs((draws,), rng, like)
    if size(u).isfinite().all():
        return u
    # a simulator may overflow at most prior draws: take the tamest of many
    u = reduced.sample_inputs((64 * draws,), rng, like)
    sizes = torch.cat([size(part) for part in u.split(draws)])
    order = sizes.argsort()[:draws]
    return u[order[sizes[order].isfinite()]]


def _constraint(reduced: ObservedModel, u: Tensor, data: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The constraint of the data, or of the model's own outputs at ``u``: ``[..., D] -> [..., Dy]``."""
    with torch.no_grad():
        values = reduced.outputs(u) if data is None else data
    return lambda v: reduced.residual(v, values)


class Spectrum(NamedTuple):
    """Singular values of a Jacobian at several points."""

    rank: int
    """The largest rank."""
    largest: float
    """The median over the points; NaN if a structure's rank is known without them."""
    smallest: float
    """The median over the points, of those that count for the rank."""

    @property
    def condition(self) -> float:
        return self.largest / self.smallest


def spectrum(reduced: ObservedModel, u: Tensor, data: Tensor | None) -> Spectrum:
    """Rank and singular values of the constraint's Jacobian at points ``u [n, D]``.

    Args:
        reduced: the model through its observation operator.
        u: ``[n, D]``.
        data: observed values; None for the model's own outputs at ``u``.
    """
    function = _constraint(reduced, u, data)
    if reduced.structure.has_full_rank(function, u, SETTINGS.rank):
        return Spectrum(function(u).shape[-1], math.nan, math.nan)
    value, pull = vjp(function, u)[:2]
    n_outputs, n_inputs = value.shape[-1], u.shape[-1]
    if n_outputs <= n_inputs + 8:
        rows = torch.eye(n_outputs, dtype=u.dtype, device=u.device)
    else:
        # random combinations of many outputs have the rank of all of them
        rng = torch.Generator(u.device).manual_seed(4)
        rows = torch.randn(n_inputs + 8, n_outputs, generator=rng, dtype=u.dtype, device=u.device)
    chunk = max(1, SETTINGS.entries // (value.numel() + u.numel()))
    jacobian = vmap(lambda row: pull(row.expand_as(value))[0], chunk_size=chunk)(rows).movedim(0, -2)
    values = torch.linalg.svdvals(jacobian.nan_to_num(0, 0, 0))
    rank = int((values > SETTINGS.rank * values[..., :1]).sum(-1).max())
    return Spectrum(rank, values[..., 0].median().item(), values[..., max(rank, 1) - 1].median().item())


def jump_words(size: float, operations: str) -> tuple[str, str]:
    """What is wrong with a Jacobian that jumps by a share of its size, and what to do.

    Args:
        operations: :func:`kinked_operations`; they are guessed if there are none.
    """
    where = operations or "a branch in the model's code"
    return (
        f"Jacobian jumps, by {100 * size:.0f} % of its size between neighbouring points ({where})",
        "trajectories are rejected there, and chains may never cross: use smooth functions, such as softplus or "
        "logsumexp",
    )


_OPERATIONS_WITH_KINKS = {
    "abs", "amax", "amin", "argmax", "argmin", "ceil", "clamp", "clamp_max", "clamp_min", "cummax", "cummin", "floor",
    "fmod", "grid_sampler_2d", "grid_sampler_3d", "hardsigmoid", "hardswish", "hardtanh", "kthvalue", "leaky_relu",
    "max", "max_pool2d_with_indices", "max_pool3d_with_indices", "maximum", "median", "min", "minimum", "_prelu_kernel",
    "relu", "remainder", "round", "sgn", "sign", "sort", "topk", "trunc", "where",
}  # fmt: skip
_TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__))


class _Kinked(TorchDispatchMode):
    """Records the operations with kinks, each with the layer that calls it and the line of somebody's code."""

    def __init__(self):
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _OPERATIONS_WITH_KINKS:
            self.found.setdefault(f"{name.strip('_').removesuffix('_kernel')}{_caller()}")
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    layer, frame = "", sys._getframe(2)
    while frame is not None:
        name, own = frame.f_code.co_filename, frame.f_locals.get("self")
        if name == __file__ and frame.f_code.co_name == "kinked_operations":
            # the code of a graph has no lines of its own, and those that follow called it
            break
        if not layer and isinstance(own, nn.Module) and frame.f_code.co_name == "forward":
            layer = f" in {type(own).__name__}"
        if not name.startswith((_TORCH, _OURS, "<")):
            return f"{layer}, line {frame.f_lineno} of {os.path.basename(name)}"
        frame = frame.f_back
    return layer


@torch.no_grad()
def kinked_operations(function: Callable[[Tensor], Tensor], u: Tensor) -> str:
    """The operations of a function that may have kinks, in words; empty if there are none, or it cannot be looked at.

    Args:
        u: points at which it is evaluated.
    """
    try:
        with _Kinked() as kinked:
            function(u)
    except Exception:
        return ""
    found = list(kinked.found)
    more = f"; {len(found) - SETTINGS.shown} more" if len(found) > SETTINGS.shown else ""
    return "; ".join(found[: SETTINGS.shown]) + more


_WITH_KINKS = (
    nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink,
    nn.Threshold, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)  # fmt: skip


class Kinks(NamedTuple):
    """The effect of kinks on trajectories of the length ``SETTINGS.duration``."""

    unseen: float
    """Typical change of ``log|J J^T| / 2`` along one beyond the integral of its slope."""
    acceptance: float
    """About the acceptance probability that no step size exceeds."""
    activations: str
    """The model's modules that have kinks, with their numbers; empty if there are none."""
    operations: str = ""
    """The operations that have kinks."""
    is_smoothed: bool = False
    """Whether the model is already a smooth copy, made by ``from_module(smooth=)``."""

    @property
    def remedy(self) -> str:
        if not self.is_smoothed:
            return "use from_module(net, ..., smooth=10), or activations such as SiLU"
        if self.activations:
            return "smooth= does not replace these: use smooth modules, such as SiLU or average pooling, in their place"
        return (
            "smooth= replaces modules alone: replace functional activations, such as F.leaky_relu in forward, by "
            "modules, such as nn.LeakyReLU, which smooth= finds"
        )

    @property
    def words(self) -> str:
        cause = self.activations or self.operations or "a function such as relu, abs, clamp or max in its code"
        return (
            f"kinks ({cause}): log|J J^T| / 2 jumps where its slope does not show it, by {self.unseen:.2g} over a "
            f"trajectory of length {SETTINGS.duration:g}; at most about {100 * self.acceptance:.0f} % of these can be "
            f"accepted, however small the steps: {self.remedy}"
        )


def find_kinks(reduced: ObservedModel, u: Tensor, rank: int) -> Kinks | None:
    """What kinks cost at lines ``u + t p``, ``p`` standard normal and t up to ``SETTINGS.duration``; None if little.

    The change of ``f = log|J J^T| / 2`` along a line is compared with the trapezoidal integral of its slope by
    autograd, in 6 and in 12 intervals. For a smooth model the difference falls by 4, that of jumps stays. The energy
    of a trajectory errs by as much. If this error is normal with standard deviation ``s``, the mean
    acceptance is ``2 Phi(-s / 2)``.

    Args:
        reduced: the model through its observation operator.
        u: prior draws, ``[n, D]``.
        rank: the rank of the Jacobian, or a lower number.
    """
    if rank < 1:
        return None
    rng = torch.Generator(u.device).manual_seed(5)
    start = u[torch.arange(SETTINGS.lines, device=u.device) % len(u)]
    momentum = torch.randn(start.shape, generator=rng, dtype=u.dtype, device=u.device)
    times = torch.linspace(0, SETTINGS.duration, 2 * SETTINGS.intervals + 1, dtype=u.dtype, device=u.device)
    # [nodes, lines, D]
    nodes = start + times[:, None, None] * momentum
    volume, gradient = _volumes(reduced, nodes.flatten(0, 1), min(rank, SETTINGS.rows), rng)
    volume, slope = volume.unflatten(0, nodes.shape[:2]), (gradient.unflatten(0, nodes.shape[:2]) * momentum).sum(-1)
    change = volume[-1] - volume[0]
    coarse, fine = (
        (change - torch.trapezoid(slope[::stride], times[::stride], dim=0)).nan_to_num(0, 0, 0).abs()
        for stride in (2, 1)
    )
    # medians: near a zero of |J J^T| a single line of a smooth model can err by anything
    unseen = fine.median().item() / 0.6745
    acceptance = math.erfc(unseen / math.sqrt(8))
    if acceptance > SETTINGS.harmless or fine.median() < 0.5 * coarse.median():
        return None
    # noise wraps the generator that was smoothed
    is_smoothed = any(getattr(module, "smoothing", None) is not None for module in reduced.model.modules())
    operations = kinked_operations(reduced.outputs, u[:1])
    return Kinks(unseen, acceptance, named_kinks(reduced.model), operations, is_smoothed)


@torch.enable_grad()
def find_jump(outputs: Callable[[Tensor], Tensor], start: Tensor, end: Tensor) -> float | None:
    """The largest jump of the Jacobian on lines between points, as a share of its size there; None if it is small.

    For a random combination of the outputs, the interval of 8 over which the gradient changes most is halved 20 times,
    each time to the half of the larger change. The gradient of a smooth model then changes by next to nothing, that of
    a model with ``abs``, ``max`` or a branch on its inputs by as much as at first.

    Args:
        outputs: the outputs, or the constraint: ``[n, D] -> [n, Dy]``.
        start, end: ``[lines, D]``, points where they are finite.
    """
    rng = torch.Generator(start.device).manual_seed(7)
    with torch.no_grad():
        size = outputs(start[:1]).shape[-1]
    weight = torch.randn(size, generator=rng, dtype=start.dtype, device=start.device)

    def gradient(share: Tensor) -> Tensor:
        """At shares ``[..., lines]`` of the lines: ``[..., lines, D]``."""
        u = (start + share.unsqueeze(-1) * (end - start)).flatten(0, -2).requires_grad_()
        (slope,) = torch.autograd.grad((outputs(u) @ weight).sum(), u)
        return slope.reshape(*share.shape, -1)

    nodes = torch.linspace(0, 1, SETTINGS.nodes, dtype=start.dtype, device=start.device)
    slopes = gradient(nodes[:, None].expand(-1, len(start)))
    first = (slopes[1:] - slopes[:-1]).norm(dim=-1).nan_to_num(0, 0, 0).argmax(0)
    low, high = nodes[first], nodes[first + 1]
    at_low, at_high = (slopes.gather(0, at[None, :, None].expand(1, *start.shape))[0] for at in (first, first + 1))
    for _ in range(SETTINGS.halvings):
        middle = 0.5 * (low + high)
        between = gradient(middle)
        left = (between - at_low).norm(dim=-1) > (at_high - between).norm(dim=-1)
        low, high = torch.where(left, low, middle), torch.where(left, middle, high)
        at_low = torch.where(left.unsqueeze(-1), at_low, between)
        at_high = torch.where(left.unsqueeze(-1), between, at_high)
    size = torch.maximum(at_low.norm(dim=-1), at_high.norm(dim=-1))
    jump = ((at_high - at_low).norm(dim=-1) / size).nan_to_num(0, 0, 0).max().item()
    return jump if jump > SETTINGS.large else None


def _volumes(reduced: ObservedModel, u: Tensor, n_rows: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """``log|J J^T| / 2`` of ``n_rows`` orthonormal combinations of the outputs, ``[n]``, with gradients ``[n, D]``."""
    with torch.no_grad():
        values = reduced.outputs(u[:1])[0]
    mixing = torch.randn(len(values), n_rows, generator=rng, dtype=u.dtype, device=u.device)
    rows = torch.linalg.qr(mixing).Q.T
    parts = [_volume(reduced, part, values, rows) for part in u.split(max(1, SETTINGS.chunk // n_rows))]
    volume, gradient = zip(*parts, strict=True)
    return torch.cat(volume), torch.cat(gradient)


@torch.enable_grad()
def _volume(reduced: ObservedModel, u: Tensor, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    u = u.detach().requires_grad_()
    value = reduced.residual(u, values)
    # plain reverse mode, one row after the other: it makes the fewest demands on a model
    products = [torch.autograd.grad((value @ row).sum(), u, create_graph=True)[0] for row in rows]
    jacobian = torch.stack(products, -2)
    volume = 0.5 * torch.linalg.slogdet(jacobian @ jacobian.mT)[1]
    # that of a linear model does not depend on u
    (gradient,) = torch.autograd.grad(volume.sum() + 0 * u.sum(), u)
    return volume.detach(), gradient


def named_kinks(model: nn.Module) -> str:
    """The model's modules that have kinks, with their numbers; empty if there are none."""
    found = Counter(type(module).__name__ for module in model.modules() if isinstance(module, _WITH_KINKS))
    return ", ".join(f"{n} {name}" for name, n in found.most_common())
