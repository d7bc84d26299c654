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

__all__ = ["first_line", "line_of_error", "present_line", "within"]

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
    line, at = None, error.__traceback__
    below_own = False
    while isinstance(at, TracebackType):
        file = at.tb_frame.f_code.co_filename
        below_own |= file.startswith(_OWN)
        # the caller of this package is user code too
        if below_own and not _is_library(file):
            line = _quoted(file, at.tb_lineno)
        at = at.tb_next
    return line


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
