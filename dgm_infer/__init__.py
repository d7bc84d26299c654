"""Exact conditioning and honest log-likelihoods for deep generative models.

What most work begins with is here; the rest is in its room: ``dgm_infer.kernels``, ``dgm_infer.evidence`` and so on.
"""

from typing import TYPE_CHECKING, Any

from . import conditioning, diagnosis, errors, evidence, interop, kernels, likelihood_free, models, references
from .conditioning import Fibre, blur, check, condition, downsample, linear, pixels
from .errors import DgmInferError
from .evidence import (
    AIS,
    SMC,
    ContinuousTempering,
    Elbo,
    Evidence,
    GibbsTempering,
    ParallelTempering,
    SimulatedTempering,
    bidirectional,
    compare,
    log_evidence,
)
from .kernels import HMC, NUTS, ConstrainedHMC, LiftedHMC, ModeJumps
from .models import DirectedModel, GenerativeModel, Logistic, Product, StandardNormal, WithNoise
from .references import Flow, Gaussian, Mixture, modes
from .runs.resume import collect, extend, resume
from .sampling.draws import Draws
from .sampling.sample import sample
from .target import Target

if TYPE_CHECKING:
    from .interop import from_pyro, from_simulator, target_from_pyro

__version__ = "0.1.0"

__all__ = [
    "AIS",
    "HMC",
    "NUTS",
    "SMC",
    "ConstrainedHMC",
    "ContinuousTempering",
    "DgmInferError",
    "DirectedModel",
    "Draws",
    "Elbo",
    "Evidence",
    "Fibre",
    "Flow",
    "Gaussian",
    "GenerativeModel",
    "GibbsTempering",
    "LiftedHMC",
    "Logistic",
    "Mixture",
    "ModeJumps",
    "ParallelTempering",
    "Product",
    "SimulatedTempering",
    "StandardNormal",
    "Target",
    "WithNoise",
    "bidirectional",
    "blur",
    "check",
    "collect",
    "compare",
    "condition",
    "downsample",
    "extend",
    "from_pyro",
    "from_simulator",
    "linear",
    "log_evidence",
    "modes",
    "pixels",
    "resume",
    "sample",
    "target_from_pyro",
]

_ROOMS = (diagnosis, errors, models, conditioning, references, kernels, evidence, likelihood_free, interop)
# where else a newcomer's guess is found
_ELSEWHERE: dict[str, str] = dict.fromkeys(("from_hub", "from_module", "load"), "generators")


def __getattr__(name: str) -> Any:
    if name in ("from_pyro", "from_simulator", "target_from_pyro"):
        # on demand: Pyro takes longer to load than everything else here
        return getattr(interop, name)
    homes = [room.__name__ for room in _ROOMS if name in room.__all__]
    hint = next(iter(homes), _ELSEWHERE.get(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{f': use {hint}.{name}' if hint else ''}")
