"""Densities of random variables that are written in their coordinates, and the mass that others lose.

A density evaluated at ``z(x)`` loses the mass that lies where z rounds to an edge of its support: two thirds of
Beta(0.01, 0.01) are within 1e-16 of 0 or 1. Written in x, it needs ``log z`` and ``log(1 - z)`` only, which do not
round.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions import transforms
from torch.nn import functional as F

from ..errors import ModelError, warn
from .charts import (
    GENERALIZED_PARETO,
    Chart,
    chart_of,
    flattened,
    is_masked,
    log_cosh_sums,
    log_one_minus_exp,
    log_simplex,
    log_softplus,
    sum_last,
    support_of,
    without_events,
)

# The share of a prior that may be lost without a word.
TOLERATED = 1e-3
# Draws of a prior by which its lost mass is estimated, and the most numbers in all of them.
_DRAWS, _MOST = 10_000, 10**7


def log_density(d: td.Distribution, chart: Chart, x: Tensor) -> Tensor:
    """``log p(z(x)) + log|dz/dx|``, ``[*batch_shape]``, written in x where the density can be."""
    written = _written(d, chart, x)
    return d.log_prob(chart.value(x)) + chart.log_jacobian(x) if written is None else written


def lost_mass(d: td.Distribution, chart: Chart) -> float:
    """The share of a distribution that no coordinate reaches, of the element that loses most.

    Estimated by draws: those that are not finite; and if the density is not written in the coordinate, those on an edge
    of the support. The caller's random numbers are used.
    """
    base, n = without_events(d), _DRAWS * max(chart.shape.numel(), 1)
    if not chart.is_scalar or not chart.shape.numel() or n > _MOST:
        return 0.0
    z = base.sample((_DRAWS,))
    lost = ~z.isfinite()
    zero = torch.zeros(chart.shape, dtype=z.dtype, device=z.device)
    if chart.kind != "real" and _written(d, chart, zero) is None:
        ends = zero + torch.finfo(z.dtype).max
        low, high = chart.value(-ends), chart.value(ends)
        lost = lost | (z <= low) | ((z >= high) & (chart.kind == "logit"))
    return lost.double().mean(0).max().item()


def warn_of_lost_mass(program: str, lost: Mapping[str, float]) -> None:
    """Name variables whose prior has mass that no coordinate reaches.

    Args:
        program: what they are variables of.
        lost: the shares, by name.
    """
    for name, share in lost.items():
        warn(
            f"{program}: {100 * share:.2g} % of the prior of {name} rounds to an edge of its support or overflows: "
            "this mass is missing from the posterior and from log Z; use less extreme parameters, or a distribution of "
            "torch.distributions, whose densities are written in log space",
        )


def _written(d: td.Distribution, chart: Chart, x: Tensor) -> Tensor | None:
    """The density in the coordinate; None if it has to be evaluated at the value."""
    if is_masked(d):
        masked: Any = d
        inner = _written(masked.base_dist, chart, x)
        return None if inner is None else torch.where(torch.as_tensor(masked._mask), inner, chart.log_jacobian(x))
    for kind in type(d).__mro__:
        if kind in _DENSITIES:
            return _DENSITIES[kind](d, chart, x)
    return None


def _beta(d: td.Beta, chart: Chart, x: Tensor) -> Tensor:
    a, b = d.concentration1, d.concentration0
    constant = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    return constant + a * F.logsigmoid(x) + b * F.logsigmoid(-x)


def _kumaraswamy(d: td.Kumaraswamy, chart: Chart, x: Tensor) -> Tensor:
    a, b = d.concentration1, d.concentration0
    rest = log_one_minus_exp(a.log() + log_softplus(-x))
    return a.log() + b.log() + a * F.logsigmoid(x) + F.logsigmoid(-x) + (b - 1) * rest


def _uniform(d: td.Uniform, chart: Chart, x: Tensor) -> Tensor:
    return F.logsigmoid(x) + F.logsigmoid(-x) + torch.zeros_like(d.low)


def _gamma(d: td.Gamma, chart: Chart, x: Tensor) -> Tensor:
    a = d.concentration
    t = x + d.rate.log()
    return a * t - t.exp() - torch.lgamma(a)


def _inverse_gamma(d: Any, chart: Chart, x: Tensor) -> Tensor:
    a = d.concentration
    t = d.rate.log() - x
    return a * t - t.exp() - torch.lgamma(a)


def _fisher_snedecor(d: td.FisherSnedecor, chart: Chart, x: Tensor) -> Tensor:
    # the odds of a Beta variable
    a, b = d.df1 / 2, d.df2 / 2
    t = x + d.df1.log() - d.df2.log()
    constant = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    return constant + a * F.logsigmoid(t) + b * F.logsigmoid(-t)


def _half_cauchy(d: td.HalfCauchy, chart: Chart, x: Tensor) -> Tensor:
    t = x - d.scale.log()
    return math.log(2 / math.pi) + t - F.softplus(2 * t)


def _pareto(d: td.Pareto, chart: Chart, x: Tensor) -> Tensor:
    scale = d.scale.log()
    return d.alpha.log() + d.alpha * scale - (d.alpha + 1) * torch.logaddexp(scale, x) + x


def _generalized_pareto(d: Any, chart: Chart, x: Tensor) -> Tensor:
    # a function of an exponential variable exp(x)
    return x - x.exp() + torch.zeros_like(d.loc)


def _correlation(d: td.LKJCholesky, chart: Chart, x: Tensor) -> Tensor:
    log_diagonal = -log_cosh_sums(x).diagonal(dim1=-2, dim2=-1)[..., 1:]
    n = d.dim
    order = 2 * (d.concentration - 1).unsqueeze(-1) + n - torch.arange(2, n + 1, dtype=x.dtype, device=x.device)
    identity = torch.eye(n, dtype=x.dtype, device=x.device)
    return (order * log_diagonal).sum(-1) + d.log_prob(identity) + chart.log_jacobian(x)


def _dirichlet(d: td.Dirichlet, chart: Chart, x: Tensor) -> Tensor:
    a = d.concentration
    return torch.lgamma(a.sum(-1)) - torch.lgamma(a).sum(-1) + (a * log_simplex(x)).sum(-1)


def _relaxed_one_hot(d: td.RelaxedOneHotCategorical, chart: Chart, x: Tensor) -> Tensor:
    log_z, temperature = log_simplex(x), d.temperature
    n = log_z.shape[-1]
    score = d.logits - temperature * log_z
    constant = math.lgamma(n) + (n - 1) * torch.as_tensor(temperature).log()
    return constant + score.sum(-1) - n * score.logsumexp(-1)


def _independent(d: td.Independent, chart: Chart, x: Tensor) -> Tensor | None:
    inner = _written(d.base_dist, chart_of(d.base_dist), x)
    return None if inner is None else sum_last(inner, d.reinterpreted_batch_ndims)


def _mixture(d: td.MixtureSameFamily, chart: Chart, x: Tensor) -> Tensor | None:
    """Density of components in one chart; where their supports differ, each density counts where it has its own."""
    log_weights = torch.log_softmax(d.mixture_distribution.logits, -1)
    component = d.component_distribution
    if chart.kind == "circle":
        return None
    edges: list[Any] = [getattr(support_of(component), name, None) for name in ("lower_bound", "upper_bound")]
    if any(isinstance(edge, Tensor) and edge.ndim for edge in edges):
        z = d._pad(chart.value(x))
        support = support_of(component)
        inside = support.check(z)
        # a density beyond its support may be NaN
        safe = torch.where(inside, z, component.sample().to(z))
        each = torch.where(_all_last(inside, len(d.event_shape)), component.log_prob(safe), -torch.inf)
        return (each + log_weights).logsumexp(-1) + chart.log_jacobian(x)
    own = chart_of(component)
    n_events = len(d.event_shape)
    return (log_density(component, own, x.unsqueeze(-1 - n_events)) + log_weights).logsumexp(-1)


def _transformed(d: td.TransformedDistribution, chart: Chart, x: Tensor) -> Tensor | None:
    """Through the last transform, where it is one of coordinates: then it need not be computed."""
    *before, last = flattened(d.transforms)
    inner = td.TransformedDistribution(d.base_dist, before) if before else d.base_dist
    if len(inner.event_shape) != len(d.event_shape):
        inner = td.Independent(inner, len(d.event_shape) - len(inner.event_shape))
    try:
        below = chart_of(inner)
    except ModelError:
        return None
    own = (below.kind, chart.kind)
    forward, backward = type(last), type(getattr(last, "_inv", None))
    match own:
        case ("real", "log") if forward is transforms.ExpTransform and _is_zero(chart.low):
            return log_density(inner, below, x)
        case ("real", "logit") if forward is transforms.SigmoidTransform:
            return log_density(inner, below, x)
        case ("real", "logit") if forward is transforms.TanhTransform:
            return log_density(inner, below, x / 2) - sum_last(torch.full_like(x, math.log(2)), chart.event_dim)
        case ("real", "simplex") if forward is transforms.StickBreakingTransform:
            return log_density(inner, below, x)
        case ("real", "log") if forward is transforms.SoftplusTransform:
            # y = log(exp(z) - 1), dy/dz = 1/(1 - exp(-z))
            log_slope = x - log_one_minus_exp(x)
            y = chart.value(x) + log_one_minus_exp(x)
            return log_density(inner, below, y) + sum_last(log_slope, chart.event_dim)
        case ("log", "log") if forward is transforms.PowerTransform and _is_zero(below.low):
            power = torch.as_tensor(last.exponent)
            log_slope = sum_last(-power.abs().log() + torch.zeros_like(x), chart.event_dim)
            return log_density(inner, below, x / power) + log_slope
        case ("log", "log") if forward is transforms.AffineTransform:
            return log_density(inner, below, x - torch.as_tensor(last.scale).log())
        case ("logit", "logit") if forward is transforms.AffineTransform:
            return log_density(inner, below, x * torch.as_tensor(last.scale).sign())
        case ("log", "real") if backward is transforms.ExpTransform and _is_zero(below.low):
            return log_density(inner, below, x)
        case ("logit", "real") if backward is transforms.SigmoidTransform:
            return log_density(inner, below, x)
    return None


_Density = Callable[[Any, Chart, Tensor], Tensor | None]
_DENSITIES: dict[type, _Density] = {
    td.Beta: _beta,
    td.Kumaraswamy: _kumaraswamy,
    td.Uniform: _uniform,
    td.Gamma: _gamma,
    td.InverseGamma: _inverse_gamma,
    td.FisherSnedecor: _fisher_snedecor,
    td.HalfCauchy: _half_cauchy,
    td.Pareto: _pareto,
    td.Dirichlet: _dirichlet,
    td.LKJCholesky: _correlation,
    td.RelaxedOneHotCategorical: _relaxed_one_hot,
    td.Independent: _independent,
    td.MixtureSameFamily: _mixture,
    td.TransformedDistribution: _transformed,
}
_DENSITIES |= dict.fromkeys(GENERALIZED_PARETO, _generalized_pareto)


def _is_zero(edge: Any) -> bool:
    return not isinstance(edge, Tensor) and edge == 0


def _all_last(each: Tensor, n: int) -> Tensor:
    return each.flatten(-n).all(-1) if n > 0 else each
