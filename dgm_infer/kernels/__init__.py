"""Markov kernels: immutable configurations with ``init`` and ``step``."""

from .alternating import Alternating
from .constrained import ConstrainedHMC, RiemannianHMC
from .hmc import HMC
from .kernel import Info, Kernel
from .lifted import LiftedHMC
from .metropolis import Independence, RandomWalk
from .mode_jumps import ModeJumps
from .nuts import NUTS
from .pseudo_marginal import (
    ImportanceEstimate,
    LaplaceEstimate,
    ParticleFilter,
    PseudoMarginal,
    PseudoMarginalMH,
    Uniform,
)
from .slice import EllipticalSlice, LinearSlice

__all__ = [
    "HMC",
    "NUTS",
    "Alternating",
    "ConstrainedHMC",
    "EllipticalSlice",
    "ImportanceEstimate",
    "Independence",
    "Info",
    "Kernel",
    "LaplaceEstimate",
    "LiftedHMC",
    "LinearSlice",
    "ModeJumps",
    "ParticleFilter",
    "PseudoMarginal",
    "PseudoMarginalMH",
    "RandomWalk",
    "RiemannianHMC",
    "Uniform",
]
