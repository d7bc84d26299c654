"""Objects as bytes without pickles: a tree of class paths and fields as JSON, and its tensors, in one safetensors file.

An object is what its class and its attributes are. Reading looks classes and functions up by name in modules that are
imported, or in this project's packages; it calls nothing that a file names, but for ``__setstate__`` of such a class.
The standard library's are refused: no file can ask for ``os.system``.
"""

import collections
import dataclasses
import enum
import functools
import importlib
import json
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ArgumentError, CheckpointError, cause

# Packages that may be imported for a class that a file names.
_OWN = ("dgm_infer", "generators", "trainers", "evaluation")
# Modules of the standard library whose functions and classes compute, and do nothing else.
_HARMLESS = ("math", "operator", "collections")
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def encode(value: Any, what: str, given: Sequence[Any] = ()) -> bytes:
    """The bytes of an object.

    Args:
        what: its name in messages.
        given: objects that are referred to by their place here, and not stored: the reader has them.

    Raises:
        ArgumentError: it holds what neither a class path nor tensors describe, such as a lambda or a lock.
    """
    writer = _Writer(given)
    try:
        tree = json.dumps(writer.node(value))
        return _saved(writer.tensors, {"tree": tree})
    except (TypeError, ValueError, RuntimeError, NotImplementedError, RecursionError, AttributeError) as error:
        raise ArgumentError(
            f"{what} cannot be stored: {cause(error)}; functions and classes have to be those of a module, not lambdas"
        ) from error


def decode(content: bytes, what: str, devices: dict[str, str] | None = None, given: Sequence[Any] = ()) -> Any:
    """The object of :func:`encode`.

    Args:
        what: its name in messages.
        devices: for the name of a device that tensors were on, that of the one to put them on.
        given: the reader's own objects in place of the writer's.

    Raises:
        CheckpointError: one of its classes is not available, or is another one now.
    """
    try:
        return _Reader(_loaded(content), devices or {}, given).value(_tree(content))
    except Exception as error:  # of __setstate__ too
        raise CheckpointError(f"{what} cannot be read here: {cause(error)}") from error


def modules_of(*contents: bytes) -> list[str]:
    """The modules whose classes and functions these bytes of :func:`encode` name."""
    found = set()
    waiting = [_tree(content) for content in contents]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, str) and ":" in node and node.partition(":")[0] in sys.modules:
            found.add(node.partition(":")[0])
    return sorted(found)


def encode_tensors(tensors: dict[str, Tensor]) -> bytes:
    """Tensors by name; they are copied to the CPU."""
    return _saved({name: _own(tensor) for name, tensor in tensors.items()})


