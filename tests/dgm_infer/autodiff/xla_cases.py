"""Operations of torch with inputs at which they are known to be delicate."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten, prims = torch.ops.aten, torch.ops.prims
INF, NAN = math.inf, math.nan
FLOATS = (torch.float64, torch.float32)


class Case(NamedTuple):
    """An operation of some inputs, which are tensors of the first arguments, or anything else."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    rtol: float = 1.0
    """In units of the usual tolerance."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def edges(*more: float) -> Tensor:
    own = [-INF, -30.0, -2.5, -1.0, -0.5, -0.3, -0.0, 0.0, 0.2, 0.5, 1.0, 1.5, 2.5, 3.0, 30.0, INF, NAN]
    return torch.tensor([*own, *more], dtype=torch.float64)


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """All of them with all."""
    return values[:, None], values[None]


def whole(*values: int) -> Tensor:
    return torch.tensor(values or (-7, -3, -1, 0, 1, 2, 3, 9))


def truths(*shape: int) -> Tensor:
    return normal(*shape, seed=5) > 0


def positive_definite(n: int = 4, batch: int = 3) -> Tensor:
    root = normal(batch, n, n, seed=7)
    return root @ root.mT + torch.eye(n, dtype=torch.float64)


UNARY = """
exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid
log_sigmoid_forward relu silu erf erfc erfinv special_ndtri special_log_ndtr special_erfcx lgamma digamma i0
special_i0e special_i1 special_i1e neg reciprocal square sqrt rsqrt abs sign sgn floor ceil round trunc frac isnan
isinf isfinite signbit logical_not softplus nan_to_num hardtanh elu leaky_relu hardswish mish logit clone alias
detach zero
"""
WHOLE_UNARY = """
neg abs sign sgn square exp sqrt reciprocal logical_not bitwise_not isnan isinf signbit round
"""
BINARY = """
add sub rsub mul div remainder fmod floor_divide pow atan2 logaddexp minimum maximum copysign hypot nextafter lt le
gt ge eq ne logical_and logical_or logical_xor xlogy
"""
WHOLE_BINARY = """
add sub mul div minimum maximum lt le gt ge eq ne bitwise_and bitwise_or bitwise_xor logical_and logical_or
"""


WITH_A_NUMBER = """
add sub rsub mul div remainder fmod floor_divide pow copysign lt le gt ge eq ne xlogy
"""


def _elementwise() -> Iterator[Case]:
    for name in UNARY.split():
        yield Case(name, getattr(aten, name), (edges(),), 10)
    for name in WHOLE_UNARY.split():
        yield Case(f"{name} of integers", getattr(aten, name), (whole(),))
    for name in BINARY.split():
        yield Case(name, getattr(aten, name), pairs(edges()), 10)
    for name in WITH_A_NUMBER.split():
        own = getattr(aten, name)
        yield Case(f"{name} of a number", lambda x, f=own: f(x, 2.5), (edges(),), 10)
    for name in WHOLE_BINARY.split():
        yield Case(f"{name} of integers", getattr(aten, name), pairs(whole()))
    for name in ("remainder", "fmod", "floor_divide"):
        yield Case(f"{name} of integers", getattr(aten, name), (whole(), whole(-4, 4, 3, -3, 2, 5, -2, 7)))
        own = getattr(aten, name)
        yield Case(f"{name} by -3", lambda x, f=own: f(x, -3), (whole(),))
    for mode in ("floor", "trunc", None):
        by = whole(-4, 4, 3, -3, 2, 5, -2, 7)
        yield Case(f"div {mode} of integers", lambda a, b, m=mode: aten.div(a, b, rounding_mode=m), (whole(), by))
        # the last digit of a quotient, which decides where it is a whole number, is not torch's
        yield Case(
            f"div {mode}",
            lambda a, b, m=mode: aten.div(a, b, rounding_mode=m),
            pairs(edges(0.1))
            if mode != "trunc"
            else pairs(torch.cat([normal(9), torch.tensor([INF, -INF, NAN, 0.0])])),
        )
    for exponent in (0, 1, 2, 3, -1, -2, 0.5, -0.5, 7, -3, 1.7, -2.3, 12, INF, -INF, NAN):
        yield Case(f"pow {exponent}", lambda x, e=exponent: aten.pow(x, e), (edges(),), 10)
    yield Case("pow of integers", lambda x: [aten.pow(x, 0), aten.pow(x, 3), aten.pow(x, 2.0)], (whole(),))
    yield Case("pow of a base", lambda x: [aten.pow(2, x), aten.pow(-1.5, x), aten.pow(0, x)], (edges(),), 10)
    yield Case(
        "add times",
        lambda a, b: [aten.add(a, b, alpha=2), aten.sub(a, b, alpha=-0.5), aten.rsub(a, 3)],
        (normal(3), normal(3, seed=1)),
    )
    yield Case(
        "addcmul",
        lambda a, b, c: [aten.addcmul(a, b, c, value=0.5), aten.addcdiv(a, b, c, value=2)],
        (normal(3), normal(2, 3), normal(3, seed=1)),
    )
    yield Case(
        "lerp",
        lambda a, b, w: [aten.lerp(a, b, w), aten.lerp(a, b, 0.7)],
        (normal(4), normal(4, seed=1), torch.tensor([0.0, 0.3, 0.5, 1.0])),
    )
    yield Case(
        "round decimals", lambda x: [aten.round(x * 7, decimals=2), aten.round(x * 700, decimals=-1)], (normal(9),)
    )
    # torch itself makes NaN of infinity in float32
    yield Case("gelu", lambda x: [aten.gelu(x), aten.gelu(x, approximate="tanh")], (edges()[1:-2],), 10)
    yield Case("softplus of a number", lambda x: aten.softplus(x, 2.0, 5.0), (edges(),), 10)
    yield Case("logit eps", lambda x: aten.logit(x, 1e-3), (edges(),), 10)
    # torch's own has eleven digits
    yield Case(
        "polygamma",
        lambda x: [aten.polygamma(0, x), aten.polygamma(1, x)],
        (torch.tensor([-2.5, -1.3, -0.5, 0.2, 0.5, 1.0, 3.0, 30.0, NAN]),),
        1e5,
    )
    yield Case("polygamma 2", lambda x: aten.polygamma(2, x), (normal(9).abs() + 0.1,), 100)
    yield Case("special_zeta", aten.special_zeta, (normal(9).abs() + 1.1, normal(9, seed=1).abs() + 0.1), 100)
    gammas = (normal(9).abs() + 0.1, 3 * normal(9, seed=1).abs())
    yield Case("igamma", lambda a, x: [aten.igamma(a, x), aten.igammac(a, x)], gammas, 100)
    yield Case("tanh_backward", aten.tanh_backward, (normal(4), normal(4, seed=1)))
    yield Case("sigmoid_backward", aten.sigmoid_backward, (normal(4), normal(4, seed=1)))
    for name, rest in {
        "softplus": (1.0, 20.0),
        "elu": (),
        "silu": (),
        "gelu": (),
        "leaky_relu": (0.01, False),
        "hardtanh": (-1.0, 1.0),
        "mish": (),
        "threshold": (0.5,),
    }.items():
        function = getattr(aten, f"{name}_backward")
        own = (
            (lambda g, x: aten.elu_backward(g, 1.3, 1.1, 0.7, False, x))
            if name == "elu"
            else (lambda g, x, f=function, r=rest: f(g, x, *r))
        )
        yield Case(f"{name}_backward", own, (normal(9), normal(9, seed=1)), 10)
    yield Case(
        "log_sigmoid_backward",
        lambda g, x: aten.log_sigmoid_backward(g, x, aten.log_sigmoid_forward(x)[1]),
        (normal(9), 5 * normal(9, seed=1)),
    )
    yield Case(
        "clamp", lambda x: [aten.clamp(x, -0.5, 1.0), aten.clamp(x, 1.0, -1.0), aten.clamp(x, max=0.0)], (edges(),)
    )
    yield Case("clamp by tensors", aten.clamp, (edges()[:, None], edges()[None], edges().flip(0)[None]))
    yield Case("clamp_min", lambda x: [aten.clamp_min(x, 0), aten.clamp_max(x, 0.3)], (edges(),))
    yield Case("clamp of integers", lambda x: [aten.clamp(x, -2, 3), aten.clamp(x, -1.5, 2.5)], (whole(),))
    yield Case("shifts", lambda a: [aten.bitwise_left_shift(a, 2), aten.bitwise_right_shift(a, 1)], (whole(),))
    yield Case(
        "where",
        lambda c, a, b: [aten.where(c, a, b), aten.where(c, a, 0.5), aten.where(c, 1.0, b)],
        (truths(3, 4), normal(4), normal(3, 1)),
    )
    yield Case(
        "masked_fill",
        lambda x, m: [aten.masked_fill(x, m, -INF), aten.masked_fill(x, m, x[0, 0])],
        (normal(3, 4), truths(4)),
    )
    yield Case(
        "types",
        lambda a, n, b, z: [a + n, n + 1.5, b + b, b + 2, b * n, a * z, n * z, a == z, n / 2, b & b],
        (normal(3), whole(1, 2, 3), truths(3), torch.tensor(2.5)),
    )
    yield Case(
        "comparisons of types",
        lambda a, n: [n < a, n < 1.5, a == 0.1, n == n.int(), a.float() < a],
        (torch.tensor([0.1, 1.0, 2.5]), whole(0, 1, 2)),
    )
    yield Case(
        "types that are made",
        lambda a: [a.long(), a.bool(), a.float(), a.double(), a.int(), a.half(), a.bfloat16(), (a.half() * 3).float()],
        (normal(9) * 5,),
    )


def _reductions() -> Iterator[Case]:
    x, bad = normal(3, 4), torch.stack([edges(), edges().roll(3)])
    for name in ("sum", "mean", "prod", "nansum", "amax", "amin"):
        f = getattr(aten, name)
        dims = (
            (lambda x, f=f: [f(x), f(x, [1]), f(x, [0, 1], True)])
            if name != "prod"
            else (lambda x, f=f: [f(x), f(x, 1), f(x, 0, True)])
        )
        yield Case(name, dims, (x,))
        yield Case(f"{name} of what is not finite", lambda x, f=f, n=name: f(x, 0 if n == "prod" else [0]), (bad,))
    yield Case(
        "sums of other types",
        lambda n, b: [
            n.sum(),
            b.sum(),
            b.sum(0),
            n.prod(),
            b.cumsum(0),
            n.cumprod(0),
            n.sum(dtype=torch.float64),
            b.double().mean(),
            n.sum(dtype=torch.int32),
        ],
        (whole(), truths(4)),
    )
    yield Case(
        "sums of nothing",
        lambda x: [x.sum(), x.sum(0), x.prod(), x.sum(1), x.logsumexp(0), x.cumsum(0)],
        (normal(0, 3),),
    )
    for name in ("all", "any"):
        f = getattr(aten, name)
        yield Case(name, lambda m, x, f=f: [f(m), f(m, 1), f(m, 0, True), f(x)], (truths(3, 4), normal(3)))
    for name in ("max", "min"):
        f = getattr(aten, name)
        yield Case(name, lambda a, b, f=f: [f(a), *f(a, 1), *f(b, 0, True), f(a, a + 1)], (x, bad))
        yield Case(f"{name} of pairs", f, pairs(edges()))
        yield Case(f"{name} of a number", lambda a, f=f: list(f(a, 0)), (normal(),))
    yield Case("argmax", lambda a, b: [a.argmax(), a.argmax(1), a.argmin(0, True), b.argmax(1), b.argmin(1)], (x, bad))
    yield Case("aminmax", lambda a: [*aten.aminmax(a), *aten.aminmax(a, dim=1)], (x,))
    for name, own in (("var", aten.var), ("std", aten.std)):
        yield Case(name, lambda x, f=own: [f(x), f(x, [1], correction=0), f(x, [0], correction=1, keepdim=True)], (x,))
        yield Case(f"{name} of one", lambda x, f=own: f(x, [1], correction=1), (normal(3, 1),))
    yield Case("var_mean", lambda x: list(torch.var_mean(x, 1)), (x,))
    yield Case("norms", lambda x: [torch.linalg.vector_norm(x, 2, 1), torch.linalg.vector_norm(x, 1), x.norm()], (x,))
    infinite = torch.tensor([[-INF, -INF], [-INF, 1.0], [INF, 2.0], [NAN, 0.0], [900.0, 901.0]])
    for name in ("logsumexp", "logcumsumexp", "cumsum", "cumprod"):
        f = getattr(aten, name)
        yield Case(name, lambda x, f=f, n=name: f(x, [1] if n == "logsumexp" else 1), (infinite.double(),))
    yield Case("_softmax", lambda x: [x.softmax(1), x.log_softmax(1)], (infinite.double(),))
    yield Case("_softmax of numbers", lambda x: [x.softmax(0), x.log_softmax(0), x.cumsum(0)], (normal(),))
    yield Case(
        "_softmax_backward",
        lambda g, y: [aten._softmax_backward_data(g, y, 1, g.dtype), aten._log_softmax_backward_data(g, y, 1, g.dtype)],
        (x, x.softmax(1)),
    )
    ties = torch.tensor([[1.0, 3.0, 3.0, 2.0, NAN, 1.0], [0.0, -1.0, -1.0, 5.0, 5.0, 0.0]])
    yield Case("cummax", lambda x: [*aten.cummax(x, 1), *aten.cummin(x, 1)], (ties,))
    yield Case(
        "sort",
        lambda x: [*torch.sort(x, dim=1, stable=True), *aten.sort(x, 0, True), *aten.sort(x)[:1]],
        (normal(4, 5),),
    )
    yield Case("sort of what is not finite", lambda x: [x.sort(1)[0], x.sort(1, True)[0]], (bad,))
    yield Case("argsort", lambda x: [x.argsort(1), x.argsort(0, descending=True)], (normal(4, 5),))
    yield Case("topk", lambda x: [*x.topk(2), *x.topk(2, 0, largest=False), *x.kthvalue(2, 1)], (normal(4, 5),))
    yield Case(
        "median", lambda x, b: [x.median(), *x.median(1), *x.median(0, True), b.median(1)[0]], (normal(4, 5), bad)
    )
    yield Case(
        "searchsorted",
        lambda e, v: [
            torch.searchsorted(e, v),
            torch.searchsorted(e, v, right=True),
            torch.bucketize(v, e),
            torch.bucketize(v, e, right=True),
        ],
        (torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([[-1.0, 1.0, 5.0, NAN]])),
    )


def _shapes() -> Iterator[Case]:
    x = normal(3, 4, 5)
    functions: dict[str, Callable[[Tensor], Any]] = {
        "view": lambda x: [x.view(12, 5), x.view(-1), aten._unsafe_view(x, [4, 15]), x.view(3, 4, 5, 1)],
        "unsqueeze": lambda x: [x.unsqueeze(1), x.unsqueeze(-1)],
        "squeeze": lambda x: [
            x[:1].squeeze(),
            x[:1].squeeze(0),
            x.squeeze(0),
            x[:1, :1].squeeze((0, 1)),
            x[0, 0, 0].squeeze(),
        ],
        "transpose": lambda x: [x.transpose(0, -1), aten.t(x[0]), aten.t(x[0, 0]), x.permute(2, 0, 1)],
        "expand": lambda x: [x[:1].expand(4, -1, 5), x.expand(2, 3, 4, 5), x[0, 0, 0].expand(3)],
        "repeat": lambda x: [x.repeat(2, 1, 3), x[0, 0].repeat(2, 2), x[0, 0, 0].repeat(3)],
        "cat": lambda x: [torch.cat([x, x[:1]]), torch.cat([x, x.long()], -1), torch.cat([x[0], x[0, 0, :0]])],
        "stack": lambda x: [torch.stack([x, x], 1), *x.unbind(1), torch.stack([x, x], -1)],
        "split": lambda x: [*x.split(2, 1), *x.split(3, -1), *aten.split_with_sizes(x, [1, 3], 1), *x[:0].split(2)],
        "slice": lambda x: [x[1:], x[:, -2:], x[..., ::2], x[:, 1:100], x[2:1], x[:, 5:]],
        "select": lambda x: [x[1], x[:, -1], x.select(2, -2)],
        "slice_scatter": lambda x: [
            aten.slice_scatter(x, x[:2] * 2, 0, 1, 3),
            aten.slice_scatter(x, x[:, :2], 1, 0, 4, 2),
            aten.select_scatter(x, x[:, 0], 1, -1),
        ],
        "slice_backward": lambda x: [
            aten.slice_backward(x, [3, 9, 5], 1, 2, 6, 1),
            aten.select_backward(x, [3, 6, 4, 5], 1, -2),
        ],
        "flip": lambda x: [x.flip(0), x.flip(-1, 0)],
        "roll": lambda x: [x.roll(1), x.roll(-2, 1), x.roll((1, 2), (0, 2))],
        "diagonal": lambda x: [x.diagonal(), x.diagonal(1, 1, 2), x.diagonal(-1, 0, 2), torch.diag_embed(x[0])],
        "diagonal_backward": lambda x: [
            aten.diagonal_backward(x[0, 0, :3], [3, 4], 1, 0, 1),
            aten.diagonal_scatter(x, x[0, :3].T, -1, 1, 0),
            torch.diag_embed(x, 1, 0, 2),
            torch.diag_embed(x, -2),
        ],
        "tril": lambda x: [x.tril(), x.triu(), x.tril(-1), x.triu(2)],
        "constant_pad_nd": lambda x: [
            aten.constant_pad_nd(x, [1, 2], 3.0),
            aten.constant_pad_nd(x, [0, 0, -1, 1]),
            aten.constant_pad_nd(x.long(), [1, 0], 7),
        ],
        "pads": lambda x: [torch.nn.functional.pad(x, (1, 2), mode) for mode in ("reflect", "replicate", "circular")],
        "unfold": lambda x: [x.unfold(2, 3, 2), x.unfold(0, 2, 1)],
        "as_strided": lambda x: [
            aten.as_strided(x, [2, 3], [20, 2], 1),
            aten.as_strided_scatter(x, x[0, :2, :3], [2, 3], [5, 1]),
        ],
        "lift_fresh_copy": lambda x: [aten.lift_fresh_copy(x), aten.copy(x, x[0])],
        "full": lambda x: [
            aten.full([2, 3], 1.5),
            aten.full([2], 7, dtype=torch.int64),
            torch.zeros(2, 3),
            torch.ones(2),
            aten.full_like(x, 2.5),
            aten.fill(x, 2),
            aten.fill(x, x[0, 0, 0]),
        ],
        "like": lambda x: [
            torch.zeros_like(x),
            torch.ones_like(x),
            torch.empty_like(x).fill_(2.0),
            x.new_zeros(2),
            x.new_ones(2),
            x.new_full((2,), 3.0),
            x.new_empty(0),
            aten.new_empty_strided(x, [0], [1]),
            torch.empty(0),
            torch.empty_strided((0,), (1,)),
            aten.empty_permuted([0], [0]),
            torch.zeros(3, dtype=torch.bool),
        ],
        "arange": lambda x: [
            torch.arange(5),
            torch.arange(2, 9, 3),
            torch.arange(0.0, 1.0, 0.1),
            torch.arange(1, 4) * x[0, 0, 0],
        ],
        "linspace": lambda x: [torch.linspace(0, 1, 7, dtype=x.dtype), torch.eye(3, dtype=x.dtype), torch.eye(2, 3)],
        "scalar_tensor": lambda x: [aten.scalar_tensor(2.5, dtype=x.dtype) * x, aten.scalar_tensor(3) + x],
        "pixel_shuffle": lambda x: torch.nn.functional.pixel_shuffle(x.reshape(1, 4, 3, 5), 2),
        "iota": lambda x: [
            prims.iota(5, start=2, step=3, dtype=torch.int64, device="cpu", requires_grad=False),
            prims.convert_element_type(x, torch.float32),
            prims.broadcast_in_dim(x, [3, 4, 2, 5], [0, 1, 3]),
            prims.device_put(x, "cpu"),
            prims.where(x > 0, x, -x),
            prims.sum(x, [0, 1]),
            prims.var(x, [1], 0.0),
            prims.empty_strided([0], [1], dtype=x.dtype, device="cpu", requires_grad=False),
        ],
    }
    for name, function in functions.items():
        yield Case(name, function, (x,))
    yield Case(
        "numbers", lambda x: [x.flip(()), x.transpose(0, 0), x.clone(), x.view(1), x.unfold(0, 1, 1)], (normal(),)
    )


def _put(x: Tensor, r: Tensor, c: Tensor, v: Tensor, a: bool) -> list[Tensor]:
    return [
        aten.index_put(x, [r], v, a),
        aten.index_put(x, [None, c], v[:, :3].T[0], a),
        aten.index_put(x, [r, c], v[0, 0], a),
        aten._unsafe_index_put(x, [r], v, a),
    ]


def _put_by_mask(x: Tensor, m: Tensor, r: Tensor, a: bool) -> list[Tensor]:
    return [
        aten.index_put(x, [m], x[0, 0], a),
        aten.index_put(x, [r], x[0], a),
        aten.index_put(x, [None, m[0]], x[0, 0], a),
        aten.index_put(x, [m], x[0, :1], a),
    ]


def _indexed() -> Iterator[Case]:
    x, rows, columns = normal(4, 5), whole(0, -1, 2), whole(1, 1, -2)
    yield Case(
        "index", lambda x, r, c: [x[r], x[:, c], x[r, c], x[r[:, None], c], x[r][:, :0], x[None, r]], (x, rows, columns)
    )
    yield Case("_unsafe_index", lambda x, r: aten._unsafe_index(x, [None, r]), (x, rows))
    yield Case("index of nothing", lambda x, r: [x[r], x[:0][r]], (x, whole(0)[:0]))
    for accumulate in (False, True):
        # equal values where places are repeated
        yield Case(f"index_put {accumulate}", partial(_put, a=accumulate), (x, rows, columns, torch.full((3, 5), 0.7)))
        yield Case(
            f"index_put by a mask {accumulate}", partial(_put_by_mask, a=accumulate), (x, truths(4, 5), truths(4))
        )
        yield Case(
            f"put {accumulate}", lambda x, i, v, a=accumulate: aten.put(x, i, v, a), (x, whole(0, 7, -1), normal(3))
        )
    inside = whole(0, 3, 1)
    yield Case(
        "index_select",
        lambda x, i: [x.index_select(0, i), x.index_select(-1, i), x[0, 0].index_select(0, i[:1])],
        (x, inside),
    )
    index = torch.tensor([[0, 1, 2], [3, 0, 0]])
    yield Case("gather", lambda x, i: [x.gather(0, i), x.gather(1, i), x[0, 0].gather(0, i[0, 0])], (x, index))
    yield Case("take", lambda x, i: x.take(i), (x, index))
    yield Case("embedding", lambda x, i: [aten.embedding(x, i), aten.embedding(x, i, 1)], (x, index))
    yield Case(
        "embedding_dense_backward",
        lambda g, i: [
            aten.embedding_dense_backward(g, i, 4, -1, False),
            aten.embedding_dense_backward(g, i, 4, 0, True),
        ],
        (normal(2, 3, 5), index),
    )
    yield Case("masked_scatter", aten.masked_scatter, (x, truths(4, 5), normal(20, seed=3)))
    source = normal(2, 3, seed=3)
    other = torch.tensor([[0, 1, 2], [3, 2, 0]])
    yield Case(
        "scatter",
        lambda x, i, s: [
            x.scatter(0, i, s),
            x.scatter(1, i, 2.5),
            x.scatter_add(1, i, s),
            x.scatter(0, i, s, reduce="add"),
            x.scatter(0, i, 2.0, reduce="multiply"),
            x[0, 0].scatter(0, i[0, 0], s[0, 0]),
            x.scatter_add(0, i[:0], s),
        ],
        (x, other, source),
    )
    for way in ("sum", "prod", "mean", "amax", "amin"):
        yield Case(
            f"scatter_reduce {way}",
            lambda x, i, s, w=way: [
                aten.scatter_reduce(x, 0, i, s, w),
                aten.scatter_reduce(x, 1, i, s, w, include_self=False),
            ],
            (x, index, source),
        )
    yield Case(
        "index_add",
        lambda x, i, s: [
            x.index_add(0, i, s),
            x.index_add(0, i, s, alpha=-2),
            x.index_copy(0, i, s),
            x.index_fill(1, i, 3.5),
            x.index_fill(0, i, x[0, 0]),
            x[0].index_add(0, i, s[:, 0]),
        ],
        (x, inside, normal(3, 5)),
    )


CASES = {case.name: case for group in (_elementwise, _reductions, _shapes, _indexed) for case in group()}
