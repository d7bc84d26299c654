"""Log evidence with error bars: importance weights, annealing, tempering, bounds from both sides.

The registry of methods: ``dgm_infer`` re-exports what is exported here, and the tests' contract suite runs on it.
"""

from .annealing import AIS
from .comparison import Comparison, compare
from .curve import RateDistortion
from .hamiltonian import HamiltonianAIS
from .hamiltonian_bound import HamiltonianElbo
from .importance import Elbo, ImportanceSampling
from .method import Method
from .rates import rate_distortion
from .refinement import Refined, refine_base
from .result import Evidence, Expectation
from .run import Bounds, bidirectional, log_evidence
from .smc import SMC
from .tempering.continuous import ContinuousTempering
from .tempering.gibbs import GibbsTempering
from .tempering.importance_tempering import ImportanceTempering
from .tempering.parallel import ParallelTempering
from .tempering.path_sampling import PathSampling
from .tempering.simulated import SimulatedTempering

__all__ = [
    "AIS",
    "SMC",
    "Bounds",
    "Comparison",
    "ContinuousTempering",
    "Elbo",
    "Evidence",
    "Expectation",
    "GibbsTempering",
    "HamiltonianAIS",
    "HamiltonianElbo",
    "ImportanceSampling",
    "ImportanceTempering",
    "Method",
    "ParallelTempering",
    "PathSampling",
    "RateDistortion",
    "Refined",
    "SimulatedTempering",
    "bidirectional",
    "compare",
    "log_evidence",
    "rate_distortion",
    "refine_base",
]
