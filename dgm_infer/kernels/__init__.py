"""Markov kernels: immutable configurations with ``init`` and ``step``."""

from .alternating import Alternating
from .constrained import ConstrainedHMC
from .hmc import HMC
from .kernel import Info, Kernel
from .lifted import LiftedHMC
from .metropolis import Independence, RandomWalk
from .nuts import NUTS
from .slice import EllipticalSlice, LinearSlice

__all__ = [
    "HMC",
    "NUTS",
    "Alternating",
    "ConstrainedHMC",
    "EllipticalSlice",
    "Independence",
    "Info",
    "Kernel",
    "LiftedHMC",
    "LinearSlice",
    "RandomWalk",
]
