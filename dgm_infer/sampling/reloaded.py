"""Whether draws from a file are those of a problem."""

import os
from typing import Any

import torch
from torch import Tensor

from ..conditioning import Fibre
from ..errors import ArgumentError
from ..kernels import Kernel
from ..kernels.mode_jumps import innermost
from ..target import Target, reference

__all__ = ["check_problem", "last_energy_of"]

# Constraint error over the scale of the data, or difference of energies over their size, below which draws are those of
# a problem, unless the tolerance of a fibre was larger.
_NEAR = 1e-3


def last_energy_of(problem: Any, inputs: Tensor | None) -> Tensor | None:
    """Energy of a target at the last draws, ``[chains, *batch]``; None of others, and where it fails.

    A look at the draws must not cost them.
    """
    if inputs is None or not isinstance(problem, Target):
        return None
    like = reference(problem)
    last = inputs[:, -1]
    try:
        with torch.no_grad():
            return problem.energy(last if like is None else last.to(like)).detach().cpu().double()
    except Exception:
        return None


def check_problem(
    call: str,
    path: str | os.PathLike,
    problem: Fibre | Target,
    kernel: Kernel,
    inputs: Tensor,
    last_energy: Tensor | None,
) -> None:
    """Raise ArgumentError unless inputs ``[chains, draws, *batch, D]`` are draws of the problem."""
    expected = (*problem.batch_shape, problem.dim)
    if tuple(inputs.shape[2:]) != expected:
        raise ArgumentError(
            f"{call}(problem=...): {path} holds inputs of shape {tuple(inputs.shape[2:])}, the problem has "
            f"{expected}: give the problem that was sampled"
        )
    if isinstance(problem, Fibre):
        error = problem.constraint_error(inputs[:, -1].to(problem.values))
        if not (error < max(_NEAR, 10 * (getattr(innermost(kernel), "tolerance", None) or 0)) * problem.scale).all():
            raise ArgumentError(
                f"{call}(problem=...): the draws in {path} miss its observation by {error.max():.2g}: give the "
                "problem that was sampled"
            )
    energy = last_energy_of(problem, inputs)
    if energy is not None and last_energy is not None:
        error = (energy - last_energy).abs()
        if (error > _NEAR * last_energy.abs().clamp_min(1)).any():
            raise ArgumentError(
                f"{call}(problem=...): the energy at the draws in {path} differs from that of the run by "
                f"{error.max():.2g}: give the problem that was sampled"
            )
