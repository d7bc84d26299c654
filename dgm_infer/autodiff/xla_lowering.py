"""Graphs of torch operations as functions of JAX arrays."""

import operator
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..errors import ModelError
from .simplify import mutates
from .xla_algebra import algebra
from .xla_layers import layers
from .xla_operations import Known, arithmetic, array_type, elementwise_names
from .xla_reductions import reductions
from .xla_structures import structures

# Arguments that the type of a result tells already, or its memory.
_OF_TYPES = {
    "dtype",
    "device",
    "layout",
    "pin_memory",
    "memory_format",
    "non_blocking",
    "implicit",
    "output_dtype",
    "requires_grad",
    "generator",
}
# Checks, of which there is no result; what fails them gives NaN.
_CHECKS = {"_linalg_check_errors", "_assert_tensor_metadata"}
# Decompositions of decompositions: simple operations are reached long before.
_DEEPEST = 8


def known_operation(target: Any) -> Known | None:
    """The function of JAX arrays that an operation of torch is; None if it is not known.

    Overloads share one function: they differ by types of arguments, which JAX tells apart itself. So do operations
    and those that return copies of what they return views of.
    """
    packet = getattr(target, "overloadpacket", None)
    if packet is None or target.namespace not in ("aten", "prims"):
        return None
    name, known = packet.__name__, known_operations()
    if target.namespace == "prims":
        # the same names of others may have other arguments
        own = known.get(f"prims.{name}")
        return known.get(name) if own is None and name in elementwise_names() else own
    return known.get(name) or known.get(name.removesuffix("_copy"))


@cache
def known_operations() -> dict[str, Known]:
    """All that are known, by name."""
    own = {**structures(), **algebra(), **layers(), "grid_sampler_2d_backward": _grid_backward}
    return {**arithmetic(), **reductions(), **{name: Known(function, "own") for name, function in own.items()}}


def _grid_backward(g: Any, x: Any, grid: Any, kind: int, padding: int, align: bool, wanted: Sequence[bool]) -> Any:
    import jax

    target = torch.ops.aten.grid_sampler_2d.default
    _, pulled = jax.vjp(lambda x, grid: decomposed(target, [x, grid, kind, padding, align], {}), x, grid)
    return [each if own else None for each, own in zip(pulled(g), wanted, strict=True)]


def lowered(module: fx.GraphModule, depth: int = 0) -> Callable[..., Any]:
    """The graph as a function of JAX arrays, which returns what the graph does.

    Raises:
        ModelError: when it is traced, if an operation is not known.
    """
    module = _functional(module)

    def run(*inputs: Any) -> Any:
        import jax

        values: dict[fx.Node, Any] = {}
        given = iter(inputs)

        def of(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return values[argument]
            return [of(each) for each in argument] if isinstance(argument, (tuple, list)) else argument

        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(module)
                values[node] = jax.numpy.asarray(_array(value)) if isinstance(value, Tensor) else value
            elif node.op == "output":
                return of(node.args[0])
            elif node.target is operator.getitem:
                values[node] = values[node.args[0]][node.args[1]]
            elif _name(node.target) == "while_loop":
                values[node] = _loop(*(of(argument) for argument in node.args))
            elif _name(node.target) not in _CHECKS and not _is_left_behind(node):
                values[node] = _operation(node, of, depth)
        raise AssertionError("a graph without a result")

    return run


def _array(value: Tensor) -> Any:
    array_type(value.dtype)
    # NumPy has no bfloat16
    value = value.detach().cpu()
    return value.float().numpy() if value.dtype is torch.bfloat16 else value.numpy()


def _name(target: Any) -> str:
    return getattr(getattr(target, "overloadpacket", target), "__name__", str(target))


def _loop(more: fx.GraphModule, body: fx.GraphModule, carried: Sequence[Any], others: Sequence[Any] = ()) -> Any:
    import jax

    goes_on, turn = lowered(more), lowered(body)

    def test(state: Any) -> Any:
        (found,) = _listed(goes_on(*state, *others))
        return found.reshape(())

    return jax.lax.while_loop(test, lambda state: tuple(turn(*state, *others)), tuple(carried))


def _listed(found: Any) -> Sequence[Any]:
    return found if isinstance(found, (tuple, list)) else [found]


def _operation(node: fx.Node, of: Callable[[Any], Any], depth: int) -> Any:
    known, result = known_operation(node.target), node.meta.get("val")
    args = [of(each) for each in node.args]
    if known is None:
        kwargs = {name: of(each) for name, each in node.kwargs.items()}
        return _typed(decomposed(node.target, args, kwargs, depth + 1), result)
    kwargs = {name: of(each) for name, each in node.kwargs.items() if name not in _OF_TYPES}
    if any(isinstance(each, Tensor) for each in _listed(result)):
        args = _promoted(known, args, result)
    try:
        return _typed(known.function(*args, **kwargs), result)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"XLA cannot be told {node.target} ({error})") from error


