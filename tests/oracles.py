"""Problems with a known answer, and the test that compares draws with it.

Every oracle names statistics of the draws and their exact expectations. ``compare`` measures the difference in
Monte Carlo standard errors; ``assert_agrees`` and ``assert_refuted`` are the two sides of one law, the second for
its negative control.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer.conditioning.projection import Projection
from generators import LinearGaussian

FLOAT = torch.float64


# ---------------------------------------------------------------------------------------------------------- the law


class Comparison(NamedTuple):
    """Sample means against exact expectations, one entry a statistic."""

    z: Tensor
    """Differences in Monte Carlo standard errors."""
    ess: Tensor
    """Effective sample sizes of the means (ArviZ)."""


def compare(values: Tensor, expected: Tensor) -> Comparison:
    """Compare ``values [chains, draws, K]`` with ``expected [K]``."""
    import arviz as az

    assert values.shape[2:] == expected.shape
    ess = torch.tensor([float(az.ess(v.numpy(), method="mean")) for v in values.movedim(-1, 0)], dtype=FLOAT)
    flat = values.flatten(0, 1)
    return Comparison((flat.mean(0) - expected) * ess.sqrt() / flat.std(0), ess)


@dataclass(frozen=True)
class Oracle:
    """A problem to sample and the exact expectations of statistics of its draws."""

    problem: Any
    """A Fibre or a Target."""
    statistics: Callable[[Tensor], Tensor]
    """``inputs [chains, draws, *batch, D] -> [chains, draws, K]``."""
    expected: Tensor
    """``[K]``."""

    def compare(self, draws: dgm.Draws) -> Comparison:
        return compare(self.statistics(draws.inputs), self.expected)


def assert_agrees(oracle: Oracle, draws: dgm.Draws, *, least_ess: float = 500) -> None:
    """The draws have the exact expectations, to within 5 standard errors that mean something."""
    z, ess = oracle.compare(draws)
    assert ess.min() >= least_ess, f"effective sample sizes {ess.tolist()}: too few to test with"
    assert z.abs().max() <= 5, f"{z.abs().max():.1f} standard errors off: {z.tolist()}"


def assert_refuted(oracle: Oracle, draws: dgm.Draws) -> None:
    """The same comparison notices that these draws are of something else."""
    z, _ = oracle.compare(draws)
    assert z.abs().max() > 5, f"not noticed: {z.tolist()}"


def trusted(position: Tensor, converged: Tensor) -> Projection:
    """A projection that cost nothing."""
    none = torch.zeros_like(converged)
    return Projection(position, converged, none.to(torch.int32), retried=none)


def without_reverse_check(solver: Callable) -> Callable:
    """A solver whose calls for reversed drifts, which say where these should return, are taken to have succeeded.

    To be given to ``geodesic`` with an infinite reversal tolerance.
    """

    def trusting(fibre, v, base, *, active, expected=None, **_):
        return solver(fibre, v, base, active=active) if expected is None else trusted(v, active)

    return trusting


# ------------------------------------------------------------------------------------------------ curves in the plane


class Circle(dgm.GenerativeModel):
    """``x = |u|^2``, two standard normal inputs."""

    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return u.square().sum(-1, keepdim=True)

    def latents(self, u):
        return {"angle": torch.atan2(u[..., 1], u[..., 0])}


class Ellipse(dgm.GenerativeModel):
    """``x = u1^2 + 4 u2^2``: on its fibre |J J^T| varies, so a missing Gram term shows."""

    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return u[..., :1].square() + 4 * u[..., 1:].square()


class LogisticEllipse(Ellipse):
    """The same of logistic inputs."""

    input_density = dgm.Logistic(2)


class Wave(dgm.GenerativeModel):
    """``x = u2 - height sin(frequency u1)``: a strongly curved fibre, on which projections find far roots."""

    def __init__(self, height: float = 0.5, frequency: float = 3.0):
        super().__init__()
        self.input_density = dgm.StandardNormal(2)
        self.height, self.frequency = height, frequency

    def observed(self, u):
        return u[..., 1:] - self.height * torch.sin(self.frequency * u[..., :1])


def along_curve(
    curve: Callable, gradient: Callable, t: Tensor, density: dgm.models.InputDensity, *, gram: bool = True
) -> Tensor:
    """Probabilities of the grid points of a curve parameter under ``p_u |J J^T|^(-1/2)`` per unit length.

    ``t`` is an even grid over a period, or over everything but negligible tails: the trapezoidal sum is then exact
    to rounding. ``gram=False`` gives the density that leaves the Gram term out, the classic silent error.
    """
    velocity = torch.func.vmap(torch.func.jacrev(curve))(t)
    points = curve(t)
    log_density = density.log_prob(points) + velocity.norm(dim=-1).log()
    if gram:
        log_density = log_density - gradient(points).norm(dim=-1).log()
    return log_density.softmax(0)


def harmonics(angle: Tensor) -> Tensor:
    return torch.stack([f(k * angle) for k in (1, 2, 4) for f in (torch.cos, torch.sin)], -1)


def circle(square_radius: float = 1.5) -> Oracle:
    """The angle is uniform."""
    problem = dgm.condition(Circle(), [square_radius])
    return Oracle(problem, lambda u: harmonics(torch.atan2(u[..., 1], u[..., 0])), torch.zeros(6, dtype=FLOAT))


def ellipse(
    level: float = 2.0, *, gram: bool = True, problem: dgm.Fibre | None = None, model: type[Ellipse] = Ellipse
) -> Oracle:
    """``u1^2 + 4 u2^2 = level``, by the eccentric angle t: ``u = sqrt(level) (cos t, sin(t)/2)``."""
    t = torch.arange(2000, dtype=FLOAT) * (2 * math.pi / 2000)
    weights = along_curve(
        lambda t: math.sqrt(level) * torch.stack([t.cos(), t.sin() / 2], -1),
        lambda u: torch.stack([2 * u[..., 0], 8 * u[..., 1]], -1),
        t,
        model.input_density,
        gram=gram,
    )
    return Oracle(
        problem or dgm.condition(model(), [level]),
        lambda u: harmonics(torch.atan2(2 * u[..., 1], u[..., 0])),
        weights @ harmonics(t),
    )


def wave(height: float = 0.5, frequency: float = 3.0) -> Oracle:
    """``u2 = height sin(frequency u1)``, by u1: the density is ``exp(-|u|^2 / 2)``."""

    def statistics(u1):
        s = frequency * u1
        return torch.stack([u1, u1.square(), s.cos(), s.sin(), (2 * s).cos(), (2 * s).sin()], -1)

    t = torch.linspace(-12, 12, 20001, dtype=FLOAT)
    weights = along_curve(
        lambda t: torch.stack([t, height * torch.sin(frequency * t)], -1),
        lambda u: torch.stack([-height * frequency * torch.cos(frequency * u[..., 0]), torch.ones_like(u[..., 0])], -1),
        t,
        dgm.StandardNormal(2),
    )
    problem = dgm.condition(Wave(height, frequency), [0.0])
    return Oracle(problem, lambda u: statistics(u[..., 0]), weights @ statistics(t))


# ----------------------------------------------------------------------------------------------------- Gaussian cases


def linear_gaussian_model(*, n_latents: int = 3, n_outputs: int = 6, sd: float = 0.5) -> LinearGaussian:
    rng = torch.Generator().manual_seed(20)
    weight = torch.randn(n_outputs, n_latents, generator=rng, dtype=FLOAT)
    bias = torch.randn(n_outputs, generator=rng, dtype=FLOAT)
    return LinearGaussian(weight, bias, sd)


def gaussian_conditional(matrix: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of ``u ~ N(0, I)`` given ``matrix u = value``."""
    gain = torch.linalg.solve(matrix @ matrix.mT, matrix).mT
    return gain @ value, torch.eye(matrix.shape[1], dtype=FLOAT) - gain @ matrix


