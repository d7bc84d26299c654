"""The published problems on which samplers of the fibre are compared."""

from dataclasses import dataclass

import numpy as np
import torch

import dgm_infer as dgm
import generators
from dgm_infer import DirectedModel, Fibre
from dgm_infer.errors import ConfigError
from dgm_infer.models.densities import STANDARD_LOGISTIC

__all__ = ["PROBLEMS", "Problem"]


@dataclass(frozen=True)
class Problem:
    """A generator of parameters ``z1, ..., z4`` and its published observations, or only the first of them.

    Args:
        name: a key of :data:`PROBLEMS`.
        n_observed: condition on the first so many outputs, for a quick look; None for all of them.
    """

    name: str
    n_observed: int | None = None

    def __post_init__(self):
        if self.name not in PROBLEMS:
            raise ConfigError(f"problems: {self.name!r} is not one of {', '.join(PROBLEMS)}")
        whole = PROBLEMS[self.name]
        if not whole.unit <= self.n_outputs <= whole.n_outputs or self.n_outputs % whole.unit:
            raise ConfigError(
                f"n_observed: {self.n_observed} observations of {self.name} are not possible: a multiple of "
                f"{whole.unit}, {whole.n_outputs} at most"
            )

    @property
    def n_outputs(self) -> int:
        return PROBLEMS[self.name].n_outputs if self.n_observed is None else self.n_observed

    def model(self) -> DirectedModel:
        n = self.n_outputs
        if self.name == "lotka_volterra":
            return generators.LotkaVolterra(n // 2)
        return generators.GeneralisedLambda(n)

    def observations(self) -> torch.Tensor:
        """``[n_outputs]``, float64."""
        return type(self.model()).published_observations()[0][: self.n_outputs]  # type: ignore[attr-defined]

    def generating_inputs(self) -> torch.Tensor:
        """The inputs ``u`` that generated the observations, by the published recipe (math 10): ``[4 + n_outputs]``."""
        z = type(self.model()).published_observations()[1]  # type: ignore[attr-defined]
        random = np.random.RandomState(1234)
        if self.name == "lotka_volterra":
            u1, u2 = z.log() + 2, torch.from_numpy(random.normal(size=100))
        else:
            p = torch.from_numpy(random.uniform(size=250))
            u1 = torch.stack([z[0], z[2], z[3], z[1].expm1().log() / STANDARD_LOGISTIC])
            u2 = torch.logit(p) / STANDARD_LOGISTIC
        return torch.cat([u1, u2[: self.n_outputs]])

    def fibre(self, device: str = "cpu") -> Fibre:
        return dgm.condition(self.model(), self.observations(), device=device)


@dataclass(frozen=True)
class _Published:
    n_outputs: int
    unit: int
    """Outputs that come together: a time step."""


PROBLEMS = {"generalised_lambda": _Published(250, 1), "lotka_volterra": _Published(100, 2)}
