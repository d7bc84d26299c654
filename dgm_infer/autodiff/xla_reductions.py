"""Operations of torch that reduce, accumulate or sort numbers, as those of JAX."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from .xla_operations import Known


def reductions() -> dict[str, Known]:
    """By the name of torch's operation."""
    return {
        **{name: Known(function, "result") for name, function in _sums().items()},
        **{name: Known(function, "own") for name, function in _extremes().items()},
    }


def _axes(dim: Any) -> tuple[int, ...] | None:
    """Dimensions of a reduction; none are all."""
    if dim is None or (isinstance(dim, Sequence) and len(dim) == 0):
        return None
    return tuple(dim) if isinstance(dim, Sequence) else (dim,)


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim=None, keepdim=False: function(x, axis=_axes(dim), keepdims=keepdim)


def _sums() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp
    from jax import lax, nn
    from jax.scipy import special

    def variance(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
        dims = range(x.ndim) if _axes(dim) is None else _axes(dim)
        n = math.prod(x.shape[d] for d in dims or ())
        centred = x - x.mean(axis=_axes(dim), keepdims=True)
        sums = (centred * centred).sum(axis=_axes(dim), keepdims=keepdim)
        return sums / max(0.0, n - (1 if correction is None else correction))

    def accumulated(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, dim: function(x, axis=dim % max(1, x.ndim)) if x.ndim else x

    return {
        "sum": _reduction(jnp.sum),
        "nansum": _reduction(jnp.nansum),
        "mean": _reduction(jnp.mean),
        "prod": _reduction(jnp.prod),
        "logsumexp": _reduction(special.logsumexp),
        "var": variance,
        "prims.var": lambda x, dims, correction=1: variance(x, dims, correction=correction),
        "prims.sum": _reduction(jnp.sum),
        "std": lambda *args, **kwargs: jnp.sqrt(variance(*args, **kwargs)),
        "cumsum": accumulated(jnp.cumsum),
        "cumprod": accumulated(jnp.cumprod),
        "logcumsumexp": accumulated(lax.cumlogsumexp),
        "_softmax": lambda x, dim, _: nn.softmax(x, axis=dim) if x.ndim else jnp.ones_like(x),
        "_log_softmax": lambda x, dim, _: nn.log_softmax(x, axis=dim) if x.ndim else jnp.zeros_like(x),
    }


def _extremes() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp
    from jax import lax

    def extreme(values: Callable[..., Any], places: Callable[..., Any], pairs: Callable[..., Any]) -> Any:
        def found(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
            if hasattr(dim, "ndim"):
                kind = jnp.promote_types(x.dtype, dim.dtype)
                return pairs(x.astype(kind), dim.astype(kind))
            if dim is None:
                return values(x)
            if x.ndim == 0:
                return x, jnp.zeros((), int)
            return values(x, axis=dim, keepdims=keepdim), places(x, axis=dim, keepdims=keepdim)

        return found

    def place(function: Callable[..., Any]) -> Callable[..., Any]:
        def found(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
            return function(x, axis=dim if x.ndim else None, keepdims=keepdim)

        return found

    def running(before: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        """Extremes of the first ones, and where they are: the last of equal ones; from a NaN on that."""

        def later(a: Any, b: Any) -> Any:
            taken = ~before(b[0], a[0]) & ~jnp.isnan(a[0]) | jnp.isnan(b[0])
            return jnp.where(taken, b[0], a[0]), jnp.where(taken, b[1], a[1])

        def found(x: Any, dim: int) -> Any:
            if x.ndim == 0:
                return x, jnp.zeros((), int)
            places = lax.broadcasted_iota("int64", x.shape, dim % x.ndim)
            return lax.associative_scan(later, (x, places), axis=dim)

        return found

    def ordered(x: Any, *args: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        if args:
            dim, descending = (*args, descending)[:2]
        if x.ndim == 0:
            return x, jnp.zeros((), int)
        places = jnp.argsort(x, axis=dim, stable=True, descending=descending)
        return jnp.take_along_axis(x, places, dim), places

    def largest(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, places = ordered(x, dim=dim, descending=largest)
        if x.ndim == 0:
            return values, places
        return lax.slice_in_dim(values, 0, k, axis=dim), lax.slice_in_dim(places, 0, k, axis=dim)

    def kth(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
        values, places = (each.reshape(each.shape or (1,)) for each in ordered(x, dim=dim))
        found = (lax.slice_in_dim(each, k - 1, k, axis=dim) for each in (values, places))
        return tuple(each if keepdim and x.ndim else jnp.squeeze(each, dim) for each in found)

    def median(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        own = x.reshape(-1) if dim is None or x.ndim == 0 else x
        along = -1 if dim is None else dim
        values, places = kth(own, (own.shape[along] + 1) // 2, along, keepdim and x.ndim > 0)
        if jnp.issubdtype(x.dtype, jnp.floating):
            bad = jnp.isnan(own)
            kept = keepdim and x.ndim > 0
            none = ~bad.any(axis=along, keepdims=kept)
            values = jnp.where(none, values, jnp.nan)
            places = jnp.where(none, places, jnp.argmax(bad, axis=along, keepdims=kept))
        return values if dim is None else (values, places)

    def range_of(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
        return jnp.min(x, axis=dim, keepdims=keepdim), jnp.max(x, axis=dim, keepdims=keepdim)

    return {
        "all": _reduction(jnp.all),
        "any": _reduction(jnp.any),
        "amax": _reduction(jnp.max),
        "amin": _reduction(jnp.min),
        "aminmax": range_of,
        "max": extreme(jnp.max, jnp.argmax, jnp.maximum),
        "min": extreme(jnp.min, jnp.argmin, jnp.minimum),
        "argmax": place(jnp.argmax),
        "argmin": place(jnp.argmin),
        "cummax": running(operator.lt),
        "cummin": running(operator.gt),
        "sort": ordered,
        "topk": largest,
        "kthvalue": kth,
        "median": median,
    }
