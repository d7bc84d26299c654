"""Log evidence with error bars: importance weights, annealing, tempering, bounds from both sides.

The registry of methods: ``dgm_infer`` re-exports what is exported here, and the tests' contract suite runs on it.
"""

from .annealing import AIS, HamiltonianAIS
from .bounds import Bounds, bidirectional
from .estimate import Refined, log_evidence, refine_base
from .lower_bounds import Elbo, HamiltonianElbo, ImportanceSampling
from .method import Method
from .rates import RateDistortion, rate_distortion
from .result import Comparison, Evidence, Expectation, compare
from .smc import SMC
from .tempering.continuous import ContinuousTempering, GibbsTempering, PathSampling
from .tempering.parallel import ParallelTempering
from .tempering.simulated import ImportanceTempering, SimulatedTempering

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
