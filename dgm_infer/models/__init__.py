"""Generative models and the densities of their inputs."""

from .densities import InputDensity, Logistic, Product, StandardNormal
from .directed import DirectedModel
from .model import GenerativeModel, reference_tensor
from .noise import WithNoise
from .structure import STRUCTURES, Units
from .validate import validate

__all__ = [
    "STRUCTURES",
    "DirectedModel",
    "GenerativeModel",
    "InputDensity",
    "Logistic",
    "Product",
    "StandardNormal",
    "Units",
    "WithNoise",
    "reference_tensor",
    "validate",
]
