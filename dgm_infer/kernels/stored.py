"""Kernels as JSON: a class path and the values of its fields, as stored in files of draws."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..linear_maps import LinearMap
from .mode_jumps import Jumps

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
