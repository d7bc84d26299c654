"""The draws of one run: recorded, or replayed from an input vector; and the line of user code that draws or fails."""

import linecache
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributions as td

from ..errors import ModelError
from ..models import Logistic, StandardNormal
from .reparametrisation import Kind, Reparametrisation


class Draw(NamedTuple):
    """One draw of a program: a slice of its input vector."""

    kind: Kind
    shape: torch.Size
    is_prior: bool
    """Whether it was drawn for the latent variables, not as noise of the simulation."""
    line: str
    """The line of user code, or the name, that drew it."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def is_like(self, other: "Draw") -> bool:
        return self[:3] == other[:3]


class Tape:
    """Draws in the order of a program: from inputs ``u [D]``, or recorded if there are none.

    Args:
        name: of the program, for messages.
        dtype: floating-point type that the program computes in.
        device: its device.
        u: the inputs; None to record.
        draws: what an earlier run drew, which a replay must repeat.
        rng: generator of recorded draws.

    Attributes:
        charted: recorded distributions whose values are those of a chart, by the line or name that drew them.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        u: Tensor | None = None,
        draws: Sequence[Draw] = (),
        rng: torch.Generator | None = None,
    ):
        self.name, self.dtype, self.device, self.u, self.rng = name, dtype, device, u, rng
        self.draws: list[Draw] = list(draws)
        self.in_prior = False
        self.invalid: str | None = None
        self.factors: list[Tensor] = []
        self.charted: dict[str, td.Distribution] = {}
        self._recorded: list[Tensor] = []
        self._next = 0
        self._parts = [] if u is None else _parts(u, self.draws)

    def draw(self, form: Reparametrisation, name: str | None = None) -> Tensor:
        """The value of a form: from the next inputs, or from random ones, which are recorded."""
        if self.u is None:
            density = {"normal": StandardNormal, "logistic": Logistic}[form.kind](math.prod(form.shape))
            # these numbers are the tape's own, not the program's
            with torch._C.DisableTorchFunction():
                v = density.sample(generator=self.rng, dtype=self.dtype).to(self.device).reshape(form.shape)
            self._record(form, v, name)
        else:
            v = self.take(form.kind, form.shape)
        value = form.value(v)
        if form.log_factor is not None:
            self.factors.append(form.log_factor(v, value))
        return value

    def record(self, form: Reparametrisation, value: Tensor) -> Tensor:
        """Record a value that was drawn otherwise, and return it."""
        assert form.inverse is not None
        v = form.inverse(value)
        self._record(form, v, None)
        if form.log_factor is not None:
            self.factors.append(form.log_factor(v, value))
        return value

    def finish(self) -> None:
        """Raise :class:`ModelError` if a replay drew fewer numbers than the recorded run."""
        if self.u is not None and self._next < len(self.draws):
            raise _changed(self.name, self.draws[self._next].line)

    @property
    def inputs(self) -> Tensor:
        """The recorded inputs, ``[D]``."""
        flat = [v.detach().to(self.dtype).reshape(-1) for v in self._recorded]
        return torch.cat(flat) if flat else torch.empty(0, dtype=self.dtype, device=self.device)

    def _record(self, form: Reparametrisation, v: Tensor, name: str | None) -> None:
        line = present_line() if name is None else name
        self.draws.append(Draw(form.kind, form.shape, self.in_prior, line))
        if form.of is not None:
            self.charted[line] = form.of
        self._recorded.append(v)

    def take(self, kind: Kind, shape: torch.Size) -> Tensor:
        """The next inputs.

        Raises:
            ModelError: the recorded run drew others here.
        """
        assert self.u is not None
        index = self._next
        if index >= len(self.draws) or self.draws[index][:2] != (kind, shape):
            raise _changed(self.name, present_line())
        self._next = index + 1
        return self._parts[index]


def _parts(u: Tensor, draws: Sequence[Draw]) -> list[Tensor]:
    """The inputs of each draw, in its shape; together, since the gradient of a slice is as large as all inputs."""
    runs = [(is_number, list(group)) for is_number, group in groupby(draws, lambda draw: not draw.shape)]
    # numbers one after another are one part of the vector
    sizes = [size for is_number, group in runs for size in ([len(group)] if is_number else [d.size for d in group])]
    vectors = iter(u.split(sizes) if len(sizes) > 1 else [u])
    parts: list[Tensor] = []
    for is_number, group in runs:
        if is_number:
            parts += next(vectors).unbind()
        else:
            parts += [v if len(d.shape) == 1 else v.reshape(d.shape) for d, v in zip(group, vectors, strict=False)]
    return parts


def check_same(name: str, first: Sequence[Draw], other: Sequence[Draw]) -> None:
    """Raise :class:`ModelError` if two recorded runs drew different numbers of numbers."""
    for a, b in zip(first, other, strict=False):
        if not a.is_like(b):
            raise _changed(name, b.line)
    if len(first) != len(other):
        longer = max(first, other, key=len)
        raise _changed(name, longer[min(len(first), len(other))].line)


def _changed(name: str, line: str) -> ModelError:
    return ModelError(
        f"{name} draws other random numbers from run to run, first at {line}: draw the same numbers in every run, and "
        "use only those that are needed, for example with torch.where"
    )


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


def within_distributions(most: int) -> bool:
    """Whether one of the ``most`` frames above the caller is of ``torch.distributions``."""
    for i, frame in enumerate(_frames(sys._getframe(2))):
        if i == most:
            return False
        if frame.f_code.co_filename.startswith(f"{_TORCH}/distributions/"):
            return True
    return False
