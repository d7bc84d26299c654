"""Flattening and rebuilding of nested tuples of tensors and Jacobian maps."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Form", "flatten", "take", "tree_map", "unflatten"]

Form = Any
"""A tree without its tensors: None for a tensor, else a type and the forms of its parts. Hashable."""


def flatten(tree: Any) -> tuple[list[Tensor], Form]:
    """The tensors of a tree, in order, and its form."""
    tensors: list[Tensor] = []
    return tensors, _collect(tree, tensors)


def unflatten(tensors: Iterable[Tensor], form: Form) -> Any:
    """The tree of this form with these tensors."""
    return _build(iter(tensors), form)


def tree_map(function: Callable[..., Tensor], *trees: Any) -> Any:
    """The tree of ``function`` applied to the tensors of trees of one form."""
    flat = [flatten(tree) for tree in trees]
    return unflatten([function(*tensors) for tensors in zip(*(f[0] for f in flat), strict=True)], flat[0][1])


def take(tree: Any, batch: torch.Size, problems: Tensor) -> Any:
    """The tree of tensors ``[*batch, ...]`` at flat indices ``[N]`` of the batch: tensors ``[N, ...]``."""
    return tree_map(lambda data: data.reshape(batch.numel(), *data.shape[len(batch) :])[problems], tree)


def _collect(tree: Any, tensors: list[Tensor]) -> Form:
    """The form of a tree, whose tensors are added to those."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return None
    parts = tree if isinstance(tree, tuple) else tree.tensors
    return type(tree), tuple([_collect(part, tensors) for part in parts])


def _build(tensors: Iterator[Tensor], form: Form) -> Any:
    if form is None:
        return next(tensors)
    kind, parts = form
    built = [_build(tensors, part) for part in parts]
    return tuple(built) if kind is tuple else kind(*built)
