"""Checks of arguments: each returns the value as the code computes with it, or raises one line that names it.

Every message has the form ``call(field=value): must be ...``.
"""

from .objects import file_path, function, instance, mapping, names_of, of_kind, optional, random_generator
from .tensors import (
    allocatable,
    array,
    available_device,
    boolean_mask,
    context,
    default_type,
    finite,
    floating_type,
    indices,
    lead_shape,
    numbers,
    points,
    positive_numbers,
    sizes,
)
from .values import (
    choice,
    counts,
    flag,
    fraction,
    interval,
    optional_positive,
    positive,
    random_seed,
    whole_number,
    within,
)

__all__ = [
    "allocatable",
    "array",
    "available_device",
    "boolean_mask",
    "choice",
    "context",
    "counts",
    "default_type",
    "file_path",
    "finite",
    "flag",
    "floating_type",
    "fraction",
    "function",
    "indices",
    "instance",
    "interval",
    "lead_shape",
    "mapping",
    "names_of",
    "numbers",
    "of_kind",
    "optional",
    "optional_positive",
    "points",
    "positive",
    "positive_numbers",
    "random_generator",
    "random_seed",
    "sizes",
    "whole_number",
    "within",
]
