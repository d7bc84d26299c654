"""Operations of torch on single numbers as those of JAX: arithmetic, special functions and comparisons.

Results are brought into torch's types by the caller, and arguments into the type that torch computes in.
"""

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from ..errors import ModelError

_TYPES = {
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


def array_type(dtype: torch.dtype) -> str:
    """The name of JAX's type.

    Raises:
        ModelError: programs have no such numbers.
    """
    if dtype not in _TYPES:
        raise ModelError(f"XLA cannot be told of numbers of type {dtype}")
    return _TYPES[dtype]


class Known(NamedTuple):
    """An operation of torch as a function of JAX arrays."""

    function: Callable[..., Any]
    types: Literal["result", "compared", "own"]
    """What the arguments are brought to: the type of the result, the one that they have in common, or none."""


def arithmetic() -> dict[str, Known]:
    """By the name of torch's operation."""
    return {
        **{name: Known(function, "result") for name, function in {**_arithmetic(), **_special()}.items()},
        **{name: Known(function, "compared") for name, function in _comparisons().items()},
    }


@cache
def elementwise_names() -> frozenset[str]:
    """Those that treat every number alone."""
    return frozenset({**_arithmetic(), **_special(), **_comparisons()})


def _arithmetic() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp
    from jax import lax

    def whole(x: Any) -> bool:
        return jnp.issubdtype(x.dtype, jnp.integer)

    def arrays(a: Any, b: Any) -> list[Any]:
        kind = (a if hasattr(a, "dtype") else b).dtype
        return jnp.broadcast_arrays(jnp.asarray(a, kind), jnp.asarray(b, kind))

    def powered(x: Any, exponent: Any) -> Any:
        if hasattr(exponent, "dtype"):
            return jnp.power(*arrays(x, exponent))
        if exponent == 0.5:
            return jnp.sqrt(x)
        if exponent == -0.5:
            return lax.rsqrt(x)
        if float(exponent).is_integer() and abs(exponent) <= 8:
            return lax.integer_pow(x, int(exponent))
        return jnp.power(*arrays(x, exponent))

    def remainder(a: Any, b: Any) -> Any:
        a, b = arrays(a, b)
        rest = lax.rem(a, b)
        other = (rest != 0) & ((rest < 0) != (b < 0))
        return jnp.where(other, rest + b, rest)

    def floored(a: Any, b: Any) -> Any:
        a, b = arrays(a, b)
        if whole(a):
            return jnp.floor_divide(a, b)
        # as Python's, not as that of the rounded quotient
        rest = lax.rem(a, b)
        found = (a - rest) / b
        found = jnp.where((rest != 0) & ((b < 0) != (rest < 0)), found - 1, found)
        near = jnp.floor(found)
        near = jnp.where(found - near > 0.5, near + 1, near)
        return jnp.where(b == 0, a / b, jnp.where(found == 0, jnp.copysign(0.0, a / b), near))

    def divided(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
        if rounding_mode == "floor":
            return floored(a, b)
        a, b = arrays(a, b)
        if rounding_mode is None:
            return a / b
        if whole(a):
            return lax.div(a, b)
        # XLA may divide by a product with a reciprocal: the last digit decides here
        found = jnp.round((a - lax.rem(a, b)) / b)
        return jnp.where(jnp.isfinite(found), found, jnp.trunc(a / b))

    def clamped(x: Any, low: Any = None, high: Any = None) -> Any:
        x = x if low is None else jnp.maximum(x, low)
        return x if high is None else jnp.minimum(x, high)

    def rounded(x: Any, *, decimals: int = 0) -> Any:
        if decimals == 0:
            return jnp.round(x)
        scale = 10.0 ** abs(decimals)
        return jnp.round(x * scale) / scale if decimals > 0 else jnp.round(x / scale) * scale

    return {
        "add": lambda a, b, *, alpha=1: a + (b if alpha == 1 else alpha * b),
        "sub": lambda a, b, *, alpha=1: a - (b if alpha == 1 else alpha * b),
        "rsub": lambda a, b, alpha=1: b - (a if alpha == 1 else alpha * a),
        "mul": operator.mul,
        "div": divided,
        "floor_divide": floored,
        "remainder": remainder,
        "fmod": lambda a, b: lax.rem(*arrays(a, b)),
        "neg": operator.neg,
        "pow": powered,
        "reciprocal": lambda x: 1 / x,
        "sqrt": jnp.sqrt,
        "rsqrt": lax.rsqrt,
        "abs": jnp.abs,
        "sign": lambda x: jnp.where(jnp.isnan(x), 0, jnp.sign(x)),
        "sgn": lambda x: jnp.where(jnp.isnan(x), 0, jnp.sign(x)),
        "floor": jnp.floor,
        "ceil": jnp.ceil,
        "round": rounded,
        "trunc": jnp.trunc,
        "frac": lambda x: x - jnp.trunc(x),
        "minimum": jnp.minimum,
        "maximum": jnp.maximum,
        "clamp": clamped,
        "clamp_min": lambda x, low: jnp.maximum(x, low),
        "clamp_max": lambda x, high: jnp.minimum(x, high),
        "copysign": lambda a, b: jnp.copysign(*arrays(a, b)),
        "hypot": lambda a, b: jnp.hypot(*arrays(a, b)),
        "nextafter": lambda a, b: jnp.nextafter(*arrays(a, b)),
        "addcmul": lambda c, a, b, *, value=1: c + value * (a * b),
        "addcdiv": lambda c, a, b, *, value=1: c + value * (a / b),
        "lerp": lambda a, b, w: jnp.where(jnp.abs(w) < 0.5, a + w * (b - a), b - (b - a) * (1 - w)),
        "bitwise_and": lambda a, b: a & b,
        "bitwise_or": lambda a, b: a | b,
        "bitwise_xor": lambda a, b: a ^ b,
        "bitwise_not": operator.invert,
        "bitwise_left_shift": lambda a, b: jnp.left_shift(*arrays(a, b)),
        "bitwise_right_shift": lambda a, b: jnp.right_shift(*arrays(a, b)),
        "prims.convert_element_type": lambda x, _: x,
        "prims.device_put": lambda x, *_: x,
    }


def _special() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp
    from jax import lax, nn
    from jax.scipy import special

    def softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
        return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(x * beta, threshold))) / beta)

    def gelu(x: Any, *, approximate: str = "none") -> Any:
        if approximate == "tanh":
            return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + special.erf(x * math.sqrt(0.5)))

    def trigamma(x: Any) -> Any:
        # of negative numbers by reflection
        low = x < 0.5
        sine = jnp.sin(math.pi * (x - jnp.round(x)))
        mirrored = special.polygamma(1, jnp.where(low, 1 - x, x))
        return jnp.where(low, (math.pi / sine) ** 2 - mirrored, mirrored)

    def digamma(x: Any) -> Any:
        # the sign of a zero tells the side
        pole = (x < 0) & (x == jnp.round(x))
        found = special.digamma(jnp.where(pole | (x == 0), 1.0, x))
        return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), jnp.where(pole, jnp.nan, found))

    def polygamma(n: Any, x: Any) -> Any:
        if n == 0:
            return digamma(x)
        if n == 1:
            return trigamma(x)
        return (-1) ** (n + 1) * math.factorial(n) * lax.zeta(jnp.full_like(x, n + 1), x)

    def scaled_erfc(x: Any) -> Any:
        positive = _scaled_erfc(jnp.abs(x))
        return jnp.where(x < 0, 2 * jnp.exp(x * x) - positive, positive)

    def log_normal_cdf(x: Any) -> Any:
        low, y = x < -1, x * math.sqrt(0.5)
        tail = jnp.log(_scaled_erfc(jnp.abs(y)) / 2) - y * y
        return jnp.where(low, tail, jnp.log1p(-special.erfc(jnp.where(low, 0.0, y)) / 2))

    def logit(x: Any, eps: float | None = None) -> Any:
        x = x if eps is None else jnp.clip(x, eps, 1 - eps)
        return jnp.log(x / (1 - x))

    return {
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
        "log_sigmoid_forward": lambda x: (nn.log_sigmoid(x), jnp.exp(-jnp.abs(x))),
        "logit": logit,
        "softplus": softplus,
        "relu": lambda x: jnp.maximum(x, 0),
        "silu": lambda x: x * nn.sigmoid(x),
        "gelu": gelu,
        "erf": special.erf,
        "erfc": special.erfc,
        "erfinv": special.erfinv,
        "special_erfcx": scaled_erfc,
        "special_ndtri": special.ndtri,
        "special_log_ndtr": log_normal_cdf,
        "lgamma": special.gammaln,
        "digamma": digamma,
        "polygamma": polygamma,
        "special_zeta": lambda x, q: lax.zeta(*jnp.broadcast_arrays(x, q)),
        "igamma": lambda a, x: lax.igamma(*jnp.broadcast_arrays(a, x)),
        "igammac": lambda a, x: lax.igammac(*jnp.broadcast_arrays(a, x)),
        "i0": special.i0,
        "special_i0e": special.i0e,
        "special_i1": special.i1,
        "special_i1e": special.i1e,
        "xlogy": lambda a, b: jnp.where(jnp.isnan(b), jnp.nan, jnp.where(a == 0, 0, a * jnp.log(b))),
    }


def _scaled_erfc(x: Any) -> Any:
    """``exp(x^2) erfc(x)`` for x >= 0."""
    import jax.numpy as jnp
    from jax.scipy import special

    small = jnp.minimum(x, 5.0)
    large = jnp.maximum(x, 5.0)
    # the continued fraction converges the faster, the larger the number
    fraction = jnp.zeros_like(large)
    for k in range(40, 0, -1):
        fraction = 0.5 * k / (large + fraction)
    tail = 1 / ((large + fraction) * math.sqrt(math.pi))
    return jnp.where(x < 5, jnp.exp(small * small) * special.erfc(small), tail)


def _comparisons() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp

    return {
        "lt": operator.lt,
        "le": operator.le,
        "gt": operator.gt,
        "ge": operator.ge,
        "eq": operator.eq,
        "ne": operator.ne,
        "isnan": jnp.isnan,
        "isinf": jnp.isinf,
        "logical_and": jnp.logical_and,
        "logical_or": jnp.logical_or,
        "logical_xor": jnp.logical_xor,
        "logical_not": jnp.logical_not,
        "signbit": lambda x: jnp.signbit(x) if jnp.issubdtype(x.dtype, jnp.floating) else x < 0,
    }