def decode_tensors(content: bytes, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Tensors by name, on a device."""
    return {name: value.to(device) for name, value in _loaded(content).items()}


def _tree(content: bytes) -> Any:
    size = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["tree"])


def _saved(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    from safetensors.torch import save

    return save(tensors, metadata)


def _loaded(content: bytes) -> dict[str, Tensor]:
    from safetensors.torch import load

    return load(content)


def _own(tensor: Tensor) -> Tensor:
    """A copy with a memory of its own: a part of a tensor would be stored with all of it."""
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)


class _Writer:
    """Turns objects into nodes of JSON: a plain value is itself, everything else a list that begins with its kind."""

    def __init__(self, given: Sequence[Any] = ()):
        self.tensors: dict[str, Tensor] = {}
        self._given = {id(value): i for i, value in enumerate(given)}
        # what was met already, kept alive so that no other object takes its address
        self._met: dict[int, tuple[Any, int]] = {}

    def node(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if id(value) in self._given:
            return ["given", self._given[id(value)]]
        for name, sequence in _SEQUENCES.items():
            if kind is sequence:
                return [name, [self.node(item) for item in value]]
        if kind in (dict, collections.OrderedDict):
            pairs = [[self.node(key), self.node(item)] for key, item in value.items()]
            return ["dict", pairs, kind is collections.OrderedDict]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, np.generic | np.ndarray):
            return ["array", self.node(torch.as_tensor(np.asarray(value))), isinstance(value, np.generic)]
        if isinstance(value, type):
            return ["class", _path_of(value)]
        if isinstance(value, _FUNCTIONS):
            return ["class", _path_of(value)]
        if isinstance(value, types.MethodType):
            return ["method", self.node(value.__self__), value.__name__]
        if kind is functools.partial:
            return ["partial", self.node(value.func), self.node(value.args), self.node(value.keywords)]
        if isinstance(value, enum.Enum):
            return ["enum", _path_of(kind), self.node(value.value)]
        if isinstance(value, slice):
            return ["slice", [self.node(part) for part in (value.start, value.stop, value.step)]]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["named", _path_of(kind), [self.node(item) for item in value]]
        if id(value) in self._met:
            return ["known", self._met[id(value)][1]]
        number = len(self._met)
        self._met[id(value)] = (value, number)
        if isinstance(value, Tensor):
            return self._tensor(value, number)
        return self._object(value, number)

    def _tensor(self, value: Tensor, number: int) -> Any:
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_meta:
            raise TypeError(f"a {type(value).__name__} of layout {value.layout} on {value.device} is not stored")
        self.tensors[str(number)] = _own(value)
        # sums run in the order of the memory: to the bit they are those of the same layout
        strides = None if value.is_contiguous() else list(value.stride())
        return ["tensor", number, str(value.device), value.requires_grad, isinstance(value, nn.Parameter), strides]

    def _object(self, value: Any, number: int) -> Any:
        kind = type(value)
        if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
            raise TypeError(f"a {kind.__name__} is not made of its attributes")
        # an object of C code refuses this, whose attributes are not all that it is
        object.__new__(kind)
        if dataclasses.is_dataclass(value):
            state = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        else:
            found = value.__getstate__()
            parts = found if isinstance(found, tuple) else (found,)
            state = {name: item for part in parts if part for name, item in part.items()}
        return ["object", number, _path_of(kind), [[name, self.node(item)] for name, item in state.items()]]


class _Reader:
    """Turns nodes into objects again."""

    def __init__(self, tensors: dict[str, Tensor], devices: dict[str, str], given: Sequence[Any] = ()):
        self._tensors, self._devices, self._givens = tensors, devices, given
        self._met: dict[int, Any] = {}

    def value(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, *rest = node
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.value(item) for item in rest[0])
        return getattr(self, f"_{kind}")(*rest)

    def _dict(self, pairs: list, ordered: bool) -> dict:
        values = {self.value(key): self.value(item) for key, item in pairs}
        return collections.OrderedDict(values) if ordered else values

    def _dtype(self, name: str) -> Any:
        return getattr(torch, name)

    def _device(self, name: str) -> torch.device:
        return torch.device(self._devices.get(name, name))

    def _array(self, node: Any, is_scalar: bool) -> Any:
        array = self.value(node).numpy()
        return array[()] if is_scalar else array

    def _class(self, path: str) -> Any:
        return _found(path)

    def _method(self, node: Any, name: str) -> Any:
        return getattr(self.value(node), name)

    def _partial(self, function: Any, arguments: Any, named: Any) -> Any:
        return functools.partial(self.value(function), *self.value(arguments), **self.value(named))

    def _enum(self, path: str, value: Any) -> Any:
        return _found(path)(self.value(value))

    def _slice(self, parts: list) -> slice:
        return slice(*map(self.value, parts))

    def _named(self, path: str, items: list) -> Any:
        return tuple.__new__(_found(path), [self.value(item) for item in items])

    def _known(self, number: int) -> Any:
        return self._met[number]

    def _given(self, number: int) -> Any:
        return self._givens[number]

    def _tensor(
        self, number: int, device: str, requires_grad: bool, is_parameter: bool, strides: list[int] | None = None
    ) -> Tensor:
        tensor = _laid_out(self._tensors[str(number)].to(self._device(device)), strides)
        if is_parameter:
            tensor = nn.Parameter(tensor, requires_grad)
        self._met[number] = tensor.requires_grad_(requires_grad)
        return tensor

    def _object(self, number: int, path: str, state: list) -> Any:
        kind = _found(path)
        if hasattr(kind, "__del__"):
            raise TypeError(f"{path} does something when it ends")
        made = self._met[number] = object.__new__(kind)
        values = {name: self.value(item) for name, item in state}
        if hasattr(kind, "__setstate__"):
            made.__setstate__(values)
        else:
            for name, value in values.items():
                object.__setattr__(made, name, value)
        return made


def _laid_out(values: Tensor, strides: list[int] | None) -> Tensor:
    """The same values in memory as they were: transposed or expanded; in order for None, and for slices of others."""
    if strides is None or values.numel() == 0:
        return values
    # what is expanded has one value there
    corner = values[tuple(slice(None if stride else 1) for stride in strides)]
    order = sorted(range(values.ndim), key=lambda i: -strides[i])
    dense = corner.permute(order).contiguous().permute([order.index(i) for i in range(values.ndim)])
    return dense.expand_as(values)


def _path_of(value: Any) -> str:
    """``module:name`` of a class or a function."""
    path = f"{value.__module__}:{value.__qualname__}"
    if getattr(torch, value.__name__, None) is value:
        path = f"torch:{value.__name__}"
    if _found(path) is not value:
        raise ValueError(f"{path} is not what has this name")
    return path


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    root = module.split(".")[0]
    if root in sys.stdlib_module_names and root not in _HARMLESS:
        raise ValueError(f"{path} is of the standard library")
    if root in _OWN:
        importlib.import_module(module)
    found: Any = sys.modules.get(module)
    if found is None:
        raise ValueError(f"import the module {module} first, which defines {name}, or give problem=")
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type | types.FunctionType | types.BuiltinFunctionType):
        raise ValueError(f"there is no {name} in {module} here: define it as it was, or give problem=")
    return found
