"""Generative models and the densities of their inputs."""

from .copies import copied, evaluation_copy
from .decoded import MeanOfDecoder, as_generative_model
from .decoder import DiscreteModel, LatentVariableModel, base_distribution, is_discrete, output_distribution
from .densities import InputDensity, Logistic, Product, StandardNormal
from .directed import DirectedModel
from .model import GenerativeModel, reference_tensor
from .noise import WithNoise
from .validate import validate

__all__ = [
    "DirectedModel",
    "DiscreteModel",
    "GenerativeModel",
    "InputDensity",
    "LatentVariableModel",
    "Logistic",
    "MeanOfDecoder",
    "Product",
    "StandardNormal",
    "WithNoise",
    "as_generative_model",
    "base_distribution",
    "copied",
    "evaluation_copy",
    "is_discrete",
    "output_distribution",
    "reference_tensor",
    "validate",
]