def _promoted(known: Known, args: list[Any], result: Any) -> list[Any]:
    """Arguments in the type that torch computes in."""
    import jax.numpy as jnp

    if known.types == "own":
        return args
    if known.types == "compared":
        dtype = _common(args)
    else:
        dtype = next(each for each in _listed(result) if isinstance(each, Tensor)).dtype
    # numbers of 16 bits are computed with 32
    dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    kind = array_type(dtype)
    return [each.astype(kind) if isinstance(each, jnp.ndarray) else each for each in args]


def _common(args: Sequence[Any]) -> torch.dtype:
    """The type in which torch compares."""
    examples: list[Any] = [
        torch.empty((0,) * each.ndim, dtype=_torch_type(each)) if hasattr(each, "ndim") else each for each in args[:2]
    ]
    return torch.result_type(*examples) if len(examples) == 2 else examples[0].dtype


def _torch_type(array: Any) -> torch.dtype:
    return getattr(torch, array.dtype.name)


def _typed(found: Any, result: Any) -> Any:
    """A result in the type that torch gives it."""
    if isinstance(found, (tuple, list)):
        if not isinstance(result, (tuple, list)):
            return found
        return [_typed(each, own) for each, own in zip(found, result, strict=True)]
    if not isinstance(result, Tensor) or found is None:
        return found
    if tuple(found.shape) != tuple(result.shape):
        raise ModelError(f"a result has shape {tuple(found.shape)}, not {tuple(result.shape)}")
    return found.astype(array_type(result.dtype))


def decomposed(target: Any, args: Sequence[Any], kwargs: dict[str, Any], depth: int = 1) -> Any:
    """The result of an operation that is not known, by simpler ones.

    Raises:
        ModelError: it has no decomposition.
    """
    if target not in _decompositions() or depth > _DEEPEST:
        raise ModelError(f"XLA cannot be told {target}")
    arrays: list[Any] = []

    def collected(argument: Any) -> Any:
        """The argument with places for the arrays."""
        if isinstance(argument, (tuple, list)):
            return tuple(collected(each) for each in argument)
        if not hasattr(argument, "ndim"):
            return argument
        arrays.append(argument)
        return _Place(len(arrays) - 1)

    given = collected(args), tuple((name, collected(each)) for name, each in kwargs.items())
    kinds = tuple((each.shape, _torch_type(each)) for each in arrays)
    try:
        # 1, 1.0 and True are the same key
        found = lowered(_simpler(target, given, kinds, repr(given)), depth)(*arrays)
    except Exception as error:
        raise ModelError(f"XLA cannot be told {target}") from error
    several = len(target._schema.returns) > 1 or str(target._schema.returns[0].type).endswith("[]")
    return list(found) if several else found[0]


class _Place(NamedTuple):
    """Where an array is among those of an operation."""

    k: int


@lru_cache(256)
def _simpler(target: Any, given: Any, kinds: Any, _: str) -> fx.GraphModule:
    """The graph of an operation of tensors of some shapes and types, by simpler ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    table = _decompositions()

    def alone(*tensors: Tensor) -> list[Any]:
        def filled(argument: Any) -> Any:
            if isinstance(argument, _Place):
                return tensors[argument.k]
            return [filled(each) for each in argument] if isinstance(argument, tuple) else argument

        return list(_listed(table[target](*filled(given[0]), **{name: filled(each) for name, each in given[1]})))

    with FakeTensorMode(), torch.no_grad():
        fake = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
        return make_fx(alone, decomposition_table=table)(*fake)


# Operations of higher order write nothing either.
_NOTHING = SimpleNamespace(is_mutable=False)


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's, of operations that are not known and write nothing."""
    from torch._decomp import decomposition_table

    return {
        target: own
        for target, own in decomposition_table.items()
        if known_operation(target) is None and not getattr(target, "_schema", _NOTHING).is_mutable
    }


def _functional(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph without operations that write into tensors."""
    if not any(map(mutates, module.graph.nodes)):
        return module
    from torch.fx.experimental.proxy_tensor import make_fx

    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    own = torch.func.functionalize(module, remove="mutations")
    try:
        with torch.no_grad():
            return make_fx(own, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    except Exception as error:
        raise ModelError(f"XLA cannot be told of operations in place ({error})") from error


def _is_left_behind(node: fx.Node) -> bool:
    """Whether it is what a functional graph ends with: the values of inputs that it wrote into."""
    return node.target is torch.ops.aten.copy_.default and not node.users
