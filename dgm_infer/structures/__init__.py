"""Structures of Jacobians: their entries, factorisation and cost, and the check of a model that declares one.

To add a structure, add a file with its map and its :class:`Structure`, and a line to :data:`STRUCTURES`.
"""

from ..autodiff.jacobian_products import push_forward
from .blocks import (
    STRUCTURES,
    Blocks,
    Diagonal,
    LowRankPlusBlocks,
    LowRankPlusDiagonal,
    declared_structure,
    of_units,
    validate_structure,
)
from .jacobian import Evaluation, JacobianMap
from .structure import Dense, DenseJacobian, Structure, Units, UnitStructure, View

__all__ = [
    "STRUCTURES",
    "Blocks",
    "Dense",
    "DenseJacobian",
    "Diagonal",
    "Evaluation",
    "JacobianMap",
    "LowRankPlusBlocks",
    "LowRankPlusDiagonal",
    "Structure",
    "UnitStructure",
    "Units",
    "View",
    "declared_structure",
    "of_units",
    "push_forward",
    "validate_structure",
]
