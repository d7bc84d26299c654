"""Approximate Bayesian computation in parameter space, for simulators that need be neither differentiable nor torch."""

from .methods import ABCMCMC, ABCSMC, ABCImportance, ABCRejection
from .sample import ABCDraws, sample_abc
from .simulation import Simulation

__all__ = ["ABCMCMC", "ABCSMC", "ABCDraws", "ABCImportance", "ABCRejection", "Simulation", "sample_abc"]
