"""Adapters for other libraries: their programs and simulators as models, our posteriors behind their interfaces."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .deepinv import DeepinvReconstructor
    from .guides import base_from_guide
    from .programs import from_pyro
    from .pyro import target_from_pyro
    from .sbi import SBIPosterior
    from .simulators import from_simulator

__all__ = [
    "DeepinvReconstructor",
    "SBIPosterior",
    "base_from_guide",
    "from_pyro",
    "from_simulator",
    "target_from_pyro",
]

# imported on demand: Pyro and deepinv take longer to load than everything else here
_FILES = {
    "DeepinvReconstructor": "deepinv",
    "SBIPosterior": "sbi",
    "base_from_guide": "guides",
    "from_pyro": "programs",
    "from_simulator": "simulators",
    "target_from_pyro": "pyro",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(import_module(f".{_FILES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