def linear_gaussian_posterior(model: LinearGaussian, y: Tensor, operator: Tensor) -> tuple[Tensor, Tensor]:
    """Exact mean and covariance of z given ``operator @ x = y``; the rows of ``operator`` select or mix outputs."""
    everything = operator @ torch.cat([model.weight, model.sd * torch.eye(len(model.bias), dtype=FLOAT)], 1)
    mean, covariance = gaussian_conditional(everything, y - operator @ model.bias)
    n = model.weight.shape[1]
    return mean[:n], covariance[:n, :n]


def gaussian_moments(x: Tensor, means: Tensor, scale: Tensor) -> Tensor:
    """First and second central moments, in units of ``scale``: ``[c, d, B, D] -> [c, d, B (D + D (D + 1)/2)]``."""
    first = (x - means) / scale
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1])
    return torch.cat([first, first[..., i] * first[..., j]], -1).flatten(2)


def gaussian_oracle(problem, means: Tensor, covariances: Tensor, z: Callable[[Tensor], Tensor]) -> Oracle:
    """``z(inputs) [c, d, B, D]`` is ``N(means [B, D], covariances [B, D, D])``."""
    scale = covariances.diagonal(dim1=-2, dim2=-1).sqrt()
    correlations = covariances / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    i, j = torch.triu_indices(means.shape[-1], means.shape[-1])
    expected = torch.cat([torch.zeros_like(means), correlations[:, i, j]], -1).flatten()
    return Oracle(problem, lambda u: gaussian_moments(z(u), means, scale), expected)


