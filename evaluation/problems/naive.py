"""Published simulators as somebody would write them for a first try, and the same by hand as functions of inputs.

The first take their random numbers from torch and know nothing of conditioning: :func:`dgm_infer.from_simulator` makes
models of them. The second have the same arithmetic, with a Python loop where the first have one, and the structure that
is found in the first; tracing is measured beside them.
"""

import torch
from torch import Tensor
from torch import distributions as td

from dgm_infer import DirectedModel, GenerativeModel, Logistic, Product, StandardNormal
from dgm_infer.models.densities import STANDARD_LOGISTIC

__all__ = [
    "GENERALISED_LAMBDA_PRIOR",
    "PREDATOR_PREY_PRIOR",
    "GeneralisedLambdaByHand",
    "PredatorPreyByHand",
    "generalised_lambda",
    "predator_prey",
]

# in the order of the inputs of generators.GeneralisedLambda
GENERALISED_LAMBDA_PRIOR: dict[str, td.Distribution] = {
    "z1": td.Normal(0.0, 1.0),
    "z3": td.Normal(0.0, 1.0),
    "z4": td.Normal(0.0, 1.0),
    "z2": td.Exponential(1.0),
}
PREDATOR_PREY_PRIOR: dict[str, td.Distribution] = {f"z{i}": td.LogNormal(-2.0, 1.0) for i in range(1, 5)}


def generalised_lambda(z: dict[str, Tensor], n: int) -> Tensor:
    """Draws ``[n]`` of the generalised lambda distribution (math 12.1)."""
    p = td.Uniform(0.0, 1.0).rsample((n,))
    return _quantile(p, z["z1"], z["z2"], z["z3"], z["z4"])


def predator_prey(z: dict[str, Tensor], n_steps: int) -> Tensor:
    """Prey and predators in turn, ``[2 n_steps]``, of unit time steps and noise (math 12.3)."""
    prey = predators = torch.tensor(100.0)
    series = []
    for _ in range(n_steps):
        expected = _next(prey, predators, z["z1"], z["z2"], z["z3"], z["z4"])
        prey, predators = (td.Normal(mean, 1.0).rsample() for mean in expected)
        series += [prey, predators]
    return torch.stack(series)


class GeneralisedLambdaByHand(DirectedModel):
    """The simulator as a function of inputs, without a loop; the inputs are those of ``generators.GeneralisedLambda``.

    Unlike there the arithmetic is the formula's, as in :func:`generalised_lambda`.
    """

    structure = "independent"

    def __init__(self, n: int):
        super().__init__()
        self.output_shape = (n,)
        self.global_density = Product(StandardNormal(3), Logistic(1))
        self.local_density = Logistic(n)

    def global_latents(self, u1):
        z1, z3, z4, v2 = u1.unbind(-1)
        return {"z1": z1, "z2": torch.nn.functional.softplus(STANDARD_LOGISTIC * v2, threshold=40), "z3": z3, "z4": z4}

    def simulate(self, z, u2):
        z1, z2, z3, z4 = (z[f"z{i}"].unsqueeze(-1) for i in range(1, 5))
        return _quantile(torch.sigmoid(STANDARD_LOGISTIC * u2), z1, z2, z3, z4)


class PredatorPreyByHand(GenerativeModel):
    """The simulator as a function of inputs ``[..., 4 + 2 n_steps]``, with its loop."""

    def __init__(self, n_steps: int):
        super().__init__()
        self.output_shape = (2 * n_steps,)
        self.input_density = StandardNormal(4 + 2 * n_steps)

    def observed(self, u):
        z1, z2, z3, z4 = self.latents(u).values()
        noise = u[..., 4:].unbind(-1)
        prey = predators = torch.full_like(z1, 100.0)
        series = []
        for n_prey, n_predators in zip(noise[::2], noise[1::2], strict=True):
            prey, predators = _next(prey, predators, z1, z2, z3, z4)
            prey, predators = prey + n_prey, predators + n_predators
            series += [prey, predators]
        return torch.stack(series, -1)

    def latents(self, u):
        return {f"z{i + 1}": value for i, value in enumerate(torch.exp(u[..., :4] - 2).unbind(-1))}

    def inputs_of(self, series: Tensor, u1: Tensor) -> Tensor:
        """The inputs ``[..., 4 + 2 n_steps]`` with parameters ``u1 [..., 4]`` that make a series ``[2 n_steps]``."""
        states = series.reshape(-1, 2)
        before = torch.cat([torch.full_like(states[:1], 100.0), states[:-1]])
        z = [value.unsqueeze(-1) for value in self.latents(u1).values()]
        noise = states - torch.stack(_next(*before.unbind(-1), *z), -1)
        return torch.cat([u1, noise.flatten(-2)], -1)


def _quantile(p: Tensor, z1: Tensor, z2: Tensor, z3: Tensor, z4: Tensor) -> Tensor:
    return z1 + ((p**z3 - 1) / z3 - ((1 - p) ** z4 - 1) / z4) / z2


def _next(prey: Tensor, predators: Tensor, z1: Tensor, z2: Tensor, z3: Tensor, z4: Tensor) -> tuple[Tensor, Tensor]:
    met = prey * predators
    return prey + z1 * prey - z2 * met, predators + z4 * met - z3 * predators
