"""Approximate Bayesian computation in parameter space, for simulators that need be neither differentiable nor torch."""

from .mcmc import ABCMCMC
from .rejection import ABCImportance, ABCRejection
from .result import ABCDraws
from .run import sample_abc
from .simulation import Simulation
from .smc import ABCSMC

__all__ = ["ABCMCMC", "ABCSMC", "ABCDraws", "ABCImportance", "ABCRejection", "Simulation", "sample_abc"]
