"""How a fibre's functions are evaluated: in which type, in chunks of rows, as they stand, traced or compiled."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ModelError
from ..settings import Settings
from .capture import Graph, capture, quiet
from .captured import agree, once
from .pytrees import Form, flatten, tree_map, unflatten


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


class Functions:
    """Captured functions of rows of a fibre and of their data, each on first use.

    Args:
        fibre: a :class:`~dgm_infer.Fibre` of R rows.
        u: positions ``[R, D]``.
    """

    def __init__(self, fibre: Any, u: Tensor):
        self.fibre, self._u = fibre, u.detach()
        self._known: dict[str, tuple[Graph, Form]] = {}

    def __call__(self, name: str, data: tuple[Any, ...], u: Tensor) -> Any:
        """What the fibre's method of this name gives of positions ``[R, D]``."""
        if name not in self._known:
            self._known[name] = self._captured(name)
        graph, form = self._known[name]
        return unflatten(graph(*flatten(data)[0], u), form)

    def _captured(self, name: str) -> tuple[Graph, Form]:
        """The graph of a method.

        Raises:
            ModelError: it cannot be captured, or the graph computes something else.
        """
        data, data_form = flatten(self.fibre.data)
        forms = []

        def function(*tensors: Tensor) -> list[Tensor]:
            own = self.fibre.with_data(*unflatten(tensors[:-1], data_form))
            with torch.no_grad():
                found, form = flatten(getattr(own, name)(tensors[-1]))
            forms[:] = [form]
            return [each.detach() for each in found]

        rng = torch.Generator(self._u.device).manual_seed(0)
        points = [
            self._u + _MOVE * torch.randn(self._u.shape, generator=rng, dtype=self._u.dtype, device=self._u.device)
            for _ in range(2)
        ]
        with quiet():
            graph = capture(function, *data, self._u)
            coarse = torch.float32 if self.fibre.computation.float32 else None
            with torch.no_grad():
                same = all(agree(graph(*data, u), function(*data, u), coarse) for u in points)
        if not same:
            raise ModelError(f"the graph of its {name} computes something else at another position")
        return graph, forms[0]


# Size of the moves to the points at which a graph is compared with its function: on the fibre a constraint is rounding.
_MOVE = 0.1


@dataclass(frozen=True, eq=False)
class CapturedRows:
    """Rows of a fibre whose functions are graphs: a tree of tensors, which loops of programs can take."""

    functions: Functions
    data: tuple[Any, ...]

    @property
    def values(self) -> Tensor:
        return self.data[0]

    @property
    def scale(self) -> Tensor:
        return self.values.abs().amax(-1).clamp_min(1)

    def constraint(self, u: Tensor) -> Tensor:
        return self.functions("constraint", self.data, u)

    def entries(self, u: Tensor) -> Any:
        return self.functions("entries", self.data, u)

    def jacobian(self, u: Tensor) -> Any:
        return self.functions("jacobian", self.data, u)

    def linearise(self, u: Tensor) -> Any:
        return self.functions("linearise", self.data, u)


def captured_rows(fibre: Any, u: Tensor) -> CapturedRows:
    """The rows of a fibre for the program that is being captured."""
    return CapturedRows(once(fibre, lambda: Functions(fibre, u)), fibre.data)
