"""Twelve Pyro programs: posterior moments by quadrature or in closed form, and what Pyro itself says of them."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dgm_infer as dgm

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    import pyro.distributions
    import pyro.infer
    import pyro.infer.mcmc.util
    from pyro.ops.stats import effective_sample_size

# Pyro's distributions are torch's with more methods, which their types do not have
dist: Any = pyro.distributions

FLOAT = torch.float64
Y = torch.tensor([0.3, 1.2, 0.7, -0.4, 2.1, 1.4], dtype=FLOAT)
X = torch.linspace(-1, 1, 6, dtype=FLOAT)
PAIRS = torch.tensor(
    [[0.9, 1.1], [-0.4, 0.2], [1.3, 0.6], [-1.0, -1.4], [0.2, 0.7], [-0.6, -0.3], [0.5, -0.4], [0.1, 0.6]], dtype=FLOAT
)
COUNTS = torch.tensor([2.0, 0.0, 3.0, 4.0, 1.0, 6.0], dtype=FLOAT)
ANSWERS = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0], dtype=FLOAT)
WEIGHTS = torch.tensor([[1.0, 0.0], [0.5, 1.0], [-1.0, 2.0]], dtype=FLOAT)
NOISE = torch.tensor([[1.0, 0.3, 0.0], [0.3, 0.5, 0.1], [0.0, 0.1, 0.8]], dtype=FLOAT)


def hierarchical(y, width=3.0):
    mean = pyro.sample("mean", dist.Normal(0.0, width))
    spread = pyro.sample("spread", dist.HalfCauchy(1.0))
    with pyro.plate("groups", 6):
        group = pyro.sample("group", dist.Normal(mean, spread))
        pyro.sample("y", dist.Normal(group, 0.4), obs=y)


def hierarchical_without_groups(y, width=3.0):
    """The same with the groups integrated out, for quadrature."""
    mean = pyro.sample("mean", dist.Normal(0.0, width))
    spread = pyro.sample("spread", dist.HalfCauchy(1.0))
    pyro.sample("y", dist.Normal(mean, (spread**2 + 0.4**2).sqrt()).expand([6]).to_event(1), obs=y)


def half_cauchy(y, width=2.0):
    scales = pyro.sample("scales", dist.HalfCauchy(width * torch.ones(2)).to_event(1))
    with pyro.plate("data", 8):
        pyro.sample("y", dist.Normal(0.0, scales).to_event(1), obs=y)


def correlated(y, concentration=1.5):
    factor = pyro.sample("factor", dist.LKJCholesky(2, concentration))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("data", 8):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), scale_tril=scale * factor), obs=y)


def gamma_and_beta(y, shape=2.5):
    rate = pyro.sample("rate", dist.Gamma(shape, 1.5))
    share = pyro.sample("share", dist.Beta(2.0, 3.0))
    pyro.sample("y", dist.Exponential(rate * share).expand([6]).to_event(1), obs=y)


def poisson(y, counts, loc=0.5):
    level = pyro.sample("level", dist.Normal(loc, 0.5))
    pyro.sample("y", dist.Normal(level, 0.5), obs=y)
    with pyro.plate("data", 6):
        pyro.sample("counts", dist.Poisson(level.exp()), obs=counts)


def bernoulli(y, answers, width=2.0):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, width))
    pyro.sample("y", dist.Normal(slope, 1.5), obs=y)
    with pyro.plate("data", 6):
        pyro.sample("answers", dist.Bernoulli(logits=intercept + slope * X), obs=answers)


def plates(y, centre=0.0):
    loc = pyro.sample("loc", dist.StudentT(4.0, 0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(centre, 0.5))
    with pyro.plate("data", 6):
        pyro.sample("y", dist.Normal(loc, scale), obs=y)


def nested(y, width=1.0):
    mean = pyro.sample("mean", dist.Laplace(0.0, width))
    with pyro.plate("columns", 2):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        with pyro.plate("rows", 8):
            pyro.sample("y", dist.Normal(mean, scale), obs=y)


def vector(y, width=1.0):
    mean = pyro.sample("mean", dist.MultivariateNormal(torch.zeros(2, dtype=FLOAT), width * torch.eye(2, dtype=FLOAT)))
    pyro.sample("y", dist.MultivariateNormal(WEIGHTS @ mean, NOISE), obs=y)


def transformed(y, low=-1.0):
    loc = pyro.sample("loc", dist.Uniform(low, 2.0))
    base = dist.Normal(loc, 1.0).expand([6]).to_event(1)
    pyro.sample("y", dist.TransformedDistribution(base, [dist.transforms.SoftplusTransform()]), obs=y)


def total(rate=1.0):
    first = pyro.sample("first", dist.Exponential(rate))
    second = pyro.sample("second", dist.Exponential(1.0))
    pyro.deterministic("total", first + second)


def mixed(y, counts, weight=0.3):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.InverseGamma(3.0, 2.0))
    with pyro.plate("data", 6):
        pyro.sample("y", dist.Normal(slope * X, scale), obs=y)
        pyro.sample("counts", dist.Poisson((slope * X).exp()), obs=counts)
    pyro.sample("sign", dist.Bernoulli(logits=slope), obs=torch.tensor(1.0))
    pyro.factor("penalty", -weight * slope.square())


Moments = dict[str, Tensor]
"""First and second moments by name of a variable, each ``[2, *shape]``."""


class Case(NamedTuple):
    """A program, its data, and what its posterior is."""

    program: Callable[..., None]
    args: tuple
    wrong: dict[str, float]
    """What makes it a slightly wrong program."""
    exact: Callable[..., Moments]
    """Moments, given what makes the program a wrong one."""
    observed: dict[str, float] | None = None
    """What is observed exactly, where Pyro's ``obs=`` does not say it."""
    has_nuts: bool = False
    """Whether the oracle has integrated a variable out, whose moments Pyro's NUTS gives."""


