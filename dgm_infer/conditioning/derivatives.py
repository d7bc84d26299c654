"""Derivatives of a model at prior draws: whether they match its outputs, and their rank."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vjp, vmap

from ..errors import ModelError, cause
from ..structures.jacobian import forward_mode
from .reduced import ObservedModel

__all__ = ["Spectrum", "check_derivatives", "spectrum", "tame_draws"]

# Singular values below this, relative to the largest, count as zero: normalisation adds a small number to a norm, which
# leaves the direction it removes with a derivative of about that size.
RANK_TOLERANCE = 1e-6
# Relative difference up to which derivatives agree: between the modes, and with finite differences.
MODES_TOLERANCE = 1e-6
DIFFERENCES_TOLERANCE = 1e-3
# Maximum entries of derivatives held at once.
ENTRIES = 2**25


def tame_draws(reduced: ObservedModel, draws: int, data: Tensor | None, like: Tensor) -> Tensor:
    """Up to ``draws`` prior draws without overflow, ``[n, D]``."""
    rng = torch.Generator(like.device).manual_seed(2)

    def size(u: Tensor) -> Tensor:
        with torch.no_grad():
            return _constraint(reduced, u, data)(u + 1e-3).abs().amax(-1).nan_to_num(torch.inf, torch.inf)

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
    """Raise :class:`ModelError` unless ``w.(J v)`` agrees between both modes and finite differences."""
    rng = torch.Generator(u.device).manual_seed(3)
    function, name = _constraint(reduced, u, data), type(reduced.model).__name__
    v = torch.randn(u.shape[-1], generator=rng, dtype=u.dtype, device=u.device)
    step = 1e-6
    with torch.no_grad():
        difference = (function(u + step * v) - function(u - step * v)) / (2 * step)
    w = torch.randn(difference.shape[-1], generator=rng, dtype=u.dtype, device=u.device)
    with _differentiating(name, "reverse"):
        reverse = vjp(function, u)[1](w.expand_as(difference))[0] @ v
    with _differentiating(name, "forward"):
        forward = forward_mode(function, u, v.unsqueeze(0))[1][0] @ w
    # size of the terms in the products
    size = torch.linalg.vector_norm(difference, dim=-1) * torch.linalg.vector_norm(w)
    apart = ((reverse - forward).abs() / size.maximum(reverse.abs()).clamp_min(1e-12)).nanmedian().item()
    if not apart <= MODES_TOLERANCE:
        raise ModelError(
            f"reverse- and forward-mode derivatives of {name} differ, by {apart:.2g} of their size: correct the "
            "backward or the jvp of its autograd.Function"
        )
    # the median over draws: at a kink finite differences mean little
    apart = ((reverse - difference @ w).abs() / size.clamp_min(1e-9)).nanmedian().item()
    if not apart <= DIFFERENCES_TOLERANCE:
        raise ModelError(
            f"the derivatives of {name} do not match its outputs (finite differences differ by {apart:.2g} of "
            "their size): look for detach(), rounding, or a backward of another function"
        )


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
