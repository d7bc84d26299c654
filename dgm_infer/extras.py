"""Imports of packages that only an extra installs."""

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import MissingExtraError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Context for imports that need the extra ``name``.

    In nested blocks the outermost names its extra: what the user called knows best what else it will need.

    Raises:
        MissingExtraError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # a dotted name is a module that its package, which is there, does not have: a mistake, not a missing package
        if error.name is None or "." in error.name:
            raise
        raise MissingExtraError(
            f'{error.name} is not installed: pip install "dgm-infer[{name}]"', name=error.name
        ) from error
