"""Flattening and rebuilding of nested tuples of tensors and Jacobian maps."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..structures import JacobianMap

__all__ = ["Form", "flatten", "take", "tree_map", "unflatten"]

Form = Any
"""A tree without its tensors: None for a tensor, else a type and the forms of its parts. Hashable."""


def flatten(tree: Any) -> tuple[list[Tensor], Form]:
    """The tensors of a tree, in order, and its form."""
    if isinstance(tree, Tensor):
        return [tree], None
    parts = [flatten(part) for part in (tree.tensors if isinstance(tree, JacobianMap) else tree)]
    return [t for tensors, _ in parts for t in tensors], (type(tree), tuple(form for _, form in parts))


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


def _build(tensors: Iterator[Tensor], form: Form) -> Any:
    if form is None:
        return next(tensors)
    kind, parts = form
    built = [_build(tensors, part) for part in parts]
    return tuple(built) if kind is tuple else kind(*built)
