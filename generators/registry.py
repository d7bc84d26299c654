"""The classes of generators that a file can describe, by name."""

from typing import TypeVar

from torch import nn

from dgm_infer.arguments.values import shown
from dgm_infer.errors import ArgumentError

__all__ = ["CLASSES", "register"]

Class = TypeVar("Class", bound=type[nn.Module])

CLASSES: dict[str, type[nn.Module]] = {}
"""Filled by :func:`register` when the modules of the classes are imported."""


def register(cls: Class) -> Class:
    """Class decorator: generators of this class can be trained, stored and loaded.

    A file describes a generator by the name of its class and ``config``, an attribute of the generator: the arguments
    of its constructor, as JSON values. A file never imports anything, so the module of your own class must be imported
    before :func:`generators.load` meets its name.

    Raises:
        ArgumentError: not a ``torch.nn.Module``, or another class has this name.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ArgumentError(f"register({shown(cls)}): expected a subclass of torch.nn.Module")
    known = CLASSES.get(cls.__name__, cls)
    # a class that is redefined, in a notebook or by a reload, replaces the first
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ArgumentError(f"register({cls.__name__}): {known.__module__}.{known.__qualname__} has this name already")
    CLASSES[cls.__name__] = cls
    return cls
