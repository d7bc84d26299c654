"""Which inputs a captured graph is affine in, read off its operations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import ModelError
from .capture import Graph, capture, operations

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
    if target in (
        aten.index_add,
        aten.scatter,
        aten.scatter_add,
        aten.masked_fill,
        aten.masked_scatter,
        aten.slice_scatter,
        aten.select_scatter,
        aten.copy,
        aten.index_put,
    ):
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
