"""Log evidence with error bars: importance weights, annealing, tempering, bounds from both sides.

This is the registry of methods: what it exports, ``dgm_infer`` has, and the contract suite of the tests runs on.
"""

from .annealing import AIS
from .hamiltonian import HamiltonianAIS
from .importance import Elbo, ImportanceSampling
from .method import Method
from .refinement import Refined, refine_base
from .result import Evidence, Expectation
from .run import Bounds, bidirectional, log_evidence
from .smc import SMC
from .tempering.continuous import ContinuousTempering
from .tempering.gibbs import GibbsTempering
from .tempering.path_sampling import PathSampling
from .tempering.simulated import SimulatedTempering

__all__ = [
    "AIS",
    "SMC",
    "Bounds",
    "ContinuousTempering",
    "Elbo",
    "Evidence",
    "Expectation",
    "GibbsTempering",
    "HamiltonianAIS",
    "ImportanceSampling",
    "Method",
    "PathSampling",
    "Refined",
    "SimulatedTempering",
    "bidirectional",
    "log_evidence",
    "refine_base",
]
