"""The package's exceptions, for mistakes of a user, and the per-chain status, for what a chain runs into."""

import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Protocol, TypeVar

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "ConfigError",
    "DgmInferError",
    "EvidenceError",
    "MissingExtraError",
    "ModelError",
    "ObservationError",
    "StartError",
    "Status",
    "cause",
    "reported_as",
    "uninterrupted",
    "warn",
]


# Whose frames lie between the user's call and a warning.
_BETWEEN = ("dgm_infer", "generators", "torch", "contextlib")


class DgmInferError(Exception):
    """Base of all exceptions of this project; the message is one line that names the value and the remedy."""


class ArgumentError(DgmInferError, ValueError):
    """An argument or a field of a configuration is outside its legal range."""


class ModelError(DgmInferError):
    """A generative model cannot be conditioned as it is."""


class ObservationError(DgmInferError, ValueError):
    """The observed values or the mask do not fit the model."""


class StartError(DgmInferError):
    """No starting point on the fibre was found."""


class EvidenceError(DgmInferError):
    """A base cannot be fitted, or no estimate of the evidence can be made from it."""


class CheckpointError(DgmInferError):
    """Stored weights, or a stored result, are missing, damaged or of another kind."""


class ConfigError(DgmInferError):
    """A configuration file or a command line is wrong."""


class MissingExtraError(DgmInferError, ModuleNotFoundError):
    """A required package is missing that only an extra installs."""


def cause(error: BaseException, most: int = 200) -> str:
    """The message of another library's exception, as one line of at most ``most`` characters.

    Only its first paragraph, which ends at an empty or indented line unless a colon precedes it: torch appends call
    stacks, Pyro tables. Of TorchScript, which quotes its code first, the last line. The exception's type if the message
    is empty.
    """
    text = str(error).strip()
    if "TorchScript" in text:
        text = text.splitlines()[-1]
    first = re.match(r".*((?<=:)\n.*|\n\S.*)*", text)
    assert first is not None
    return textwrap.shorten(first[0], most, placeholder=" ...") or type(error).__name__


@contextmanager
def reported_as(kind: type[DgmInferError]) -> Iterator[None]:
    """An :class:`ArgumentError` of the block becomes one of this kind: what it names is of the model or the data."""
    try:
        yield
    except ArgumentError as error:
        raise kind(str(error)) from error.__cause__


class Result(Protocol):
    """Draws, or evidence."""

    interrupted: bool


Whole = TypeVar("Whole", bound=Result)


def uninterrupted(result: Whole) -> Whole:
    """The result of a run that was not stopped, for those who can use no part of one.

    Raises:
        KeyboardInterrupt: it was, as by Ctrl-C.
    """
    if result.interrupted:
        raise KeyboardInterrupt
    return result


class Status(IntEnum):
    """Outcome of one chain's transition; anything but ``OK`` is a rejection of that chain alone."""

    OK = 0
    PROJECTION_FAILED = 1
    """The solve for a point on the fibre did not converge."""
    REVERSAL_FAILED = 2
    """The step run backwards did not return to its start."""
    DIVERGED = 3
    """The energy at the proposal was not finite, or the energy error exceeded 1000."""


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


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that called the package, however many calls lie between."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)
