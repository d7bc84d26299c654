"""Straight-line code of a program, if it has the program's values and derivatives."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from .straight_line import Code, Function, Recording

__all__ = ["Codes", "Parts", "straightened"]


class Parts(NamedTuple):
    """What a run at one input makes."""

    output: list[Tensor]
    latents: list[Tensor]
    factors: list[Tensor]


class Codes(NamedTuple):
    """Code of each part."""

    output: Code
    latents: Code
    factors: Code


@torch.inference_mode(False)
def straightened(run: Callable[[Tensor], Parts], probes: Tensor) -> Codes | None:
    """Straight-line code of a run; None if it does not do what the run does, and the program must run as it is.

    Args:
        run: at one input ``[D]``.
        probes: inputs at which values and derivatives must be the same, ``[n, D]``, n at least 2.
    """
    try:
        v = probes[0].clone()
        with torch.no_grad(), Recording(v) as recording:
            parts = run(v)
        codes = [_checked(recording.code(part), run, i, probes) for i, part in enumerate(parts)]
    except Exception:
        # whatever torch refuses: the program itself is sure to work
        return None
    return Codes(*codes)


def _checked(code: Code, run: Callable[[Tensor], Parts], part: int, probes: Tensor) -> Code:
    """The code without ``rows`` where those are wrong.

    Raises:
        ArithmeticError: those of one input are.
    """
    expected = _with_gradients(lambda v: tuple(run(v)[part]), probes)
    if not all(each.isfinite().all() for each in expected):
        raise ArithmeticError("numbers that are not finite agree with anything")
    if not _agree(_with_gradients(code.row, probes), expected):
        raise ArithmeticError("the code of a run computes something else")
    if code.rows is not None:
        with suppress(Exception):
            if _agree(_gradients_of_rows(code.rows, probes), expected):
                return code
    # what writes to memory of one input fails for many, or mixes them
    if not _agree(_gradients_of_rows(_vectorised(code.row), probes), expected):
        raise ArithmeticError("the code of a run computes something else for several inputs")
    return code._replace(rows=None)


def _vectorised(row: Function) -> Function:
    return lambda v: tuple(value.movedim(0, -1) for value in torch.func.vmap(row)(v.T))


def _with_gradients(function: Function, probes: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``[n, N]`` of each input alone, and the gradients ``[n, D]`` of their weighted sums."""
    values, gradients = [], []
    for probe in probes:
        value, pull, *_ = torch.func.vjp(lambda v: _flat([x.unsqueeze(0) for x in function(v)], v)[0], probe.clone())
        values.append(value)
        gradients.append(pull(_weights(value))[0])
    return torch.stack(values), torch.stack(gradients)


def _gradients_of_rows(function: Function, probes: Tensor) -> tuple[Tensor, Tensor]:
    """The same, of all inputs at once."""
    v = torch.cat([probes, probes[:1], probes[:1]])

    def outputs(v: Tensor) -> Tensor:
        return _flat([x.movedim(-1, 0) for x in function(v.T.contiguous())], v)

    value, pull, *_ = torch.func.vjp(outputs, v)
    return value[: len(probes)], pull(_weights(value))[0][: len(probes)]


def _flat(values: Sequence[Tensor], like: Tensor) -> Tensor:
    if not values:
        return like.new_zeros(len(like) if like.ndim > 1 else 1, 0)
    return torch.cat([value.reshape(len(value), -1).to(like.dtype) for value in values], -1)


def _weights(value: Tensor) -> Tensor:
    return torch.linspace(1, 2, value.shape[-1], dtype=value.dtype, device=value.device).expand_as(value)


def _agree(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    tolerance = 1000 * torch.finfo(a[0].dtype).eps
    return all(torch.allclose(x, y, tolerance, tolerance) for x, y in zip(a, b, strict=True))
