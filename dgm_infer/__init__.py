"""Exact conditioning and honest log-likelihoods for deep generative models."""

from typing import TYPE_CHECKING, Any

from . import errors
from .bases import Gaussian
from .conditioning.check import check
from .conditioning.condition import condition
from .conditioning.fibre import Fibre
from .conditioning.observations import blur, downsample, linear, pixels
from .errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DgmInferError,
    EvidenceError,
    ModelError,
    ObservationError,
    StartError,
    Status,
)
from .evidence import (
    AIS,
    SMC,
    ContinuousTempering,
    Elbo,
    Evidence,
    GibbsTempering,
    HamiltonianAIS,
    ImportanceSampling,
    PathSampling,
    SimulatedTempering,
    bidirectional,
    log_evidence,
    refine_base,
)
from .kernels import HMC, NUTS, ConstrainedHMC
from .models import (
    DirectedModel,
    GenerativeModel,
    InputDensity,
    LatentVariableModel,
    Logistic,
    Product,
    StandardNormal,
    WithNoise,
)
from .sampling.draws import Draws
from .sampling.sample import sample
from .target import Target

if TYPE_CHECKING:
    from .interop.pyro import target_from_pyro

__version__ = "0.1.0"

__all__ = [
    "AIS",
    "HMC",
    "NUTS",
    "SMC",
    "ArgumentError",
    "CheckpointError",
    "ConfigError",
    "ConstrainedHMC",
    "ContinuousTempering",
    "DgmInferError",
    "DirectedModel",
    "Draws",
    "Elbo",
    "Evidence",
    "EvidenceError",
    "Fibre",
    "Gaussian",
    "GenerativeModel",
    "GibbsTempering",
    "HamiltonianAIS",
    "ImportanceSampling",
    "InputDensity",
    "LatentVariableModel",
    "Logistic",
    "ModelError",
    "ObservationError",
    "PathSampling",
    "Product",
    "SimulatedTempering",
    "StandardNormal",
    "StartError",
    "Status",
    "Target",
    "WithNoise",
    "bidirectional",
    "blur",
    "check",
    "condition",
    "downsample",
    "errors",
    "linear",
    "log_evidence",
    "pixels",
    "refine_base",
    "sample",
    "target_from_pyro",
]


def __getattr__(name: str) -> Any:
    # imported when asked for: Pyro takes longer to load than everything else here
    if name == "target_from_pyro":
        from .interop.pyro import target_from_pyro

        return target_from_pyro
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
