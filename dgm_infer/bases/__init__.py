"""Normalised base densities, their fits to a target, and its modes."""

from .gaussian import Gaussian
from .modes import Modes, modes

__all__ = ["Gaussian", "Modes", "modes"]
