"""Conditioning a generative model on an observation, exactly or by an ABC kernel, and checks that this is possible."""

from .abc_kernels import InputPosterior
from .check import Report, check
from .condition import condition
from .fibre import Fibre, Linearisation
from .latent import LatentPosterior
from .observations import Bound, Observation, blur, downsample, linear, pixels
from .observed import ObservedModel
from .operators import DisjointSums, Everything, Function, Operator, Reduction, Selection
from .pictures import image

__all__ = [
    "Bound",
    "DisjointSums",
    "Everything",
    "Fibre",
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
    "image",
    "linear",
    "pixels",
]
