"""Concrete generative models, and where their weights are found."""

from dgm_infer import WithNoise

from .checkpoints import load, save
from .linear import LinearGaussian
from .vae import GaussianDecoder, GaussianEncoder, GaussianVAE

__all__ = ["GaussianDecoder", "GaussianEncoder", "GaussianVAE", "LinearGaussian", "WithNoise", "load", "save"]
