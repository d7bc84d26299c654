"""Operators on flat outputs whose structure conditioning can use; anything else is a plain callable."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DisjointSums", "Operator", "Selection"]


@dataclass(frozen=True)
class Selection:
    """Entries of a flat vector: ``index`` is ``[Dy]``, or ``[*batch, Dy]`` when every problem has its own."""

    index: Tensor
    size: int

    @property
    def is_everything(self) -> bool:
        return self.index.ndim == 1 and torch.equal(self.index, torch.arange(self.size, device=self.index.device))

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., *batch, Dx] -> [..., *batch, Dy]``."""
        if self.index.ndim == 1:
            return x.index_select(-1, self.index)
        lead = torch.broadcast_shapes(x.shape[:-1], self.index.shape[:-1])
        return x.expand(*lead, x.shape[-1]).gather(-1, self.index.expand(*lead, -1))

    def scatter(self, values: Tensor, into: Tensor) -> Tensor:
        """``into [..., *batch, Dx]`` with the selected entries replaced by ``values [..., *batch, Dy]``."""
        lead = into.shape[:-1]
        return into.scatter(-1, self.index.expand(*lead, -1), values.expand(*lead, -1))


@dataclass(frozen=True)
class DisjointSums:
    """``y_j = sum_k weights_jk x_{index_jk}`` where no entry of x occurs twice; index and weights ``[Dy, K]``."""

    index: Tensor
    weights: Tensor
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., Dx] -> [..., Dy]``."""
        return (x.index_select(-1, self.index.flatten()).unflatten(-1, self.index.shape) * self.weights).sum(-1)


Operator = Selection | DisjointSums | Callable[[Tensor], Tensor]
