"""Exact conditioning and honest log-likelihoods for deep generative models.

What most work begins with is here; the rest is in its room: ``dgm_infer.kernels``, ``dgm_infer.evidence`` and so on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import (  # noqa: F401 (rooms, no names of the root)
        conditioning,
        diagnosis,
        errors,
        evidence,
        interop,
        kernels,
        likelihood_free,
        models,
        references,
    )
    from .conditioning import Fibre, blur, check, condition, downsample, image, linear, pixels
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
    from .interop import from_pyro, from_simulator, target_from_pyro
    from .kernels import HMC, NUTS, ConstrainedHMC, LiftedHMC, ModeJumps
    from .models import DirectedModel, GenerativeModel, Logistic, Product, StandardNormal, WithNoise
    from .references import Flow, Gaussian, Mixture, modes
    from .runs.resume import collect, extend, resume
    from .sampling.draws import Draws
    from .sampling.sample import sample
    from .target import Target

__version__ = "0.2.0"

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
    "image",
    "linear",
    "log_evidence",
    "modes",
    "pixels",
    "resume",
    "sample",
    "target_from_pyro",
]

_ROOMS = (
    "diagnosis",
    "errors",
    "models",
    "conditioning",
    "references",
    "kernels",
    "evidence",
    "likelihood_free",
    "interop",
)
# files that have names of the root, and belong to no room that is shown
_FILES = ("target", "sampling.sample", "sampling.draws", "runs.resume")
# where else a newcomer's guess is found
_ELSEWHERE: dict[str, str] = dict.fromkeys(("from_hub", "from_module", "load"), "generators")


def __getattr__(name: str) -> Any:
    """A room, or a name of one, at its first use: the command line answers a mistake before torch is loaded."""
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if not name.startswith("_"):
        for home in (import_module(f".{place}", __name__) for place in (*_ROOMS, *_FILES)):
            if name in home.__all__:
                if name not in __all__:
                    raise AttributeError(_unknown(name, home.__name__))
                # found without this function from now on
                globals()[name] = value = getattr(home, name)
                return value
    raise AttributeError(_unknown(name, _ELSEWHERE.get(name)))


def _unknown(name: str, home: str | None) -> str:
    from difflib import get_close_matches

    known = {each.lower(): each for each in (*_ROOMS, *__all__)}
    near = get_close_matches(name.lower(), known, 1) if home is None else []
    help_ = f": use {home}.{name}" if home else f": did you mean {known[near[0]]}?" if near else ""
    return f"module {__name__!r} has no attribute {name!r}{help_}"


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS, "__all__", "__doc__", "__file__", "__name__", "__version__"})
