"""Approximate Bayesian computation in parameter space, for simulators that need be neither differentiable nor torch."""

from .methods import ABCMCMC, ABCSMC, ABCImportance, ABCRejection
from .sample import ABCDraws, Simulation, sample_abc

__all__ = ["ABCMCMC", "ABCSMC", "ABCDraws", "ABCImportance", "ABCRejection", "Simulation", "sample_abc"]
