"""Operations of torch as those of JAX. Results are brought into torch's types by the caller."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

TYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
"""Names of JAX's types."""

_TABLE: dict[str, Callable[..., Any]] = {}


def of_aten(target: Any) -> Callable[..., Any] | None:
    """The function of JAX arrays that an operation of torch is; None if it is not known.

    Overloads share one function: they differ by types of arguments, which JAX tells apart itself.
    """
    if not _TABLE:
        _TABLE.update(_table())
    packet = getattr(target, "overloadpacket", None)
    return None if packet is None else _TABLE.get(packet.__name__)


def _axes(dim: Any) -> tuple[int, ...] | None:
    """Dimensions of a reduction; none are all."""
    if dim is None or (isinstance(dim, Sequence) and len(dim) == 0):
        return None
    return tuple(dim) if isinstance(dim, Sequence) else (dim,)


def _table() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp
    from jax import lax, nn
    from jax.scipy import linalg, special

    from .xla_structures import structures

    def reduction(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, dim=None, keepdim=False: function(x, axis=_axes(dim), keepdims=keepdim)

    def extreme(values: Callable[..., Any], places: Callable[..., Any]) -> Callable[..., Any]:
        def found(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
            if dim is None:
                return values(x)
            return values(x, axis=dim, keepdims=keepdim), places(x, axis=dim, keepdims=keepdim)

        return found

    def variance(x: Any, dim: Any = None, *, correction: float = 1, keepdim: bool = False) -> Any:
        return jnp.var(x, axis=_axes(dim), ddof=correction, keepdims=keepdim)

    def power(x: Any, exponent: Any) -> Any:
        whole = isinstance(exponent, float) and exponent.is_integer() and abs(exponent) <= 8
        return x ** (int(exponent) if whole else exponent)

    def divided(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
        return {None: lambda x: x, "floor": jnp.floor, "trunc": jnp.trunc}[rounding_mode](a / b)

    def clamped(x: Any, low: Any = None, high: Any = None) -> Any:
        x = x if low is None else jnp.maximum(x, low)
        return x if high is None else jnp.minimum(x, high)

    def product(c: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Any:
        found = a @ b if alpha == 1 else alpha * (a @ b)
        return found + (c if beta == 1 else beta * c)

    def softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
        return jnp.where(x * beta > threshold, x, jnp.logaddexp(x * beta, 0) / beta)

    def gelu(x: Any, approximate: str = "none") -> Any:
        return nn.gelu(x, approximate=approximate == "tanh")

    elementwise = {
        "add": lambda a, b, alpha=1: a + (b if alpha == 1 else alpha * b),
        "sub": lambda a, b, alpha=1: a - (b if alpha == 1 else alpha * b),
        "rsub": lambda a, b, alpha=1: b - (a if alpha == 1 else alpha * a),
        "mul": operator.mul,
        "div": divided,
        "floor_divide": lambda a, b: jnp.floor_divide(a, b),
        "remainder": lambda a, b: jnp.remainder(a, b),
        "fmod": lambda a, b: jnp.fmod(a, b),
        "neg": operator.neg,
        "pow": power,
        "reciprocal": lambda x: 1 / x,
        "square": lambda x: x * x,
        "sqrt": jnp.sqrt,
        "rsqrt": lax.rsqrt,
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "log": jnp.log,
        "log2": jnp.log2,
        "log10": jnp.log10,
        "log1p": jnp.log1p,
        "logaddexp": jnp.logaddexp,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tan": jnp.tan,
        "asin": jnp.arcsin,
        "acos": jnp.arccos,
        "atan": jnp.arctan,
        "atan2": jnp.arctan2,
        "sinh": jnp.sinh,
        "cosh": jnp.cosh,
        "tanh": jnp.tanh,
        "asinh": jnp.arcsinh,
        "acosh": jnp.arccosh,
        "atanh": jnp.arctanh,
        "tanh_backward": lambda g, y: g * (1 - y * y),
        "sigmoid": nn.sigmoid,
        "sigmoid_backward": lambda g, y: g * y * (1 - y),
        "softplus": softplus,
        "relu": nn.relu,
        "gelu": gelu,
        "erf": special.erf,
        "erfc": special.erfc,
        "erfinv": special.erfinv,
        "special_ndtri": special.ndtri,
        "lgamma": special.gammaln,
        "digamma": special.digamma,
        "polygamma": lambda n, x: special.polygamma(n, x),
        "special_log_ndtr": special.log_ndtr,
        "abs": jnp.abs,
        "sign": jnp.sign,
        "sgn": jnp.sign,
        "floor": jnp.floor,
        "ceil": jnp.ceil,
        "round": jnp.round,
        "trunc": jnp.trunc,
        "minimum": jnp.minimum,
        "maximum": jnp.maximum,
        "clamp": clamped,
        "clamp_min": lambda x, low: jnp.maximum(x, low),
        "clamp_max": lambda x, high: jnp.minimum(x, high),
        "where": jnp.where,
        "masked_fill": lambda x, mask, value: jnp.where(mask, jnp.asarray(value).astype(x.dtype), x),
        "isnan": jnp.isnan,
        "isinf": jnp.isinf,
        "isfinite": jnp.isfinite,
        "lt": operator.lt,
        "le": operator.le,
        "gt": operator.gt,
        "ge": operator.ge,
        "eq": operator.eq,
        "ne": operator.ne,
        "bitwise_and": operator.and_,
        "bitwise_or": operator.or_,
        "bitwise_xor": operator.xor,
        "bitwise_not": operator.invert,
        "logical_and": jnp.logical_and,
        "logical_or": jnp.logical_or,
        "logical_xor": jnp.logical_xor,
        "logical_not": jnp.logical_not,
    }
    products = {
        "mm": operator.matmul,
        "bmm": operator.matmul,
        "mv": operator.matmul,
        "dot": operator.matmul,
        "addmm": product,
        "baddbmm": product,
        "addmv": product,
    }
    reductions = {
        "sum": reduction(jnp.sum),
        "mean": reduction(jnp.mean),
        "prod": reduction(jnp.prod),
        "amax": reduction(jnp.max),
        "amin": reduction(jnp.min),
        "all": reduction(jnp.all),
        "any": reduction(jnp.any),
        "max": extreme(jnp.max, jnp.argmax),
        "min": extreme(jnp.min, jnp.argmin),
        "argmax": lambda x, dim=None, keepdim=False: jnp.argmax(x, axis=dim, keepdims=keepdim),
        "argmin": lambda x, dim=None, keepdim=False: jnp.argmin(x, axis=dim, keepdims=keepdim),
        "logsumexp": lambda x, dim, keepdim=False: special.logsumexp(x, axis=_axes(dim), keepdims=keepdim),
        "var": variance,
        "cumsum": lambda x, dim: jnp.cumsum(x, axis=dim),
        "cumprod": lambda x, dim: jnp.cumprod(x, axis=dim),
        "_softmax": lambda x, dim, _: nn.softmax(x, axis=dim),
        "_log_softmax": lambda x, dim, _: nn.log_softmax(x, axis=dim),
    }
    algebra = {
        "linalg_cholesky_ex": lambda x, upper=False, check_errors=False: (
            linalg.cholesky(x, lower=not upper),
            jnp.zeros(x.shape[:-2], "int32"),
        ),
        "linalg_solve_triangular": lambda a, b, *, upper, left=True, unitriangular=False: lax.linalg.triangular_solve(
            a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
        ),
        "linalg_inv_ex": lambda x, check_errors=False: (jnp.linalg.inv(x), jnp.zeros(x.shape[:-2], "int32")),
    }
    return {**elementwise, **products, **reductions, **algebra, **structures()}

