"""Concrete generative models, and where their weights are found."""

from dgm_infer import WithNoise

from .checkpoints import load, save
from .linear import LinearGaussian
from .lotka_volterra import LotkaVolterra
from .pose import HumanPose
from .quantile import GAndK, GeneralisedLambda
from .toy import Hyperbola
from .vae import GaussianDecoder, GaussianEncoder, GaussianVAE

__all__ = [
    "GAndK",
    "GaussianDecoder",
    "GaussianEncoder",
    "GaussianVAE",
    "GeneralisedLambda",
    "HumanPose",
    "Hyperbola",
    "LinearGaussian",
    "LotkaVolterra",
    "WithNoise",
    "load",
    "save",
]
