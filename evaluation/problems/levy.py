"""Signals with independent increments, observed linearly with noise: posteriors that a Gibbs sampler knows."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

import dgm_infer as dgm
from dgm_infer import GenerativeModel

__all__ = ["INCREMENTS", "OPERATORS", "LevySignal"]

_LENGTH = 64
# Decibels of the data's median power over that of the noise.
_SIGNAL_TO_NOISE = 25.0


def _blur() -> Tensor:
    taps = torch.exp(-torch.arange(-6, 7).double().square() / 8)
    taps = taps / taps.sum()
    matrix = torch.zeros(_LENGTH, _LENGTH).double()
    for i in range(_LENGTH):
        for k, weight in enumerate(taps):
            if 0 <= (j := i + k - 6) < _LENGTH:
                matrix[i, j] += weight
    return matrix


def _mask() -> Tensor:
    kept = torch.randperm(_LENGTH, generator=torch.Generator().manual_seed(0))[:26].sort().values
    return torch.eye(_LENGTH).double()[kept]


def _fourier() -> Tensor:
    """Real and imaginary parts of the 13 lowest frequencies."""
    angle = 2 * math.pi * torch.outer(torch.arange(13).double(), torch.arange(_LENGTH).double()) / _LENGTH
    return torch.cat([angle.cos(), angle.sin()[1:]]) / _LENGTH**0.5


OPERATORS: dict[str, Callable[[], Tensor]] = {
    "identity": lambda: torch.eye(_LENGTH).double(),
    "blur": _blur,
    "mask": _mask,
    "fourier": _fourier,
}
"""Matrices of the measurement: nothing, a blur of 13 taps and sd 2, 26 samples, the lowest frequencies."""

INCREMENTS: dict[str, td.Distribution] = {
    "normal": td.Normal(torch.tensor(0.0).double(), 0.5),
    "laplace": td.Laplace(torch.tensor(0.0).double(), 1.0),
    "student1": td.StudentT(torch.tensor(1.0).double()),
    "student2": td.StudentT(torch.tensor(2.0).double()),
    "student3": td.StudentT(torch.tensor(3.0).double()),
}
"""Laws of the increments."""


class LevySignal:
    """``y = A x + sd n``, ``x`` the cumulative sum of 64 independent increments.

    The noise is 25 dB below the median power of the data of a thousand signals.

    Args:
        increments: a name of :data:`INCREMENTS`.
        operator: a name of :data:`OPERATORS`.
    """

    def __init__(self, increments: str, operator: str):
        self.law, self.matrix = INCREMENTS[increments], OPERATORS[operator]()
        self.kind = increments
        with torch.random.fork_rng():
            torch.manual_seed(0)
            power = (self._signals(1000) @ self.matrix.T).square().mean(-1).median()
        self.noise = (power * 10 ** (-_SIGNAL_TO_NOISE / 10)).sqrt().item()

    def _signals(self, n: int) -> Tensor:
        return self.law.sample(torch.Size([n, _LENGTH])).cumsum(-1)

    def simulated(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Signals ``[n, 64]`` and their data ``[n, M]``."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            x = self._signals(n)
            seen = x @ self.matrix.T
            return x, seen + self.noise * torch.randn_like(seen)

    def model(self) -> GenerativeModel:
        """The signals as a simulator; the latent ``increments`` has them."""
        matrix, noise = self.matrix, self.noise

        def simulate(z: dict[str, Any]) -> Tensor:
            seen = matrix @ z["increments"].cumsum(-1)
            return seen + noise * torch.randn(len(matrix), dtype=torch.float64)

        return dgm.from_simulator(simulate, {"increments": self.law.expand(torch.Size([_LENGTH]))})

    def log_posterior(self, x: Tensor, y: Tensor) -> Tensor:
        """``log p(x | y)`` up to a constant of y: ``[S, P, 64], [P, M] -> [S, P]``."""
        increments = torch.diff(x, prepend=torch.zeros_like(x[..., :1]))
        misfit = (x @ self.matrix.T - y).square().sum(-1) / (2 * self.noise**2)
        return self.law.log_prob(increments).sum(-1) - misfit

    def gibbs(self, y: Tensor, warmup: int, draws: int, seed: int) -> Tensor:
        """Draws ``[S, P, 64]`` of the posterior, by the increments' variances and the increments in turns.

        Given the variances v the increments are normal. Given an increment e, v is: of Laplace's law, inverse Gaussian
        with mean 1 / |e| and shape 1 in 1 / v (Park and Casella 2008); of Student's with k degrees, inverse gamma with
        (k + 1) / 2 and (k + e^2) / 2.
        """
        rng = torch.Generator().manual_seed(seed)
        sums = self.matrix @ torch.ones(_LENGTH, _LENGTH).double().tril()
        gram, projected = sums.T @ sums / self.noise**2, y @ sums / self.noise**2
        v, found = torch.ones(len(y), _LENGTH).double(), []
        for i in range(warmup + draws):
            factor = torch.linalg.cholesky(gram + torch.diag_embed(1 / v))
            mean = torch.cholesky_solve(projected.unsqueeze(-1), factor)
            noise = torch.randn(len(y), _LENGTH, 1, generator=rng, dtype=torch.float64)
            e = (mean + torch.linalg.solve_triangular(factor.mT, noise, upper=True)).squeeze(-1)
            v = self._variances(e, rng)
            if i >= warmup:
                found.append(e.cumsum(-1))
        return torch.stack(found)

    def _variances(self, e: Tensor, rng: torch.Generator) -> Tensor:
        if self.kind == "normal":
            return torch.full_like(e, 0.25)
        if self.kind == "laplace":
            # Michael, Schucany and Haas 1976
            mean = 1 / e.abs().clamp_min(1e-12)
            chi = torch.randn(e.shape, generator=rng, dtype=e.dtype).square()
            root = mean + mean.square() * chi / 2 - mean / 2 * (4 * mean * chi + (mean * chi).square()).sqrt()
            small = torch.rand(e.shape, generator=rng, dtype=e.dtype) <= mean / (mean + root)
            inverse = torch.where(small, root, mean.square() / root.clamp_min(1e-300))
            return 1 / inverse.clamp(1e-12, 1e12)
        assert isinstance(self.law, td.StudentT)
        k = float(self.law.df)
        gamma = torch._standard_gamma(torch.full_like(e, (k + 1) / 2), generator=rng)  # type: ignore[attr-defined]
        return (k + e.square()) / 2 / gamma
