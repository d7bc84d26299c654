"""The line of user code that a message is about."""

import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

__all__ = ["first_line", "line_of_error", "present_line", "solver_of_error", "within"]

# Libraries that choose their steps by the values they compute, and how to make them take fixed ones.
_SOLVERS = {
    "torchdiffeq": "the default method of torchdiffeq, dopri5, chooses its steps by the error: give odeint a method of "
    'fixed steps, method="rk4" with options={"step_size": ...}',
    "torchsde": "torchsde chooses its steps by the error: give sdeint adaptive=False and a step dt",
}

_OWN = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_paths()["stdlib"]


@cache
def _is_library(file: str) -> bool:
    """Whether a file is of this package, of torch, Pyro or NumPy, or of the standard library."""
    if file.startswith("<") or file.startswith((_OWN, _TORCH)):
        return True
    parts = Path(file).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return bool({"pyro", "numpy"} & set(parts))
    return file.startswith(_STANDARD)


def _quoted(file: str, line: int) -> str:
    code = linecache.getline(file, line).strip()
    return f"line {line} of {Path(file).name}" + (f", `{code}`" if code else "")


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def present_line() -> str:
    """The innermost line of user code that is running, quoted."""
    for frame in _frames(sys._getframe(1)):
        if not _is_library(frame.f_code.co_filename):
            return _quoted(frame.f_code.co_filename, frame.f_lineno)
    return "an unknown line"


def line_of_error(error: BaseException) -> str | None:
    """The innermost line of user code that an error came through, quoted; None if it came through none."""
    line = None
    below_own = False
    for frame, number in _traced(error):
        file = frame.f_code.co_filename
        below_own |= file.startswith(_OWN)
        # the caller of this package is user code too
        if below_own and not _is_library(file) and _package(frame) not in _SOLVERS:
            line = _quoted(file, number)
    return line


def solver_of_error(error: BaseException) -> str | None:
    """How to keep a library from branching, if an error came out of one that is known to; else None."""
    return next((_SOLVERS[name] for frame, _ in _traced(error) if (name := _package(frame)) in _SOLVERS), None)


def _traced(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames that an error came through, from the outermost, and their lines."""
    at = error.__traceback__
    while isinstance(at, TracebackType):
        yield at.tb_frame, at.tb_lineno
        at = at.tb_next


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def first_line(function: Callable[..., Any]) -> str:
    """The line that defines a function, quoted; its name if it has no source."""
    function = getattr(function, "__func__", getattr(function, "forward", function))
    code = getattr(function, "__code__", None)
    return _quoted(code.co_filename, code.co_firstlineno) if code else repr(function)


def within(folder: str, most: int) -> bool:
    """Whether one of the ``most`` frames above the caller is of this folder of torch."""
    for i, frame in enumerate(_frames(sys._getframe(2))):
        if i == most:
            return False
        if frame.f_code.co_filename.startswith(f"{_TORCH}/{folder}/"):
            return True
    return False
