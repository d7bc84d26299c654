"""Functions captured as graphs of operations without autograd, and which inputs such a graph is affine in."""

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..arguments.distributions import NanFactors
from ..errors import ModelError
from .simplify import lift_constants, mutates, simplified

_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")
# The graphs whose constants are inputs of a program that is being captured, and those inputs.
_BOUND: ContextVar[tuple[tuple["Graph", tuple[Tensor, ...]], ...]] = ContextVar("bound", default=())
# The graphs that were called, where somebody wants to know.
_CALLED: ContextVar[list["Graph"] | None] = ContextVar("called", default=None)


class Graph:
    """A captured function ``[tensors] -> [tensors]``; its constants are inputs of the graph, and can be replaced.

    Attributes:
        module: the graph, of the constants and then the inputs.
        constants: the tensors that the function had in itself, what follows from them alone computed once.
    """

    def __init__(self, module: fx.GraphModule, constants: Sequence[Tensor]):
        self.module, self.constants = module, tuple(constants)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        called = _CALLED.get()
        if called is not None and self not in called:
            called.append(self)
        constants = next((tensors for graph, tensors in _BOUND.get() if graph is self), self.constants)
        return self.module(*constants, *inputs)

    @property
    def calls(self) -> int:
        """Operations of the graph."""
        return sum(node.op == "call_function" for node in self.module.graph.nodes)


