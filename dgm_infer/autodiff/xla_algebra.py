"""Linear algebra of torch as that of JAX. What torch refuses, such as a singular matrix, gives NaN or infinities."""

import operator
from collections.abc import Callable
from typing import Any


def algebra() -> dict[str, Callable[..., Any]]:
    """By the name of torch's operation."""
    return {**_products(), **_factors()}


def _products() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp
    from jax.scipy import linalg

    def added(c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        found = a @ b if alpha == 1 else alpha * (a @ b)
        # NaN times zero is left out
        return found if beta == 0 else found + (c if beta == 1 else beta * c)

    def summed(c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        found = alpha * jnp.einsum("nij,njk->ik", a, b)
        return found if beta == 0 else found + beta * c

    def outer(c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        return beta * c + alpha * jnp.outer(a, b)

    def distances(a: Any, b: Any, p: float, _: Any = None) -> Any:
        apart = jnp.abs(a[..., :, None, :] - b[..., None, :, :])
        if p == 0:
            return (apart != 0).sum(-1).astype(a.dtype)
        if p == float("inf"):
            return apart.max(-1)
        if p == 2:
            return jnp.sqrt((apart * apart).sum(-1))
        return apart.sum(-1) if p == 1 else (apart**p).sum(-1) ** (1 / p)

    def distances_backward(g: Any, a: Any, b: Any, p: float, found: Any) -> Any:
        apart, found, g = a[..., :, None, :] - b[..., None, :, :], found[..., None], g[..., None]
        if p == 0:
            return jnp.zeros_like(a)
        if p == 1:
            return (g * jnp.sign(apart)).sum(-2)
        if p == float("inf"):
            return (g * jnp.sign(apart) * (jnp.abs(apart) == found)).sum(-2)
        size = jnp.abs(apart)
        slopes = jnp.sign(apart) * size ** (p - 1) * jnp.where(found == 0, 1.0, found) ** (1 - p)
        return jnp.where((found == 0) | (apart == 0), 0, g * slopes).sum(-2)

    return {
        "mm": operator.matmul,
        "bmm": operator.matmul,
        "mv": operator.matmul,
        "dot": operator.matmul,
        "vdot": operator.matmul,
        "addmm": added,
        "baddbmm": added,
        "addmv": added,
        "addbmm": summed,
        "addr": outer,
        "_cdist_forward": distances,
        "_cdist_backward": distances_backward,
        "linalg_matrix_exp": linalg.expm,
    }


def _factors() -> dict[str, Callable[..., Any]]:
    import jax.numpy as jnp
    from jax import lax

    def info(*found: Any) -> Any:
        """What torch tells of the success of matrices: zero where it is."""
        bad = [~jnp.isfinite(each).all(axis=(-2, -1)) for each in found]
        return bad[0].astype("int32")

    def turned(x: Any) -> Any:
        return jnp.swapaxes(x, -1, -2)

    def triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
        lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (jnp.broadcast_to(each, (*lead, *each.shape[-2:])) for each in (a, b))
        return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)

    def triangular_old(b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:
        own = turned(a) if transpose else a
        found = triangular(own, b, upper=upper != transpose, unitriangular=unitriangular)
        return found, jnp.broadcast_to(a, (*found.shape[:-2], *a.shape[-2:]))

    def cholesky(x: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
        # torch reads one triangle, and JAX the lower one
        found = jnp.tril(lax.linalg.cholesky(turned(x) if upper else x, symmetrize_input=False))
        return (turned(found) if upper else found), info(found)

    def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
        lower = turned(factor) if upper else factor
        return triangular(turned(lower), triangular(lower, b, upper=False), upper=True)

    def lu(x: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
        factors, pivots, _ = lax.linalg.lu(x)
        zero = (jnp.diagonal(factors, axis1=-2, axis2=-1) == 0).any(-1)
        return factors, pivots + 1, (zero | ~jnp.isfinite(factors).all((-2, -1))).astype("int32")

    def permuted(pivots: Any, rows: int) -> Any:
        return lax.linalg.lu_pivots_to_permutation((pivots - 1).astype("int32"), rows)

    def lu_solve(factors: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
        if not left:
            return turned(lu_solve(factors, pivots, turned(b), adjoint=not adjoint))
        lead = jnp.broadcast_shapes(factors.shape[:-2], b.shape[:-2])
        order = jnp.broadcast_to(permuted(pivots, factors.shape[-2]), (*lead, factors.shape[-2]))[..., None]
        b = jnp.broadcast_to(b, (*lead, *b.shape[-2:]))
        if adjoint:
            half = triangular(turned(factors), b, upper=False)
            found = triangular(turned(factors), half, upper=True, unitriangular=True)
            return jnp.take_along_axis(found, jnp.argsort(order, -2), -2)
        half = triangular(factors, jnp.take_along_axis(b, order, -2), upper=False, unitriangular=True)
        return triangular(factors, half, upper=True)

    def unpacked(factors: Any, pivots: Any, data: bool = True, permutation: bool = True) -> Any:
        rows, columns = factors.shape[-2:]
        k = min(rows, columns)
        lower = jnp.tril(factors[..., :, :k], -1) + jnp.eye(rows, k, dtype=factors.dtype)
        order = jnp.eye(rows, dtype=factors.dtype)[permuted(pivots, rows)]
        return (
            turned(order) if permutation else jnp.zeros(0),
            lower if data else jnp.zeros(0),
            jnp.triu(factors[..., :k, :]) if data else jnp.zeros(0),
        )

    def inverse(x: Any, *, check_errors: bool = False) -> Any:
        found = jnp.linalg.inv(x)
        return found, info(found)

    def solve(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Any:
        vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
        columns = b[..., None] if vector else b
        factors, pivots, told = lu(a)
        found = lu_solve(factors, pivots, columns, left=left)
        return (found[..., 0] if vector else found), factors, pivots, told

    def determinant_parts(x: Any) -> tuple[Any, Any, Any, Any]:
        factors, pivots, _ = lu(x)
        diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
        swaps = (pivots - 1 != jnp.arange(x.shape[-1])).sum(-1)
        return factors, pivots, diagonal, jnp.where(swaps % 2 == 0, 1, -1).astype(x.dtype)

    def determinant(x: Any) -> Any:
        factors, pivots, diagonal, sign = determinant_parts(x)
        return sign * diagonal.prod(-1), factors, pivots

    def log_determinant(x: Any) -> Any:
        factors, pivots, diagonal, sign = determinant_parts(x)
        return sign * jnp.sign(diagonal).prod(-1), jnp.log(jnp.abs(diagonal)).sum(-1), factors, pivots

    def orthogonal(x: Any, mode: str = "reduced") -> Any:
        if mode == "r":
            return jnp.zeros(0, x.dtype), jnp.linalg.qr(x, mode="r")
        return tuple(jnp.linalg.qr(x, mode=mode))

    def symmetric(x: Any, UPLO: str = "L", compute_v: bool = True) -> Any:
        if not compute_v:
            return jnp.linalg.eigvalsh(x, UPLO=UPLO), jnp.zeros(0)
        values, vectors = jnp.linalg.eigh(x, UPLO=UPLO, symmetrize_input=False)
        return values, vectors

    def singular(x: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None) -> Any:
        if not compute_uv:
            return jnp.zeros(0), jnp.linalg.svd(x, compute_uv=False), jnp.zeros(0)
        return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))

    return {
        "linalg_cholesky_ex": cholesky,
        "cholesky_solve": cholesky_solve,
        "cholesky_inverse": lambda factor, upper=False: cholesky_solve(
            jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper
        ),
        "linalg_solve_triangular": triangular,
        "triangular_solve": triangular_old,
        "linalg_inv_ex": inverse,
        "linalg_lu_factor_ex": lu,
        "linalg_lu_solve": lu_solve,
        "lu_unpack": unpacked,
        "linalg_lu": lambda x, *, pivot=True: unpacked(*lu(x)[:2]),
        "_linalg_solve_ex": solve,
        "_linalg_det": determinant,
        "_linalg_slogdet": log_determinant,
        "linalg_qr": orthogonal,
        "_linalg_eigh": symmetric,
        "_linalg_svd": singular,
    }
