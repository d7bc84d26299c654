"""Twenty simulators as they are found in papers and tutorials: converted without a word, and the same functions."""

import math
from typing import Any

import pytest
import torch
from torch import distributions as td
from torch import nn
from torch.nn import functional as F

import dgm_infer as dgm

NORMAL = td.Normal(0.0, 1.0)


def moving_average(z, n=8):
    noise = torch.randn(n + 2)
    return noise[2:] + z[0] * noise[1:-1] + z[1] * noise[:-2]


def autoregression(z, n=8):
    values = [torch.zeros(()), torch.zeros(())]
    for _ in range(n):
        values.append(0.5 * torch.tanh(z[0]) * values[-1] + 0.3 * z[1] * values[-2] + torch.randn(()))
    return torch.stack(values[2:])


def volatility(z, n=6):
    h, returns = torch.zeros(()), []
    for _ in range(n):
        h = z["level"] + torch.sigmoid(z["persistence"]) * (h - z["level"]) + 0.3 * torch.randn(())
        returns.append((h / 2).exp() * torch.randn(()))
    return torch.stack(returns)


def epidemic(z, days=6):
    s, i, r = torch.tensor(0.99), torch.tensor(0.01), torch.tensor(0.0)
    cases = torch.zeros(days)
    for day in range(days):
        infected, recovered = z["contact"] * s * i, z["recovery"] * i
        s, i, r = s - infected, i + infected - recovered, r + recovered
        cases[day] = torch.log(infected) + 0.1 * torch.randn(())
    return cases


def runge_kutta(z, n=5, dt=0.1):
    def slope(x):
        return torch.stack([x[1], z * (1 - x[0] ** 2) * x[1] - x[0]])

    x, path = torch.tensor([1.0, 0.0]), []
    for _ in range(n):
        a = slope(x)
        b = slope(x + dt / 2 * a)
        c = slope(x + dt / 2 * b)
        d = slope(x + dt * c)
        x = x + dt / 6 * (a + 2 * b + 2 * c + d)
        path.append(x)
    return torch.stack(path) + td.Normal(0.0, 0.05).sample((n, 2))


def interest_rates(z, n=6, dt=1 / 12):
    # Cox, Ingersoll and Ross, by full truncation
    rate, path = torch.tensor(0.05), []
    for _ in range(n):
        positive = rate.clamp(min=0)
        rate = rate + z["speed"] * (0.05 - positive) * dt + 0.1 * (positive * dt).sqrt() * torch.randn(())
        path.append(rate)
    return torch.stack(path)


def queue(z, n=6):
    # waiting times by Lindley's recursion
    arrivals = td.Exponential(1.0).rsample((n,))
    services = td.Exponential(z.exp()).rsample((n,))
    wait, waits = torch.zeros(()), []
    for i in range(n):
        wait = F.softplus(5 * (wait + services[i] - arrivals[i])) / 5
        waits.append(wait + services[i])
    return torch.stack(waits)


def gaussian_process(z):
    x = torch.linspace(0, 1, 5)
    kernel = torch.exp(-0.5 * ((x[:, None] - x) / z["length"]) ** 2) + 1e-4 * torch.eye(5)
    return torch.linalg.cholesky(kernel) @ torch.randn(5) + 0.1 * torch.randn(5)


def factor_analysis(z, loadings):
    scores = torch.randn(4, 2)
    return scores @ loadings.T + z.exp() * torch.randn(4, 3)


def mixture(z, n=5):
    low, high = z["loc"] - 1 + 0.3 * torch.randn(n), z["loc"] + 1 + 0.3 * torch.randn(n)
    return torch.where(torch.rand(n) < 0.3, low, high)


def heavy_tails(z, n=5):
    return z["loc"] + z["scale"] * td.StudentT(3.0).rsample((n,))


def extremes(z, n=4):
    return td.Gumbel(z["loc"], z["scale"]).rsample((n,)) + td.Weibull(2.0, 1.5).rsample((n,))


def stable(z, n=4):
    # Chambers, Mallows and Stuck, symmetric
    alpha = 1 + torch.sigmoid(z)
    v, w = math.pi * (torch.rand(n) - 0.5), td.Exponential(1.0).rsample((n,))
    first = torch.sin(alpha * v) / torch.cos(v) ** (1 / alpha)
    return first * (torch.cos((1 - alpha) * v) / w) ** ((1 - alpha) / alpha)


def image(z, psf):
    yy, xx = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    star = z["flux"] * torch.exp(-0.5 * ((xx - z["x"]) ** 2 + (yy - 3) ** 2))
    blurred = F.conv2d(star[None, None], psf[None, None], padding=1)[0, 0]
    return blurred + 0.1 * torch.randn_like(blurred)


