"""Functions of a fibre compiled by torch's compiler, Inductor, for any number of rows."""

import gc
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_aggregate

from ..errors import ModelError, cause
from .capture import quiet, uncollected
from .pytrees import Form, flatten, unflatten

# What the linker says of a library that was not written to its end.
_CUT_OFF = "file too short"


class Compiler:
    """Traces and compiles functions of batches of rows, each once for all batch sizes.

    The functions are traced to tensor operations first (``make_fx``): forward-mode derivatives, gradients and the
    user's model are all in the graph before torch's compiler sees it.

    Args:
        generates: whether code may be generated. Else what cannot be traced is called as it is.
    """

    def __init__(self, generates: bool = True):
        self.generates = generates
        self._compiled: dict[Any, tuple[Callable[..., list[Tensor]], list[Form]] | None] = {}

    def __call__(self, key: Any, function: Callable[..., Any], *arguments: Any, generate: bool) -> Any:
        """``function(*arguments)``; arguments and result are trees of tensors whose dimension 0 is the rows.

        Args:
            key: identifies the function, which is compiled once per key.
            generate: whether code is generated; else the traced operations are called one by one, which takes no time
                to compile and spares the calls of derivatives from Python.

        Raises:
            ModelError: code may be generated, and the model cannot be traced or compiled.
        """
        tensors, structure = flatten(arguments)
        rows = tensors[0].shape[0]
        # compilers treat a single row as a special case
        tensors = [t.expand(2, *t.shape[1:]) for t in tensors] if rows == 1 else tensors
        tensors = [t.contiguous() for t in tensors]
        key = (key, structure, tensors[0].dtype, tensors[0].device)
        if key not in self._compiled:
            try:
                self._compiled[key] = self._compile(function, structure, tensors, generate and self.generates)
            except ModelError:
                if self.generates:
                    raise
                self._compiled[key] = None
        known = self._compiled[key]
        if known is None:
            with torch.no_grad():
                return function(*arguments)
        compiled, result = known
        with torch.no_grad():
            values = compiled(*tensors)
        return unflatten([v[:1] for v in values] if rows == 1 else list(values), result[0])

    def _compile(self, function, structure, tensors, generate):
        result: list[Any] = []

        def flat(*flat_tensors: Tensor) -> list[Tensor]:
            values, tree = flatten(function(*unflatten(list(flat_tensors), structure)))
            result[:] = [tree]
            return [v.detach().contiguous() for v in values]

        with quiet():
            try:
                graph = _trace(flat, tensors)
                example = _of_size(tensors, 2 * _OTHER_SIZE)
                with _left_out() if generate else nullcontext():
                    compiled = _generate(graph, example) if generate else graph
                    with torch.no_grad():
                        compiled(*example)
            except Exception as error:
                remedy = "omit it"
                if _CUT_OFF in str(error):
                    remedy = f"a compilation that was stopped left a broken file, remove {cache_dir()}"
                raise ModelError(
                    f"compile=True: torch.compile fails on this model ({cause(error)}): {remedy}"
                ) from error
        return compiled, result


@contextmanager
def _left_out() -> Iterator[None]:
    """Without garbage collections, and with what has survived left out of later ones.

    The code generator leaves millions of objects that stay: looking through them again and again would take a quarter
    of a run's time. Whatever is alive then is freed by its last reference alone, no longer when only cycles hold it.
    """
    gc.collect()
    with uncollected():
        yield
        gc.collect()
        gc.freeze()


# Sizes of the traced batch, and whether its rows are fake: primes, so that a multiple of one in the graph is a number
# of rows. Real rows, which take memory, are for operations that mix fake tensors with the model's own.
_SIZES = ((10007, True), (20011, True), (53, False), (31, False))
# Another size, of real rows, at which the traced graph is checked.
_OTHER_SIZE = 3


def _of_size(tensors: list[Tensor], rows: int) -> list[Tensor]:
    return [t[torch.arange(rows, device=t.device) % len(t)] for t in tensors]


def _trace(function: Callable[..., list[Tensor]], tensors: list[Tensor]) -> torch.fx.GraphModule:
    """The graph of a function, for any number of rows.

    Forward-mode differentiation and ``vmap`` cannot be traced with symbolic sizes (they record the sizes they see), so
    the graph is traced at one size, with multiples of that size replaced; it must agree with the function at another
    size. The traced rows are fake tensors where that works, which have a size but no values: tracing then takes the
    memory of the few rows that are compared.
    """
    other = _of_size(tensors, _OTHER_SIZE)
    expected = function(*other)
    for rows, fake in _SIZES:
        try:
            graph = _trace_fake(function, tensors, rows) if fake else make_fx(function)(*_of_size(tensors, rows))
            _make_dynamic(graph, rows)
            with torch.no_grad():
                found = graph(*other)
        except Exception:
            # the last size has the last word
            if rows == _SIZES[-1][0]:
                raise
            continue
        if all(_agree(f, e) for f, e in zip(found, expected, strict=True)):
            return graph
    raise RuntimeError("its graph depends on the number of rows")


def _agree(found: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=1e-6, atol=1e-8, equal_nan=True)


def _trace_fake(function: Callable[..., list[Tensor]], tensors: list[Tensor], rows: int) -> torch.fx.GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make_fx(function)(*(torch.empty(rows, *t.shape[1:], dtype=t.dtype, device=t.device) for t in tensors))


def _generate(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
    """Compiled code of a traced graph, for any number of rows.

    ``torch.compile`` would first find the graph in the bytecode of its Python code, and test the arguments at every
    call: both are needed only where the code is not for all sizes.
    """
    sizes = ShapeEnv()
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    # sizes that are equal in the example and dynamic are one symbol: the number of rows
    contexts = [StatelessSymbolicContext([DimDynamic.DUCK] + [DimDynamic.STATIC] * (t.ndim - 1)) for t in example]
    inputs = [mode.from_tensor(t.detach(), symbolic_context=c) for t, c in zip(example, contexts, strict=True)]
    with tracing(TracingContext(mode)), torch.no_grad():
        compiled = torch._inductor.standalone_compile(graph, [*inputs], dynamic_shapes="from_tracing_context")
    if not (sizes.guards or sizes.replacements):
        return compiled
    for t in example:
        torch._dynamo.mark_dynamic(t, 0)
    return torch.compile(graph)


def _make_dynamic(graph: torch.fx.GraphModule, rows: int) -> None:
    """Replace multiples of ``rows`` in the graph by multiples of the size of its first input."""
    nodes = graph.graph
    inputs = [node for node in nodes.nodes if node.op == "placeholder"]
    with nodes.inserting_after(inputs[-1]):
        size = nodes.call_function(torch.ops.aten.sym_size.int, (inputs[0], 0))
    for node in list(nodes.nodes):
        if node is size or node.op != "call_function":
            continue

        def replace(argument: Any, before: torch.fx.Node = node) -> Any:
            if type(argument) is not int or argument <= 0 or argument % rows:
                return argument
            if argument == rows:
                return size
            with nodes.inserting_before(before):
                return nodes.call_function(operator.mul, (size, argument // rows))

        node.args = map_aggregate(node.args, replace)  # type: ignore[assignment]
    nodes.eliminate_dead_code()
    graph.recompile()
