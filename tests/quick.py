"""Which cases of a law the quick run has, where all are in the long one."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

import pytest


def cases(named: Mapping[str, Any], quick: Container[str]) -> list:
    """Parameters by their names, slow unless quick."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), id=name, marks=marks(name in quick))
        for name, value in named.items()
    ]


def some(values: Iterable[Any], quick: Container[Any]) -> list:
    """Parameters that name themselves."""
    return [pytest.param(value, id=str(value), marks=marks(value in quick)) for value in values]


def marks(quick: bool):
    return () if quick else (pytest.mark.slow,)
