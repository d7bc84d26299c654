"""Products with Jacobians: columns by forward mode, rows by reverse mode, each differentiable once more (math 3.9)."""

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from ..settings import Settings
from .layers import FixedConvolutions, PlainNormalisations


@dataclass(frozen=True)
class ProductSettings(Settings):
    """How products with Jacobians are computed: the same results up to rounding."""

    fixed_convolutions: bool = True
    """Whether convolutions are differentiated as the linear functions that they are; False leaves them to torch."""
    reverse: int = 2**14
    """Numbers in the tangents of all rows up to which differentiable products are made by reverse mode twice: there
    the time goes into calls, beyond into a network's arithmetic, of which forward mode then does less."""
    at_once: int = 2**23
    """Numbers in one tensor of the rows that are computed at once: 64 MiB in float64."""


SETTINGS = ProductSettings()


def push_forward(function: Callable[[Tensor], Tensor], u: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Value and products ``J t`` of a batched function, differentiable where gradients are recorded.

    Args:
        function: ``[..., D] -> [..., N]``, row by row.
        u: ``[..., D]``.
        tangents: ``[K, D]``, the same for every row.

    Returns:
        value ``[..., N]`` and products ``J t``, ``[K, ..., N]``, from one pass.
    """
    again = torch.is_grad_enabled()
    if again:
        function = _with_second_derivatives(function)
    large = again and len(tangents) * u.numel() > SETTINGS.reverse
    if _is_traced(u) or (large and _follows_forward(function, u)):
        return forward_mode(function, u, tangents)
    # J t is the derivative of J^T w with respect to w, in which it is linear. Against forward mode this spares the zero
    # tangents of constants, which torch works out in Python.
    with torch.enable_grad():
        x = u if u.requires_grad else u.detach().requires_grad_()
        value = function(x)
        w = torch.zeros_like(value, requires_grad=True)
        products = _pull(_pull(value, x, w, again=True), w, _of_all_rows(tangents, u), again=again)
    return (value, products) if again else (value.detach(), products)


# Operations whose products in forward mode have wrong derivatives (torch 2.14.1), by how their nodes' names begin.
_WRONG_BEYOND = ("LinalgSolveEx", "LinalgDet", "LinalgSlogdet", "LinalgHouseholderProduct")


def _with_second_derivatives(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def plain(u: Tensor) -> Tensor:
        with PlainNormalisations():
            return function(u)

    return plain


def _follows_forward(function: Callable[[Tensor], Tensor], u: Tensor) -> bool:
    """Whether products in forward mode have right derivatives, by the operations of a function."""
    with torch.enable_grad():
        try:
            value = function(u[:1].detach().requires_grad_())
        except RuntimeError:
            # rows may have data of their own
            value = function(u.detach().requires_grad_())
    return not any(node.name().startswith(_WRONG_BEYOND) for node in autograd_nodes(value))


def forward_mode(function: Callable[[Tensor], Tensor], u: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`push_forward` returns, by forward mode whatever the size."""
    load_forward_mode()

    def along(t: Tensor) -> tuple[Tensor, Tensor]:
        value, product = jvp(function, (u,), (t,))[:2]
        return value, product

    return vmap(along, out_dims=cast(Any, (None, 0)))(_of_all_rows(tangents, u))


def _of_all_rows(tangents: Tensor, u: Tensor) -> Tensor:
    """``[K, D] -> [K, ..., D]``."""
    # same memory layout as u: otherwise torch copies
    return tangents.reshape(-1, *[1] * (u.ndim - 1), u.shape[-1]).expand(-1, *u.shape).contiguous()


def pull_back(function: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """Value ``[..., N]`` and rows of J, ``[N, ..., D]``, otherwise as :func:`push_forward`.

    For a large network the rows are computed a few at a time, and again for their gradient: memory for a few rows.
    """
    if _is_traced(u):
        value, pull = vjp(function, u)[:2]
        return value, vmap(lambda e: pull(e)[0])(_unit_vectors(value))
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        x = u if u.requires_grad else u.detach().requires_grad_()
        value = function(x)
        (size, convolves), n = _seen(value), value.shape[-1]
        at_once = max(1, SETTINGS.at_once // max(size, 1))
        fixed = convolves and SETTINGS.fixed_convolutions
        if n > at_once:
            rows = cast(Tensor, _Rows.apply(x, function, fixed, at_once))
        elif fixed and again:
            rows = _rows(x, function, fixed, n)
        else:
            rows = _pull(value, x, _unit_vectors(value), again=again)
    return (value, rows) if again else (value.detach(), rows.detach())


def _seen(value: Tensor) -> tuple[int, bool]:
    """The size of the largest tensor between a function's input and its value, and whether there are convolutions on
    the way, by its graph."""
    size, convolves = 0, False
    for node in autograd_nodes(value):
        size = max(size, *(math.prod(output.shape) for output in node._input_metadata), 0)
        convolves |= node.name().startswith("Convolution")
    return size, convolves


def autograd_nodes(value: Tensor) -> Iterator[Any]:
    """The nodes between a value and what it is differentiated by."""
    seen, nodes = set(), [value.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        yield node


def _mode(fixed: bool) -> AbstractContextManager[Any]:
    return FixedConvolutions() if fixed else nullcontext()


def _rows(x: Tensor, function: Callable[[Tensor], Tensor], fixed: bool, at_once: int) -> Tensor:
    """``[N, ..., D]``, differentiable where gradients are recorded."""
    with _mode(fixed):
        value, pull = vjp(function, x)[:2]
    parts = _unit_vectors(value.detach()).split(at_once)
    return torch.cat([vmap(lambda e: pull(e)[0])(part) for part in parts])


class _Rows(torch.autograd.Function):
    """Rows of J in parts, each computed again for its gradient; once differentiable."""

    @staticmethod
    def forward(ctx, x, function, fixed, at_once):
        ctx.save_for_backward(x)
        ctx.settings = function, fixed, at_once
        return _rows(x.detach(), function, fixed, at_once)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[override]
        (weights,), (x,), (function, fixed, at_once) = grad_outputs, ctx.saved_tensors, ctx.settings
        gradient = torch.zeros_like(x)
        for part in torch.arange(len(weights), device=x.device).split(at_once):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                with _mode(fixed):
                    value, pull = vjp(function, x)[:2]
                rows = vmap(lambda e, pull=pull: pull(e)[0])(_unit_vectors(value.detach())[part])
                gradient += torch.autograd.grad((rows * weights[part]).sum(), x)[0]
        return gradient, None, None, None


def _unit_vectors(value: Tensor) -> Tensor:
    """``[N, ..., N]`` for ``value [..., N]``."""
    basis = torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
    return basis.reshape(-1, *[1] * (value.ndim - 1), value.shape[-1]).expand(-1, *value.shape)


def _pull(value: Tensor, x: Tensor, vectors: Tensor, *, again: bool) -> Tensor:
    """``J^T v`` for one v of the value's shape or several in a row, by plain autograd, which asks less of a model."""
    several = vectors.ndim > value.ndim
    if not value.requires_grad:
        # a function without a derivative has no graph
        return x.new_zeros(vectors.shape[:several] + x.shape)
    # looking for anomalies reads every number, which batched derivatives cannot do
    with torch.autograd.set_detect_anomaly(False) if several and torch.is_anomaly_enabled() else nullcontext():
        (products,) = torch.autograd.grad(
            value, x, vectors, is_grads_batched=several, create_graph=again, materialize_grads=True
        )
    return products


def _is_traced(u: Tensor) -> bool:
    # a traced tensor may have a type of its own
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return type(u) is not Tensor or get_proxy_mode() is not None


@functools.cache
def load_forward_mode() -> None:
    # torch scripts its forward-mode rules on first use, with a deprecation warning that does not concern the user
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script", category=FutureWarning)
        warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))