def coarsest_type(module: fx.GraphModule) -> torch.dtype:
    """The floating type with the largest rounding that a graph computes in."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    values = [node.meta.get("val") for graph in graphs for node in graph.nodes]
    types = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    return max(types or {torch.float64}, key=lambda dtype: torch.finfo(dtype).eps)


def bound_graphs() -> tuple[tuple[Graph, tuple[Tensor, ...]], ...]:
    """The graphs whose constants are replaced at present, with the replacements."""
    return _BOUND.get()


@contextmanager
def recorded_graphs() -> Iterator[list[Graph]]:
    """A list to which every graph that is called within is added, once."""
    called: list[Graph] = []
    token = _CALLED.set(called)
    try:
        yield called
    finally:
        _CALLED.reset(token)


@contextmanager
def bound(graphs: Sequence[Graph], constants: Sequence[Tensor]) -> Iterator[None]:
    """Graphs called within use these tensors, of all of them in order, in the place of their constants."""
    rest = iter(constants)
    token = _BOUND.set(tuple((graph, tuple(next(rest) for _ in graph.constants)) for graph in graphs))
    try:
        yield
    finally:
        _BOUND.reset(token)


def capture(function: Callable[..., Sequence[Tensor]], *examples: Tensor, differentiable: bool = False) -> Graph:
    """The graph of a function at the shapes of some examples.

    It is simplified (:func:`simplified`): what depends on constants alone is computed once, and of a matrix product of
    which only some columns are used, only these are computed.

    Args:
        differentiable: whether the graph will be differentiated.

    Raises:
        ModelError: Python decides by values, numbers are drawn at random, or an operation cannot be captured.
    """

    def in_a_run(*inputs: Tensor) -> list[Tensor]:
        with NanFactors():
            return list(function(*inputs))

    with quiet(), recorded_graphs():
        try:
            module = traced(in_a_run)(*examples)
        except Exception as error:
            looks = "value out of a tracing tensor" in str(error)
            reason = "Python looks at values of its tensors" if looks else error
            raise ModelError(f"it cannot be captured as a graph ({reason})") from error
    tag = torch.Tag.nondeterministic_seeded
    random = [node for node in module.graph.nodes if tag in getattr(node.target, "tags", ())]
    if random:
        raise ModelError(f"it draws random numbers ({random[0].target})")
    module, constants = lift_constants(module)
    module = _functional(module, [*constants, *examples])
    with torch.no_grad():
        return Graph(*simplified(module, constants, differentiable=differentiable))


def _functional(module: fx.GraphModule, examples: Sequence[Tensor]) -> fx.GraphModule:
    """The same graph without operations that write into tensors, which could be constants that are computed once."""
    if not any(map(mutates, module.graph.nodes)):
        return module
    with torch.no_grad():
        return traced(torch.func.functionalize(module, remove="mutations"))(*examples)


def value_and_gradient(
    function: Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]], x: Tensor
) -> tuple[Graph, Graph]:
    """The graphs of a scalar function per row, and of its value and gradient.

    The function is captured and simplified before it is differentiated.

    Args:
        function: ``[..., D]`` to ``[...]``, and other tensors that it computes on the way.
        x: an example.

    Returns:
        The graph of the value and the others, and that of the value, the gradient ``[..., D]`` and the others.

    Raises:
        ModelError: as :func:`capture`; also if the function has no derivative, or stops it on the way, as
            ``detach()`` does.
    """

    def flat(x: Tensor) -> list[Tensor]:
        value, others = function(x)
        return [value, *others]

    with torch.enable_grad():
        value = capture(flat, x.detach(), differentiable=True)

    def differentiated(*inputs: Tensor) -> list[Tensor]:
        *constants, x = inputs
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            result, *others = value.module(*constants, x)
            (gradient,) = torch.autograd.grad(result.sum(), x)
        return [result.detach(), gradient, *(other.detach() for other in others)]

    with quiet():
        try:
            module = traced(differentiated)(*value.constants, x.detach())
        except Exception as error:
            raise ModelError(f"its gradient cannot be captured as a graph ({error})") from error
    module, constants = lift_constants(module, given=value.constants)
    with torch.no_grad():
        both = Graph(*simplified(module, constants))
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(point)[0].sum(), point)
    with torch.no_grad():
        if not torch.allclose(
            both(x.detach())[1], slope, rtol=1e-3, atol=1e-3 * float(slope.abs().nan_to_num().max()), equal_nan=True
        ):
            raise ModelError("its gradient is not that of its values")
    return value, both


def vjp_graph(graph: Graph, inputs: Sequence[Tensor], outputs: Sequence[Tensor], skip: int = 0) -> Graph:
    """The graph of cotangents of the inputs, but the first ones, given inputs and cotangents of the outputs.

    Only inputs and outputs with derivatives have cotangents.
    """
    results = [k for k, each in enumerate(outputs) if each.is_floating_point()]
    wanted = [k for k, each in enumerate(inputs) if each.is_floating_point() and k >= skip]

    def pulled(*given: Tensor) -> list[Tensor]:
        own, cotangents = given[: len(inputs)], given[len(inputs) :]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() if k in wanted else t for k, t in enumerate(own)]
            found = graph.module(*graph.constants, *leaves)
            pairs = [(found[k], c) for k, c in zip(results, cotangents, strict=True) if found[k].requires_grad]
            gradients = torch.autograd.grad(
                [f for f, _ in pairs], [leaves[k] for k in wanted], [c for _, c in pairs], allow_unused=True
            )
        return [torch.zeros_like(own[k]) if g is None else g for k, g in zip(wanted, gradients, strict=True)]

    return capture(pulled, *inputs, *(torch.ones_like(outputs[k]) for k in results))


def gradient_graph(graph: Graph, inputs: Sequence[Tensor], wanted: Sequence[int]) -> Graph:
    """The graph of the outputs, and of the gradients of the sum of the first one by the wanted inputs."""

    def differentiated(*given: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() if k in wanted else t for k, t in enumerate(given)]
            found = graph.module(*graph.constants, *leaves)
            gradients = torch.autograd.grad(found[0].sum(), [leaves[k] for k in wanted], allow_unused=True)
        zeros = [torch.zeros_like(given[k]) if g is None else g for k, g in zip(wanted, gradients, strict=True)]
        return [*(each.detach() for each in found), *zeros]

    return capture(differentiated, *inputs)


def traced(function: Callable[..., Sequence[Tensor]]) -> Callable[..., fx.GraphModule]:
    """``make_fx``, which takes a second to import, when it is first needed."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, {torch.ops.aten.copy.default: _written})


