"""Operations of torch that move numbers, index them or convolve, as those of JAX."""

from collections.abc import Callable, Sequence
from typing import Any


def structures() -> dict[str, Callable[..., Any]]:
    """By the name of torch's operation."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    def squeezed(x: Any, dim: Any = None) -> Any:
        dims = range(x.ndim) if dim is None else (dim if isinstance(dim, Sequence) else (dim,))
        return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))

    def expanded(x: Any, sizes: Sequence[int]) -> Any:
        own = (1,) * (len(sizes) - x.ndim) + x.shape
        return jnp.broadcast_to(x, tuple(o if s == -1 else s for s, o in zip(sizes, own, strict=True)))

    def sliced(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
        return x[_along(x, dim, slice(start, end, step))]

    def _along(x: Any, dim: int, index: Any) -> Any:
        return (slice(None),) * (dim % x.ndim) + (index,)

    def split(x: Any, sizes: Any, dim: int = 0) -> Any:
        if isinstance(sizes, int):
            sizes = [min(sizes, x.shape[dim] - k) for k in range(0, x.shape[dim], sizes)]
        return jnp.split(x, [int(k) for k in np.cumsum(sizes[:-1])], dim)

    def padded(x: Any, padding: Sequence[int], value: float = 0.0) -> Any:
        pairs = list(zip(padding[::2], padding[1::2], strict=True))[::-1]
        widths = [(0, 0, 0)] * (x.ndim - len(pairs)) + [(a, b, 0) for a, b in pairs]
        return lax.pad(x, jnp.asarray(value, x.dtype), widths)

    def indices(given: Sequence[Any]) -> Any:
        return tuple(slice(None) if each is None else each for each in given)

    def put(x: Any, given: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
        place = x.at[indices(given)]
        return place.add(values) if accumulate else place.set(values)

    def places(x: Any, dim: int, index: Any) -> Any:
        grid = list(jnp.ogrid[tuple(slice(0, n) for n in index.shape)])
        grid[dim % x.ndim] = index
        return x.at[tuple(grid)]

    def own_part(source: Any, index: Any) -> Any:
        return source[tuple(slice(0, n) for n in index.shape)] if getattr(source, "ndim", 0) else source

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
        letters = "HWD"[:spatial]
        if transposed:
            # [groups * in, out, ...] is [in, groups * out, ...] of the convolution by whose gradient this is
            shape = weight.shape
            w = weight.reshape(groups, shape[0] // groups, *shape[1:]).swapaxes(1, 2)
            w = w.reshape(groups * shape[1], shape[0] // groups, *shape[2:])
            w = jnp.flip(w, tuple(range(2, w.ndim)))
            reach = [d * (k - 1) for d, k in zip(dilation, shape[2:], strict=True)]
            pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
            strides, dilated = (1,) * spatial, tuple(stride)
        else:
            w, strides, dilated = weight, tuple(stride), (1,) * spatial
            pads = [(p, p) for p in padding]
        found = lax.conv_general_dilated(
            x,
            w,
            strides,
            pads,
            lhs_dilation=dilated,
            rhs_dilation=tuple(dilation),
            dimension_numbers=(f"NC{letters}", f"OI{letters}", f"NC{letters}"),
            feature_group_count=groups,
        )
        return found if bias is None else found + bias.reshape(-1, *(1,) * spatial)

    def convolution_backward(
        gradient: Any,
        x: Any,
        weight: Any,
        bias_sizes: Any,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        wanted: Sequence[bool],
    ) -> Any:
        rest = (None, stride, padding, dilation, transposed, output_padding, groups)
        # torch gives None for what is not wanted
        own = jax.vjp(lambda a: convolution(a, weight, *rest), x)[1](gradient)[0] if wanted[0] else None
        weights = jax.vjp(lambda w: convolution(x, w, *rest), weight)[1](gradient)[0] if wanted[1] else None
        bias = gradient.sum((0, *range(2, gradient.ndim))) if wanted[2] else None
        return own, weights, bias

    return {
        "view": lambda x, shape: x.reshape(shape),
        "_unsafe_view": lambda x, shape: x.reshape(shape),
        "reshape": lambda x, shape: x.reshape(shape),
        "clone": lambda x: x,
        "alias": lambda x: x,
        "detach": lambda x: x,
        "lift_fresh_copy": lambda x: x,
        "_to_copy": lambda x: x,
        "unsqueeze": jnp.expand_dims,
        "squeeze": squeezed,
        "transpose": jnp.swapaxes,
        "t": lambda x: x.T,
        "permute": jnp.transpose,
        "expand": expanded,
        "repeat": lambda x, times: jnp.tile(x, times),
        "cat": lambda xs, dim=0: jnp.concatenate(xs, dim),
        "stack": lambda xs, dim=0: jnp.stack(xs, dim),
        "unbind": lambda x, dim=0: [jnp.squeeze(p, dim) for p in jnp.split(x, x.shape[dim], dim)],
        "split": split,
        "split_with_sizes": split,
        "slice": sliced,
        "slice_scatter": lambda x, source, dim=0, start=None, end=None, step=1: x.at[
            _along(x, dim, slice(start, end, step))
        ].set(source),
        "select": lambda x, dim, index: x[_along(x, dim, index)],
        "select_scatter": lambda x, source, dim, index: x.at[_along(x, dim, index)].set(source),
        "flip": lambda x, dims: jnp.flip(x, tuple(dims)),
        "roll": lambda x, shifts, dims=(): jnp.roll(x, tuple(shifts), tuple(dims) or None),
        "diagonal": lambda x, offset=0, dim1=0, dim2=1: jnp.diagonal(x, offset, dim1, dim2),
        "tril": lambda x, diagonal=0: jnp.tril(x, diagonal),
        "triu": lambda x, diagonal=0: jnp.triu(x, diagonal),
        "constant_pad_nd": padded,
        "full": jnp.full,
        "zeros": jnp.zeros,
        "ones": jnp.ones,
        "empty": jnp.zeros,
        "full_like": lambda x, value: jnp.full(x.shape, value),
        "zeros_like": jnp.zeros_like,
        "ones_like": jnp.ones_like,
        "empty_like": jnp.zeros_like,
        "new_zeros": lambda x, shape: jnp.zeros(shape),
        "new_ones": lambda x, shape: jnp.ones(shape),
        "new_full": lambda x, shape, value: jnp.full(shape, value),
        "new_empty": lambda x, shape: jnp.zeros(shape),
        "scalar_tensor": jnp.asarray,
        "arange": jnp.arange,
        "eye": jnp.eye,
        "index": lambda x, given: x[indices(given)],
        "index_put": put,
        "index_select": lambda x, dim, index: jnp.take(x, index, dim),
        "embedding": lambda weight, index, *_: weight[index],
        "gather": lambda x, dim, index: jnp.take_along_axis(own_part_but(x, index, dim), index, dim),
        "scatter": lambda x, dim, index, source: places(x, dim, index).set(own_part(source, index)),
        "scatter_add": lambda x, dim, index, source: places(x, dim, index).add(own_part(source, index)),
        "index_add": lambda x, dim, index, source, alpha=1: x.at[_along(x, dim, index)].add(alpha * source),
        "convolution": convolution,
        "convolution_backward": convolution_backward,
    }


def own_part_but(x: Any, index: Any, dim: int) -> Any:
    """What of a tensor ``gather`` reads: an index may be shorter in other dimensions."""
    return x[tuple(slice(None) if d == dim % x.ndim else slice(0, n) for d, n in enumerate(index.shape))]
