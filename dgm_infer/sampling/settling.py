"""When a warm-up of open length has done its work."""

import torch
from torch import Tensor

__all__ = ["Settling", "is_level"]

# Transitions in each of the two windows whose energies are compared.
_WINDOW = 10


class Settling:
    """Whether adapted values and energies have stopped moving.

    The efficiency of a kernel is flat about its best step size and length, which are not known better than the changes
    that a few chains' acceptance makes in them: a value has settled when it moved by less than a fifth over the latest
    third of its adaptation, on every problem.
    """

    fewest = 40
    """Transitions before anything counts as settled."""
    movement = 0.2
    """Largest range of a settled value, in its log."""

    def __init__(self):
        self._values: list[Tensor] = []
        self._energies: list[Tensor] = []

    def update(self, values: Tensor, energy: Tensor) -> None:
        """Learn from a transition.

        Args:
            values: adapted ones after it, positive, ``[K, *batch]``.
            energy: of the chains after it, ``[chains, *batch]``.
        """
        self._values.append(values.log())
        self._energies.append(energy)

    @property
    def reached(self) -> bool:
        """Whether everything has settled."""
        made = len(self._values)
        if made < self.fewest or not is_level(self._energies):
            return False
        latest = torch.stack(self._values[-(made // 3) :])
        return bool((latest.amax(0) - latest.amin(0) < self.movement).all())


def is_level(energies: list[Tensor]) -> bool:
    """Whether the energies of chains, ``[chains, *batch]`` of every transition, have stopped rising or falling.

    Their means over the latest ten transitions and over the ten before are compared, in units of what two such means
    of one chain differ by: 0.8 standard deviations, if the correlation of successive ones is a half. One of twenty
    batches that have settled looks as if it had not.
    """
    if len(energies) < 2 * _WINDOW:
        return False
    before, after = (torch.stack(part) for part in (energies[-2 * _WINDOW : -_WINDOW], energies[-_WINDOW:]))
    chains, problems = after.shape[1], after[0, 0].numel()
    deviation = after.flatten(0, 1).std(0) / chains**0.5
    level = torch.special.ndtri(torch.tensor(1 - 0.025 / problems, dtype=torch.float64)).item()
    # a NaN is not level
    return bool(((after.mean((0, 1)) - before.mean((0, 1))).abs() <= 0.8 * level * deviation).all())
