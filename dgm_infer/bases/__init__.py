"""Normalised base densities and their fits to a target."""

from .gaussian import Gaussian

__all__ = ["Gaussian"]
