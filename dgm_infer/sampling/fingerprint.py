"""What a problem computes at a few points: two problems that differ there are not the same one."""

import os
from typing import Any

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..errors import ArgumentError, cause
from ..target import Target, reference

# Points of a fingerprint.
_N = 2


def fingerprint(problem: Fibre | Target) -> dict[str, Tensor]:
    """``points [2, *batch, D]`` and what the problem computes there, by name: energy or constraint, density, latents.

    Raises:
        ArgumentError: it fails there.
    """
    like = reference(problem)
    rng = torch.Generator("cpu" if like is None else like.device).manual_seed(0)
    try:
        with torch.no_grad():
            if isinstance(problem, Fibre):
                points = problem.observed.sample_inputs((_N, *problem.batch_shape), rng, problem.values)
            else:
                # the target's own starting points: nothing else says where the density is
                kind = type(problem)
                own = kind.start is not Target.start and kind.initial_draws is Target.initial_draws
                points = (problem.start if own else problem.initial_draws)(_N, rng)
            return {"points": points, **_values(problem, points)}
    except Exception as error:
        raise ArgumentError(f"a {type(problem).__name__} fails at points of its own: {cause(error)}") from error


def known_problem(problem: Any) -> dict[str, Tensor] | None:
    """The fingerprint of a problem that is at hand and computes; None of others."""
    try:
        return None if problem is None else fingerprint(problem)
    except ArgumentError:
        return None


def packed(known: dict[str, Tensor]) -> Tensor:
    """A fingerprint as the bytes of a safetensors file, ``[n]``."""
    from safetensors.torch import save

    own = {name: value.cpu().contiguous().clone() for name, value in known.items()}
    return torch.frombuffer(bytearray(save(own)), dtype=torch.uint8)


def unpacked(content: Tensor | None) -> dict[str, Tensor] | None:
    """The fingerprint of these bytes; None of None.

    Raises:
        ValueError: they are damaged.
    """
    if content is None:
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content.numpy().tobytes())
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def check_problem(
    call: str, path: str | os.PathLike, problem: Fibre | Target, stored: dict[str, Tensor] | None, inputs: Tensor | None
) -> None:
    """Raise ArgumentError unless draws are those of the problem.

    Numbers may differ by half of their digits: other devices and libraries round in other ways.

    Args:
        stored: the :func:`fingerprint` of what was sampled; None if it is not known.
        inputs: the draws, ``[chains, draws, *batch, D]``, if they were kept.
    """

    def refuse(what: str) -> ArgumentError:
        return ArgumentError(f"{call}(problem=...): {what}: give the problem that was sampled")

    if stored is None and inputs is None:
        return
    expected = (*problem.batch_shape, problem.dim)
    held = inputs[0, :1] if inputs is not None else None if stored is None else stored["points"]
    if held is not None and tuple(held.shape[1:]) != expected:
        raise refuse(f"{path} holds inputs of shape {tuple(held.shape[1:])}, the problem has {expected}")
    if stored is None:
        return
    like = reference(problem)
    points = stored["points"] if like is None else stored["points"].to(like)
    try:
        with torch.no_grad():
            values = _values(problem, points)
    except Exception as error:
        raise refuse(f"it fails at points of the problem in {path}: {cause(error)}") from error
    if values.keys() != stored.keys() - {"points"}:
        names = ", ".join(sorted(values.keys() ^ (stored.keys() - {"points"})))
        raise refuse(f"it is of another kind than the problem in {path}, or has other latents ({names})")
    for name, value in values.items():
        other = stored[name]
        if value.shape != other.shape:
            raise refuse(f"its {name} has shape {tuple(value.shape)}, that of {path} has {tuple(other.shape)}")
        coarser = min(
            value.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).bits if dtype.is_floating_point else 64
        )
        value, other = value.detach().cpu().double(), other.detach().cpu().double()
        finite = other.isfinite()
        size = other[finite].abs().max().clamp_min(1) if finite.any() else other.new_ones(())
        error = (value - other)[finite & value.isfinite()].abs()
        near = torch.finfo(coarser).eps ** 0.5 if coarser.is_floating_point else 0.0
        if not torch.equal(finite, value.isfinite()) or (error > near * size).any():
            by = f" by {error.max():.2g}" if error.numel() else ""
            raise refuse(f"its {name} differs from that of the problem in {path}{by}")


def _values(problem: Any, points: Tensor) -> dict[str, Tensor]:
    if isinstance(problem, Fibre):
        found = {"constraint": problem.constraint(points), "log density": problem.observed.log_density(points)}
    else:
        found = {"energy": problem.energy(points)}
    latents = {f"latent {name}": value for name, value in problem.latents(points).items()}
    return {name: value.detach() for name, value in {**found, **latents}.items()}
