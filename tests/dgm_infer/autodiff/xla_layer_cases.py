"""Linear algebra and layers of networks in torch, with inputs at which they are known to be delicate."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .xla_cases import INF, NAN, Case, aten, normal, positive_definite, truths, whole


def _algebra() -> Iterator[Case]:
    a, b, c = normal(3, 4), normal(4, 5, seed=1), normal(3, 5, seed=2)
    yield Case("mm", lambda a, b, c: [a @ b, aten.addmm(c, a, b), aten.addmm(c[0], a, b, beta=0.5, alpha=2)], (a, b, c))
    yield Case(
        "mv",
        lambda a, b: [a @ b[:, 0], aten.dot(a[0], b[:, 0]), aten.vdot(a[0], b[:, 1]), aten.addmv(a[:, 0], a, b[:, 0])],
        (a, b),
    )
    yield Case("nothing of NaN", lambda a, b: aten.addmm(torch.full_like(a @ b, NAN), a, b, beta=0), (a, b))
    stack = normal(2, 3, 4)
    yield Case(
        "bmm",
        lambda a, b: [a @ b, aten.baddbmm(a @ b, a, b, beta=0.5), aten.addbmm((a @ b)[0], a, b)],
        (stack, normal(2, 4, 3)),
    )
    yield Case("addr", lambda a, b: aten.addr(a, a[:, 0], b), (a, normal(4)))
    yield Case("sums of products of integers", lambda n: [n @ n, n[:, None] @ n[None]], (whole(),))
    s = positive_definite()
    torn = torch.stack([s[0], -s[1], s[2]])
    yield Case(
        "linalg_cholesky_ex",
        lambda x: [*aten.linalg_cholesky_ex(x), aten.linalg_cholesky_ex(x, upper=True)[0], torch.linalg.cholesky(x)],
        (s,),
        100,
    )
    yield Case(
        "cholesky reads a triangle",
        lambda x: [aten.linalg_cholesky_ex(x.tril())[0], aten.linalg_cholesky_ex(x.triu(), upper=True)[0]],
        (s,),
        100,
    )
    yield Case("cholesky info", lambda x: aten.linalg_cholesky_ex(x)[1] > 0, (torn,))
    right = normal(3, 4, 2)
    for upper in (False, True):
        yield Case(
            f"cholesky_solve {upper}",
            lambda b, x, u=upper: [aten.cholesky_solve(b, x, u), aten.cholesky_inverse(x[0], u)],
            (right, s.triu() if upper else s.tril()),
            1000,
        )
        for flag in (False, True):
            yield Case(
                f"linalg_solve_triangular {upper} {flag}",
                lambda a, b, u=upper, f=flag: [
                    aten.linalg_solve_triangular(a, b, upper=u, unitriangular=f),
                    aten.linalg_solve_triangular(a, b.mT, upper=u, left=False, unitriangular=f),
                    aten.linalg_solve_triangular(a[0], b, upper=u),
                    *aten.triangular_solve(b, a, u, f),
                ],
                (s, right),
                1e4,
            )
    square = normal(3, 4, 4)
    yield Case("linalg_inv_ex", lambda x: [*aten.linalg_inv_ex(x), torch.linalg.inv(x)], (square,), 1e4)
    yield Case(
        "linalg_lu_factor_ex",
        lambda x: [*aten.linalg_lu_factor_ex(x), *torch.linalg.lu(x), *torch.lu_unpack(*torch.linalg.lu_factor(x))],
        (square,),
        1e3,
    )
    yield Case(
        "linalg_lu_solve",
        lambda x, b: [
            torch.linalg.lu_solve(*torch.linalg.lu_factor(x), b),
            torch.linalg.lu_solve(*torch.linalg.lu_factor(x), b.mT, left=False),
            torch.linalg.lu_solve(*torch.linalg.lu_factor(x), b, adjoint=True),
        ],
        (square, right),
        1e4,
    )
    yield Case(
        "solve",
        lambda x, b: [
            torch.linalg.solve(x, b),
            torch.linalg.solve(x, b[..., 0]),
            torch.linalg.solve(x, b.mT, left=False),
        ],
        (square, right),
        1e4,
    )
    yield Case("det", lambda x: [torch.linalg.det(x), *torch.linalg.slogdet(x)], (square,), 1e3)
    yield Case(
        "linalg_qr",
        lambda x: [*torch.linalg.qr(x), *torch.linalg.qr(x.mT, "complete"), torch.linalg.qr(x, "r")[1]],
        (right,),
        1e3,
    )
    yield Case(
        "_linalg_eigh",
        lambda x: [torch.linalg.eigh(x)[0], torch.linalg.eigvalsh(x.tril()), _again(*torch.linalg.eigh(x))],
        (s,),
        1e4,
    )
    yield Case(
        "_linalg_svd",
        lambda x: [torch.linalg.svd(x)[1], torch.linalg.svdvals(x), _product(*torch.linalg.svd(x, False))],
        (right,),
        1e4,
    )
    yield Case("linalg_matrix_exp", torch.linalg.matrix_exp, (square,), 1e4)
    for p in (0.0, 1.0, 2.0, 3.0, INF):
        near = torch.cat([normal(3, 4), normal(1, 4, seed=1)])
        yield Case(f"_cdist_forward {p}", lambda a, b, p=p: aten._cdist_forward(a, b, p, None), (near, near[1:]), 10)
        yield Case(
            f"_cdist_backward {p}",
            lambda g, a, b, p=p: aten._cdist_backward(g, a, b, p, aten._cdist_forward(a, b, p, None)),
            (normal(4, 3), near, near[1:]),
            10,
        )


def _again(values: Tensor, vectors: Tensor) -> Tensor:
    """Eigenvectors have no sign of their own."""
    return vectors @ (values[..., None] * vectors.mT)


def _product(u: Tensor, s: Tensor, v: Tensor) -> Tensor:
    return u @ (s[..., None] * v)


def _layers() -> Iterator[Case]:
    for n, shape in {1: (7,), 2: (7, 6), 3: (5, 4, 6)}.items():
        x, weight, bias = normal(2, 4, *shape), normal(6, 2, *(3, 2, 3)[:n], seed=1), normal(6, seed=2)
        one, two = [1] * n, [2] * n
        for label, rest in {
            "plain": (one, [0] * n, one, False, [0] * n, 2),
            "dilated": (two, one, two, False, [0] * n, 2),
        }.items():
            yield Case(
                f"convolution {n} {label}", lambda x, w, b, r=rest: aten.convolution(x, w, b, *r), (x, weight, bias), 10
            )
        back = normal(4, 3, *(3, 2, 3)[:n], seed=1)
        turned = (two, one, one, True, one, 2)
        yield Case(
            f"convolution {n} transposed", lambda x, w, b, r=turned: aten.convolution(x, w, b, *r), (x, back, bias), 10
        )
        for label, w, rest in (("plain", weight, (one, one, one, False, [0] * n, 2)), ("transposed", back, turned)):
            yield Case(f"convolution_backward {n} {label}", _convolution_backward(rest), (x, w, bias), 100)
    for n, shape in {1: (7,), 2: (7, 6), 3: (5, 4, 6)}.items():
        x, weight = normal(2, 4, *shape), normal(4, 4, *(3, 2, 3)[:n], seed=1)
        one, two = [1] * n, [2] * n
        for transposed in (False, True):
            for stride, dilation in ((one, one), (two, one), (one, two), (two, two)):
                rest = (
                    stride,
                    one,
                    dilation,
                    transposed,
                    one if transposed and two in (stride, dilation) else [0] * n,
                    1,
                )
                name = f"convolution {n} of one group {transposed} {stride} {dilation}"
                yield Case(name, _convolution_and_backward(rest), (x, weight, normal(4, seed=2)), 100)
    for images in (12, 13):
        # more than are computed at once: as three parts, and each alone
        x, weight = normal(images, 4, 20, 20), normal(4, 4, 7, 7, seed=1)
        rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        yield Case(
            f"convolution of {images} images", _convolution_and_backward(rest), (x, weight, normal(4, seed=2)), 100
        )
    x2, x3 = normal(2, 3, 7, 6), normal(2, 3, 5, 4, 6)
    bad = x2.masked_fill(truths(7, 6) & truths(2, 3, 7, 6), -INF)
    for name, x, n in (
        ("max_pool2d_with_indices", x2, 2),
        ("max_pool2d_with_indices", bad, 2),
        ("max_pool3d_with_indices", x3, 3),
    ):
        for rest in ((3,), (2, 1, 1), ([2, 3] if n == 2 else 3, 2, 1, 1, True), (2, 2, 0, 2)):
            yield Case(f"{name} {rest}", _pooled(name, rest), (x,))
    for n, x in ((1, x2[0]), (2, x2), (3, x3)):
        f = getattr(aten, f"avg_pool{n}d")
        for rest in (
            ([2] * n,),
            ([3] * n, [2] * n, [1] * n),
            ([3] * n, [2] * n, [1] * n, True),
            ([3] * n, [2] * n, [1] * n, True, False),
        ):
            yield Case(f"avg_pool{n}d {rest}", lambda x, f=f, r=rest: f(x, *r), (x,))
        if n > 1:
            g = getattr(aten, f"avg_pool{n}d_backward")
            rest = ([3] * n, [2] * n, [1] * n, True, True, 5 if n == 2 else None)
            yield Case(f"avg_pool{n}d_backward", lambda x, f=f, g=g, r=rest: g(f(x, *r).cos(), x, *r), (x,))
            mean, largest = getattr(aten, f"_adaptive_avg_pool{n}d"), getattr(aten, f"adaptive_max_pool{n}d")
            mean_b = getattr(aten, f"_adaptive_avg_pool{n}d_backward")
            largest_b = getattr(aten, f"adaptive_max_pool{n}d_backward")
            out = [3, 4, 2][:n]
            yield Case(
                f"adaptive pools {n}",
                lambda x, m=mean, top=largest, mb=mean_b, lb=largest_b, o=out: [
                    m(x, o),
                    *top(x, o),
                    mb(m(x, o).cos(), x),
                    lb(top(x, o)[0].cos(), x, top(x, o)[1]),
                ],
                (x,),
            )
    yield from _resampled(x2)
    weight, bias = normal(3, seed=1), normal(3, seed=2)
    yield Case(
        "normalisations",
        lambda x, w, b: [
            torch.nn.functional.layer_norm(x, x.shape[2:]),
            torch.nn.functional.group_norm(x, 3, w, b),
            torch.nn.functional.instance_norm(x),
            torch.nn.functional.batch_norm(x, b, w.abs(), w, b),
            torch.nn.functional.batch_norm(x, None, None, w, b, True),
        ],
        (x2, weight, bias),
        10,
    )
    yield Case(
        "backwards of normalisations",
        lambda x, w, b: [
            *aten.native_layer_norm_backward(
                x.cos(), x, [6], *aten.native_layer_norm(x, [6], None, None, 1e-5)[1:], None, None, [True, False, False]
            )[:1],
            *aten.native_group_norm_backward(
                x.cos(), x, *aten.native_group_norm(x, w, b, 2, 3, 42, 3, 1e-5)[1:], w, 2, 3, 42, 3, [True, True, True]
            ),
            *aten.native_batch_norm_backward(x.cos(), x, w, b, w.abs(), None, None, False, 1e-5, [True, True, True]),
        ],
        (x2, weight, bias),
        100,
    )
    q, k, v = (normal(2, 2, 5, 4, seed=s) for s in range(3))
    name = "_scaled_dot_product_flash_attention_for_cpu"
    attended, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
    for causal in (False, True):
        yield Case(f"{name} {causal}", lambda q, k, v, c=causal: attended(q, k, v, 0.0, c), (q, k, v), 10)
        yield Case(
            f"{name}_backward {causal}",
            lambda q, k, v, c=causal: backward(q.cos(), q, k, v, *attended(q, k, v, 0.0, c), 0.0, c),
            (q, k, v),
            100,
        )
    yield Case(
        "attention with a mask",
        lambda q, k, v, m: attended(q, k, v, attn_mask=m, scale=0.3),
        (q, k, v, normal(5, 5)),
        10,
    )


def _convolution_and_backward(rest: tuple[Any, ...]) -> Callable[..., Any]:
    back = _convolution_backward(rest)
    return lambda x, w, b: [aten.convolution(x, w, b, *rest), *back(x, w, b)]


def _convolution_backward(rest: tuple[Any, ...]) -> Callable[..., Any]:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Any:
        g = aten.convolution(x, w, None, *rest).cos()
        return [
            each
            for wanted in ([True, True, True], [True, False, False])
            for each in aten.convolution_backward(g, x, w, [len(b)], *rest, wanted)
            if each is not None
        ]

    return function


def _pooled(name: str, rest: tuple[Any, ...]) -> Callable[..., Any]:
    def function(x: Tensor) -> Any:
        found, index = getattr(aten, name)(x, *rest)
        n = x.ndim - 2
        kernel, stride, padding, dilation, ceil = (*rest, *[None] * (5 - len(rest)))
        sides = [[v] * n if isinstance(v, int) else v for v in (kernel, stride or kernel, padding or 0, dilation or 1)]
        back = getattr(aten, f"{name}_backward")(index.to(x.dtype), x, *sides, bool(ceil), index)
        return [found, index, back]

    return function


def _resampled(x: Tensor) -> Iterator[Case]:
    shapes = {1: (x[0], [9]), 2: (x, [9, 4]), 3: (x.reshape(1, 1, 6, 7, 6), [3, 9, 5])}
    for n, (own, out) in shapes.items():
        none = [None] * n
        for name in (f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"):
            yield Case(name, _upsampled(name, out, none), (own,), 10)
        name = {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}[n]
        for align in (False, True):
            yield Case(f"{name} {align}", _upsampled(name, out, [align, *none]), (own,), 10)
    yield Case("upsample_bicubic2d", _upsampled("upsample_bicubic2d", [9, 4], [False, None, None]), (x,), 10)
    yield Case(
        "interpolate",
        lambda x: [
            torch.nn.functional.interpolate(x, scale_factor=2.0, mode=mode)
            for mode in ("nearest", "bilinear", "bicubic")
        ],
        (x,),
        10,
    )
    grid = 0.8 * normal(2, 4, 5, 2)
    for kind, padding, align in ((0, 0, False), (0, 1, True), (1, 0, False), (0, 2, False)):
        yield Case(
            f"grid_sampler_2d {kind} {padding}",
            lambda x, g, r=(kind, padding, align): [
                aten.grid_sampler_2d(x, g, *r),
                *aten.grid_sampler_2d_backward(aten.grid_sampler_2d(x, g, *r).cos(), x, g, *r, [True, True]),
            ],
            (x, grid),
            100,
        )


def _upsampled(name: str, out: list[int], rest: list[Any]) -> Callable[..., Any]:
    def function(x: Tensor) -> Any:
        found = getattr(aten, name)(x, out, *rest)
        return [found, getattr(aten, f"{name}_backward")(found.cos(), out, list(x.shape), *rest)]

    return function


LAYER_CASES = {case.name: case for group in (_algebra, _layers) for case in group()}
