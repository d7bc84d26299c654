"""Derivatives of a model at prior draws: whether they match its outputs, and their rank."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from ..autodiff.jacobian_products import forward_mode
from ..differences import Differences, differences, disagreement
from ..errors import ModelError, ObservationError, cause
from .observed import ObservedModel

__all__ = [
    "Spectrum",
    "check_agreement",
    "check_atoms",
    "check_derivatives",
    "check_flatness",
    "check_once",
    "faulty_operation",
    "spectrum",
    "tame_draws",
]

# Singular values below this, relative to the largest, count as zero: normalisation adds a small number to a norm, which
# leaves the direction it removes with a derivative of about that size.
RANK_TOLERANCE = 1e-6
# Relative difference up to which derivatives agree: between the modes, and with finite differences.
MODES_TOLERANCE = 1e-6
DIFFERENCES_TOLERANCE = 1e-3
# The same in 32 bits, for both.
COARSE_TOLERANCE = 5e-2
# Operations of torch with a wrong derivative, by the beginning of the name of their node, and what to use instead.
_FAULTY = {
    "CholeskyInverseBackward": "the forward-mode derivative of torch.cholesky_inverse(L) is wrong (torch 2.14.1): use "
    "torch.linalg.inv(L @ L.mT)",
}
# Maximum entries of derivatives held at once.
ENTRIES = 2**25


def tame_draws(
    reduced: ObservedModel,
    draws: int,
    data: Tensor | None,
    like: Tensor,
    function: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Up to ``draws`` prior draws without overflow, ``[n, D]``.

    Args:
        function: what must not overflow, ``[n, D] -> [n, N]``; None for the constraint of the data.
    """
    rng = torch.Generator(like.device).manual_seed(2)

    def size(u: Tensor) -> Tensor:
        with torch.no_grad():
            return (function or _constraint(reduced, u, data))(u + 1e-3).abs().amax(-1).nan_to_num(torch.inf, torch.inf)

    u = reduced.sample_inputs((draws,), rng, like)
    if size(u).isfinite().all():
        return u
    # a simulator may overflow at most prior draws: take the tamest of many
    u = reduced.sample_inputs((64 * draws,), rng, like)
    sizes = torch.cat([size(part) for part in u.split(draws)])
    order = sizes.argsort()[:draws]
    return u[order[sizes[order].isfinite()]]


