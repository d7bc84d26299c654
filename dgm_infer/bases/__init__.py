"""Normalised base densities, their fits to a target, and its modes."""

from .gaussian import Gaussian
from .mixture import Mixture
from .modes import Modes, modes

__all__ = ["Gaussian", "Mixture", "Modes", "modes"]
