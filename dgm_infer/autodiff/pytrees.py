"""Pytrees: flattening and rebuilding of nested tuples, dictionaries and frozen dataclasses of tensors."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Form = Any
"""A tree without its tensors: None for a tensor, else how to rebuild it, and the forms of its parts. Hashable."""


def flatten(tree: Any) -> tuple[list[Tensor], Form]:
    """The tensors of a tree, in order, and its form.

    A tree is a tensor, a tuple, a dictionary, a dataclass or an object with ``tensors``, of trees; what is none of
    them, such as a number or a string, is part of the form.
    """
    tensors: list[Tensor] = []
    return tensors, _collect(tree, tensors)


def unflatten(tensors: Iterable[Tensor], form: Form) -> Any:
    """The tree of this form with these tensors; dataclasses are not checked again."""
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
    kind = type(tree)
    if isinstance(tree, tuple):
        return kind, tuple([_collect(part, tensors) for part in tree])
    if hasattr(tree, "tensors"):
        return kind, tuple([_collect(part, tensors) for part in tree.tensors])
    if isinstance(tree, dict):
        return dict, tuple([_collect(part, tensors) for part in tree.values()]), tuple(tree)
    if dataclasses.is_dataclass(tree):
        names = tuple(field.name for field in dataclasses.fields(tree))
        return kind, tuple([_collect(getattr(tree, name), tensors) for name in names]), names
    return _Static, (), tree


class _Static:
    """Marks what a form holds itself."""


def _build(tensors: Iterator[Tensor], form: Form) -> Any:
    if form is None:
        return next(tensors)
    kind, parts, *rest = form
    if kind is _Static:
        return rest[0]
    built = [_build(tensors, part) for part in parts]
    if not rest:
        return tuple(built) if kind is tuple else kind(*built)
    pairs = zip(rest[0], built, strict=True)
    if kind is dict:
        return dict(pairs)
    tree = object.__new__(kind)
    for name, value in pairs:
        object.__setattr__(tree, name, value)
    return tree
