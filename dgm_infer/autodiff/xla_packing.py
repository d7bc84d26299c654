"""Tensors given to machine code and taken from it, several in one: each costs microseconds by itself."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .xla_operations import array_type

# Bytes from which on a tensor is not copied for the sake of microseconds.
_LARGE = 2**14


def as_array(tensor: Tensor) -> Any:
    """The numbers of a tensor, where they are: of NumPy on the host, else of JAX."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        from jax import dlpack

        return dlpack.from_dlpack(tensor)
    if tensor.dtype is torch.bfloat16:
        from jax.numpy import bfloat16

        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()


def _as_tensor(array: Any, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The first n rows of an array of JAX, with memory of their own."""
    if device.type != "cpu":
        return torch.from_dlpack(array)[:n].clone()
    rows = np.asarray(array)[:n].copy()
    if dtype is torch.bfloat16:
        return torch.from_numpy(rows.view(np.int16)).view(dtype)
    return torch.from_numpy(rows)


class Packing:
    """How tensors are joined by type: small ones, or all.

    Args:
        example: such tensors. With ``whole`` their first dimension is one that all have.
        whole: whether large ones are joined too, with their first dimension kept.
    """

    def __init__(self, example: Sequence[Tensor], whole: bool = False):
        self._whole = whole
        self._shapes = [tuple(t.shape) for t in example]
        small = [k for k, t in enumerate(example) if whole or t.numel() * t.element_size() <= _LARGE]
        types = {example[k].dtype: None for k in small}
        self.groups = [(kind, [k for k in small if example[k].dtype == kind]) for kind in types]
        """Types, and which of the tensors are joined."""
        self._apart = [k for k in range(len(example)) if k not in set(small)]

    def joined(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        first = 1 if self._whole else 0
        together = [
            torch.cat([tensors[k].reshape(*tensors[k].shape[:first], -1) for k in own], -1) for _, own in self.groups
        ]
        return [*together, *(tensors[k] for k in self._apart)]

    def apart(self, arrays: Sequence[Any]) -> list[Any]:
        """The same of JAX arrays, backwards."""
        found: list[Any] = [None] * len(self._shapes)
        for array, (_, own) in zip(arrays, self.groups, strict=False):
            at = 0
            for k in own:
                size = math.prod(self._shapes[k])
                found[k] = array[..., at : at + size].reshape(self._shapes[k])
                at += size
        for array, k in zip(arrays[len(self.groups) :], self._apart, strict=True):
            found[k] = array
        return found


class Results:
    """How results of a call are joined by type in a row.

    Args:
        example: such results.
        device: where they are.
    """

    def __init__(self, example: Sequence[Tensor], device: torch.device):
        self._device = device
        self._shapes = [tuple(t.shape) for t in example]
        self._kinds = list({t.dtype: None for t in example})
        self._groups = [[k for k, t in enumerate(example) if t.dtype == kind] for kind in self._kinds]
        self.size = sum(t.numel() * t.element_size() for t in example)
        """Bytes of a call."""
        self._widths = [sum(math.prod(self._shapes[k]) for k in own) for own in self._groups]
        # of a result: its group, where it begins, its strides
        self._places: list[Any] = [None] * len(example)
        for group, own in enumerate(self._groups):
            at = 0
            for k in own:
                shape = self._shapes[k]
                strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
                self._places[k] = group, at, shape, (self._widths[group], *strides)
                at += math.prod(shape)

    def empty(self, n: int) -> list[Any]:
        """JAX arrays for the results of n calls."""
        import jax.numpy as jnp

        return [jnp.zeros((n, w), array_type(kind)) for w, kind in zip(self._widths, self._kinds, strict=True)]

    def joined(self, found: Sequence[Any]) -> list[Any]:
        """JAX arrays of a call in one of each type."""
        import jax.numpy as jnp

        return [jnp.concatenate([found[k].reshape(-1) for k in own]) for own in self._groups]

    def apart(self, rows: Sequence[Any], n: int) -> list[Tensor]:
        """The results of the first n calls, ``[n, ...]``, from JAX arrays."""
        tensors = [_as_tensor(row, n, kind, self._device) for row, kind in zip(rows, self._kinds, strict=True)]
        return [
            torch.as_strided(tensors[group], (len(tensors[group]), *shape), strides, at)
            for group, at, shape, strides in self._places
        ]
