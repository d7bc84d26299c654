"""Markov kernels: immutable configurations with ``init`` and ``step``."""

from .constrained import ConstrainedHMC
from .hmc import HMC
from .kernel import Info, Kernel

__all__ = ["HMC", "ConstrainedHMC", "Info", "Kernel"]
