"""Models of independent units, and the structure of units of given sizes."""

from typing import Any

from .blocks import Blocks
from .diagonal import Diagonal
from .structure import Units
from .units import SIMULATED, UnitStructure, View

__all__ = ["independent", "of_units"]


def of_units(sizes: Units, view: View = SIMULATED) -> UnitStructure:
    """The structure of units of these sizes."""
    return Diagonal(sizes, view) if sizes.is_scalar else Blocks(sizes, view)


def independent(model: Any) -> UnitStructure:
    """Single outputs, or ``unit_outputs`` consecutive ones, given the global inputs (math 4.6, J 8.2)."""
    return of_units(Units(model.global_density.dim, model.unit_inputs or 1, model.unit_outputs or 1))
