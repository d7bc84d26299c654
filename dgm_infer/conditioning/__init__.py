"""Conditioning a generative model on an observation, exactly or by an ABC kernel, and checks that this is possible."""

from .abc_kernels import InputPosterior
from .check import Finding, Report, check
from .condition import condition
from .fibre import Fibre, Linearisation
from .latent import LatentPosterior
from .linear import blur, downsample, linear
from .observations import Bound, Observation, pixels
from .observed import ObservedModel
from .operators import DisjointSums, Everything, Function, Operator, Reduction, Selection

__all__ = [
    "Bound",
    "DisjointSums",
    "Everything",
    "Fibre",
    "Finding",
    "Function",
    "InputPosterior",
    "LatentPosterior",
    "Linearisation",
    "Observation",
    "ObservedModel",
    "Operator",
    "Reduction",
    "Report",
    "Selection",
    "blur",
    "check",
    "condition",
    "downsample",
    "linear",
    "pixels",
]
