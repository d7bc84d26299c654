"""Exact conditioning and honest log-likelihoods for deep generative models."""

from . import errors
from .condition import condition
from .draws import Draws
from .errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DgmInferError,
    ModelError,
    ObservationError,
    StartError,
    Status,
)
from .fibre import Fibre
from .inputs import InputDensity, Logistic, Product, StandardNormal
from .kernels import HMC, ConstrainedHMC
from .model import DirectedModel, GenerativeModel, WithNoise
from .observe import blur, downsample, linear, pixels
from .sampling import sample
from .target import Target

__version__ = "0.1.0"

__all__ = [
    "HMC",
    "ArgumentError",
    "CheckpointError",
    "ConfigError",
    "ConstrainedHMC",
    "DgmInferError",
    "DirectedModel",
    "Draws",
    "Fibre",
    "GenerativeModel",
    "InputDensity",
    "Logistic",
    "ModelError",
    "ObservationError",
    "Product",
    "StandardNormal",
    "StartError",
    "Status",
    "Target",
    "WithNoise",
    "blur",
    "condition",
    "downsample",
    "errors",
    "linear",
    "pixels",
    "sample",
]
