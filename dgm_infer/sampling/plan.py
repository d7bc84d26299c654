"""What a run of chains is asked for, the kernel it gets where none is given, and what it has come to."""

import os
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..arguments import choice, fraction, positive, random_seed, whole_number
from ..conditioning.abc_kernels import InputPosterior
from ..conditioning.fibre import Fibre
from ..conditioning.marginal import NoiseMarginal
from ..kernels import HMC, ConstrainedHMC, EllipticalSlice, Kernel, LiftedHMC, RiemannianHMC
from ..target import Target


@dataclass(frozen=True)
class RidgeSettings:
    """When a posterior is a ridge so narrow that kernels with Jacobians cost less than HMC.

    HMC takes steps of the width of a ridge, :class:`ConstrainedHMC` and :class:`RiemannianHMC` move along it. On
    ``dgm-infer bench samplers`` HMC no longer mixes from a stretch of about 40, with one row.
    """

    prior_draws: int = 8
    """At which the stretch is measured: how much narrower than the prior a posterior is across the ridge."""
    step: float = 5
    """Steps of HMC per step with a Jacobian of no rows, in time."""
    row: float = 2
    """The same for every row of the Jacobian: a backward pass."""

    def least(self, rows: int) -> float:
        """The stretch from which a ridge is narrow."""
        return self.step + self.row * rows


_RIDGE = RidgeSettings()


def default_kernel(problem: Fibre | Target) -> Kernel:
    """The default kernel for this kind of problem."""
    if isinstance(problem, Fibre):
        narrow = problem.marginal is None or _is_ridge(problem, problem.marginal)
        return ConstrainedHMC() if narrow else LiftedHMC()
    if not problem.has_gradient:
        return EllipticalSlice()
    return RiemannianHMC() if isinstance(problem, InputPosterior) and _is_narrow(problem) else HMC()


def _is_ridge(problem: Fibre, marginal: NoiseMarginal) -> bool:
    """Whether additive noise is narrow, and leaves most directions of the global inputs free.

    Where it fixes most of them an adapted metric suffices: a predator-prey series of 104 inputs and 100 values, and
    digits of 12 latents and 9 pixels, mix no better on the fibre.
    """
    rows = problem.values.shape[-1]
    if 2 * rows > marginal.dim:
        return False
    u1 = marginal.initial_draws(_RIDGE.prior_draws, torch.Generator(problem.values.device).manual_seed(0))
    precision = marginal.precision(u1)
    # a simulator may overflow at prior draws, which says nothing
    told = precision.isfinite().all(-1).all(-1)
    unit = torch.eye(marginal.dim).to(precision)
    stretch = torch.linalg.eigvalsh(torch.where(told[..., None, None], precision, unit))[..., -1].sqrt()
    return bool(told.any()) and stretch[told].median().item() > _RIDGE.least(rows)


def _is_narrow(problem: InputPosterior) -> bool:
    """Whether a tolerance is so small that its steps cost HMC more than Jacobians cost :class:`RiemannianHMC`."""
    if problem.embedding is None:
        return False
    u = problem.initial_draws(_RIDGE.prior_draws, torch.Generator(problem.values.device).manual_seed(0))
    rows = min(problem.embedding.fibre.values.shape[-1], problem.dim)
    return problem.embedding.stretch(u).nanmedian().item() > _RIDGE.least(rows)


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
