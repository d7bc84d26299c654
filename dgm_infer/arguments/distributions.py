"""Checks of torch that would end all chains where one has come to a point without density: off while chains run."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
R = TypeVar("R")
_LOCK = threading.Lock()
_LOCAL = threading.local()
_depth, _before = 0, True


@contextmanager
def unvalidated() -> Iterator[None]:
    """Distributions that are made here do not check their parameters or values, but where asked to.

    A check would end all chains where one has come to a scale of zero, which has no density: a point like others. The
    switch is torch's own, of the whole process, set back at the end.
    """
    global _depth, _before
    if getattr(_LOCAL, "validated", False):
        yield
        return
    with _LOCK:
        _depth += 1
        if _depth == 1:
            _before = Distribution._validate_args
            Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        with _LOCK:
            _depth -= 1
            if _depth == 0:
                Distribution.set_default_validate_args(_before)


@contextmanager
def validated() -> Iterator[None]:
    """Within it, :func:`unvalidated` changes nothing: mistakes that checks find at every point are said."""
    _LOCAL.validated = True
    try:
        yield
    finally:
        _LOCAL.validated = False


def without_validation(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs within :func:`unvalidated`, and again within :class:`NanFactors` where it fails by a
    matrix."""

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with unvalidated():
            try:
                return function(*args, **kwargs)
            except LinAlgError:
                with NanFactors():
                    return function(*args, **kwargs)

    return plain


class NanFactors(TorchFunctionMode):
    """While active, factors, inverses and solutions of the matrices of a batch that have none are NaN, which torch
    refuses for the whole batch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        own = _FACTORISATIONS.get(func)
        return func(*args, **(kwargs or {})) if own is None else own(*args, **(kwargs or {}))


def _cholesky(A: Tensor, *, upper: bool = False) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(A, upper=upper)
    return _where_found(failed, factor)


def _old_cholesky(input: Tensor, upper: bool = False) -> Tensor:
    return _cholesky(input, upper=upper)


def _inverse(A: Tensor) -> Tensor:
    inverse, failed = torch.linalg.inv_ex(A)
    return _where_found(failed, inverse)


def _solution(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    solution, failed = torch.linalg.solve_ex(A, B, left=left)
    return _where_found(failed, solution)


def _where_found(failed: Tensor, value: Tensor) -> Tensor:
    return torch.where(failed.reshape(*failed.shape, *[1] * (value.ndim - failed.ndim)) == 0, value, torch.nan)


_FACTORISATIONS: dict[Any, Callable[..., Any]] = {
    torch.linalg.cholesky: _cholesky,
    torch.cholesky: _old_cholesky,
    torch.linalg.inv: _inverse,
    torch.inverse: _inverse,
    Tensor.inverse: _inverse,
    torch.linalg.solve: _solution,
}
