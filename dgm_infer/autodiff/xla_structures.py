"""Operations of torch that make, move, index and scatter numbers, as those of JAX.

Indices that torch would refuse give NaN, or drop what is written: no chain goes on from a wrong number.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ModelError


def structures() -> dict[str, Callable[..., Any]]:
    """By the name of torch's operation."""
    return {**_shapes(), **_new(), **_indexed(), **_scattered()}


def along(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """An index of one dimension."""
    return (slice(None),) * (dim % max(1, x.ndim)) + (index,)


def _shapes() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    def squeezed(x: Any, dim: Any = None) -> Any:
        dims = range(x.ndim) if dim is None else (dim if isinstance(dim, Sequence) else (dim,))
        return jnp.squeeze(x, tuple(d for d in dims if x.ndim and x.shape[d] == 1))

    def expanded(x: Any, sizes: Sequence[int], implicit: bool = False) -> Any:
        own = (1,) * (len(sizes) - x.ndim) + x.shape
        return jnp.broadcast_to(x, tuple(o if s == -1 else s for s, o in zip(sizes, own, strict=True)))

    def sliced(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
        return x[along(x, dim, slice(start, end, step))]

    def split(x: Any, sizes: Any, dim: int = 0) -> Any:
        if isinstance(sizes, int):
            # nothing is one part
            sizes = [min(sizes, x.shape[dim] - k) for k in range(0, x.shape[dim], sizes)] if x.shape[dim] else [0]
        return jnp.split(x, [int(k) for k in np.cumsum(sizes[:-1])], dim)

    def padded(x: Any, padding: Sequence[int], value: float = 0.0) -> Any:
        pairs = list(zip(padding[::2], padding[1::2], strict=True))[::-1]
        widths = [(0, 0, 0)] * (x.ndim - len(pairs)) + [(a, b, 0) for a, b in pairs]
        return lax.pad(x, jnp.asarray(value).astype(x.dtype), widths)

    def repeated(x: Any, times: Sequence[int]) -> Any:
        return jnp.tile(x.reshape((1,) * (len(times) - x.ndim) + x.shape), times)

    def rolled(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
        return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])

    def strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
        return x.reshape(-1)[_places(size, stride, offset)]

    def unfolded(x: Any, dim: int, size: int, step: int) -> Any:
        if x.ndim == 0:
            return x.reshape(1)[:size]
        dim = dim % x.ndim
        starts = np.arange(0, x.shape[dim] - size + 1, step)
        return jnp.moveaxis(x[along(x, dim, starts[:, None] + np.arange(size))], dim + 1, -1)

    def joined(parts: Sequence[Any], dim: int = 0) -> Any:
        # torch leaves out empty vectors
        rank = max(each.ndim for each in parts)
        parts = [each for each in parts if each.ndim == rank or each.size]
        kind = jnp.result_type(*(each.dtype for each in parts))
        return jnp.concatenate([each.astype(kind) for each in parts], dim)

    def diagonal_set(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
        own = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
        rows = np.arange(source.shape[-1]) + max(0, -offset)
        found = own.at[..., rows, rows + offset].set(source)
        return jnp.moveaxis(found, (-2, -1), (dim1, dim2))

    def diagonal_embedded(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
        n = x.shape[-1] + abs(offset)
        dim1, dim2 = dim1 % (x.ndim + 1), dim2 % (x.ndim + 1)
        shape = list(x.shape[:-1])
        for d in sorted((dim1, dim2)):
            shape.insert(d, n)
        return diagonal_set(_zeros(x, shape), x, offset, dim1, dim2)

    return {
        **dict.fromkeys(("clone", "alias", "detach", "lift_fresh", "lift_fresh_copy"), lambda x, *_: x),
        **dict.fromkeys(("view", "_unsafe_view"), lambda x, shape: x.reshape(tuple(shape))),
        "_to_copy": jnp.asarray,
        "copy": lambda x, source, *_: jnp.broadcast_to(source, x.shape),
        "unsqueeze": jnp.expand_dims,
        "squeeze": squeezed,
        "transpose": lambda x, a, b: jnp.swapaxes(x, a, b) if x.ndim else x,
        "t": lambda x: x.T,
        "permute": lambda x, dims: jnp.transpose(x, tuple(dims)),
        "expand": expanded,
        "repeat": repeated,
        "cat": joined,
        "stack": lambda xs, dim=0: jnp.stack(xs, dim),
        "unbind": lambda x, dim=0: [jnp.squeeze(p, dim) for p in jnp.split(x, x.shape[dim], dim)] if x.size else [],
        "split": split,
        "split_with_sizes": split,
        "slice": sliced,
        "slice_scatter": lambda x, source, dim=0, start=None, end=None, step=1: x.at[
            along(x, dim, slice(start, end, step))
        ].set(source),
        "select": lambda x, dim, index: x[along(x, dim, index)],
        "select_scatter": lambda x, source, dim, index: x.at[along(x, dim, index)].set(source),
        "slice_backward": lambda g, sizes, dim, start, end, step: (
            _zeros(g, sizes).at[along(_zeros(g, sizes), dim, slice(start, end, step))].set(g)
        ),
        "select_backward": lambda g, sizes, dim, index: _zeros(g, sizes).at[along(_zeros(g, sizes), dim, index)].set(g),
        "flip": lambda x, dims: jnp.flip(x, tuple(dims)) if x.ndim else x,
        "roll": rolled,
        "diagonal": lambda x, offset=0, dim1=0, dim2=1: jnp.diagonal(x, offset, dim1, dim2),
        "diagonal_scatter": diagonal_set,
        "diagonal_backward": lambda g, sizes, *rest: diagonal_set(_zeros(g, sizes), g, *rest),
        "diag_embed": diagonal_embedded,
        "tril": lambda x, diagonal=0: jnp.tril(x, diagonal),
        "triu": lambda x, diagonal=0: jnp.triu(x, diagonal),
        "constant_pad_nd": padded,
        "unfold": unfolded,
        "as_strided": strided,
        "as_strided_scatter": lambda x, source, size, stride, offset=None: (
            x.reshape(-1).at[_places(size, stride, offset)].set(source).reshape(x.shape)
        ),
        "prims.broadcast_in_dim": lambda x, shape, dims: lax.broadcast_in_dim(x, tuple(shape), tuple(dims)),
    }


def _zeros(like: Any, shape: Sequence[int]) -> Any:
    import jax.numpy as jnp

    return jnp.zeros(tuple(shape), like.dtype)


def _places(size: Sequence[int], stride: Sequence[int], offset: int | None) -> Any:
    """Where the numbers of a strided tensor are in its memory."""
    import numpy as np

    found = np.full(tuple(size), offset or 0)
    for dim, (n, step) in enumerate(zip(size, stride, strict=True)):
        found = found + (np.arange(n) * step).reshape(-1, *(1,) * (len(size) - dim - 1))
    return found


def _new() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp

    def zeros(shape: Sequence[int], *_: Any) -> Any:
        return jnp.zeros(tuple(shape))

    def zeros_like(x: Any, *_: Any) -> Any:
        return jnp.zeros(x.shape)

    def new_zeros(x: Any, shape: Sequence[int], *_: Any) -> Any:
        return jnp.zeros(tuple(shape))

    return {
        **dict.fromkeys(("zeros", "empty", "empty_strided", "empty_permuted", "prims.empty_strided"), zeros),
        **dict.fromkeys(("zeros_like", "empty_like"), zeros_like),
        **dict.fromkeys(("new_zeros", "new_empty", "new_empty_strided"), new_zeros),
        "full": lambda shape, value: jnp.full(tuple(shape), value),
        "fill": lambda x, value: jnp.broadcast_to(jnp.asarray(value), x.shape),
        "zero": zeros_like,
        "ones": lambda shape: jnp.ones(tuple(shape)),
        "full_like": lambda x, value: jnp.full(x.shape, value),
        "ones_like": lambda x: jnp.ones(x.shape),
        "new_ones": lambda x, shape: jnp.ones(tuple(shape)),
        "new_full": lambda x, shape, value: jnp.full(tuple(shape), value),
        "scalar_tensor": jnp.asarray,
        "arange": jnp.arange,
        "linspace": jnp.linspace,
        "eye": jnp.eye,
    }


def _indexed() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp
    from jax import lax

    def index(x: Any, given: Sequence[Any]) -> Any:
        if any(each is not None and each.dtype == bool for each in given):
            raise ModelError("the shape of what a mask selects depends on values: use torch.where")
        place = x.at[tuple(slice(None) if each is None else each for each in given)]
        return place.get(mode="fill") if x.size else place.get()

    def selected(x: Any, dim: int, index: Any) -> Any:
        own = x.reshape(x.shape or (1,))
        found = own.at[along(own, dim, _inside(index.reshape(-1), own.shape[dim]))].get(mode="fill")
        return found.reshape(()) if x.ndim == 0 else found

    def gathered(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
        if x.ndim == 0:
            return jnp.broadcast_to(x, index.shape)
        dim = dim % x.ndim
        # an index may be shorter in other dimensions
        own = x[tuple(slice(None) if d == dim else slice(0, n) for d, n in enumerate(index.shape))]
        return jnp.take_along_axis(own, _inside(index, x.shape[dim]), dim, mode="fill")

    def embedding(weight: Any, index: Any, *_: Any) -> Any:
        return weight.at[_inside(index, len(weight))].get(mode="fill")

    def embedding_backward(g: Any, index: Any, n: int, padding: int, by_count: bool) -> Any:
        index = index.reshape(-1)
        rows = jnp.where((index == padding)[:, None], 0, g.reshape(-1, g.shape[-1]))
        if by_count:
            rows = rows / jnp.zeros(n, g.dtype).at[index].add(1)[index][:, None]
        return jnp.zeros((n, g.shape[-1]), g.dtype).at[index].add(rows)

    def filled(x: Any, mask: Any, value: Any) -> Any:
        return jnp.where(mask, jnp.asarray(value).astype(x.dtype), x)

    def mask_scattered(x: Any, mask: Any, source: Any) -> Any:
        x, mask = jnp.broadcast_arrays(x, mask)
        places = jnp.cumsum(mask.reshape(-1)) - 1
        return jnp.where(mask, source.reshape(-1).at[places].get(mode="fill").reshape(x.shape), x)

    def searched(edges: Any, values: Any, *, right: bool = False, side: str | None = None, **_: Any) -> Any:
        values = jnp.asarray(values)
        right = right or side == "right"
        found = edges[..., None, :] <= values[..., None] if right else edges[..., None, :] < values[..., None]
        # NaN comes last
        return (found | jnp.isnan(values)[..., None]).sum(-1)

    return {
        "index": index,
        "_unsafe_index": index,
        "index_select": selected,
        "gather": gathered,
        "take": lambda x, index: x.reshape(-1).at[index].get(mode="fill"),
        "embedding": embedding,
        "embedding_dense_backward": embedding_backward,
        **dict.fromkeys(("where", "prims.where"), lambda condition, a, b: jnp.where(condition.astype(bool), a, b)),
        "masked_fill": filled,
        "masked_scatter": mask_scattered,
        "searchsorted": searched,
        "bucketize": lambda values, edges, *, right=False, **_: searched(edges, values, right=right),
        "prims.iota": lambda n, *, start, step: start + step * lax.iota("int64", n),
    }


def _inside(index: Any, size: int) -> Any:
    """The index with negative numbers, which torch refuses here, made too large."""
    import jax.numpy as jnp

    return jnp.where(index < 0, size, index)


def _scattered() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp

    def checked(found: Any, index: Any, low: int, size: int) -> Any:
        """NaN throughout if an index was outside."""
        if not jnp.issubdtype(found.dtype, jnp.floating):
            return found
        return jnp.where(((index >= low) & (index < size)).all(), found, jnp.nan)

    def put(x: Any, given: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
        masks = [each for each in given if each is not None and each.dtype == bool]
        if masks:
            return put_by_mask(x, given, values, accumulate)
        place = x.at[tuple(slice(None) if each is None else each for each in given)]
        found = place.add(values) if accumulate else place.set(values)
        dims = [d for d, each in enumerate(given) if each is not None]
        for d in dims:
            found = checked(found, given[d], -x.shape[d], x.shape[d])
        return found

    def put_by_mask(x: Any, given: Sequence[Any], values: Any, accumulate: bool) -> Any:
        first = next(k for k, each in enumerate(given) if each is not None)
        mask = given[first]
        alone = all(each is None for k, each in enumerate(given) if k != first)
        rest = x.ndim - first - mask.ndim
        if not alone or (first and values.size > 1) or (values.ndim > rest and values.shape[0] != 1):
            raise ModelError("what is written where a mask is true depends on values in shape: use torch.where")
        values = values.reshape(values.shape[values.ndim - rest :]) if values.ndim > rest else values
        mask = mask.reshape((1,) * first + mask.shape + (1,) * rest)
        return jnp.where(mask, x + values if accumulate else values, x).astype(x.dtype)

    def places(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
        grid = list(jnp.ogrid[tuple(slice(0, n) for n in index.shape)])
        grid[dim] = _inside(index, x.shape[dim])
        return tuple(grid)

    def scattered(way: str) -> Callable[..., Any]:
        def found(x: Any, dim: int, index: Any, source: Any, *, reduce: str | None = None) -> Any:
            if x.ndim == 0:
                return found(x[None], 0, index.reshape(1), jnp.reshape(source, (1,)), reduce=reduce)[0]
            if index.size == 0:
                return x
            dim = dim % x.ndim
            own = source[tuple(slice(0, n) for n in index.shape)] if getattr(source, "ndim", 0) else source
            own = own.astype(x.dtype) if hasattr(own, "dtype") else own
            place = x.at[places(x, dim, index)]
            name = {None: way, "add": "add", "multiply": "multiply"}[reduce]
            return checked(getattr(place, name)(own), index, 0, x.shape[dim])

        return found

    def reduced(x: Any, dim: int, index: Any, source: Any, reduce: str = "sum", *, include_self: bool = True) -> Any:
        if index.size == 0:
            return x
        dim = dim % x.ndim
        place = places(x, dim, index)
        own = source[tuple(slice(0, n) for n in index.shape)]
        hit = jnp.zeros(x.shape, bool).at[place].set(True)
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        lowest, highest = (jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max) if whole else (-jnp.inf, jnp.inf)
        neutral = {"sum": 0, "mean": 0, "prod": 1, "amax": lowest, "amin": highest}[reduce]
        begin = x if include_self else jnp.where(hit, jnp.asarray(neutral, x.dtype), x)
        way = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce]
        found = getattr(begin.at[place], way)(own)
        if reduce == "mean":
            counts = jnp.zeros(x.shape, x.dtype).at[place].add(1) + (1 if include_self else 0)
            counts = jnp.maximum(counts, 1)
            found = jnp.floor_divide(found, counts) if whole else found / counts
        return checked(found, index, 0, x.shape[dim])

    def added(x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Any:
        return by_rows(x, dim, index, source if alpha == 1 else alpha * source, "add")

    def by_rows(x: Any, dim: int, index: Any, source: Any, way: str) -> Any:
        if x.ndim == 0:
            return by_rows(x[None], 0, index.reshape(-1), jnp.reshape(source, -1), way)[0]
        index, size = index.reshape(-1), x.shape[dim]
        source = source[..., None] if getattr(source, "ndim", x.ndim) == x.ndim - 1 and x.ndim == 1 else source
        return checked(getattr(x.at[along(x, dim, _inside(index, size))], way)(source), index, 0, size)

    def rows_set(x: Any, dim: int, index: Any, source: Any) -> Any:
        return by_rows(x, dim, index, source, "set")

    def put_flat(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
        place = x.reshape(-1).at[index.reshape(-1)]
        found = place.add(source.reshape(-1)) if accumulate else place.set(source.reshape(-1))
        return checked(found.reshape(x.shape), index, -x.size, x.size)

    return {
        "index_put": put,
        "_unsafe_index_put": put,
        "scatter": scattered("set"),
        "scatter_add": scattered("add"),
        "scatter_reduce": reduced,
        "index_add": added,
        **dict.fromkeys(("index_copy", "index_fill"), rows_set),
        "put": put_flat,
    }
