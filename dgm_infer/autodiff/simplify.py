"""Simplification of captured graphs: constants computed once, columns that nobody reads left out."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# Operations whose result depends on the shape of their input alone.
_OF_SHAPES = {
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
}
# Those that make a tensor of numbers.
_OF_NUMBERS = {
    aten.scalar_tensor.default,
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.eye.default,
    aten.eye.m,
    aten.lift_fresh_copy.default,
}
# Those that return their input.
_NOTHING = {aten.alias.default, aten.lift_fresh.default}
# Those without a meaning of their own where nothing is differentiated.
_DETACHED = {aten.detach.default}
# Largest constant, in numbers, that is computed from others and kept.
_LARGEST = 2**24
# Elementwise operations, through which a selection of columns is taken before rather than after.
_ONE = {
    aten.tanh.default,
    aten.sigmoid.default,
    aten.relu.default,
    aten.exp.default,
    aten.neg.default,
    aten.leaky_relu.default,
    aten.softplus.default,
    aten.gelu.default,
    aten.silu.default,
    aten.elu.default,
    aten.hardtanh.default,
    aten.clamp.default,
    aten.pow.Tensor_Scalar,
}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_TWO = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def lift_constants(module: fx.GraphModule, given: Sequence[Tensor] = ()) -> tuple[fx.GraphModule, list[Tensor]]:
    """The same graph with its tensors as first inputs, and these; the values of its first inputs may be given."""
    graph, constants = module.graph, list(given)
    known: dict[Any, fx.Node] = {}
    places = [node for node in graph.nodes if node.op == "placeholder"]
    before = places[len(given)] if len(places) > len(given) else next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op != "get_attr" or not isinstance(value := operator.attrgetter(node.target)(module), Tensor):
            continue
        key = value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
        if key not in known or value.numel() == 0:
            with graph.inserting_before(before):
                known[key] = _placeholder(graph, "constant", value.detach())
            constants.append(value.detach())
        node.replace_all_uses_with(known[key])
        graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(module, graph), constants


def simplified(
    module: fx.GraphModule, constants: Sequence[Tensor], *, differentiable: bool = False
) -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph of ``constants`` and other inputs with the same results from fewer operations.

    - What follows from constants alone is computed here, and laid out contiguously.
    - Zeros are not added, and nothing is multiplied by or divided by one.
    - What was joined and is taken apart again is not joined.
    - Operations whose results nobody reads, or that are there twice, are dropped.
    - ``(x W + b)[..., index]`` becomes ``x W[:, index] + b[index]``, also through elementwise operations.

    Args:
        differentiable: whether the graph will be differentiated, so that its detached tensors have to stay detached.
    """
    nothing = _NOTHING if differentiable else _NOTHING | _DETACHED
    values = dict(zip([n for n in module.graph.nodes if n.op == "placeholder"], constants, strict=False))
    graph = module.graph
    for _ in range(2):
        _fold(graph, values, nothing)
        _split_joined(graph)
        _drop_neutral(graph, values)
        _select_first(graph, values)
        _merge_equal(graph)
        graph.eliminate_dead_code()
    module = fx.GraphModule(module, graph)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    kept = []
    for node in places:
        if node in values:
            if node.users:
                kept.append(values[node])
            else:
                graph.erase_node(node)
    graph.lint()
    module.recompile()
    return module, kept


def _fold(graph: fx.Graph, values: dict[fx.Node, Tensor], nothing: set[Any]) -> None:
    """Compute what depends on constants alone."""
    computed: dict[fx.Node, Any] = dict(values)
    first = next(node for node in graph.nodes if node.op == "placeholder")
    for node in list(graph.nodes):
        if node.op != "call_function" or node in computed:
            continue
        if node.target in nothing and node.args[0] not in computed:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        if node.target in _OF_SHAPES:
            like = node.args[0]
            example = computed.get(like)
            if example is None:
                example = like.meta["val"]
                example = torch.empty(example.shape, dtype=example.dtype, device=example.device)
            computed[node] = node.target(example, *node.args[1:], **node.kwargs)
            continue
        inputs = node.all_input_nodes
        if node.target is aten._linalg_check_errors.default and inputs[0] in computed:
            # it has passed
            graph.erase_node(node)
            continue
        if node.target is operator.getitem and node.args[0] in computed:
            computed[node] = computed[node.args[0]][node.args[1]]
            continue
        if not all(i in computed for i in inputs) or not (inputs or node.target in _OF_NUMBERS):
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or mutates(node):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), computed.__getitem__)
        computed[node] = node.target(*args, **kwargs)
    for node, value in computed.items():
        if node in values or not isinstance(value, Tensor) or value.numel() > _LARGEST:
            continue
        users = [user for user in node.users if user not in computed]
        if not users:
            continue
        value = value.detach().contiguous()
        with graph.inserting_before(first):
            place = _placeholder(graph, "folded", value)
        node.replace_all_uses_with(place, delete_user_cb=lambda user: user not in computed)
        values[place] = value


