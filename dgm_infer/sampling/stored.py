"""What a file of draws knows of its run: the kernel, as JSON; the problem, by what it computes at a few points."""

import dataclasses
import math
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..errors import ArgumentError, cause
from ..kernels.mode_jumps import Jumps
from ..linear_maps import LinearMap
from ..target import Target, first_points, reference

# Points of a fingerprint at most, and numbers of them: two of a large problem are half a megabyte.
_N, _NUMBERS = 64, 2**16


def known_problem(problem: Fibre | Target | None) -> dict[str, Tensor] | None:
    """The fingerprint of a problem: ``points [n, *batch, D]``, and what it computes there by name, as energy or
    constraint, density and latents. None of none, and of one that fails there.
    """
    if problem is None:
        return None
    like = reference(problem)
    rng = torch.Generator("cpu" if like is None else like.device).manual_seed(0)
    try:
        n = min(_N, max(2, _NUMBERS // (math.prod(problem.batch_shape) * problem.dim)))
        with torch.no_grad():
            if isinstance(problem, Fibre):
                points = problem.observed.sample_inputs((n, *problem.batch_shape), rng, problem.values)
            else:
                points = first_points(problem, n, rng)
            return {"points": points, **_values(problem, points)}
    except Exception:
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
        stored: :func:`known_problem` of what was sampled; None if it is not known.
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
        if (by := _difference(value, other)) is not None:
            raise refuse(f"its {name} differs from that of the problem in {path}{by}")


def check_energies(problem: Fibre | Target, kernel: Any, state: Any) -> None:
    """Raise ArgumentError unless a problem has the energies that chains had where they stopped.

    Problems may be the same at the points of a fingerprint and differ where the chains are.

    Args:
        state: of the kernel; one without an energy is not looked at.
    """
    known = getattr(state, "energy", None)
    if not isinstance(known, Tensor):
        return
    with torch.no_grad():
        energy = kernel.init(problem, state.position).energy
    if (by := _difference(energy, known)) is not None:
        raise ArgumentError(
            f"the energy of {type(problem).__name__} where chains stopped differs from theirs there{by}: "
            "give the problem that was sampled, or begin a new run"
        )


def _difference(value: Tensor, other: Tensor) -> str | None:
    """By how much numbers of one shape differ, in words; None if rounding explains it."""
    coarser = min(
        value.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).bits if dtype.is_floating_point else 64
    )
    value, other = value.detach().cpu().double(), other.detach().cpu().double()
    finite = other.isfinite()
    size = other[finite].abs().max().clamp_min(1) if finite.any() else other.new_ones(())
    error = (value - other)[finite & value.isfinite()].abs()
    near = torch.finfo(coarser).eps ** 0.5 if coarser.is_floating_point else 0.0
    if torch.equal(finite, value.isfinite()) and not (error > near * size).any():
        return None
    return f" by {error.max():.2g}" if error.numel() else ""


def _values(problem: Any, points: Tensor) -> dict[str, Tensor]:
    if isinstance(problem, Fibre):
        found = {"constraint": problem.constraint(points), "log density": problem.observed.log_density(points)}
    else:
        found = {"energy": problem.energy(points)}
    latents = {f"latent {name}": value for name, value in problem.latents(points).items()}
    return {name: value.detach() for name, value in {**found, **latents}.items()}


_METHODS = ("check", "init", "step")
# What kernels hold beside numbers.
_PARTS = (Jumps, LinearMap)


@dataclass(frozen=True)
class UnknownKernel:
    """A stored kernel whose class is not available, or cannot be rebuilt; it keeps its name and samples nothing."""

    class_path: str
    init_args: dict[str, Any]
    """The fields as they were stored."""

    def check(self, problem: Any) -> None:
        """Refuse every problem.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"the kernel {self.class_path} is not available here: import its module before loading the draws, or give "
            "sample() another kernel"
        )

    def init(self, problem: Any, position: Tensor) -> Any:
        self.check(problem)

    def step(self, problem: Any, state: Any, rng: torch.Generator) -> Any:
        self.check(problem)


def to_json(kernel: Any) -> dict[str, Any]:
    """``{"class_path", "init_args"}``; of a kernel that is not a dataclass, names alone."""
    if isinstance(kernel, UnknownKernel):
        return {"class_path": kernel.class_path, "init_args": kernel.init_args}
    if dataclasses.is_dataclass(kernel):
        values = {f.name: _value_to_json(getattr(kernel, f.name)) for f in dataclasses.fields(kernel) if f.init}
    else:
        # what a plain class was made with is not known: an instance with attributes is named, not made again
        values = {name: {"repr": repr(value)} for name, value in getattr(kernel, "__dict__", {}).items()}
    return {"class_path": _class_path(type(kernel)), "init_args": values}


def from_json(stored: dict[str, Any]) -> Any:
    """The kernel that :func:`to_json` described; an :class:`UnknownKernel` if it cannot be rebuilt.

    Classes are looked up in modules that are already imported: loading a file runs no code that it names.
    """
    cls = _imported(stored["class_path"])
    if cls is not None:
        try:
            return cls(**{name: _value_from_json(value) for name, value in stored["init_args"].items()})
        except (TypeError, ValueError):
            # fields of another version of the class, or fields that JSON could not hold
            pass
    return UnknownKernel(stored["class_path"], stored["init_args"])


def _class_path(cls: type) -> str:
    """Path of the class in the shortest package that exports it, which survives a move of its file."""
    parts = cls.__module__.split(".")
    for n in range(1, len(parts)):
        package = ".".join(parts[:n])
        if getattr(sys.modules.get(package), cls.__name__, None) is cls:
            return f"{package}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _imported(class_path: str) -> Any:
    """The class at that path if its module is imported and it is a kernel or part of one, else None."""
    module, _, name = class_path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    is_kernel = isinstance(found, type) and all(callable(getattr(found, method, None)) for method in _METHODS)
    is_part = isinstance(found, type) and issubclass(found, _PARTS)
    return found if is_kernel or is_part else None


def _value_to_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return [_value_to_json(item) for item in value]
    if isinstance(value, type(None) | bool | int | float | str):
        return value
    if isinstance(value, _PARTS) or all(callable(getattr(value, method, None)) for method in _METHODS):
        return to_json(value)
    # what JSON cannot hold is stored by its repr, so that the draws can still be saved
    return {"repr": repr(value)}


def _value_from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value_from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if "class_path" in value:
        kernel = from_json(value)
        if not isinstance(kernel, UnknownKernel):
            return kernel
    raise ValueError(f"{value} cannot be rebuilt")
