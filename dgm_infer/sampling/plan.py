"""What a run of chains is asked for, begins with, and has come to."""

import os
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch import Tensor

from ..arguments import choice, fraction, positive, random_seed, whole_number
from ..conditioning.fibre import Fibre
from ..kernels import Kernel
from ..target import Target

# Iterations of a warm-up whose length is not given, at most.
LONGEST_WARMUP = 300


@dataclass(frozen=True)
class RunPlan:
    """The numbers of a run, as :func:`sample` takes them."""

    chains: int
    warmup: int
    draws: int
    thin: int
    seed: int
    keep: str
    target_acceptance: float | None
    is_open: bool = False
    """Whether the warm-up may end sooner."""
    block: int | None = None
    """Bytes of draws that are held in memory; None for all of them."""

    @classmethod
    def checked(
        cls,
        *,
        chains: int,
        warmup: int | None,
        draws: int,
        thin: int,
        seed: int | None,
        keep: str,
        target_acceptance: float | None,
    ) -> Self:
        """The plan of these arguments of ``sample``; a random seed for None.

        Raises:
            ArgumentError: one is outside its range.
        """
        return cls(
            chains=whole_number("sample", "chains", chains, 1),
            warmup=LONGEST_WARMUP if warmup is None else whole_number("sample", "warmup", warmup, 0),
            draws=whole_number("sample", "draws", draws, 1),
            thin=whole_number("sample", "thin", thin, 1),
            seed=random_seed("sample", seed),
            keep=choice("sample", "keep", keep, ("inputs", "latents")),
            target_acceptance=(
                None if target_acceptance is None else fraction("sample", "target_acceptance", target_acceptance)
            ),
            is_open=warmup is None,
        )

    @property
    def transitions(self) -> int:
        return self.warmup + self.draws * self.thin


class Keeping(NamedTuple):
    """Where a run is kept, and who makes it: arguments of the functions that begin one."""

    run: str | os.PathLike | None
    checkpoint_every: float
    devices: Any
    executor: Any

    @classmethod
    def checked(cls, call: str, run: Any, checkpoint_every: float, devices: Any = None, executor: Any = None) -> Self:
        """These arguments of a function.

        Raises:
            ArgumentError: ``checkpoint_every`` is not positive.
        """
        return cls(run, positive(call, "checkpoint_every", checkpoint_every), devices, executor)

    @property
    def is_asked_for(self) -> bool:
        return any(each is not None for each in (self.run, self.devices, self.executor))


class RunInputs(NamedTuple):
    """What a run begins with."""

    problem: Fibre | Target
    kernel: Kernel
    initial: Tensor | None
    """Given starting points, ``[chains, *batch, D]``."""
    undecided: bool
    """Whether the kernel is the default one, which jumps where several modes are found."""


class RunOutcome(NamedTuple):
    """What a run has come to."""

    problem: Fibre | Target | None
    """None if it is not at hand."""
    kernel: Kernel
    plan: RunPlan
    draws: dict[str, Tensor]
    """``inputs`` or ``latents.*``, and ``stats.*``: each ``[chains, draws, ...]``."""
    made: int
    """Draws so far."""
    ancestors: Tensor | None
    stayed: Tensor
    adapted: bool
    """Whether warm-up chose the step size."""
