"""Approximate Bayesian computation in parameter space, for simulators that need be neither differentiable nor torch."""

from .rejection import ABCImportance, ABCRejection
from .sample import ABCDraws, sample_abc
from .simulation import Simulation
from .smc import ABCMCMC, ABCSMC

__all__ = ["ABCMCMC", "ABCSMC", "ABCDraws", "ABCImportance", "ABCRejection", "Simulation", "sample_abc"]
