"""Normalised base densities and their fits to a target."""

from .gaussian import Gaussian, as_target

__all__ = ["Gaussian", "as_target"]
