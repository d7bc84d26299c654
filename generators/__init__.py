"""Concrete generative models, and where their weights are found."""

from dgm_infer import WithNoise

from .checkpoints import load, save
from .iwae import IWAE, BernoulliDecoder
from .latent_posterior import LatentPosterior
from .linear import LinearGaussian
from .lotka_volterra import LotkaVolterra
from .pose import HumanPose
from .quantile import GAndK, GeneralisedLambda
from .toy import Hyperbola
from .vae import GaussianDecoder, GaussianEncoder, GaussianVAE

__all__ = [
    "IWAE",
    "BernoulliDecoder",
    "GAndK",
    "GaussianDecoder",
    "GaussianEncoder",
    "GaussianVAE",
    "GeneralisedLambda",
    "HumanPose",
    "Hyperbola",
    "LatentPosterior",
    "LinearGaussian",
    "LotkaVolterra",
    "WithNoise",
    "load",
    "save",
]
