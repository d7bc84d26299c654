"""Exact conditioning and honest log-likelihoods for deep generative models."""
# ruff: noqa: F403 (rooms define what they export)

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors, evidence, kernels, likelihood_free
from .conditioning.check import check
from .conditioning.condition import condition
from .conditioning.fibre import Fibre
from .conditioning.linear import blur, downsample, linear
from .conditioning.observations import pixels
from .diagnosis import Diagnosis, DiagnosisWarning, Finding
from .errors import *
from .evidence import *
from .kernels import *
from .likelihood_free import *
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
from .references import Flow, Gaussian, Mixture, Modes, modes
from .runs.resume import collect, extend, resume
from .sampling.draws import Draws
from .sampling.sample import sample
from .target import Target

if TYPE_CHECKING:
    from .interop.deepinv import DeepinvReconstructor
    from .interop.guides import base_from_guide
    from .interop.programs import from_pyro
    from .interop.pyro import target_from_pyro
    from .interop.sbi import SBIPosterior
    from .interop.simulators import from_simulator

__version__ = "0.1.0"

__all__ = [
    "DeepinvReconstructor",
    "Diagnosis",
    "DiagnosisWarning",
    "DirectedModel",
    "Draws",
    "Fibre",
    "Finding",
    "Flow",
    "Gaussian",
    "GenerativeModel",
    "InputDensity",
    "LatentVariableModel",
    "Logistic",
    "Mixture",
    "Modes",
    "Product",
    "SBIPosterior",
    "StandardNormal",
    "Target",
    "WithNoise",
    "base_from_guide",
    "blur",
    "check",
    "collect",
    "condition",
    "downsample",
    "errors",
    "extend",
    "from_pyro",
    "from_simulator",
    "linear",
    "modes",
    "pixels",
    "resume",
    "sample",
    "target_from_pyro",
]
# re-export these rooms: a kernel or an evidence method is named only in its own room
__all__ += errors.__all__
__all__ += evidence.__all__
__all__ += kernels.__all__
__all__ += likelihood_free.__all__


# imported on demand: Pyro and deepinv take longer to load than everything else here
_ON_DEMAND = {
    "DeepinvReconstructor": "deepinv",
    "SBIPosterior": "sbi",
    "base_from_guide": "guides",
    "from_pyro": "programs",
    "from_simulator": "simulators",
    "target_from_pyro": "pyro",
}
# what is looked for here, and where it is
_ELSEWHERE = dict.fromkeys(("from_hub", "from_module", "load"), "generators")


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(import_module(f".interop.{_ON_DEMAND[name]}", __name__), name)
    elsewhere = f": use {_ELSEWHERE[name]}.{name}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{elsewhere}")
