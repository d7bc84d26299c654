"""Layers of networks in torch as those of JAX: convolutions, pooling, resampling and attention."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Numbers of the matrix that a convolution is a product with, above which images are computed in parts: others leave
# the processor's caches. 128 images of a GAN of 28 x 28 took 123 ms at once and 81 in parts, 95 in parts of four times
# the size; torch itself took 79.
_COLUMNS = 2**18


def layers() -> dict[str, Callable[..., Any]]:
    """By the name of torch's operation."""
    return {**_convolutions(), **_pools(), **_resampled(), **_attention()}


def _convolutions() -> dict[str, Callable[..., Any]]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    # XLA puts channels last itself, but not within loops, where other orders are ten times slower. It would draw plain
    # transpositions into the convolution again.
    def channels_last(x: Any) -> Any:
        return x.reshape(*x.shape[:2], -1).swapaxes(1, 2).reshape(x.shape[0], *x.shape[2:], x.shape[1])

    def channels_first(x: Any) -> Any:
        return x.reshape(x.shape[0], -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape[0], x.shape[-1], *x.shape[1:-1])

    # As a product of matrices, faster than convolutions in float64 or between the entries of their input.
    def by_product(x: Any, weight: Any, stride: Any, pads: Any, dilation: Any) -> Any:
        kernel = weight.shape[2:]
        spans = [n + sum(pad) for n, pad in zip(x.shape[2:], pads, strict=True)]
        sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(spans, kernel, stride, dilation, strict=True)]
        rows = weight.reshape(*weight.shape[:2], -1).transpose(2, 1, 0).reshape(-1, weight.shape[0])

        def of_images(x: Any) -> Any:
            x = jnp.pad(channels_last(x), ((0, 0), *pads, (0, 0)))
            shifted = []
            for at in itertools.product(*map(range, kernel)):
                firsts = zip(at, sizes, stride, dilation, strict=True)
                parts = [slice(i * d, i * d + (n - 1) * s + 1, s) for i, n, s, d in firsts]
                shifted.append(x[(slice(None), *parts)])
            columns = jnp.concatenate(shifted, -1).reshape(-1, len(shifted) * x.shape[-1])
            return channels_first((columns @ rows).reshape(x.shape[0], *sizes, -1))

        n = len(x)
        wanted = -(-n * math.prod(sizes) * rows.shape[0] // _COLUMNS)
        parts = next(k for k in range(min(wanted, n), n + 1) if n % k == 0)
        if parts == 1:
            return of_images(x)
        found = jax.lax.map(of_images, x.reshape(parts, n // parts, *x.shape[1:]))
        return found.reshape(n, *found.shape[2:])

    # Entry i = s q + a of the kernel of a transposed convolution of stride s adds to outputs a, a + s, ...: those are a
    # convolution of stride 1 for each a.
    def by_phases(x: Any, weight: Any, stride: Any, padding: Any, extra: Any) -> Any:
        n, kernel = len(stride), weight.shape[2:]
        parts = [-(-k // s) for k, s in zip(kernel, stride, strict=True)]
        filled = [(0, s * q - k) for s, q, k in zip(stride, parts, kernel, strict=True)]
        w = jnp.pad(weight, ((0, 0), (0, 0), *filled))
        w = w.reshape(*weight.shape[:2], *(each for pair in zip(parts, stride, strict=True) for each in pair))
        w = jnp.flip(w, tuple(range(2, 2 + 2 * n, 2))).transpose(1, *range(3, 3 + 2 * n, 2), 0, *range(2, 2 + 2 * n, 2))
        w = w.reshape(-1, weight.shape[0], *parts)
        y = by_product(x, w, (1,) * n, [(q - 1, q - 1) for q in parts], (1,) * n)
        y = y.reshape(x.shape[0], weight.shape[1], *stride, *y.shape[2:])
        y = y.transpose(0, 1, *(each for d in range(n) for each in (2 + n + d, 2 + d)))
        y = y.reshape(*y.shape[:2], *(a * b for a, b in zip(y.shape[2::2], y.shape[3::2], strict=True)))
        spans = zip(y.shape[2:], x.shape[2:], kernel, stride, padding, extra, strict=True)
        ends = [(size, p, (m - 1) * s - 2 * p + k + o) for size, m, k, s, p, o in spans]
        y = jnp.pad(y, ((0, 0), (0, 0), *((0, max(0, p + out - size)) for size, p, out in ends)))
        return y[(slice(None), slice(None), *(slice(p, p + out) for _, p, out in ends))]

    def convolution(
        x: Any,
        weight: Any,
        bias: Any,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Any:
        spatial = x.ndim - 2
        stride, padding, dilation, output_padding = (
            tuple(each) * (spatial if len(each) == 1 else 1) for each in (stride, padding, dilation, output_padding)
        )
        shift = 0 if bias is None else bias.reshape(-1, *(1,) * spatial)
        if transposed and groups == 1 and max(stride) > 1 and max(dilation) == 1:
            return by_phases(x, weight, stride, padding, output_padding) + shift
        if transposed:
            # [groups * in, out, ...] is [in, groups * out, ...] of the convolution by whose gradient this is
            shape = weight.shape
            w = weight.reshape(groups, shape[0] // groups, *shape[1:]).swapaxes(1, 2)
            w = w.reshape(groups * shape[1], shape[0] // groups, *shape[2:])
            w = jnp.flip(w, tuple(range(2, w.ndim)))
            reach = [d * (k - 1) for d, k in zip(dilation, shape[2:], strict=True)]
            pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
            strides, dilated = (1,) * spatial, stride
        else:
            w, strides, dilated = weight, stride, (1,) * spatial
            pads = [(p, p) for p in padding]
        if groups == 1 and max(dilated) == 1 and x.dtype == jnp.float64 and min(min(pad) for pad in pads) >= 0:
            return by_product(x, w, strides, pads, dilation) + shift
        letters = "HWD"[:spatial]
        found = lax.conv_general_dilated(
            channels_last(x),
            w.reshape(*w.shape[:2], -1).transpose(2, 1, 0).reshape(*w.shape[2:], w.shape[1], w.shape[0]),
            strides,
            pads,
            lhs_dilation=dilated,
            rhs_dilation=dilation,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            feature_group_count=groups,
        )
        return channels_first(found) + shift

    def convolution_backward(gradient: Any, x: Any, weight: Any, bias_sizes: Any, *how: Any) -> Any:
        # as the convolution was made, and which of the three gradients are wanted
        *geometry, wanted = how
        stride, padding, dilation, transposed, _, groups = geometry
        # the gradient of a convolution is a transposed one, and the other way round
        sizes = zip(x.shape[2:], gradient.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        more = [0 if transposed else n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
        back = (None, stride, padding, dilation, not transposed, more, groups)
        # torch gives None for what is not wanted
        own = convolution(gradient, weight, *back) if wanted[0] else None
        if transposed and own is not None:
            # outputs that padding added see no input
            own = own[tuple(slice(n) for n in x.shape)]
        weights = jax.vjp(lambda w: convolution(x, w, None, *geometry), weight)[1](gradient)[0] if wanted[1] else None
        bias = gradient.sum((0, *range(2, gradient.ndim))) if wanted[2] else None
        return own, weights, bias

    return {"convolution": convolution, "convolution_backward": convolution_backward}


def _sides(value: Any, n: int) -> list[int]:
    value = [value] if isinstance(value, int) else list(value)
    return value * n if len(value) == 1 else value


def _pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    found = (-(-span // stride) if ceil else span // stride) + 1
    # the last window begins inside
    return found - 1 if ceil and (found - 1) * stride >= size + padding else found


def _pools() -> dict[str, Callable[..., Any]]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    def largest(n: int) -> Callable[..., Any]:
        def pooled(
            x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
        ) -> Any:
            kernel, padding, dilation = (_sides(each, n) for each in (kernel, padding, dilation))
            stride = _sides(stride or kernel, n)
            sizes = x.shape[-n:]
            # where each window looks: a number for every place in it
            places, inside = np.zeros((1,) * (2 * n), int), np.ones((1,) * (2 * n), bool)
            for d, size in enumerate(sizes):
                out = _pooled_size(size, kernel[d], stride[d], padding[d], dilation[d], ceil)
                at = (np.arange(out) * stride[d] - padding[d])[:, None] + np.arange(kernel[d]) * dilation[d]
                shape = [1] * (2 * n)
                shape[d], shape[n + d] = at.shape
                at = at.reshape(shape)
                inside = inside & (at >= 0) & (at < size)
                places = places * size + at.clip(0, size - 1)
            out = places.shape[:n]
            places, inside = (
                np.broadcast_to(e, np.broadcast_shapes(places.shape, inside.shape)) for e in (places, inside)
            )
            places, inside = places.reshape(*out, -1), inside.reshape(*out, -1)
            windows = x.reshape(*x.shape[:-n], -1)[..., places]
            lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
            windows = jnp.where(inside, windows, lowest)
            best = jnp.argmax(windows, -1)
            index = jnp.take_along_axis(jnp.broadcast_to(places, windows.shape), best[..., None], -1)[..., 0]
            return windows.max(-1), index

        return pooled

    def largest_backward(n: int) -> Callable[..., Any]:
        def backward(g: Any, x: Any, *rest: Any) -> Any:
            return _at_places(g, rest[-1], x.shape, n)

        return backward

    def mean(n: int) -> Callable[..., Any]:
        def pooled(
            x: Any,
            kernel: Any,
            stride: Any = (),
            padding: Any = 0,
            ceil: bool = False,
            count_pads: bool = True,
            divisor: int | None = None,
        ) -> Any:
            kernel, padding = _sides(kernel, n), _sides(padding, n)
            stride = _sides(stride or kernel, n)
            lead = x.ndim - n
            pads = []
            for d, size in enumerate(x.shape[-n:]):
                out = _pooled_size(size, kernel[d], stride[d], padding[d], 1, ceil)
                pads.append((padding[d], max(0, (out - 1) * stride[d] + kernel[d] - size - padding[d])))

            def summed(values: Any) -> Any:
                own = values.ndim - n
                widths, steps = (1,) * own + tuple(kernel), (1,) * own + tuple(stride)
                zero = np.zeros((), values.dtype)
                return lax.reduce_window(values, zero, lax.add, widths, steps, [(0, 0)] * own + pads)

            if divisor is not None:
                return summed(x) / divisor
            ones = jnp.ones(x.shape[lead:], x.dtype)
            if count_pads:
                around = [(p, min(p, after)) for p, (_, after) in zip(padding, pads, strict=True)]
                ones = jnp.pad(ones, around, constant_values=1)
                extra = [(0, after - p) for (_, after), (_, p) in zip(pads, around, strict=True)]
                widths = lax.reduce_window(
                    jnp.pad(ones, extra), np.zeros((), x.dtype), lax.add, tuple(kernel), tuple(stride), "valid"
                )
            else:
                widths = summed(ones)
            return summed(x) / widths

        return pooled

    def mean_backward(n: int) -> Callable[..., Any]:
        return lambda g, x, *rest: jax.vjp(lambda own: mean(n)(own, *rest), jnp.zeros_like(x))[1](g)[0]

    def parts(size: int, out: int) -> Any:
        """Which numbers each of the windows of a given number has, ``[out, size]``."""
        begin, end = (np.arange(out) * size) // out, -((-(np.arange(out) + 1) * size) // out)
        at = np.arange(size)
        return (at >= begin[:, None]) & (at < end[:, None])

    def adapted(n: int) -> Callable[..., Any]:
        def pooled(x: Any, out: Sequence[int]) -> Any:
            for d in range(n):
                own = parts(x.shape[x.ndim - n + d], out[d])
                weights = jnp.asarray(own / own.sum(1, keepdims=True), x.dtype)
                x = jnp.moveaxis(jnp.moveaxis(x, x.ndim - n + d, -1) @ weights.T, -1, x.ndim - n + d)
            return x

        return pooled

    def adapted_backward(n: int) -> Callable[..., Any]:
        return lambda g, x: jax.vjp(lambda own: adapted(n)(own, g.shape[-n:]), jnp.zeros_like(x))[1](g)[0]

    def adapted_largest(n: int) -> Callable[..., Any]:
        def pooled(x: Any, out: Sequence[int]) -> Any:
            masks = [parts(size, o) for size, o in zip(x.shape[-n:], out, strict=True)]
            values, places = [], []
            for cell in itertools.product(*(range(o) for o in out)):
                inside = [np.flatnonzero(mask[k]) for mask, k in zip(masks, cell, strict=True)]
                index = np.ravel_multi_index(np.ix_(*inside), x.shape[-n:]).reshape(-1)
                window = x.reshape(*x.shape[:-n], -1)[..., index]
                values.append(window.max(-1))
                places.append(jnp.asarray(index)[jnp.argmax(window, -1)])
            shape = (*x.shape[:-n], *out)
            return jnp.stack(values, -1).reshape(shape), jnp.stack(places, -1).reshape(shape)

        return pooled

    return {
        **{f"max_pool{n}d_with_indices": largest(n) for n in (2, 3)},
        **{f"max_pool{n}d_with_indices_backward": largest_backward(n) for n in (2, 3)},
        **{f"avg_pool{n}d": mean(n) for n in (2, 3)},
        **{f"avg_pool{n}d_backward": mean_backward(n) for n in (2, 3)},
        **{f"_adaptive_avg_pool{n}d": adapted(n) for n in (2, 3)},
        **{f"_adaptive_avg_pool{n}d_backward": adapted_backward(n) for n in (2, 3)},
        **{f"adaptive_max_pool{n}d": adapted_largest(n) for n in (2, 3)},
        **{f"adaptive_max_pool{n}d_backward": largest_backward(n) for n in (2, 3)},
    }


def _at_places(g: Any, places: Any, shape: Sequence[int], n: int) -> Any:
    """Sums of gradients at flat places of the last dimensions."""
    import jax.numpy as jnp

    lead, size = math.prod(shape[:-n]), math.prod(shape[-n:])
    rows = jnp.arange(lead)[:, None]
    zeros = jnp.zeros((lead, size), g.dtype)
    return zeros.at[rows, places.reshape(lead, -1)].add(g.reshape(lead, -1)).reshape(tuple(shape))


def _resampled() -> dict[str, Callable[..., Any]]:
    import jax
    import jax.numpy as jnp

    aten: Any = torch.ops.aten

    def weights(kind: str, size: int, out: int, align: bool, scale: float | None) -> Any:
        """Each new number by the old ones of a dimension, ``[out, size]``, as torch computes them."""
        lines = torch.eye(size, dtype=torch.float64)[None]
        if kind == "nearest":
            found = aten.upsample_nearest1d(lines, [out], scale)
        elif kind == "exact":
            found = aten._upsample_nearest_exact1d(lines, [out], scale)
        elif kind == "linear":
            found = aten.upsample_linear1d(lines, [out], align, scale)
        else:
            found = aten.upsample_bicubic2d(lines[..., None], [out, 1], align, scale, None)[..., 0]
        return found[0].T.numpy()

    def linear(x: Any, matrices: Sequence[Any]) -> Any:
        n = len(matrices)
        for d, matrix in enumerate(matrices):
            at = x.ndim - n + d
            if ((matrix != 0).sum(1) == 1).all():
                x = jnp.take(x, matrix.argmax(1), at)
            else:
                own = jnp.asarray(matrix.T, x.dtype)
                x = jnp.moveaxis(jnp.moveaxis(x, at, -1) @ own, -1, at)
        return x

    def matrices(kind: str, sizes: Sequence[int], out: Any, rest: Sequence[Any]) -> list[Any]:
        """One for every dimension; the rest are whether corners are aligned, where the kind has them, and scales."""
        n = len(sizes)
        rest = list(rest)
        align = bool(rest.pop(0)) if kind in ("linear", "cubic") else False
        scales = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else (rest or [None] * n)
        if out is None:
            out = [int(size * scale) for size, scale in zip(sizes, scales, strict=True)]
        scales = scales if scales and any(s is not None for s in scales) else [None] * n
        return [weights(kind, old, new, align, scale) for old, new, scale in zip(sizes, out, scales, strict=True)]

    def forwards(kind: str, n: int) -> Callable[..., Any]:
        return lambda x, out, *rest: linear(x, matrices(kind, x.shape[-n:], out, rest))

    def backwards(kind: str, n: int) -> Callable[..., Any]:
        def backward(g: Any, out: Sequence[int], sizes: Sequence[int], *rest: Any) -> Any:
            own = matrices(kind, sizes[-n:], out, rest)
            return jax.vjp(lambda x: linear(x, own), jnp.zeros(tuple(sizes), g.dtype))[1](g)[0]

        return backward

    names = {
        **{f"upsample_nearest{n}d": ("nearest", n) for n in (1, 2, 3)},
        **{f"_upsample_nearest_exact{n}d": ("exact", n) for n in (1, 2, 3)},
        "upsample_linear1d": ("linear", 1),
        "upsample_bilinear2d": ("linear", 2),
        "upsample_trilinear3d": ("linear", 3),
        "upsample_bicubic2d": ("cubic", 2),
    }
    return {
        **{name: forwards(*kind) for name, kind in names.items()},
        **{f"{name}_backward": backwards(*kind) for name, kind in names.items()},
    }


def _attention() -> dict[str, Callable[..., Any]]:
    import jax
    import jax.numpy as jnp
    from jax.scipy import special

    def attended(
        q: Any,
        k: Any,
        v: Any,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> Any:
        scores = q @ jnp.swapaxes(k, -1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        if attn_mask is not None:
            scores = jnp.where(attn_mask, scores, -jnp.inf) if attn_mask.dtype == bool else scores + attn_mask
        return jax.nn.softmax(scores, -1) @ v, special.logsumexp(scores, -1)

    def backward(g: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, dropout: float, causal: bool, **rest: Any) -> Any:
        return jax.vjp(lambda q, k, v: attended(q, k, v, dropout, causal, **rest)[0], q, k, v)[1](g)

    name = "_scaled_dot_product_flash_attention_for_cpu"
    return {name: attended, f"{name}_backward": backward}
