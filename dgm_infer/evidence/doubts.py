"""Estimates that are of no use, and how they show."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .method import EstimateStatus

__all__ = ["doubts"]

# Share of the weights that one draw may have, and the acceptance of moves below which none are made.
_SHARE, _MOVES = 0.999, 1e-3


def doubts(diagnostics: Mapping[str, Tensor], status: EstimateStatus, chains: int) -> Iterator[str]:
    """Lines that name problems whose estimate and standard error mean nothing, whatever their status promises.

    Args:
        diagnostics: of an outcome, each ``[..., *batch]``.
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


def _where(problems: Tensor) -> str:
    """`` of problem 2 and 5 others``; nothing for a single problem."""
    if problems.numel() == 1:
        return ""
    numbers = torch.nonzero(problems.reshape(-1)).flatten().tolist()
    return f" of problem {numbers[0]}" + (f" and {len(numbers) - 1} others" if len(numbers) > 1 else "")
