"""How a fibre's functions are evaluated: in which type, in chunks of rows, as they stand, traced or compiled."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..settings import Settings
from .pytrees import tree_map


@dataclass(frozen=True)
class Computation:
    """How derivatives are computed: the same results up to rounding, but for the Gram force."""

    float32: bool = False
    """Whether Jacobians, their determinants and gradients are those of the model in float32 (math 3.8); the constraint
    itself, and energies without a Jacobian, keep their type."""
    gram_force: bool = True
    """Whether the gradient of the energy has its Gram term, else it is that of ``-log p_u`` alone."""
    mode: Literal["plain", "traced", "compiled"] = "plain"
    """Traced: Jacobians and their derivatives run as tensor operations that were traced once, in a few seconds, which
    spares the calls by which derivatives of derivatives are found. Compiled: every function runs as generated code."""


PLAIN = Computation()


@dataclass(frozen=True)
class ExecutionSettings(Settings):
    """Sizes at which an evaluation changes its way."""

    elements: int = 2**22
    """Jacobian entries per chunk of rows: the graph for their gradient is about thirty times as large."""
    many: int = 2**15
    """Entries of a Jacobian without structure from which a network's arithmetic takes the time: with 64 pixels of 784
    inputs derivatives in float32 take half of it."""
    traced: int = 2**19
    """Entries of the Jacobian of all outputs, of all rows, up to which traced derivatives spare time: until then it
    goes into calls, beyond into a network's arithmetic (2.2 times as fast on
    `mnist_gan`, no faster on 64 x 64 faces)."""


SETTINGS = ExecutionSettings()


def evaluate(fibre: Any, function: Callable[..., Any], arguments: tuple[Any, ...], often: bool) -> Any:
    """``function(fibre, *arguments)`` without gradients, compiled or traced if the fibre is.

    Many rows are evaluated in chunks, so that derivatives need little more memory than their results.

    Args:
        fibre: a :class:`~dgm_infer.Fibre` of R rows.
        function: takes a fibre of R rows and trees of tensors of R rows, and returns such a tree.
        often: whether it is called so often that generated code gains more than it takes to generate.
    """
    row_size = fibre.structure.row_size(fibre.values.shape[-1], fibre.dim)
    n_rows, size = len(fibre.values), max(1, SETTINGS.elements // row_size)
    if n_rows <= size:
        return _evaluate(fibre, function, arguments, often)
    parts = []
    for rows in torch.arange(n_rows, device=fibre.values.device).split(size):
        first, last = int(rows[0]), int(rows[-1]) + 1
        part = tree_map(lambda t, a=first, b=last: t[a:b], arguments)
        parts.append(_evaluate(fibre.take(rows), function, part, often))
    return tree_map(lambda *tensors: torch.cat(tensors), *parts)


def _evaluate(fibre: Any, function: Callable[..., Any], arguments: tuple[Any, ...], often: bool) -> Any:
    derives = function in (type(fibre).jacobian, type(fibre).linearise)
    few = fibre.values.numel() * math.prod(fibre.model.output_shape) <= SETTINGS.traced
    if fibre.compiler is None or not (fibre.is_compiled or (derives and few)):
        with torch.no_grad():
            return function(fibre, *arguments)

    def of_tensors(data: tuple[Any, ...], *arguments: Any) -> Any:
        return function(fibre.with_data(*data), *arguments)

    return fibre.compiler((function, fibre.computation), of_tensors, fibre.data, *arguments, generate=often)