def linear_gaussian(
    *, masks: Tensor | None = None, problems: tuple[int, ...] = (), model: LinearGaussian | None = None, wrap=None
) -> Oracle:
    """z given all outputs, the outputs under one mask ``[Dx]``, or under one mask a problem ``[*problems, Dx]``."""
    model = model or linear_gaussian_model()
    n_outputs, n_latents = model.weight.shape
    rng = torch.Generator().manual_seed(21)
    y = 2 * torch.randn(*problems, n_outputs, generator=rng, dtype=FLOAT)
    seen = torch.ones(n_outputs, dtype=torch.bool) if masks is None else masks
    answers = []
    for values, mask in zip(
        y.reshape(-1, n_outputs), seen.expand(*problems, n_outputs).reshape(-1, n_outputs), strict=True
    ):
        operator = torch.eye(n_outputs, dtype=FLOAT)[mask]
        answers.append(linear_gaussian_posterior(model, values[mask], operator))
    means, covariances = (torch.stack(a) for a in zip(*answers, strict=True))
    # what is hidden must not matter
    given = y.masked_fill(~seen, math.nan)
    observe = None if masks is None else dgm.pixels(masks)
    problem = dgm.condition(model if wrap is None else wrap(model), given, observe=observe)
    return gaussian_oracle(
        problem, means, covariances, lambda u: u[..., :n_latents].reshape(*u.shape[:2], -1, n_latents)
    )


class LinearMap(dgm.GenerativeModel):
    """``x = W u + b``, without noise."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.input_density = dgm.StandardNormal(weight.shape[1])
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def observed(self, u):
        return u @ self.weight.mT + self.bias


def soft_gaussian(tolerance: float = 2.0, **options) -> Oracle:
    """u under a tolerance: the posterior is that of the same model with noise of this standard deviation."""
    noisy = linear_gaussian_model(sd=tolerance)
    y = 2 * torch.randn(len(noisy.bias), generator=torch.Generator().manual_seed(21), dtype=FLOAT)
    mean, covariance = linear_gaussian_posterior(noisy, y, torch.eye(len(y), dtype=FLOAT))
    problem = dgm.condition(LinearMap(noisy.weight, noisy.bias), y, tolerance=tolerance, **options)
    return gaussian_oracle(problem, mean[None], covariance[None], lambda u: u.unsqueeze(-2))


class LinearPairs(dgm.DirectedModel):
    """``x = W z + blockdiag(L, ..., L) n``: pairs of outputs share two noises, which L correlates."""

    weight: Tensor
    mix: Tensor
    structure = "independent"
    unit_inputs = unit_outputs = 2

    def __init__(self, correlation: float = 0.8, n_pairs: int = 4):
        super().__init__()
        self.global_density, self.local_density = dgm.StandardNormal(3), dgm.StandardNormal(2 * n_pairs)
        rng = torch.Generator().manual_seed(22)
        self.register_buffer("weight", torch.randn(2 * n_pairs, 3, generator=rng, dtype=FLOAT))
        self.register_buffer("mix", 0.7 * torch.tensor([[1, 0], [correlation, (1 - correlation**2) ** 0.5]]).double())

    def global_latents(self, u1):
        return {"z": u1}

    def simulate(self, z, u2):
        noise = u2.unflatten(-1, (-1, 2)) @ self.mix.mT
        return z["z"] @ self.weight.mT + noise.flatten(-2)


class LinearWalk(dgm.DirectedModel):
    """``x_t = M x_{t-1} + B z + L n_t`` in the plane, from ``x_0 = z``: the noise of a step is correlated."""

    structure = "markov"
    step_inputs = 2

    def __init__(self, correlation: float = 0.8, n_steps: int = 4):
        super().__init__()
        self.global_density, self.local_density = dgm.StandardNormal(2), dgm.StandardNormal(2 * n_steps)
        self.register_buffer("decay", torch.tensor([[0.8, -0.3], [0.4, 0.6]], dtype=FLOAT))
        self.register_buffer("push", torch.tensor([[0.5, 0.2], [0.0, -0.7]], dtype=FLOAT))
        self.register_buffer("mix", 0.7 * torch.tensor([[1, 0], [correlation, (1 - correlation**2) ** 0.5]]).double())

    def global_latents(self, u1):
        return {"z": u1}

    def initial(self, z):
        return z["z"]

    def transition(self, previous, z, u2_t):
        return previous @ self.decay.mT + z["z"] @ self.push.mT + u2_t @ self.mix.mT


def linear_posterior(model: dgm.DirectedModel, y: Tensor, operator: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and covariance of z for any linear model of normal inputs, given ``operator @ x`` of the output y ``[Dx]``.

    Without an operator all of x is given.
    """
    n, origin = model.global_density.dim, torch.zeros(model.input_density.dim, dtype=FLOAT)
    matrix = torch.func.jacrev(model.observed)(origin)
    operator = torch.eye(len(matrix), dtype=FLOAT) if operator is None else operator
    mean, covariance = gaussian_conditional(operator @ matrix, operator @ (y - model.observed(origin)))
    return mean[:n], covariance[:n, :n]


