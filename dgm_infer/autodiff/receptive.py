"""Receptive fields: a convolutional network computed only where a few of its outputs look (math 3.10)."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from .convolution import Box, FixedConvolutions, Layer, between

__all__ = ["InFields", "Part", "ReceptiveFields"]

# Monotone functions of single numbers: what depends on them is seen with the identity in their place, since a slope
# that happens to be zero hides it.
_POINTWISE = {
    *("relu", "relu_", "relu6", "leaky_relu", "leaky_relu_", "elu", "elu_", "selu", "celu", "gelu", "silu", "mish"),
    *("softplus", "tanh", "sigmoid", "hardtanh", "hardsigmoid", "hardswish", "logsigmoid", "softsign", "prelu"),
    *("abs", "clamp", "clip", "clamp_min", "clamp_max", "rrelu", "threshold", "tanh_", "sigmoid_", "clamp_"),
}
# Most rows that fields are looked up for.
_MOST_ROWS = 2**10
# Share of the work on whole images above which parts are not worth their calls.
_WORTH = 0.6
# Products that take as long as the calls from Python that a part takes, some 5 ms.
_CALLS = 2e8
# Relative difference of rows computed both ways up to which they agree, and its absolute scale.
_AGREE = 1e-3


class Part(NamedTuple):
    """Outputs that look at the same places."""

    rows: tuple[int, ...]
    boxes: tuple[Box, ...]
    """Of every convolution in the order of their calls: the part of its output that matters."""
    needs: tuple[Box, ...]
    """The part of its input that this needs."""
    grids: tuple[tuple[int, ...], ...]
    """The size of its whole output."""
    joined: tuple[bool, ...]
    """Of every convolution: whether the next one takes just that part of its output."""
    share: float
    """Of the work of the whole network."""
    whole: float
    """That work, in products for one image."""

    def mode(self) -> TorchFunctionMode:
        """While active, a network computes this part of its images: zeros, or wrong numbers, elsewhere."""
        return _Cropped(self)


class InFields:
    """A function ``[..., D] -> [..., N]`` with the receptive fields of its outputs."""

    def __init__(self, function: Callable[[Tensor], Tensor], fields: "ReceptiveFields"):
        self.function, self.fields = function, fields

    def __call__(self, u: Tensor) -> Tensor:
        return self.function(u)


class ReceptiveFields:
    """Parts of the outputs of one network, found on first use and shared by all functions that differ in data only."""

    def __init__(self):
        self._found: dict[int, tuple[Part, ...] | None] = {}

    def parts(self, function: Callable[[Tensor], Tensor], u: Tensor, n: int) -> tuple[Part, ...] | None:
        """Parts that make up the ``n`` outputs at ``u [R, D]``; None if the whole network is the better way."""
        if n not in self._found:
            # a network may do what this does not know of: then it is computed as a whole
            self._found[n] = None
            with suppress(_NotCropped, RuntimeError), torch.enable_grad():
                self._found[n] = _checked(function, u.detach())
        parts = self._found[n] or ()
        spared = sum(len(part.rows) * (1 - part.share) * part.whole for part in parts)
        return self._found[n] if spared * u.shape[:-1].numel() > _CALLS * len(parts) else None


class _NotCropped(Exception):
    """A network whose convolutions cannot be computed in part."""


def _checked(function: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Part, ...] | None:
    """The parts of ``function`` if rows computed by them are those of the whole network, and less work."""
    parts = _recorded(function, u)
    if parts is None:
        return None
    whole = _some_rows(function, u, parts, FixedConvolutions())
    for joined in (True, False):
        if not joined:
            parts = tuple(part._replace(joined=(False,) * len(part.joined)) for part in parts)
        with suppress(_NotCropped, RuntimeError):
            rows = torch.cat([_some_rows(function, u, [part], part.mode()) for part in parts])
            if torch.allclose(rows, whole, rtol=_AGREE, atol=_AGREE * whole.abs().max().item()):
                return parts
    return None


def _some_rows(
    function: Callable[[Tensor], Tensor], u: Tensor, parts: Sequence[Part], mode: TorchFunctionMode
) -> Tensor:
    """The first row of every part, ``[parts, R, D]``."""
    with mode:
        value, pull = vjp(function, u)[:2]
    vectors = torch.eye(value.shape[-1], dtype=u.dtype, device=u.device)[[part.rows[0] for part in parts]]
    return vmap(lambda e: pull(e.expand_as(value))[0])(vectors)


def _recorded(function: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Part, ...] | None:
    """The parts by the derivatives of the outputs of all convolutions."""
    recorder = _Recorder()
    with recorder:
        value = function(u.clone().requires_grad_())
    calls = recorder.calls
    if not calls or not 1 < value.shape[-1] <= _MOST_ROWS:
        return None
    found: dict[tuple[Box, ...], list[int]] = {}
    for row in range(value.shape[-1]):
        images = [call.output for call in calls]
        slopes = torch.autograd.grad(
            value[..., row].sum(), images, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        found.setdefault(tuple(map(_box, slopes)), []).append(row)
    whole = sum(call.layer.work(call.output.shape[2:]) for call in calls)
    parts, grids = [], tuple(tuple(call.output.shape[2:]) for call in calls)
    for boxes, rows in found.items():
        needs = [call.layer.needs(box, call.grid) for call, box in zip(calls, boxes, strict=True)]
        joined = [
            here.output.shape[2:] == after.grid and box == need
            for here, after, box, need in zip(calls, calls[1:], boxes, needs[1:], strict=False)
        ]
        work = sum(call.layer.work(_size(box)) for call, box in zip(calls, boxes, strict=True))
        parts.append(Part(tuple(rows), boxes, tuple(needs), grids, (*joined, False), work / whole, whole))
    # each part computes its outputs once, and every row their derivative
    work = sum(part.share * (1 + len(part.rows)) for part in parts)
    return tuple(parts) if work < _WORTH * value.shape[-1] else None


class _Call(NamedTuple):
    layer: Layer
    grid: tuple[int, ...]
    """Of the input."""
    output: Tensor


class _Recorder(TorchFunctionMode):
    """Keeps the output of every convolution; other functions of single numbers are replaced by the identity."""

    def __init__(self):
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        layer = Layer.of(func, args, kwargs or {})
        if layer is not None:
            output = layer(layer.input)
            self.calls.append(_Call(layer, tuple(layer.input.shape[2:]), output))
            return output
        name = getattr(func, "__name__", "")
        if name in _POINTWISE and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return args[0] * 1
        if name.startswith("conv"):
            raise _NotCropped
        return func(*args, **(kwargs or {}))


class _Cropped(TorchFunctionMode):
    """Computes every convolution where it matters for a part of the outputs."""

    def __init__(self, part: Part):
        super().__init__()
        self.part, self.calls = part, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        layer = Layer.of(func, args, kwargs or {})
        if layer is None:
            return between(func, args, kwargs or {})
        if self.calls == len(self.part.boxes):
            raise _NotCropped
        number = self.calls
        self.calls += 1
        box, need = self.part.boxes[number], self.part.needs[number]
        x, grid = layer.input, tuple(layer.input.shape[2:])
        if number and self.part.joined[number - 1]:
            if grid != _size(need):
                raise _NotCropped
        else:
            x = _cut(x, need)
        y = layer.part(x, need, box)
        return y if self.part.joined[number] else _paste(y, box, self.part.grids[number])


def _cut(x: Tensor, box: Box) -> Tensor:
    for dim, (first, last) in enumerate(box, 2):
        x = x.narrow(dim, first, last - first)
    return x


def _paste(x: Tensor, box: Box, grid: Sequence[int]) -> Tensor:
    """A part of an image among zeros."""
    sides = [(first, n - last) for (first, last), n in zip(box, grid, strict=True)]
    return pad(x, [n for side in reversed(sides) for n in side])


def _box(slope: Tensor) -> Box:
    """The positions of an image ``[R, C, *grid]`` that are not zero for some row and channel."""
    there = (slope != 0).flatten(0, 1).any(0)
    edges = []
    for dim in range(there.ndim):
        line = there.movedim(dim, 0).flatten(1).any(1) if there.ndim > 1 else there
        at = line.nonzero()
        edges.append((int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0))
    return tuple(edges)


def _size(box: Box) -> tuple[int, ...]:
    return tuple(last - first for first, last in box)
