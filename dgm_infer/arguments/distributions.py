"""Checks that torch's distributions make of their arguments: off while chains run, which come to where they fail."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from torch.distributions import Distribution

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
    """A function that runs within :func:`unvalidated`."""

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with unvalidated():
            return function(*args, **kwargs)

    return plain
