"""The samplers that ``dgm-infer bench images`` compares."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from .image_sampling import Conditioned

__all__ = ["METHODS", "SMALL_NOISE", "Method"]

SMALL_NOISE = 0.01
"""Standard deviation of the noise that a user of NUTS would give observations without any; images are in [0, 1]."""

_OURS = "evaluation.benchmarks.image_sampling:run"


@dataclass(frozen=True)
class Method:
    """How a problem is sampled.

    Args:
        label: as tables have it.
        function: of the worker, ``"module:name"``.
        kernel: of :class:`ImageTask`.
        noise: whether it is for models with output noise (True) or without (False); None for both.
        packages: that it needs.
        problems: names of the problems it is for; None for all.
        exact: whether it samples the posterior that the others do.
        together: whether it is in JAX, with all its chains in one process.
        start: of :class:`ImageTask`.
        dtype: of :class:`ImageTask`.
        chains: of its own per image; None for as many as ours.
    """

    label: str
    function: str = _OURS
    kernel: str = "constrained"
    noise: bool | None = None
    packages: tuple[str, ...] = ()
    problems: tuple[str, ...] | None = None
    exact: bool = True
    together: bool = False
    start: str = "descents"
    dtype: str = "float32"
    chains: int | None = None

    @property
    def is_ours(self) -> bool:
        """This project, of this or another revision: one process with all threads."""
        return not self.packages

    @property
    def missing(self) -> str | None:
        """Which packages are not here, in one line; None if all are."""
        names = [name for name in self.packages if find_spec(name) is None]
        return f"{' and '.join(names)} not installed: pip install 'dgm-infer[bench]'" if names else None

    def applies(self, name: str, given: Conditioned) -> bool:
        has_noise = given.sd is not None
        return self.noise in (None, has_noise) and (self.problems is None or name in self.problems)


def _jax(label: str, module: str, kernel: str, **facts: Any) -> Method:
    """A peer in JAX, which takes the noise of the model as ours does."""
    packages = ("jax", "blackjax", "optax") if module == "blackjax_peer" else ("jax", "numpyro")
    function = f"evaluation.benchmarks.{module}:run"
    return Method(label, function, kernel, noise=True, packages=packages, together=True, **facts)


METHODS = {
    "constrained": Method("constrained"),
    "baseline": Method("constrained", "evaluation.benchmarks.earlier_peer:run"),
    "compiled": Method("compiled constrained", kernel="compiled"),
    "lifted": Method("lifted", kernel="lifted", noise=True),
    "default": Method("default", kernel="default", noise=True),
    "nuts": Method("NUTS on latents", kernel="nuts", noise=True),
    "nuts_noise": Method("NUTS, noise 0.01", kernel="nuts", noise=False, exact=False),
    "pyro": Method("Pyro NUTS", "evaluation.benchmarks.pyro_images_peer:run", noise=True, packages=("pyro",)),
    "mici": Method(
        "Mici with JAX",
        "evaluation.benchmarks.mici_images_peer:run",
        noise=True,
        packages=("mici", "jax"),
        problems=("digits",),
    ),
    "blackjax": _jax("BlackJAX NUTS", "blackjax_peer", "nuts"),
    "mclmc": _jax("BlackJAX MCLMC", "blackjax_peer", "mclmc", exact=False),
    "chees": _jax("BlackJAX ChEES-HMC", "blackjax_peer", "chees"),
    "chees_16": _jax("BlackJAX ChEES-HMC, 16 chains", "blackjax_peer", "chees", chains=16),
    "numpyro": _jax("NumPyro NUTS", "numpyro_peer", "nuts"),
}
"""By the names that ``methods=`` has."""
