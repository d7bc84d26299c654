"""Generative models and the densities of their inputs."""

from .decoder import (
    CensoredNormal,
    DiscreteModel,
    LatentVariableModel,
    MeanOfDecoder,
    as_generative_model,
    base_distribution,
    is_discrete,
    output_distribution,
)
from .densities import InputDensity, Logistic, Product, StandardNormal
from .directed import DirectedModel, WithNoise, beneath_noise, noiseless, validate
from .model import GenerativeModel, check_weights, copied, evaluation_copy, frozen_copy, reference_tensor

__all__ = [
    "CensoredNormal",
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
    "beneath_noise",
    "check_weights",
    "copied",
    "evaluation_copy",
    "frozen_copy",
    "is_discrete",
    "noiseless",
    "output_distribution",
    "reference_tensor",
    "validate",
]
