"""Derivatives of a function in both modes beside finite differences, and what to change where they fail or differ."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from ..autodiff.jacobian_products import autograd_nodes, forward_mode, push_forward
from ..differences import Differences, differences, relative_error
from ..errors import ModelError, cause
from ..settings import Settings


@dataclass(frozen=True)
class AgreementSettings(Settings):
    """Where derivatives count as different."""

    modes: float = 0.4
    """Relative difference up to which derivatives in both modes agree, as a power of rounding: 5e-7, or 2e-3 in 32
    bits."""
    differences: float = 1e-3
    """The same of derivatives and finite differences, beyond the errors of these."""
    around: float = 1e-2
    """Distance of points around one at which derivatives differ: beyond steps of differences, within a branch."""
    looks: int = 8
    """Points around it."""
    agreeing: float = 0.75
    """Share of these at which the same output must differ: by rounding it does at less than a tenth."""
    still: float = 1e-6
    """Change over prior draws, as a share of the largest value, below which an output is constant: that of 32 bits."""


SETTINGS = AgreementSettings()
# Operations of torch with a wrong derivative, by the beginning of the name of their node, and what to use instead.
_FAULTY = {
    "CholeskyInverseBackward": "the forward-mode derivative of torch.cholesky_inverse(L) is wrong (torch 2.14.1): use "
    "torch.linalg.inv(L @ L.mT)",
    "ScatterReduceBackward": "the forward-mode derivative of scatter_reduce(..., 'prod') is zero (torch 2.14.1): use "
    "sums of logarithms, or prod() of parts",
}


def check_agreement(
    function: Callable[[Tensor], Tensor], u: Tensor, name: str, *, needs_both: bool = False
) -> Differences:
    """Raise :class:`ModelError` unless reverse mode, forward mode and finite differences of a function agree.

    It costs seven evaluations at every point, and as many around one at which they do not.

    Args:
        function: ``[..., D] -> [..., N]``.
        u: points ``[n, D]``.
        name: what it is a function of, for messages.
        needs_both: whether a mode that is not defined is an error; else it is not compared.

    Returns:
        the finite differences.
    """
    compared = _compare(function, u, name, needs_both)
    most = SETTINGS.differences
    suspect, modes_agree = compared.apart > most, compared.modes <= torch.finfo(u.dtype).eps ** SETTINGS.modes
    # where reverse mode is right, forward mode is wrong
    if suspect.any() and (modes_agree or suspect[:, -1].any()):
        # a kink beside one point, or rounding, has no match around it; what is wrong has
        worst, size = u[suspect.any(-1)][:1], (SETTINGS.looks, u.shape[-1])
        rng = torch.Generator(u.device).manual_seed(6)
        near = worst + SETTINGS.around * torch.randn(size, generator=rng, dtype=u.dtype, device=u.device)
        again = (_compare(function, near, name, needs_both).apart > most)[:, suspect.any(0)]
        if (again.double().mean(0) >= SETTINGS.agreeing).any():
            if not compared.apart.isfinite().all():
                raise ModelError(
                    f"the derivatives of {name} are not finite where its outputs are: torch.where differentiates the "
                    "branch that it does not take, too, as of a root or logarithm below 0: clamp its argument first"
                )
            raise ModelError(
                f"the derivatives of {name} do not match its outputs (finite differences differ by "
                f"{compared.apart.max().item():.2g} of their size): look for detach(), no_grad(), rounding, operations "
                "of torch without a derivative, or a backward of another function"
            )
    if not modes_agree:
        if not compared.modes < torch.finfo(u.dtype).max:
            raise ModelError(
                f"the derivatives of {name} are not finite at some of its inputs: a slope without bound, as of sqrt(x) "
                "at 0 after relu: add a small number, sqrt(x + 1e-6)"
            )
        raise ModelError(
            f"reverse- and forward-mode derivatives of {name} differ, by {compared.modes:.2g} of their size: "
            + (faulty_operation(function, u) or "correct the backward or the jvp of its autograd.Function")
        )
    return compared.found


class _Compared(NamedTuple):
    """Derivatives at n points along a direction each."""

    found: Differences
    apart: Tensor
    """By how much they differ from differences, as a share of the size of these, by output and for a combination of
    all, ``[n, N + 1]``, or of the combination alone; 0 where differences tell nothing."""
    modes: float
    """By how much reverse and forward mode differ, as a share of their size, in the median; 0 if one is not defined."""


def _compare(function: Callable[[Tensor], Tensor], u: Tensor, name: str, needs_both: bool) -> _Compared:
    rng = torch.Generator(u.device).manual_seed(3)
    # each point has a direction of its own: one alone may hide what is wrong with others
    v = torch.randn(u.shape, generator=rng, dtype=u.dtype, device=u.device)
    with torch.no_grad():
        w = torch.randn(function(u[:1]).shape[-1], generator=rng, dtype=u.dtype, device=u.device)
    found = differences(function, u, v, w)
    with _differentiating(name, "reverse"):
        pulled = vjp(function, u)[1](w.expand_as(found.products))[0] if needs_both else _reverse(function, u, w)
    reverse = torch.linalg.vecdot(pulled, v)
    apart = relative_error(found.combined, reverse, found.size, found.combined_error).unsqueeze(-1)
    try:
        with _differentiating(name, "forward"):
            # one number per point moves it along its direction
            start, one = u.new_zeros(len(u), 1), u.new_ones(1, 1)
            forward = forward_mode(lambda t: function(u + t * v), start, one)[1][0]
    except ModelError:
        if needs_both:
            raise
        return _Compared(found, apart, 0.0)
    combined = forward @ w
    # where reverse mode overflows, nothing is known
    modes = relative_error(reverse, combined, found.size.maximum(reverse.abs()), found.combined_error)
    modes = torch.where(reverse.isfinite(), modes, torch.nan).nanmedian().nan_to_num(0.0).item()
    # one of thousands of outputs hardly shows in their combination
    each = relative_error(found.products, forward, found.products.abs(), found.products_error)
    return _Compared(found, torch.cat([each, apart], -1), modes)


def _reverse(function: Callable[[Tensor], Tensor], u: Tensor, w: Tensor) -> Tensor:
    """``J^T w`` by plain autograd, which asks less of a model than torch.func."""
    with torch.enable_grad():
        x = u.detach().requires_grad_()
        value = function(x)
        if not value.requires_grad:
            return torch.zeros_like(u)
        return torch.autograd.grad((value * w).sum(), x, materialize_grads=True)[0]


def check_second(function: Callable[[Tensor], Tensor], u: Tensor, name: str, *, by_columns: bool = False) -> None:
    """Raise :class:`ModelError` unless the derivatives of a function can be differentiated, and rightly.

    Products ``w . J v`` are differentiated, and compared with their differences.

    Args:
        function: ``[n, D] -> [n, N]``.
        u: points ``[n, D]``; a fault is one of most of them, as kinks are not.
        by_columns: whether sampling takes J by products ``J v``, as of outputs with local inputs, not by rows.
    """
    rng = torch.Generator(u.device).manual_seed(8)
    v, along = torch.randn(2, *u.shape, generator=rng, dtype=u.dtype, device=u.device)
    with torch.no_grad():
        w = torch.randn(function(u[:1]).shape[-1], generator=rng, dtype=u.dtype, device=u.device)

    def product(x: Tensor) -> Tensor:
        if by_columns:
            return push_forward(function, x, v[:1])[1][0] @ w
        x = x if x.requires_grad else x.detach().requires_grad_()
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            value = function(x)
            if not value.requires_grad:
                return torch.zeros_like(x[..., 0])
            pulled = torch.autograd.grad((value @ w).sum(), x, create_graph=again, materialize_grads=True)[0]
        return torch.linalg.vecdot(pulled, v[:1])

    try:
        with torch.enable_grad():
            x = u.detach().requires_grad_()
            first = product(x)
            second = torch.zeros_like(u)
            if first.requires_grad:
                (second,) = torch.autograd.grad(first.sum(), x, materialize_grads=True)
    except RuntimeError as error:
        remedy = derivative_remedy(str(error)) or DIFFERENTIABLE
        raise ModelError(
            f"{name} has no second derivative, which the gradient of the density takes ({cause(error)}): {remedy}"
        ) from error
    with torch.no_grad():
        found = differences(lambda x: product(x).unsqueeze(-1), u, along)
    apart = relative_error(found.combined, torch.linalg.vecdot(second, along), found.size, found.combined_error)
    if (apart > SETTINGS.differences).double().mean() >= SETTINGS.agreeing:
        raise ModelError(
            f"the second derivatives of {name} do not match its first ones (differences differ by "
            f"{apart.median().item():.2g} of their size): look for a backward that is not the derivative of its own "
            "autograd.Function, detach() inside one, or an operation of torch with a wrong double backward"
        )


def faulty_operation(function: Callable[[Tensor], Tensor], u: Tensor) -> str | None:
    """What to use instead of an operation of torch with a wrong derivative; None if a function has none."""
    with torch.enable_grad():
        nodes = autograd_nodes(function(u.detach().requires_grad_()))
    found = (remedy for node in nodes for name, remedy in _FAULTY.items() if node.name().startswith(name))
    return next(found, None)


@contextmanager
def _differentiating(name: str, mode: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"{name} has no {mode}-mode derivative ({cause(error)}): {derivative_remedy(str(error)) or DIFFERENTIABLE}"
        ) from error


def derivative_remedy(error: str) -> str | None:
    """What to change where torch refuses to differentiate a model, by its message; None if that does not say."""
    if "in-place" in error.lower() or "inplace" in error.lower():
        return "replace operations in place (x += y, x[...] = y, copy_) by ones that return new tensors"
    if "out=" in error:
        return "replace operations that write into a given tensor (torch.mul(a, b, out=c)) by ones that return new ones"
    if "use_reentrant" in error:
        return "call checkpoint(..., use_reentrant=False)"
    if "once_differentiable" in error:
        return "an adjoint or a function marked once_differentiable has a first derivative only: use plain operations"
    if "torch.compile" in error:
        return "torch.compile keeps one derivative: pass the network itself, which is net._orig_mod of a compiled one"
    if "setup_context" in error:
        return "its autograd.Function needs setup_context, with forward(x) in place of forward(ctx, x), and a jvp"
    if "generate_vmap_rule" in error:
        return "its autograd.Function needs generate_vmap_rule = True, or a vmap of its own"
    if missing := re.search(r"derivative for aten::(\w+?)(_backward)? is not implemented", error):
        name = missing[1]
        instead = {"hardsigmoid": "relu6(x + 3) / 6, a sigmoid, or from_module(net, ..., smooth=10)"}
        return f"torch itself has none of its {name}: use {instead.get(name, 'another operation')}"
    return None


DIFFERENTIABLE = (
    "compute with torch's differentiable functions; an autograd.Function needs setup_context and its own jvp"
)


def stepped(found: Differences) -> Tensor:
    """Which observed values change in steps, with derivatives that are 0, ``[N]``."""
    values = found.values
    spread = values.amax(0) - values.amin(0)
    # less than rounding of the others: a unit of a network that is saturated
    return (found.products == 0).all(0) & (spread > SETTINGS.still * values.abs().max())


def constant_outputs(found: Differences, name: str, *, has_noise: bool = False) -> str | None:
    """Which observed values are constant, or change in steps; None if none does.

    Args:
        found: differences of the values at several prior draws.
        name: of the model.
        has_noise: whether they are measured with noise, with which constants say nothing and do no harm.
    """
    flat, values = (found.products == 0).all(0), found.values
    spread, steps = values.amax(0) - values.amin(0), stepped(found)

    def which(those: Tensor) -> str:
        first = int(those.nonzero()[0])
        return f"{int(those.sum())} of {len(flat)} observed values of {name} (the first is number {first})"

    if steps.any():
        return (
            f"{which(steps)} change only in steps, with derivatives that are exactly 0: leave out rounding (round, "
            "floor, comparisons, argmax), or pass tolerance= and a kernel that needs no derivative"
        )
    if not flat.any() or has_noise:
        return None
    change = "are the same at every prior draw"
    if spread[flat].max() > 0:
        change = f"change by {spread[flat].max().item():.1g} at most over the prior (a network that is saturated?)"
    return f"{which(flat)} {change}: leave these out, observe=pixels(mask), or add noise, WithNoise(model, sd=...)"
