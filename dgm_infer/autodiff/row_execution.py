"""How a fibre's functions are evaluated: in which type, in chunks of rows, as they stand or as captured graphs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    traced: bool = False
    """Whether Jacobians and their derivatives run as graphs of tensor operations, captured in a few seconds for every
    number of rows, which spares the calls by which derivatives of derivatives are found."""


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
    move: float = 0.1
    """Size of the moves to the points at which a graph is compared with its function."""


SETTINGS = ExecutionSettings()


def evaluate(fibre: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """``function(fibre, *arguments)`` without gradients, as a graph if the fibre is traced.

    Many rows are evaluated in chunks, so that derivatives need little more memory than their results.

    Args:
        fibre: a :class:`~dgm_infer.Fibre` of R rows.
        function: takes a fibre of R rows and trees of tensors of R rows, and returns such a tree.
    """
    n_rows, size = len(fibre.values), _chunk(fibre)
    if n_rows <= size:
        return _evaluate(fibre, function, arguments)
    parts = []
    for rows in torch.arange(n_rows, device=fibre.values.device).split(size):
        first, last = int(rows[0]), int(rows[-1]) + 1
        part = tree_map(lambda t, a=first, b=last: t[a:b], arguments)
        parts.append(_evaluate(fibre.take(rows), function, part))
    return tree_map(lambda *tensors: torch.cat(tensors), *parts)


def _chunk(fibre: Any) -> int:
    """Rows that are evaluated at once."""
    return max(1, SETTINGS.elements // fibre.structure.row_size(fibre.values.shape[-1], fibre.dim))


def _evaluate(fibre: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if fibre.graphs is not None and function in (type(fibre).jacobian, type(fibre).linearise):
        few = fibre.values.numel() * math.prod(fibre.model.output_shape) <= SETTINGS.traced
        if few and fibre.graphs.has(fibre, function.__name__, *arguments):
            with torch.no_grad():
                return fibre.graphs(fibre, function.__name__, fibre.data, *arguments)
    with torch.no_grad():
        return function(fibre, *arguments)


class FibreGraphs:
    """Captured methods of a fibre and of those with other data, each once for every computation and number of rows."""

    def __init__(self):
        self._known: dict[Any, tuple[Graph, Form] | None] = {}

    def has(self, fibre: Any, name: str, u: Tensor) -> bool:
        """Whether a method can be captured."""
        key = self._key(fibre, name, u)
        if key not in self._known:
            try:
                self._known[key] = _captured(fibre, name, u.detach())
            except ModelError:
                self._known[key] = None
        return self._known[key] is not None

    def __call__(self, fibre: Any, name: str, data: tuple[Any, ...], u: Tensor) -> Any:
        """What the method of a fibre with other data gives of positions ``[R, D]``.

        Raises:
            ModelError: it cannot be captured.
        """
        key = self._key(fibre, name, u)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _captured(fibre, name, u.detach())
        graph, form = known
        return unflatten(graph(*flatten(data)[0], u), form)

    def _key(self, fibre: Any, name: str, u: Tensor) -> Any:
        return name, fibre.computation, u.shape, u.dtype


def _captured(fibre: Any, name: str, u: Tensor) -> tuple[Graph, Form]:
    """The graph of a method, of the data and positions.

    Raises:
        ModelError: it cannot be captured, or the graph computes something else.
    """
    data, data_form = flatten(fibre.data)
    forms = []

    def function(*tensors: Tensor) -> list[Tensor]:
        own = fibre.with_data(*unflatten(tensors[:-1], data_form))
        with torch.no_grad():
            found, form = flatten(getattr(own, name)(tensors[-1]))
        forms[:] = [form]
        return [each.detach() for each in found]

    rng = torch.Generator(u.device).manual_seed(0)
    # on the fibre a constraint is rounding
    points = [u + SETTINGS.move * torch.randn(u.shape, generator=rng, dtype=u.dtype, device=u.device) for _ in "ab"]
    coarse = torch.float32 if fibre.computation.float32 else None
    with quiet():
        graph = capture(function, *data, u)
        with torch.no_grad():
            same = all(agree(graph(*data, point), function(*data, point), coarse) for point in points)
    if not same:
        raise ModelError(f"the graph of its {name} computes something else at another position")
    return graph, forms[0]


@dataclass(frozen=True, eq=False)
class CapturedRows:
    """Rows of a fibre in a program that is being captured, where its methods are graphs: a tree that loops can take."""

    fibre: Any
    graphs: FibreGraphs
    data: tuple[Any, ...]
    scale: Tensor

    def constraint(self, u: Tensor) -> Tensor:
        return self._of("constraint", u)

    def entries(self, u: Tensor) -> Any:
        return self._of("entries", u)

    def jacobian(self, u: Tensor) -> Any:
        return self._of("jacobian", u)

    def linearise(self, u: Tensor) -> Any:
        return self._of("linearise", u)

    def evaluate(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(rows, *arguments)``."""
        return function(self, *arguments)

    def _of(self, name: str, u: Tensor) -> Any:
        return self.graphs(self.fibre, name, self.data, u)


def captured_rows(fibre: Any) -> CapturedRows:
    """The rows of a fibre for the program that is being captured.

    Raises:
        ModelError: they are too many to be evaluated at once.
    """
    if len(fibre.values) > _chunk(fibre):
        raise ModelError(f"{len(fibre.values)} rows are too many for one program: {_chunk(fibre)} at most")
    return CapturedRows(fibre, once(fibre, FibreGraphs), fibre.data, fibre.scale)