def _drop_neutral(graph: fx.Graph, values: dict[fx.Node, Tensor]) -> None:
    """Leave out sums with zeros, products with ones, views of views, views and expansions to a shape that is there."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in {*_VIEWS, aten.expand.default}:
            source = node.args[0]
            if "val" in node.meta and "val" in source.meta and node.meta["val"].shape == source.meta["val"].shape:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            elif node.target in _VIEWS and source.target in _VIEWS:
                # the inner one may hide that the last dimension is as it was
                node.update_arg(0, source.args[0])
            continue
        if node.target not in _TWO or node.kwargs:
            continue
        a, b = node.args[:2]
        neutral = 0 if node.target in (aten.add.Tensor, aten.sub.Tensor) else 1
        pairs = [(a, b)] if node.target in (aten.sub.Tensor, aten.div.Tensor) else [(a, b), (b, a)]
        for keep, other in pairs:
            if not isinstance(keep, fx.Node) or "val" not in keep.meta or "val" not in node.meta:
                continue
            alike = (
                keep.meta["val"].shape == node.meta["val"].shape and keep.meta["val"].dtype == node.meta["val"].dtype
            )
            if alike and _is_all(values.get(other) if isinstance(other, fx.Node) else other, neutral):
                node.replace_all_uses_with(keep)
                graph.erase_node(node)
                break


def _split_joined(graph: fx.Graph) -> None:
    """Take the parts of what was joined from where they were."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.slice.Tensor or len(node.args) < 4:
            continue
        arguments: Any = node.args
        source, dim, start, end = arguments[:4]
        if not isinstance(source, fx.Node) or source.target is not aten.cat.default or len(node.args) > 4:
            continue
        rank = source.meta["val"].ndim
        joined: Any = source.args
        if dim % rank != (joined[1] if len(joined) > 1 else 0) % rank:
            continue
        size, at = source.meta["val"].shape[dim], 0
        start, end = (min(size, k + size if k < 0 else k) for k in (start, end))
        for part in joined[0]:
            width = part.meta["val"].shape[dim]
            if (at, at + width) == (start, end):
                node.replace_all_uses_with(part)
                graph.erase_node(node)
                break
            at += width


def _is_all(value: Any, number: float) -> bool:
    return bool((value == number).all()) if isinstance(value, Tensor) else value == number


def _select_first(graph: fx.Graph, values: dict[fx.Node, Tensor]) -> None:
    """Select columns of a product by selecting those of its matrix."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.index_select.default:
            continue
        source, dim, index = node.args
        shape = source.meta["val"].shape if "val" in source.meta else ()
        if index not in values or dim % max(1, len(shape)) != len(shape) - 1:
            continue
        replaced = _selected(graph, source, values[index], values, node)
        if replaced is not None:
            node.replace_all_uses_with(replaced)


def _selected(
    graph: fx.Graph, node: Any, index: Tensor, values: dict[fx.Node, Tensor], where: fx.Node
) -> fx.Node | None:
    """``node[..., index]`` from a product with fewer columns; None if there is no product behind it.

    Args:
        where: before which new operations are inserted.
    """
    if not isinstance(node, fx.Node) or node.op != "call_function" or len(node.users) > 1:
        return None
    width = node.meta["val"].shape[-1] if "val" in node.meta else None

    def constant(value: Tensor) -> fx.Node:
        with graph.inserting_before(next(iter(graph.nodes))):
            place = _placeholder(graph, "selected", value.contiguous())
        values[place] = place.meta["val"]
        return place

    def call(target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(where):
            new = graph.call_function(target, args)
        like = node.meta["val"]
        new.meta["val"] = torch.empty((*like.shape[:-1], len(index)), dtype=like.dtype, device="meta")
        return new

    def other(value: Any) -> Any:
        """An operand that does not stem from the product; None if it cannot be selected from."""
        if not isinstance(value, fx.Node):
            return value
        if value not in values:
            return None
        own = values[value]
        return value if own.ndim == 0 or own.shape[-1] == 1 else constant(own[..., index])

    if node.target in _VIEWS:
        arguments: Any = node.args
        source, shape = arguments[0], list(arguments[1])
        if not isinstance(source, fx.Node) or source.meta["val"].shape[-1] != width or width == 1:
            return None
        inner = _selected(graph, source, index, values, where)
        return None if inner is None else call(node.target, inner, [*shape[:-1], len(index)])
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
        if weight not in values or bias not in values:
            return None
        return call(node.target, other(bias), x, constant(values[weight][..., index]))
    if node.target is aten.mm.default:
        x, weight = node.args
        return None if weight not in values else call(node.target, x, constant(values[weight][..., index]))
    if node.target in _ONE:
        inner = _selected(graph, node.args[0], index, values, where)
        return None if inner is None else call(node.target, inner, *node.args[1:])
    if node.target in _TWO and not node.kwargs:
        a, b = node.args
        for k, (mine, its) in enumerate(((a, b), (b, a))):
            same = isinstance(mine, fx.Node) and "val" in mine.meta and mine.meta["val"].shape == node.meta["val"].shape
            rest = other(its) if same else None
            if rest is None:
                continue
            inner = _selected(graph, mine, index, values, where)
            if inner is not None:
                return call(node.target, *((inner, rest) if k == 0 else (rest, inner)))
    return None


def _merge_equal(graph: fx.Graph) -> None:
    """Compute what is computed twice once."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if mutates(node) or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        key = node.target, repr(node.args), repr(node.kwargs)
        if key in known:
            node.replace_all_uses_with(known[key])
            graph.erase_node(node)
        else:
            known[key] = node


def mutates(node: fx.Node) -> bool:
    """Whether a node is an operation that writes into its tensors."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _placeholder(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    place = graph.placeholder(name)
    # arguments need names of their own, as nodes have
    place.target = place.name
    place.meta["val"] = value
    return place
