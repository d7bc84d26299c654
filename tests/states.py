"""What tests look at in a kernel's state."""

import dataclasses
from collections.abc import Iterator

import torch


def tensors(state) -> Iterator[torch.Tensor]:
    """All tensors of a state, however nested."""
    for value in state:
        if isinstance(value, torch.Tensor):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from tensors(getattr(value, f.name) for f in dataclasses.fields(value))
        elif isinstance(value, tuple):
            yield from tensors(value)