def _constraint(reduced: ObservedModel, u: Tensor, data: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The constraint of the data, or of the model's own outputs at ``u``: ``[..., D] -> [..., Dy]``."""
    with torch.no_grad():
        values = reduced.outputs(u) if data is None else data
    return lambda v: reduced.residual(v, values)


def check_derivatives(reduced: ObservedModel, u: Tensor, data: Tensor | None) -> None:
    """Raise :class:`ModelError` unless ``w.(J v)`` exists in both modes, and both agree with differences."""
    with torch.no_grad():
        values = reduced.outputs(u[:1])[0] if data is None else data
    check_agreement(lambda v: reduced.residual(v, values), u, type(reduced.model).__name__, needs_both=True)


def check_agreement(
    function: Callable[[Tensor], Tensor], u: Tensor, name: str, *, needs_both: bool = False
) -> Differences:
    """Raise :class:`ModelError` unless reverse mode, forward mode and finite differences of a function agree.

    It costs seven evaluations at every point.

    Args:
        function: ``[..., D] -> [..., N]``.
        u: points ``[n, D]``.
        name: what it is a function of, for messages.
        needs_both: whether a mode that is not defined is an error; else it is not compared.

    Returns:
        the finite differences.
    """
    rng = torch.Generator(u.device).manual_seed(3)
    # each point has a direction of its own: one alone may hide what is wrong with others
    v = torch.randn(u.shape, generator=rng, dtype=u.dtype, device=u.device)
    with torch.no_grad():
        w = torch.randn(function(u[:1]).shape[-1], generator=rng, dtype=u.dtype, device=u.device)
    found = differences(function, u, v, w)
    with _differentiating(name, "reverse"):
        pulled = vjp(function, u)[1](w.expand_as(found.products))[0] if needs_both else _reverse(function, u, w)
    reverse = torch.linalg.vecdot(pulled, v)
    forward = None
    try:
        with _differentiating(name, "forward"):
            # a number a point moves it along its direction
            start, one = u.new_zeros(len(u), 1), u.new_ones(1, 1)
            forward = forward_mode(lambda t: function(u + t * v), start, one)[1][0] @ w
    except ModelError:
        if needs_both:
            raise
    exact = u.dtype == torch.float64
    apart = disagreement(found, reverse)
    if not apart <= (DIFFERENCES_TOLERANCE if exact else COARSE_TOLERANCE):
        raise ModelError(
            f"the derivatives of {name} do not match its outputs (finite differences differ by {apart:.2g} of "
            "their size): look for detach(), no_grad(), rounding, or a backward of another function"
        )
    if forward is None:
        return found
    size = found.size.maximum(reverse.abs()).clamp_min(1e-12)
    apart = ((reverse - forward).abs() / size).nanmedian().item()
    if not apart <= (MODES_TOLERANCE if exact else COARSE_TOLERANCE):
        raise ModelError(
            f"reverse- and forward-mode derivatives of {name} differ, by {apart:.2g} of their size: "
            + (faulty_operation(function, u) or "correct the backward or the jvp of its autograd.Function")
        )
    return found


def _reverse(function: Callable[[Tensor], Tensor], u: Tensor, w: Tensor) -> Tensor:
    """``J^T w`` by plain autograd, which asks less of a model than torch.func."""
    with torch.enable_grad():
        x = u.detach().requires_grad_()
        value = function(x)
        if not value.requires_grad:
            return torch.zeros_like(u)
        return torch.autograd.grad((value * w).sum(), x, materialize_grads=True)[0]


def check_atoms(values: Tensor, data: Tensor, name: str) -> None:
    """Raise :class:`ObservationError` if data are values that the model gives with positive probability.

    A clamped output makes an event of such a value, which no surface of inputs has.

    Args:
        values: observed values at prior draws, which broadcast with the data, ``[n, *batch, Dy]``.
        data: ``[*batch, Dy]``.
        name: of the model.
    """
    hits = (values == data).sum(0)
    if not (hits > 1).any():
        return
    value, most = data[(hits > 1).expand_as(data)][0].item(), int(hits.max())
    raise ObservationError(
        f"{int((hits > 1).sum())} of {hits.numel()} observed values, such as {value:.4g}, are values that {name} gives "
        f"with positive probability ({most} of {len(values)} prior draws): a clamped or censored output is an event: "
        "observe the others, pixels(mask), and multiply the probability of the event, by log_factor or as a soft "
        "observation of a program; or pass tolerance="
    )


def faulty_operation(function: Callable[[Tensor], Tensor], u: Tensor) -> str | None:
    """What to use instead of an operation of torch with a wrong derivative; None if a function has none."""
    with torch.enable_grad():
        waiting, seen = [function(u.detach().requires_grad_()).grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name, remedy in _FAULTY.items():
            if node.name().startswith(name):
                return remedy
        waiting += [before for before, _ in node.next_functions]
    return None


@contextmanager
def _differentiating(name: str, mode: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ModelError(f"{name} has no {mode}-mode derivative ({cause(error)}): {_remedy(str(error))}") from error


def _remedy(error: str) -> str:
    """What to change where torch.func refuses a model, by its message."""
    if "in-place" in error.lower() or "inplace" in error.lower():
        return "replace operations in place (x += y, x[...] = y, copy_) by ones that return new tensors"
    if "out=" in error:
        return "replace operations that write into a given tensor (torch.mul(a, b, out=c)) by ones that return new ones"
    if "setup_context" in error:
        return "its autograd.Function needs setup_context, with forward(x) in place of forward(ctx, x), and a jvp"
    if "generate_vmap_rule" in error:
        return "its autograd.Function needs generate_vmap_rule = True, or a vmap of its own"
    return "compute with torch's differentiable functions; an autograd.Function needs setup_context and its own jvp"


def check_once(module: nn.Module, observe: object, check: Callable[[], None]) -> None:
    """Run a check of derivatives unless the same module, with the same weights, has passed it.

    Args:
        module: whose derivatives they are.
        observe: what is observed of its outputs: another function of them has another derivative.
        check: raises what is wrong.
    """
    version = tuple(weight._version for weight in (*module.parameters(), *module.buffers()))
    try:
        key = None if observe is None else weakref.ref(observe)
        passed = _PASSED.setdefault(module, [])
    except TypeError:
        return check()
    if not any(before == version and (each() if each else None) is observe for before, each in passed):
        check()
        passed.append((version, key))


_PASSED: weakref.WeakKeyDictionary[nn.Module, list] = weakref.WeakKeyDictionary()


def check_flatness(found: Differences, name: str) -> None:
    """Raise :class:`ObservationError` if observed values are constant, or change in steps.

    Args:
        found: differences of the values at several prior draws.
        name: of the model.
    """
    flat = (found.products == 0).all(0)
    if not flat.any():
        return
    index = int(flat.nonzero()[0])
    values, n = found.values[:, index], int(flat.sum())
    which = f"{n} of {len(flat)} observed values of {name} (the first is number {index})"
    if (values == values[0]).all():
        raise ObservationError(
            f"{which} are the same at every prior draw: leave these constants out, "
            "observe=pixels(mask), or add noise, WithNoise(model, sd=...)"
        )
    raise ObservationError(
        f"{which} change only in steps, with derivatives that are exactly 0: leave out rounding (round, floor, "
        "comparisons, argmax), or pass tolerance= and a kernel that needs no derivative"
    )


class Spectrum(NamedTuple):
    """Singular values of a Jacobian at several points."""

    rank: int
    """The largest rank."""
    largest: float
    """The median over the points; NaN if a structure's rank is known without them."""
    smallest: float
    """The median over the points, of those that count for the rank."""

    @property
    def condition(self) -> float:
        return self.largest / self.smallest


def spectrum(reduced: ObservedModel, u: Tensor, data: Tensor | None) -> Spectrum:
    """Rank and singular values of the constraint's Jacobian at points ``u [n, D]``.

    Args:
        reduced: the model through its observation operator.
        u: ``[n, D]``.
        data: observed values; None for the model's own outputs at ``u``.
    """
    function = _constraint(reduced, u, data)
    if reduced.structure.has_full_rank(function, u, RANK_TOLERANCE):
        return Spectrum(function(u).shape[-1], math.nan, math.nan)
    value, pull = vjp(function, u)[:2]
    n_outputs, n_inputs = value.shape[-1], u.shape[-1]
    if n_outputs <= n_inputs + 8:
        rows = torch.eye(n_outputs, dtype=u.dtype, device=u.device)
    else:
        # random combinations of many outputs have the rank of all of them
        rng = torch.Generator(u.device).manual_seed(4)
        rows = torch.randn(n_inputs + 8, n_outputs, generator=rng, dtype=u.dtype, device=u.device)
    chunk = max(1, ENTRIES // (value.numel() + u.numel()))
    jacobian = vmap(lambda row: pull(row.expand_as(value))[0], chunk_size=chunk)(rows).movedim(0, -2)
    values = torch.linalg.svdvals(jacobian.nan_to_num(0, 0, 0))
    rank = int((values > RANK_TOLERANCE * values[..., :1]).sum(-1).max())
    return Spectrum(rank, values[..., 0].median().item(), values[..., max(rank, 1) - 1].median().item())
