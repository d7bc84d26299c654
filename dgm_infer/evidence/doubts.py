"""Estimates that are of no use, and how they show."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .method import EstimateStatus

__all__ = ["doubts"]

# Share of the weights that one draw may have, the acceptance of moves below which none are made, and a standard error
# of log Z, in nats, that says nothing.
_SHARE, _MOVES, _NATS = 0.999, 1e-3, 10.0


def doubts(diagnostics: Mapping[str, Tensor], std_error: Tensor, status: EstimateStatus, chains: int) -> Iterator[str]:
    """Lines that name problems whose estimate and standard error mean nothing, whatever their status promises.

    Args:
        diagnostics: of an outcome, each ``[..., *batch]``.
        std_error: of log Z, ``[*batch]``.
        status: that of the method; bounds may rest on few draws and are bounds still.
        chains: chains per problem; of one alone nothing is said.
    """
    if chains == 1 or status not in ("unbiased", "consistent"):
        return
    share = diagnostics.get("max_weight_share")
    if share is not None and (share > _SHARE).any():
        yield (
            f"all weight is on one draw{_where(share > _SHARE)}: the estimate is far too low, and its standard error "
            "means nothing: use a base near the target, or more temperatures"
        )
    acceptance = diagnostics.get("acceptance")
    if acceptance is not None and (acceptance < _MOVES).any():
        yield (
            f"no chain moved{_where(acceptance < _MOVES)}: use a base near the target, more temperatures, or a smaller "
            "step_size"
        )
    wide = std_error > _NATS
    if wide.any():
        yield (
            f"the standard error of log Z is {std_error[wide].max().item():.2g}{_where(wide)}: the estimate says "
            "nothing: use a base near the target, more temperatures, or more draws"
        )


def _where(problems: Tensor) -> str:
    """`` of problem 2 and 5 others``; nothing for a single problem."""
    if problems.numel() == 1:
        return ""
    numbers = torch.nonzero(problems.reshape(-1)).flatten().tolist()
    return f" of problem {numbers[0]}" + (f" and {len(numbers) - 1} others" if len(numbers) > 1 else "")
