"""The targets that the field compares samplers on, with what is known of each (math 12.8)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dgm_infer import Gaussian, Target

from . import debian_data
from .brownian import Brownian
from .cox import CoxProcess
from .funnel import Funnel
from .mixtures import NormalMixture, StudentMixture
from .regressions import LogisticRegression, Seeds
from .wells import ManyWell

__all__ = ["FOLDER", "NAMES", "KnownTarget", "known_target"]

FOLDER = "known_targets"
"""The subfolder of the reference folder that ``python -m evaluation.problems.debian_data`` fills."""

# of the stand-ins and of the mixtures' means
_SEED = 0
_BASES: dict[str, Callable[[Target, bool], Gaussian]] = {
    "broad": lambda target, fast: Gaussian.broad(target),
    "full fit": lambda target, fast: Gaussian.fit(
        target, "full", start=Gaussian.standard(target, torch.float64), steps=50 if fast else 1500
    ),
    "diagonal fit": lambda target, fast: Gaussian.fit(target, steps=50 if fast else 300, rate=0.1),
}


@dataclass(frozen=True)
class KnownTarget:
    """A target with what is known of it; ``log_z`` and ``draw`` of the target itself say whether those are."""

    words: str
    target: Target
    base_kind: str
    """What every method starts from, a generic tool of the library."""
    most_chains: int | None = None
    """Where a gradient is expensive."""

    @property
    def log_z(self) -> float | None:
        """Log Z, if it is known."""
        return self.target.log_z  # type: ignore[attr-defined]

    @property
    def can_draw(self) -> bool:
        """Whether exact draws are to be had, for two-sided bounds."""
        return hasattr(self.target, "draw")

    def base(self, fast: bool = False) -> Gaussian:
        """The base; a fast one is made in a few steps, and worse."""
        return _BASES[self.base_kind](self.target, fast)


def known_target(name: str, folder: Path | None) -> KnownTarget:
    """One of :data:`NAMES`.

    Args:
        name: its name.
        folder: with the files of :mod:`evaluation.problems.debian_data`; what is not there is simulated.

    Raises:
        CheckpointError: a file is damaged.
    """
    return _MAKERS[name](folder)


def _has(folder: Path | None, name: str) -> bool:
    return folder is not None and (folder / name).is_file()


def _pines(folder: Path | None) -> KnownTarget:
    if folder is not None and _has(folder, "finpines.txt"):
        target = CoxProcess.of_points(debian_data.pines(folder), 40)
        words = "log-Gaussian Cox process, 126 Finnish pine saplings in 40 x 40 cells, whitened"
    else:
        target = CoxProcess.simulated(40, _SEED)
        words = "log-Gaussian Cox process, a simulated pattern in 40 x 40 cells, whitened"
    return KnownTarget(words, target, "diagonal fit", most_chains=4)


def _regression(file: str, read: Callable[[Path], tuple], n: int, features: int, words: str):
    def make(folder: Path | None) -> KnownTarget:
        if folder is not None and _has(folder, file):
            target, data = LogisticRegression(*read(folder)), words
        else:
            target, data = LogisticRegression.simulated(n, features, _SEED), f"simulated data of the size of {words}"
        return KnownTarget(f"logistic regression, {data}", target, "full fit")

    return make


def _fixed(words: str, make: Callable[[], Target], base: str) -> Callable[[Path | None], KnownTarget]:
    return lambda folder: KnownTarget(words, make(), base)


_MAKERS: dict[str, Callable[[Path | None], KnownTarget]] = {
    "funnel-10": _fixed("Neal's funnel", Funnel, "full fit"),
    "many-well-10": _fixed("5 double wells, 32 modes", lambda: ManyWell(10), "broad"),
    "many-well-32": _fixed("16 double wells, 65 536 modes", lambda: ManyWell(32), "broad"),
    "normals-2": _fixed("40 normals, means within 40", NormalMixture.forty, "broad"),
    "normals-10": _fixed("10 normals, means within 10", lambda: NormalMixture.spread(10, 10, 10, _SEED), "broad"),
    "normals-50": _fixed("10 normals, means within 10", lambda: NormalMixture.spread(10, 50, 10, _SEED), "broad"),
    "students-10": _fixed("10 of Student's t, means within 10", lambda: StudentMixture.spread(10, 10, 10, _SEED),
                          "broad"),
    "students-50": _fixed("10 of Student's t, means within 10", lambda: StudentMixture.spread(10, 50, 10, _SEED),
                          "broad"),
    "brownian": _fixed("Brownian motion with noise, the middle missing", Brownian, "full fit"),
    "seeds": _fixed("random effects of 21 plates of seeds", Seeds, "full fit"),
    "ionosphere": _regression("Ionosphere.rda", debian_data.ionosphere, 351, 33, "ionosphere"),
    "sonar": _regression("Sonar.rda", debian_data.sonar, 208, 60, "sonar"),
    "credit": _regression("GermanCredit.RData", debian_data.credit, 1000, 59, "German credit in indicators"),
    "cox-1600": _pines,
}  # fmt: skip

NAMES = tuple(_MAKERS)
"""Names of all targets."""
