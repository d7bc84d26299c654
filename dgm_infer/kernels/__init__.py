"""Markov kernels: immutable configurations with ``init`` and ``step``."""

from .constrained import ConstrainedHMC
from .hmc import HMC
from .kernel import Info, Kernel
from .lifted import LiftedHMC
from .nuts import NUTS

__all__ = ["HMC", "NUTS", "ConstrainedHMC", "Info", "Kernel", "LiftedHMC"]
