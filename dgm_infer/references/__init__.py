"""Normalised base densities, their fits to a target, and its modes."""

from .flow import Flow
from .gaussian import Gaussian
from .mixture import Mixture
from .modes import Modes, modes

__all__ = ["Flow", "Gaussian", "Mixture", "Modes", "modes"]