def by_quadrature(program: Callable[..., None], *args: Any, box: list[tuple[float, float]], n: int) -> Callable:
    """Moments by the trapezoidal rule on the real line of every variable, where densities are smooth."""

    def moments(**wrong: Any) -> Moments:
        target = dgm.target_from_pyro(program, *args, **wrong)
        assert target.dim == len(box)
        axes = [torch.linspace(*ends, n, dtype=FLOAT) for ends in box]
        x = torch.cartesian_prod(*axes).reshape(-1, target.dim)
        with torch.no_grad():
            energy = torch.cat([target.energy(part) for part in x.split(20_000)])
            weight = torch.softmax(-energy, 0)
            edge = torch.stack([(x == x.amin(0)) | (x == x.amax(0))]).any(-1).squeeze(0)
            # what the box leaves out is far below any Monte Carlo error
            assert weight[edge].sum() < 1e-4
            kept = weight > 1e-12
            values = target.latents(x[kept])
        return {name: _weighted(value.double(), weight[kept]) for name, value in values.items()}

    return moments


def _weighted(value: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([torch.tensordot(weight, value**power, 1) for power in (1, 2)])


def of_vector(width: float = 1.0) -> Moments:
    """Of a normal mean with normal data, in closed form."""
    precision = torch.linalg.inv(NOISE)
    covariance = torch.linalg.inv(WEIGHTS.T @ precision @ WEIGHTS + torch.eye(2, dtype=FLOAT) / width)
    mean = covariance @ WEIGHTS.T @ precision @ Y[:3]
    return {"mean": torch.stack([mean, mean**2 + covariance.diagonal()])}


BOX_OF_VECTOR = [(-4.0, 5.0)] * 2


def of_total(rate: float = 1.0) -> Moments:
    """Given their sum 3: the first has the density ``exp(-(rate - 1) x)`` on (0, 3)."""
    x = (torch.arange(30_000, dtype=FLOAT) + 0.5) / 10_000
    weight = torch.softmax(-(rate - 1) * x, 0)
    return {"first": _weighted(x, weight), "second": _weighted(3 - x, weight)}


def _case(program: Callable[..., None], *args: Any, wrong: dict[str, float], box: list, n: int, **more: Any) -> Case:
    return Case(program, args, wrong, by_quadrature(more.pop("collapsed", program), *args, box=box, n=n), **more)


POSITIVE = Y.abs() + 0.2
CASES: dict[str, Case] = {
    "hierarchical normal": _case(
        hierarchical,
        Y,
        collapsed=hierarchical_without_groups,
        wrong={"width": 1.0},
        box=[(-5, 6), (-14, 5)],
        n=160,
        has_nuts=True,
    ),
    "half-Cauchy scales": _case(half_cauchy, PAIRS, wrong={"width": 0.5}, box=[(-3, 3.5)] * 2, n=120),
    "LKJ correlation": _case(correlated, PAIRS, wrong={"concentration": 4.0}, box=[(-4, 5), (-3, 3)], n=120),
    "Gamma and Beta": _case(gamma_and_beta, POSITIVE, wrong={"shape": 4.0}, box=[(-4, 5), (-6, 7)], n=120),
    "Poisson": _case(poisson, torch.tensor(1.5), COUNTS, wrong={"loc": 0.2}, box=[(-1, 3)], n=400),
    "Bernoulli": _case(bernoulli, torch.tensor(1.0), ANSWERS, wrong={"width": 1.0}, box=[(-6, 6), (-6, 9)], n=160),
    "plates": _case(plates, Y, wrong={"centre": 0.5}, box=[(-4, 6), (-2.5, 3)], n=160),
    "nested plates": _case(nested, PAIRS, wrong={"width": 0.1}, box=[(-2, 2.5), (-2.2, 2), (-2.2, 2)], n=60),
    "normal vector": Case(vector, (Y[:3],), {"width": 0.5}, of_vector),
    "transformed": _case(transformed, POSITIVE, wrong={"low": 0.2}, box=[(-14, 16)], n=1000),
    "a sum": Case(total, (), {"rate": 1.5}, of_total, {"total": 3.0}),
    "mixed": _case(mixed, Y, COUNTS, wrong={"weight": 1.0}, box=[(-3, 5), (-2.5, 4)], n=160),
}


class Estimates(NamedTuple):
    """Moments with their standard errors and effective sample sizes, like :data:`Moments`."""

    moments: Moments
    errors: Moments
    ess: Moments


def estimates(values: Mapping[str, Tensor]) -> Estimates:
    """From draws ``[chains, draws, *shape]`` of every variable."""
    parts: list[Moments] = [{}, {}, {}]
    for name, value in values.items():
        powers = torch.stack([value.double(), value.double() ** 2])
        columns = powers.reshape(*powers.shape[:3], -1).permute(0, 3, 1, 2)
        ess = torch.stack([torch.stack([_ess(each) for each in column]) for column in columns])
        ess = ess.reshape(2, *value.shape[2:])
        spread = powers.flatten(1, 2).var(1)
        parts[0][name] = powers.mean((1, 2))
        parts[1][name] = (spread / ess).sqrt()
        parts[2][name] = ess
    return Estimates(*parts)


def _ess(draws: Tensor) -> Tensor:
    """Of ``[chains, draws]``; infinite for what cannot vary, as the corner of a factor."""
    # one at a time: a NaN of one would be that of all
    return effective_sample_size(draws, 0, 1) if draws.std() > 1e-6 else torch.tensor(math.inf)


def by_chains(values: Mapping[str, Tensor]) -> Estimates:
    """From many independent chains ``[chains, draws, *shape]``, whose means tell the error without a model of it."""
    found = estimates(values)
    errors = {}
    for name, value in values.items():
        means = torch.stack([value.double(), value.double() ** 2]).mean(2)
        errors[name] = means.std(1) / math.sqrt(means.shape[1])
    return found._replace(errors=errors)


def potential_of(case: Case) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor]], Tensor], dict[str, Any]]:
    """Of Pyro: a point in its coordinates, ``-log p`` of such, and the bijections to them."""
    with torch.random.fork_rng():
        pyro.set_rng_seed(0)
        start, potential, bijections, _ = pyro.infer.mcmc.util.initialize_model(case.program, case.args)
    return start, potential, bijections


