"""Structures of Jacobians: their entries, factorisation and cost, and the check of a model that declares one.

To add a structure, add a file with its map and its :class:`Structure`, and a line to :data:`STRUCTURES`.
"""

from collections.abc import Callable
from typing import Any

from ..errors import ModelError
from .blocks import Blocks, LowRankPlusBlocks
from .convolution import QuickConvolutions
from .dense import Dense, DenseJacobian
from .diagonal import Diagonal, LowRankPlusDiagonal
from .independent import independent, of_units
from .jacobian import Evaluation, JacobianMap, push_forward
from .markov import markov
from .products import quicker
from .receptive import InFields, ReceptiveFields
from .structure import Structure, Units
from .units import UnitStructure, View

__all__ = [
    "STRUCTURES",
    "Blocks",
    "Dense",
    "DenseJacobian",
    "Diagonal",
    "Evaluation",
    "InFields",
    "JacobianMap",
    "LowRankPlusBlocks",
    "LowRankPlusDiagonal",
    "QuickConvolutions",
    "ReceptiveFields",
    "Structure",
    "UnitStructure",
    "Units",
    "View",
    "declared_structure",
    "of_units",
    "push_forward",
    "quicker",
    "validate_structure",
]

STRUCTURES: dict[str, Callable[[Any], Structure]] = {
    "independent": independent,
    "markov": markov,
    "dense": lambda model: Dense(),
}
"""The structures that a model can declare by name, as functions of the model."""


def validate_structure(model: Any) -> None:
    """Raise :class:`ModelError` unless the model declares a name of :data:`STRUCTURES` or a :class:`Structure`."""
    declared = model.structure
    known = declared in STRUCTURES if isinstance(declared, str) else isinstance(declared, Structure)
    if not known:
        raise ModelError(f"{type(model).__name__}.structure = {declared!r} is not one of {', '.join(STRUCTURES)}")


def declared_structure(model: Any) -> Structure:
    """The structure that a model's attribute ``structure`` names or is."""
    declared = model.structure
    return STRUCTURES[declared](model) if isinstance(declared, str) else declared
