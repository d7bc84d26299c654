"""Small posteriors that no number was chosen on: two modes of unequal width, sixteen signs, eight schools."""

import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer.errors import extra

__all__ = ["Folded", "Squares", "eight_schools", "folded", "squares", "wide_mass"]

_NOISE = 0.01


class Folded(dgm.GenerativeModel):
    """Slope 1 on the right and -4 on the left: an output of 1 has a wide and a narrow mode, masses 0.71 and 0.29."""

    input_density = dgm.StandardNormal(1)

    def observed(self, u: Tensor) -> Tensor:
        return -1.5 * u + 2.5 * (u.square() + 0.01).sqrt()


def folded() -> dgm.Fibre:
    """An output of 1 of :class:`Folded`, with noise of 0.01."""
    return dgm.condition(dgm.WithNoise(Folded(), _NOISE), torch.ones(1, dtype=torch.float64))  # type: ignore[return-value]


def wide_mass() -> float:
    """Mass of the mode on the right, by a sum on an even grid."""
    u = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
    misfit = (1 - Folded().observed(u.unsqueeze(-1)).squeeze(-1)) / _NOISE
    return torch.softmax(-0.5 * (u.square() + misfit.square()), 0)[u > 0].sum().item()


class Squares(dgm.GenerativeModel):
    """``y_i = u_i^2 + u_i u_{i+1} / 4`` in a ring of four: every sign of every input is a mode, of its own mass."""

    input_density = dgm.StandardNormal(4)

    def observed(self, u: Tensor) -> Tensor:
        return u.square() + 0.25 * u * u.roll(-1, -1)


def squares() -> dgm.Fibre:
    """Outputs of 1.5 on average, with noise of 0.1."""
    data = torch.tensor([1.0, 1.5, 1.5, 2.0], dtype=torch.float64)
    return dgm.condition(dgm.WithNoise(Squares(), 0.1), data)  # type: ignore[return-value]


def eight_schools() -> dgm.Target:
    """Effects of coaching in eight schools, not centred as Rubin had them: ten unknowns, a Pyro program."""
    with extra("bench"):
        import pyro
        from pyro import distributions as dist

    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
    sd = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)

    def schools(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(y.new_tensor(0.0), 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(y.new_tensor(5.0)))
        with pyro.plate("schools", len(y)):
            raw = pyro.sample("raw", dist.Normal(torch.zeros_like(y), 1.0))
            pyro.sample("y", dist.Normal(mu + tau * raw, sd), obs=y)  # type: ignore[call-arg]

    return dgm.target_from_pyro(schools, y, dtype=torch.float64)