def nuts(case: Case, chains: int, warmup: int, draws: int) -> dict[str, Tensor]:
    """Draws ``[chains, draws, *shape]`` by Pyro's NUTS, chains one after the other."""
    runs = []
    with torch.random.fork_rng():
        for seed in range(chains):
            pyro.set_rng_seed(seed)
            kernel = pyro.infer.NUTS(case.program, max_tree_depth=6)
            mcmc = pyro.infer.MCMC(kernel, num_samples=draws, warmup_steps=warmup, disable_progbar=True)
            mcmc.run(*case.args)
            runs.append(mcmc.get_samples())
    return {name: torch.stack([run[name] for run in runs]) for name in runs[0]}


def distances(found: Estimates, exact: Moments, errors: Moments | None = None) -> dict[str, Tensor]:
    """Standard errors between moments, of those variables that both have; combined with those of the other."""
    apart = {}
    for name in found.moments.keys() & exact.keys():
        error = found.errors[name]
        if errors is not None:
            error = (error**2 + errors[name] ** 2).sqrt()
        # entries that cannot vary, as the corner of a factor, agree to rounding
        apart[name] = (found.moments[name] - exact[name]).abs() / (error + 1e-6)
    return apart


def largest(apart: Mapping[str, Tensor]) -> float:
    return max(each.max().item() for each in apart.values())