def spectrum(z, n=8):
    signal = torch.sin(z * torch.arange(float(n))) + 0.2 * torch.randn(n)
    return torch.fft.rfft(signal).abs()


def survival(z, n=5):
    covariates = torch.linspace(-1, 1, n)
    return td.Weibull(torch.exp(z["intercept"] + z["slope"] * covariates), torch.tensor(1.5)).rsample()


def hierarchical(z, groups=2, n=3):
    means = td.Normal(z["mean"], z["spread"]).rsample((groups,))
    return td.Normal(means[:, None].expand(groups, n), 0.5).rsample()


def lensed(z):
    beta = torch.linspace(-1, 1, 5)
    radius = torch.sqrt(beta**2 + 0.1)
    return beta + z * beta / radius + 0.02 * torch.empty(5).normal_()


def random_walk_on_a_circle(z, n=5):
    angle = torch.cumsum(z + 0.3 * torch.randn(n), 0)
    return torch.stack([angle.cos(), angle.sin()], -1) + 0.01 * torch.randn(n, 2)


class Recurrent(nn.Module):
    """A network with a state, driven by noise."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.cell, self.out = nn.Linear(5, 3), nn.Linear(3, 1)

    def forward(self, z):
        state, outputs = torch.zeros(3), []
        for _ in range(4):
            state = torch.tanh(self.cell(torch.cat([state, z, torch.randn(1)])))
            outputs.append(self.out(state) + 0.1 * torch.randn(1))
        return torch.cat(outputs)


# simulators, their priors and arguments
SIMULATORS: dict[str, tuple[Any, ...]] = {
    "moving average": (moving_average, td.Uniform(-torch.ones(2), 1.0)),
    "autoregression": (autoregression, td.Normal(torch.zeros(2), 1.0)),
    "stochastic volatility": (volatility, {"level": NORMAL, "persistence": NORMAL}),
    "epidemic": (epidemic, {"contact": td.LogNormal(-0.5, 0.3), "recovery": td.Uniform(0.05, 0.3)}),
    "Van der Pol, Runge-Kutta": (runge_kutta, td.LogNormal(0.0, 0.5)),
    "interest rates": (interest_rates, {"speed": td.Gamma(2.0, 1.0)}),
    "queue": (queue, NORMAL),
    "Gaussian process": (gaussian_process, {"length": td.LogNormal(-1.0, 0.3)}),
    "factor analysis": (factor_analysis, NORMAL, torch.tensor([[1.0, 0.0], [0.5, 1.0], [-1.0, 0.3]])),
    "mixture": (mixture, {"loc": NORMAL}),
    "heavy tails": (heavy_tails, {"loc": NORMAL, "scale": td.HalfCauchy(1.0)}),
    "extremes": (extremes, {"loc": NORMAL, "scale": td.HalfNormal(1.0)}),
    "stable": (stable, NORMAL),
    "blurred star": (image, {"flux": td.LogNormal(1.0, 0.5), "x": td.Uniform(1.0, 4.0)}, torch.full((3, 3), 1 / 9)),
    "spectrum": (spectrum, td.Uniform(0.5, 2.5)),
    "survival": (survival, {"intercept": NORMAL, "slope": NORMAL}),
    "hierarchical": (hierarchical, {"mean": NORMAL, "spread": td.HalfNormal(1.0)}),
    "lens": (lensed, td.LogNormal(-1.0, 0.5)),
    "circle": (random_walk_on_a_circle, NORMAL),
    "recurrent network": (Recurrent(), td.Normal(torch.zeros(1), 1.0)),
}


def test_there_are_twenty():
    assert len(SIMULATORS) == 20


@pytest.mark.parametrize("name", SIMULATORS)
def test_a_simulator_is_converted_in_silence_and_is_the_same_function(name):
    simulate, prior, *args = SIMULATORS[name]
    # warnings are errors
    model = dgm.from_simulator(simulate, prior, *args)
    # in the type of the plain run: torch draws other numbers in another
    tape, _ = model.record(torch.float32, torch.device("cpu"), seed=7)
    u = tape.inputs.double()[model.order]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        z = {key: value.float() for key, value in model.latents(u).items()}
        plain = simulate(z if isinstance(prior, dict) else z["z"], *args)
        replayed = model.observed(u)
    torch.testing.assert_close(replayed.float(), plain.flatten(), rtol=2e-3, atol=1e-4)
    assert model.output_shape == plain.shape
    # the control: other numbers give another output
    assert (model.observed(u + 0.1) - replayed).abs().max() > 1e-3
