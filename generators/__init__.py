"""Concrete generative models, and the loading of their weights."""

from dgm_infer import WithNoise
from dgm_infer.conditioning.latent import LatentPosterior

from .bernoulli_vae import BernoulliDecoder, BernoulliVAE
from .censored_vae import CensoredDecoder, CensoredVAE
from .checkpoints import load, save
from .diffusions import DiffusionGenerator, from_diffusion
from .faces import FaceGAN, FaceImages
from .flows import FlowGenerator, LatentFlow
from .gan import GAN, Critic
from .iwae import IWAE
from .linear import LinearGaussian
from .lotka_volterra import LotkaVolterra
from .modules import NetworkGenerator, from_hub, from_module
from .pose import HumanPose
from .quantile import GAndK, GeneralisedLambda
from .registry import register
from .toy import Hyperbola
from .vae import GaussianDecoder, GaussianEncoder, GaussianVAE
from .velocities import VelocityMLP, VelocityUNet

__all__ = [
    "GAN",
    "IWAE",
    "BernoulliDecoder",
    "BernoulliVAE",
    "CensoredDecoder",
    "CensoredVAE",
    "Critic",
    "DiffusionGenerator",
    "FaceGAN",
    "FaceImages",
    "FlowGenerator",
    "GAndK",
    "GaussianDecoder",
    "GaussianEncoder",
    "GaussianVAE",
    "GeneralisedLambda",
    "HumanPose",
    "Hyperbola",
    "LatentFlow",
    "LatentPosterior",
    "LinearGaussian",
    "LotkaVolterra",
    "NetworkGenerator",
    "VelocityMLP",
    "VelocityUNet",
    "WithNoise",
    "from_diffusion",
    "from_hub",
    "from_module",
    "load",
    "register",
    "save",
]
