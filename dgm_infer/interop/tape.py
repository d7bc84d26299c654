"""The draws of one run: recorded, or replayed from an input vector."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributions as td

from ..errors import ModelError
from ..models import Logistic, StandardNormal
from .forms import Form, Kind
from .sources import present_line

__all__ = ["Draw", "Tape", "check_same"]


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

    def draw(self, form: Form, name: str | None = None) -> Tensor:
        """The value of a form: from the next inputs, or from random ones, which are recorded."""
        if self.u is None:
            density = {"normal": StandardNormal, "logistic": Logistic}[form.kind](math.prod(form.shape))
            # these numbers are the tape's own, not the program's
            with torch._C.DisableTorchFunction():
                v = density.sample(generator=self.rng, dtype=self.dtype).to(self.device).reshape(form.shape)
            self._record(form, v, name)
        else:
            v = self._taken(form)
        value = form.value(v)
        if form.log_factor is not None:
            self.factors.append(form.log_factor(v, value))
        return value

    def record(self, form: Form, value: Tensor) -> Tensor:
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

    def _record(self, form: Form, v: Tensor, name: str | None) -> None:
        line = present_line() if name is None else name
        self.draws.append(Draw(form.kind, form.shape, self.in_prior, line))
        if form.of is not None:
            self.charted[line] = form.of
        self._recorded.append(v)

    def _taken(self, form: Form) -> Tensor:
        assert self.u is not None
        index = self._next
        if index >= len(self.draws) or self.draws[index][:2] != (form.kind, form.shape):
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