def _written(place: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten.copy``, what writing into a tensor is without the tensor, by operations that have derivatives."""
    return source.to(place.dtype).expand(place.shape)


class _Counted(TorchDispatchMode):
    """Counts operations while it is active, and the numbers that they make."""

    def __init__(self):
        super().__init__()
        self.calls, self.numbers = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else [result]
        self.numbers += sum(each.numel() for each in made if isinstance(each, Tensor))
        return result


def operations(function: Callable[..., Any], *examples: Tensor) -> int:
    """Operations of a function, without its derivatives: what to know before a long simulator is captured."""
    return calls_and_numbers(function, *examples)[0]


def calls_and_numbers(function: Callable[..., Any], *examples: Tensor) -> tuple[int, int]:
    """Operations of a function, and the numbers that they make."""
    with torch.no_grad(), _Counted() as counted:
        function(*examples)
    return counted.calls, counted.numbers


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collections, which would look through millions of a compiler's objects again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def reproducible() -> Iterator[None]:
    """Convolutions on a GPU add in one order and have all digits of their type, so that what computes them compares."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


@contextmanager
def quiet() -> Iterator[None]:
    """Without the compilers' notices to their own developers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        level = _LOGGER.level
        # what it logs, it raises as well, and captures are tried in several ways
        _LOGGER.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            _LOGGER.setLevel(level)


aten = torch.ops.aten

# Operations of a function that are looked at, at most: each takes a millisecond to capture.
_MOST = 3000
# Linear in their first argument, the others being numbers or fixed.
_LINEAR = {
    aten.view, aten._unsafe_view, aten.reshape, aten.expand, aten.unsqueeze, aten.squeeze, aten.permute, aten.transpose,
    aten.t, aten.slice, aten.select, aten.narrow, aten.split, aten.split_with_sizes, aten.unbind, aten.alias,
    aten.clone, aten.contiguous, aten.detach, aten._to_copy, aten.neg, aten.sum, aten.mean, aten.cumsum, aten.flip,
    aten.index_select, aten.index, aten.gather, aten.take_along_dim, aten.repeat, aten.roll, aten.diagonal, aten.tril,
    aten.triu, aten.as_strided, aten.constant_pad_nd, aten.diff, aten.movedim, aten.flatten, aten.avg_pool2d,
    aten.lift_fresh,
}  # fmt: skip
# Affine where all their tensors are.
_SUMS = {aten.add, aten.sub, aten.rsub, aten.cat, aten.stack}
# Affine where all their tensors of real numbers are: what is written, and what it is written into.
_WRITTEN = {
    aten.index_add, aten.scatter, aten.scatter_add, aten.masked_fill, aten.masked_scatter, aten.slice_scatter,
    aten.select_scatter, aten.index_put,
}  # fmt: skip
# Affine where one factor is and the others are fixed.
_PRODUCTS = {aten.mul, aten.mm, aten.bmm, aten.matmul, aten.mv, aten.dot, aten.convolution, aten.vdot}


def affine_graph(function: Callable[[Tensor, Tensor], Tensor], fixed: Tensor, free: Tensor) -> Graph | None:
    """The graph of ``function(fixed, free)`` if it is affine in its second argument, whatever the first one is.

    None unless every operation on the way shows it, or if one is not known, or there are thousands.

    Args:
        fixed, free: examples.
    """
    if operations(function, fixed, free) > _MOST:
        return None
    try:
        graph = capture(lambda a, b: [function(a, b)], fixed.detach(), free.detach(), differentiable=True)
    except ModelError:
        return None
    if not _result_is_affine(graph):
        return None
    # tensors of other classes than torch's own may hide what is done with them
    with torch.no_grad():
        a, b = fixed + 0.1, free + 1
        found, expected = graph(a, b)[0], function(a, b)
        same = torch.allclose(found.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0), rtol=1e-4)
    return graph if same else None


def _result_is_affine(graph: Graph) -> bool:
    nodes = list(graph.module.graph.nodes)
    places = [node for node in nodes if node.op == "placeholder"]
    # 0 for what does not depend on the input, 1 for what is affine in it, 2 for the rest
    degree: dict[fx.Node, int] = {place: int(place is places[-1]) for place in places}
    for node in nodes:
        if node.op == "output":
            return all(degree.get(value, 0) <= 1 for value in node.all_input_nodes)
        if node.op == "call_function":
            degree[node] = _degree(node, degree)
    return False


def _degree(node: fx.Node, degree: dict[fx.Node, int]) -> int:
    inputs = [degree[value] for value in node.all_input_nodes]
    highest = max(inputs, default=0)
    if highest == 0:
        return 0
    if highest == 2:
        return 2
    target: Any = getattr(node.target, "overloadpacket", node.target)
    if target in _SUMS or getattr(target, "__name__", "") == "getitem":
        return 1
    first = node.args[0]
    depends = [_of(value, degree) for value in node.args]
    if target in _LINEAR:
        return 1 if sum(depends) == depends[0] else 2
    if target in _PRODUCTS:
        return 1 if sum(depends) == 1 else 2
    if target is aten.div:
        return 1 if isinstance(first, fx.Node) and depends[0] == sum(depends) else 2
    if target in (aten.addmm, aten.baddbmm):
        # b + x W
        return 1 if depends[1] + depends[2] <= 1 else 2
    if target is aten.where:
        return 1 if depends[0] == 0 else 2
    if target in _WRITTEN:
        tensors = [value for value in node.all_input_nodes if value.meta["val"].is_floating_point()]
        return 1 if all(degree[value] <= 1 for value in tensors) else 2
    return 2


def _of(value: Any, degree: dict[fx.Node, int]) -> int:
    """The degree of an argument: 0 of numbers; of a list the sum."""
    if isinstance(value, fx.Node):
        return degree[value]
    if isinstance(value, list | tuple):
        return sum(_of(each, degree) for each in value)
    return 0