def linear(model: dgm.DirectedModel, y: Tensor, *, observe=None, operator: Tensor | None = None) -> Oracle:
    """z of a linear model given what ``observe``, the same as ``operator``, sees of y."""
    mean, covariance = linear_posterior(model, y, operator)
    problem = dgm.condition(model, y, observe=observe)
    return gaussian_oracle(problem, mean[None], covariance[None], lambda u: u[..., : len(mean)].unsqueeze(-2))


class GaussianTarget(dgm.Target):
    """``N(mean, scale^2 correlation)``: ``scale [*batch]``, one per problem, ``mean [D]``, ``correlation [D, D]``."""

    def __init__(self, scale: Tensor, mean: Tensor, correlation: Tensor):
        super().__init__(None, len(mean), tuple(scale.shape))
        self.scale, self.mean, self.precision = scale, mean, torch.linalg.inv(correlation)

    def energy(self, x):
        d = (x - self.mean) / self.scale.unsqueeze(-1)
        return 0.5 * (d * (d @ self.precision)).sum(-1)

    def start(self, chains, rng):
        return self.mean + self.scale.unsqueeze(-1) * super().start(chains, rng).to(FLOAT)


def correlated_gaussian(scales=(1.0,), *, wrong: float = 1.0) -> Oracle:
    """A correlated Gaussian with one scale per problem; ``wrong`` widens the answer's scale, not the target's."""
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=FLOAT)
    correlation = torch.tensor([[1.0, 0.8, 0.0], [0.8, 1.0, -0.3], [0.0, -0.3, 1.0]], dtype=FLOAT)
    scale = torch.tensor(scales, dtype=FLOAT)
    covariances = (wrong * scale).square()[:, None, None] * correlation
    return gaussian_oracle(
        GaussianTarget(scale, mean, correlation), mean.expand(len(scale), 3), covariances, lambda x: x
    )


class Funnel(dgm.Target):
    """Neal's funnel ``v ~ N(0, 9)``, ``x_i | v ~ N(0, exp(v))``, non-centred: ``v = 3 n0``, ``x = exp(v/2) n``.

    ``jacobian=False`` evaluates the density of (v, x) at the inputs and forgets the change of variables.
    """

    def __init__(self, n: int = 4, *, jacobian: bool = True):
        super().__init__(None, n + 1)
        self.jacobian = jacobian

    def latents(self, x):
        v = 3 * x[..., :1]
        return {"v": v[..., 0], "x": torch.exp(v / 2) * x[..., 1:]}

    def energy(self, x):
        z = self.latents(x)
        v, n = z["v"], self.dim - 1
        energy = v.square() / 18 + n * v / 2 + 0.5 * (z["x"].square().sum(-1) * (-v).exp())
        return energy - n * v / 2 if self.jacobian else energy


def funnel(*, jacobian: bool = True) -> Oracle:
    """Moments of v and of ``log x_1^2 = v + log chi^2_1``."""
    problem = Funnel(jacobian=jacobian)
    mean_log_chi2 = torch.special.digamma(torch.tensor(0.5, dtype=FLOAT)).item() + math.log(2)

    def statistics(u):
        z = problem.latents(u)
        log_square = z["x"][..., 0].square().log() - mean_log_chi2
        return torch.stack([z["v"], z["v"].square(), log_square, log_square.square(), log_square * z["v"]], -1)

    expected = torch.tensor([0, 9, 0, 9 + math.pi**2 / 2, 9], dtype=FLOAT)
    return Oracle(problem, statistics, expected)
