"""A stochastic Lotka-Volterra simulator of predators and prey, and summaries of its series (J 10.2)."""

import math

import numpy as np
import torch
from torch import Tensor

from dgm_infer import DirectedModel, StandardNormal
from dgm_infer.arguments import finite, positive, whole_number
from dgm_infer.arguments.values import shown
from dgm_infer.errors import ArgumentError

__all__ = ["LotkaVolterra", "summaries"]


class LotkaVolterra(DirectedModel):
    """Euler-Maruyama steps of predator-prey dynamics with additive noise, observed after every step (math 12.3).

    ``r' = r + dt (z1 r - z2 r f) + noise sqrt(dt) n_r``
    ``f' = f + dt (z4 r f - z3 f) + noise sqrt(dt) n_f``

    Inputs ``u = [u1, u2]``, all standard normal. Latents ``z = exp(u1 - 2)``, log-normal(-2, 1), each ``[...]``: gain
    ``z1`` and loss ``z2`` of the prey, loss ``z3`` and gain ``z4`` of the predators. Outputs ``[..., 2 S]``, prey and
    predators in turn; ``u2`` holds their noise in the same order.

    Args:
        n_steps: S.
        dt: time step.
        noise: standard deviation of the white noise of both populations.
        initial: prey and predators at the start.
    """

    structure = "markov"
    step_inputs = 2
    # the noise is additive: each population has its own
    unit_inputs = 1
    unit_outputs = 1

    def __init__(
        self,
        n_steps: int = 50,
        dt: float = 1.0,
        noise: float = 1.0,
        initial: tuple[float, float] = (100.0, 100.0),
    ):
        super().__init__()
        name = type(self).__name__
        whole_number(name, "n_steps", n_steps)
        self.dt, self.noise = positive(name, "dt", dt), positive(name, "noise", noise)
        start = finite(name, "initial", initial, torch.float64)
        if start.shape != (2,):
            raise ArgumentError(f"{name}(initial={shown(initial)}): must be two numbers, prey and predators")
        self.initial_state = tuple(start.tolist())
        self.output_shape = (2 * n_steps,)
        self.global_density = StandardNormal(4)
        self.local_density = StandardNormal(2 * n_steps)

    @classmethod
    def published_observations(cls) -> tuple[Tensor, Tensor]:
        """The series of J 10.2 and the parameters ``z1, ..., z4`` that generated it: ``[100]``, ``[4]``.

        Regenerated from their recipe (math 10.2), the same to rounding.
        """
        z = torch.tensor([0.4, 0.005, 0.05, 0.001], dtype=torch.float64)
        noise = torch.from_numpy(np.random.RandomState(1234).normal(size=100))
        return cls().simulate(_named(z), noise), z

    def global_latents(self, u1):
        return _named(torch.exp(u1 - 2))

    def initial(self, z):
        return torch.stack([torch.full_like(z["z1"], value) for value in self.initial_state], -1)

    def transition(self, previous, z, u2_t):
        r, f = previous.unbind(-1)
        rates = torch.stack([z["z1"] - z["z2"] * f, z["z4"] * r - z["z3"]], -1)
        return previous * (1 + self.dt * rates) + (self.noise * math.sqrt(self.dt)) * u2_t


def summaries(x: Tensor) -> Tensor:
    """Nine summaries of a series of two alternating populations: ``[..., 2 S] -> [..., 9]``, S at least 3 (J 10.2).

    In this order: means of prey and predators, logarithms of their variances (with denominator ``S - 1``), lag-1
    autocorrelations of both, lag-2 autocorrelations of both ``sum_t d_t d_{t+k} / sum_t d_t^2`` of the deviations d
    from the mean, and the correlation of the two.

    As an observation operator: ``condition(model, summaries(x), observe=summaries)``.
    """
    series = x.unflatten(-1, (-1, 2))
    mean = series.mean(-2)
    d = series - mean.unsqueeze(-2)
    square = d.square().sum(-2)
    log_variance = (square / (series.shape[-2] - 1)).log()
    lags = [(d[..., :-k, :] * d[..., k:, :]).sum(-2) / square for k in (1, 2)]
    cross = d.prod(-1).sum(-1, keepdim=True) / square.prod(-1, keepdim=True).sqrt()
    return torch.cat([mean, log_variance, *lags, cross], -1)


def _named(z: Tensor) -> dict[str, Tensor]:
    return {f"z{i + 1}": value for i, value in enumerate(z.unbind(-1))}
