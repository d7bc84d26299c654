"""Random variables as functions of unit-variance inputs (math 1.3, 1.5), or of inputs with their own density."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributions as td
from torch.nn import functional as F

from ..models import InputDensity, Logistic, Product, StandardNormal
from ..models.densities import STANDARD_LOGISTIC
from .charts import chart_of, check_not_rounded, is_circular
from .log_densities import log_density

Kind = Literal["normal", "logistic", "real"]
"""Density of inputs: N(0, 1), or logistic of unit variance; or coordinates without a density of their own."""


@dataclass(frozen=True)
class Reparametrisation:
    """A random variable as a function of independent inputs v of one kind.

    Attributes:
        kind: the inputs are N(0, 1), or logistic of unit variance.
        shape: shape of v.
        value: the variable, ``value(v)``.
        inverse: v of a value, where simulators need it.
        log_factor: log density of v less that of its kind, from v and the value, summed; None for 0.
        of: the distribution, where values are those of its chart.
    """

    kind: Kind
    shape: torch.Size
    value: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor] | None = None
    log_factor: Callable[[Tensor, Tensor], Tensor] | None = None
    of: td.Distribution | None = None


def location_scale(loc: Any, scale: Any, shape: torch.Size) -> Reparametrisation:
    """``loc + scale v``, v normal."""
    return Reparametrisation("normal", shape, lambda v: loc + scale * v, lambda x: (x - loc) / scale)


def uniform_between(low: Any, high: Any, shape: torch.Size) -> Reparametrisation:
    """``low + (high - low) sigmoid(pi v/sqrt 3)``, v logistic."""

    def inverse(x: Tensor) -> Tensor:
        p = (x - low) / (high - low)
        # draws can be exactly 0, which represents any number below their spacing
        eps = torch.finfo(p.dtype).eps / 2
        return torch.logit(p.clamp(eps, 1 - eps)) / STANDARD_LOGISTIC

    return Reparametrisation(
        "logistic", shape, lambda v: low + (high - low) * torch.sigmoid(STANDARD_LOGISTIC * v), inverse
    )


def exponential(rate: Any, shape: torch.Size) -> Reparametrisation:
    """``softplus(pi v/sqrt 3) / rate``, v logistic."""
    return Reparametrisation(
        "logistic",
        shape,
        lambda v: F.softplus(STANDARD_LOGISTIC * v, threshold=40) / rate,
        # log(exp(a) - 1) without overflow
        lambda x: (rate * x + torch.log(-torch.expm1(-rate * x))) / STANDARD_LOGISTIC,
    )


def cauchy(loc: Any, scale: Any, shape: torch.Size) -> Reparametrisation:
    """``loc + scale tan(pi (p - 1/2))`` with ``p = sigmoid(pi v/sqrt 3)``, v logistic."""

    def value(v: Tensor) -> Tensor:
        near = v.abs() < 1
        middle = torch.tan(0.5 * math.pi * torch.tanh(0.5 * STANDARD_LOGISTIC * torch.where(near, v, 0.0)))
        far = torch.where(near, 1.0, v)
        # tan(pi (p - 1/2)) = 1/tan(pi (1 - p)), which does not cancel in the tail
        tail = far.sign() / torch.tan(math.pi * torch.sigmoid(-STANDARD_LOGISTIC * far.abs()))
        return loc + scale * torch.where(near, middle, tail)

    def inverse(x: Tensor) -> Tensor:
        return torch.logit(0.5 + torch.atan((x - loc) / scale) / math.pi) / STANDARD_LOGISTIC

    return Reparametrisation("logistic", shape, value, inverse)


def gumbel(loc: Any, scale: Any, shape: torch.Size) -> Reparametrisation:
    """``loc - scale log(-log p)`` with ``p = sigmoid(pi v/sqrt 3)``, v logistic."""

    def inverse(x: Tensor) -> Tensor:
        t = torch.exp((loc - x) / scale)
        # -log(exp(t) - 1) without overflow
        return -(t + torch.log(-torch.expm1(-t))) / STANDARD_LOGISTIC

    # -log p does not cancel in the upper tail, where p is 1 to rounding
    return Reparametrisation(
        "logistic", shape, lambda v: loc - scale * F.softplus(-STANDARD_LOGISTIC * v, threshold=40).log(), inverse
    )


def gamma(concentration: Tensor) -> Reparametrisation:
    """``exp(digamma(a) + sqrt(trigamma(a)) v)`` of unit rate, with the density that makes it Gamma(a, 1).

    v then has mean 0 and variance 1 (math 1.5): digamma and trigamma are the mean and variance of the log.
    """
    centre, width = torch.digamma(concentration), torch.polygamma(1, concentration).sqrt()

    def log_factor(v: Tensor, x: Tensor) -> Tensor:
        own = concentration * (centre + width * v) - x - torch.lgamma(concentration) + width.log()
        return (own - _log_normal(v)).sum()

    return Reparametrisation(
        "normal",
        concentration.shape,
        lambda v: torch.exp(centre + width * v),
        lambda x: (x.log() - centre) / width,
        log_factor,
    )


def reparametrise(distribution: td.Distribution) -> Reparametrisation:
    """The form of one draw of a distribution of torch, or of Pyro, which derives its own from them.

    Unit-variance inputs where there is such a form (math 1.3), else the chart of the distribution with its own density.

    Raises:
        ModelError: it is discrete, or has no chart.
    """
    check_not_rounded(distribution)
    if is_circular(distribution):
        return _own_density(distribution)
    for kind in type(distribution).__mro__:
        if kind in _FORMS:
            form = _FORMS[kind](distribution)
            if form is not None:
                return form
    return _own_density(distribution)


def reparametrise_density(density: InputDensity) -> list[Reparametrisation]:
    """The forms whose values concatenate to a draw of an input density."""
    if isinstance(density, Product):
        return [form for factor in density.factors for form in reparametrise_density(factor)]
    shape = torch.Size([density.dim])
    if isinstance(density, StandardNormal | Logistic):
        return [Reparametrisation("normal" if isinstance(density, StandardNormal) else "logistic", shape, lambda v: v)]
    return [
        Reparametrisation("normal", shape, lambda v: v, None, lambda v, x: density.log_prob(x) - _log_normal(v).sum())
    ]


def _own_density(d: td.Distribution, kind: Kind = "normal", loc: Any = 0.0, scale: Any = 1.0) -> Reparametrisation:
    """``x = loc + scale v`` in the chart of the distribution."""
    chart = chart_of(d)
    base = StandardNormal(1) if kind == "normal" else Logistic(1)

    def log_factor(v: Tensor, z: Tensor) -> Tensor:
        widths = (torch.as_tensor(scale).log() + torch.zeros_like(v)).sum()
        return log_density(d, chart, loc + scale * v).sum() + widths - base.coordinate_log_prob(v).sum()

    return Reparametrisation(kind, chart.shape, lambda v: chart.value(loc + scale * v), None, log_factor, d)


def _transformed(d: td.TransformedDistribution) -> Reparametrisation | None:
    if not all(transform.bijective for transform in d.transforms):
        return None
    base = reparametrise(d.base_dist)

    def value(v: Tensor) -> Tensor:
        x: Any = base.value(v)
        for transform in d.transforms:
            x = transform(x)
        return x

    factor = base.log_factor
    return replace(
        base, value=value, inverse=None, log_factor=None if factor is None else lambda v, x: factor(v, base.value(v))
    )


def _laplace(d: td.Laplace) -> Reparametrisation:
    def value(v: Tensor) -> Tensor:
        # log p and log(1 - p) of p = sigmoid(pi v/sqrt 3), on their own sides of the median
        magnitude = F.softplus(STANDARD_LOGISTIC * v.abs(), threshold=40) - math.log(2)
        return d.loc + d.scale * torch.where(v < 0, -magnitude, magnitude)

    return Reparametrisation("logistic", _shape(d), value)


def _half_cauchy(d: td.HalfCauchy) -> Reparametrisation:
    def value(v: Tensor) -> Tensor:
        # tan(pi p/2) for p < 1/2, and 1/tan(pi (1 - p)/2) beyond
        low = v < 0
        small = torch.tan(0.5 * math.pi * torch.sigmoid(-STANDARD_LOGISTIC * torch.where(low, -v, v)))
        return d.scale * torch.where(low, small, 1 / small)

    return Reparametrisation("logistic", _shape(d), value)


def _multivariate_normal(d: td.MultivariateNormal) -> Reparametrisation:
    return Reparametrisation("normal", _shape(d), lambda v: d.loc + (d.scale_tril @ v.unsqueeze(-1)).squeeze(-1))


def _beta(d: td.Beta) -> Reparametrisation:
    """Log odds with their mean and variance, which are those of the logs of two Gamma variables."""
    return _log_odds(d, d.concentration1, d.concentration0)


def _fisher_snedecor(d: td.FisherSnedecor) -> Reparametrisation:
    return _log_odds(d, d.df1 / 2, d.df2 / 2, d.df2.log() - d.df1.log())


def _log_odds(d: td.Distribution, a: Tensor, b: Tensor, shift: Any = 0.0) -> Reparametrisation:
    width = (torch.polygamma(1, a) + torch.polygamma(1, b)).sqrt()
    return _own_density(d, "logistic", torch.digamma(a) - torch.digamma(b) + shift, width)


def _mixture(d: td.MixtureSameFamily) -> Reparametrisation | None:
    """On the real line with the mean and standard deviation, where components have such."""
    if chart_of(d).kind != "real":
        return None
    try:
        loc, scale = d.mean, d.stddev
    except NotImplementedError:
        return None
    finite = loc.isfinite() & scale.isfinite()
    return _own_density(d, "normal", torch.where(finite, loc, 0.0), torch.where(finite, scale, 1.0))


def _gamma(d: td.Gamma) -> Reparametrisation:
    form = gamma(d.concentration.expand(_shape(d)))
    factor = form.log_factor
    assert factor is not None
    return replace(
        form, value=lambda v: form.value(v) / d.rate, inverse=None, log_factor=lambda v, x: factor(v, x * d.rate)
    )


def _student_t(d: td.StudentT) -> Reparametrisation:
    standard = td.StudentT(d.df, validate_args=False)

    def log_factor(v: Tensor, x: Tensor) -> Tensor:
        return (standard.log_prob(v) - _log_normal(v)).sum()

    return replace(location_scale(d.loc, d.scale, _shape(d)), log_factor=log_factor)


# by the most derived class first: half-Cauchy is a transformed distribution
_FORMS: dict[type, Callable[[Any], Reparametrisation | None]] = {
    td.Normal: lambda d: location_scale(d.loc, d.scale, _shape(d)),
    td.Uniform: lambda d: uniform_between(d.low, d.high, _shape(d)),
    td.Exponential: lambda d: exponential(d.rate, _shape(d)),
    td.Cauchy: lambda d: cauchy(d.loc, d.scale, _shape(d)),
    td.HalfCauchy: _half_cauchy,
    td.Laplace: _laplace,
    td.MultivariateNormal: _multivariate_normal,
    td.Beta: _beta,
    td.FisherSnedecor: _fisher_snedecor,
    td.Gamma: _gamma,
    td.Gumbel: lambda d: gumbel(d.loc, d.scale, _shape(d)),
    td.MixtureSameFamily: _mixture,
    td.StudentT: _student_t,
    td.Independent: lambda d: reparametrise(d.base_dist),
    td.TransformedDistribution: _transformed,
}


def _shape(d: td.Distribution) -> torch.Size:
    return torch.Size(d.batch_shape + d.event_shape)


def _log_normal(v: Tensor) -> Tensor:
    return -0.5 * v.square() - 0.5 * math.log(2 * math.pi)
