"""Coordinates on R^n for random variables, with densities that are written in the coordinate.

A density evaluated at ``z(x)`` loses the mass that lies where z rounds to an edge of its support: two thirds of
Beta(0.01, 0.01) are within 1e-16 of 0 or 1. Written in x, it needs ``log z`` and ``log(1 - z)`` only, which do not round.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions import constraints, transforms
from torch.nn import functional as F

from ..errors import ModelError

__all__ = [
    "TOLERATED",
    "Chart",
    "chart_of",
    "has_chart",
    "has_fewer_dimensions",
    "is_circular",
    "is_point",
    "log_density",
    "lost_mass",
    "warn_of_lost_mass",
]

Kind = Literal["real", "log", "logit", "simplex", "correlation", "circle", "other"]

# Pyro's by name, as plain simulators must not load it.
_CIRCULAR = {"VonMises", "SineBivariateVonMises", "SineSkewed"}
# The share of a prior that may be lost without a word.
TOLERATED = 1e-3
# Draws of a prior by which its lost mass is estimated, and the most numbers in all of them.
_DRAWS, _MOST = 10_000, 10**7


@dataclass(frozen=True)
class Chart:
    """A smooth map from coordinates x to values z, of every element of a variable.

    ``real``: z = x. ``log``: ``low + exp(x)``. ``logit``: ``low + (high - low) sigmoid(x)``. ``simplex``: broken
    sticks. ``correlation``: the bijection to Cholesky factors of correlations. ``circle``: the angle of a point x of the plane, so that z never leaves one turn and has no edge.

    Attributes:
        kind: one of these, or ``other``.
        shape: of x, of all elements.
        event_dim: number of the last dimensions of z that make one event.
        low: an edge of the support.
        high: the other edge.
        bijection: the map of kinds ``correlation`` and ``other``.
    """

    kind: Kind
    shape: torch.Size
    event_dim: int
    low: Any = 0.0
    high: Any = 1.0
    bijection: Any = None

    @property
    def is_scalar(self) -> bool:
        """Whether every element has a coordinate of its own."""
        return self.kind in ("real", "log", "logit")

    def value(self, x: Tensor) -> Tensor:
        """``z(x)``, which is inside the support, and finite, even where it has to be rounded."""
        match self.kind:
            case "real":
                return x
            case "log":
                info = torch.finfo(x.dtype)
                return self.low + x.clamp(math.log(info.tiny), math.log(info.max)).exp()
            case "logit":
                info = torch.finfo(x.dtype)
                return self.low + (self.high - self.low) * torch.sigmoid(x).clamp(info.tiny, 1 - info.eps)
            case "circle":
                return torch.atan2(x[..., 1], x[..., 0])
            case "simplex":
                return log_simplex(x).exp()
        return self.bijection(x)

    def log_jacobian(self, x: Tensor) -> Tensor:
        """``log|dz/dx|`` of each event.

        On a circle, the log density of x given its angle: together with the density of the angle, that of x.
        """
        if self.kind == "simplex":
            return self._over_events(log_simplex(x).sum(-1), 1)
        if self.kind == "circle":
            return self._over_events(-0.5 * x.square().sum(-1), 0)
        if self.kind == "correlation":
            sums = _log_cosh_sums(x)
            return self._over_events(-sums.tril(-2).sum((-2, -1)) - 2 * _log_cosh(x).sum(-1), 2)
        if self.kind == "other":
            each = self.bijection.log_abs_det_jacobian(x, self.bijection(x))
            return self._over_events(each, self.bijection.codomain.event_dim)
        each = torch.zeros_like(x) if self.kind == "real" else x
        if self.kind == "logit":
            each = F.logsigmoid(x) + F.logsigmoid(-x) + torch.as_tensor(self.high - self.low).log()
        return self._over_events(each, 0)

    def _over_events(self, each: Tensor, n_summed: int) -> Tensor:
        return _sum_last(each, self.event_dim - n_summed)


def chart_of(d: td.Distribution) -> Chart:
    """The chart of a distribution: the standard bijection of its support, except on circles and for mixtures.

    Raises:
        ModelError: it is discrete, or has no such bijection.
    """
    shape, event_dim = torch.Size(d.batch_shape + d.event_shape), len(d.event_shape)
    if is_circular(d):
        return Chart("circle", torch.Size((*shape, 2)), event_dim)
    if isinstance(_without_events(d), _GENERALIZED_PARETO):
        return Chart("other", shape, event_dim, bijection=_OfExponential(_without_events(d)))
    support = _support(d)
    if isinstance(support, constraints.greater_than | constraints.greater_than_eq):
        return Chart("log", shape, event_dim, low=support.lower_bound)
    if isinstance(support, constraints.interval | constraints.half_open_interval):
        return Chart("logit", shape, event_dim, low=support.lower_bound, high=support.upper_bound)
    if support is constraints.real:
        return Chart("real", shape, event_dim)
    if support is constraints.simplex:
        return Chart("simplex", torch.Size((*shape[:-1], shape[-1] - 1)), event_dim)
    try:
        bijection: Any = td.biject_to(support)
    except NotImplementedError:
        raise _no_chart(d) from None
    kind = "correlation" if isinstance(bijection, transforms.CorrCholeskyTransform) else "other"
    return Chart(kind, torch.Size(bijection.inverse_shape(shape)), event_dim, bijection=bijection)


def is_circular(d: td.Distribution) -> bool:
    """Whether a distribution is one of angles, whose support torch and Pyro give as all real numbers."""
    while isinstance(d, td.Independent | td.MixtureSameFamily):
        d = d.base_dist if isinstance(d, td.Independent) else d.component_distribution
    return any(kind.__name__ in _CIRCULAR for kind in type(d).__mro__)


def has_chart(d: td.Distribution) -> bool:
    """Whether a distribution is continuous, with a map from the real numbers."""
    try:
        chart_of(d)
    except ModelError:
        return False
    return True


def is_point(d: td.Distribution) -> bool:
    """Whether a distribution is Pyro's ``Delta``, which gives one value."""
    return any(kind.__name__ == "Delta" for kind in type(_without_events(d)).__mro__)


def has_fewer_dimensions(d: td.Distribution) -> bool:
    """Whether values of a continuous distribution lie on a surface, as those of a Dirichlet distribution do, whose
    entries sum to 1."""
    size = torch.Size(d.batch_shape + d.event_shape).numel()
    return has_chart(d) and chart_of(d).shape.numel() < size


def log_density(d: td.Distribution, chart: Chart, x: Tensor) -> Tensor:
    """``log p(z(x)) + log|dz/dx|``, ``[*batch_shape]``, written in x where the density can be."""
    written = _written(d, chart, x)
    return d.log_prob(chart.value(x)) + chart.log_jacobian(x) if written is None else written


def lost_mass(d: td.Distribution, chart: Chart) -> float:
    """The share of a distribution that no coordinate reaches, of the element that loses most.

    Estimated by draws: those that are not finite; and if the density is not written in the coordinate, those on an edge
    of the support. The caller's random numbers are used.
    """
    base, n = _without_events(d), _DRAWS * max(chart.shape.numel(), 1)
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


def warn_of_lost_mass(program: str, lost: Mapping[str, float], stacklevel: int) -> None:
    """Name variables whose prior has mass that no coordinate reaches.

    Args:
        program: what they are variables of.
        lost: the shares, by name.
        stacklevel: that of the user's call, as for ``warnings.warn`` here.
    """
    for name, share in lost.items():
        warnings.warn(
            f"{program}: {100 * share:.2g} % of the prior of {name} rounds to an edge of its support or overflows: this "
            "mass is missing from the posterior and from log Z; use less extreme parameters, or a distribution of "
            "torch.distributions, whose densities are written in log space",
            stacklevel=stacklevel,
        )


def log_simplex(x: Tensor) -> Tensor:
    """``log z`` of the stick-breaking bijection, ``[..., K - 1] -> [..., K]``."""
    left = torch.arange(x.shape[-1], 0, -1, dtype=x.dtype, device=x.device)
    t = x - left.log()
    rest = F.logsigmoid(-t).cumsum(-1)
    zero = torch.zeros_like(x[..., :1])
    return torch.cat([F.logsigmoid(t), zero], -1) + torch.cat([zero, rest], -1)


@dataclass(frozen=True)
class _OfExponential:
    """``loc + scale (exp(c e) - 1)/c`` with ``e = exp(x)``: a generalised Pareto variable, whatever the sign of c."""

    of: Any
    codomain = constraints.real

    def __call__(self, x: Tensor) -> Tensor:
        d, e = self.of, x.exp()
        flat = d.concentration == 0
        c = torch.where(flat, 1.0, d.concentration)
        grown = torch.where(flat, e, torch.expm1((c * e).clamp_max(math.log(torch.finfo(x.dtype).max) - 1)) / c)
        return d.loc + d.scale * grown

    def log_abs_det_jacobian(self, x: Tensor, z: Tensor) -> Tensor:
        return self.of.scale.log() + self.of.concentration * x.exp() + x


def _support(d: td.Distribution) -> Any:
    """The constraint on one element of a variable."""
    if isinstance(d, td.MixtureSameFamily):
        return _support_of_mixture(d)
    try:
        support: Any = d.support
        discrete = support is None or support.is_discrete
    except NotImplementedError:
        discrete, support = True, None
    if discrete:
        raise _no_chart(d)
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    inner = _without_events(d)
    if support is constraints.real and isinstance(inner, td.TransformedDistribution):
        return _support_of_affine(inner)
    return support


def _support_of_affine(d: td.TransformedDistribution) -> Any:
    """The support of ``loc + scale z``, which torch gives as all real numbers whatever that of z is."""
    *before, last = _flattened(d.transforms)
    if not isinstance(last, transforms.AffineTransform):
        return constraints.real
    inner = _support(td.TransformedDistribution(d.base_dist, before) if before else d.base_dist)
    low, high = getattr(inner, "lower_bound", None), getattr(inner, "upper_bound", None)
    loc, scale = torch.as_tensor(last.loc), torch.as_tensor(last.scale)
    if low is not None and high is not None:
        ends = loc + scale * low, loc + scale * high
        return constraints.interval(torch.minimum(*ends), torch.maximum(*ends))
    try:
        is_positive = bool((scale > 0).all())
    except RuntimeError:
        # under vmap nobody knows
        return constraints.real
    return constraints.greater_than(loc + scale * low) if low is not None and is_positive else constraints.real


def _support_of_mixture(d: td.MixtureSameFamily) -> Any:
    """The constraint that holds for all components."""
    support = _support(d.component_distribution)
    edges = [getattr(support, name, None) for name in ("lower_bound", "upper_bound")]
    if not any(isinstance(edge, Tensor) and edge.ndim for edge in edges):
        return support
    dim = -1 - len(d.event_shape)
    low, high = (edge.movedim(dim, -1) if isinstance(edge, Tensor) and edge.ndim else edge for edge in edges)
    low = low.amin(-1) if isinstance(low, Tensor) and low.ndim else low
    if high is None:
        return constraints.greater_than(low)
    return constraints.interval(low, high.amax(-1) if isinstance(high, Tensor) and high.ndim else high)


def _no_chart(d: td.Distribution) -> ModelError:
    return ModelError(f"{type(d).__name__} is discrete, or has no bijection from the real numbers")


def _written(d: td.Distribution, chart: Chart, x: Tensor) -> Tensor | None:
    """The density in the coordinate; None if it has to be evaluated at the value."""
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
    rest = _log_one_minus_exp(a.log() + _log_softplus(-x))
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
    log_diagonal = -_log_cosh_sums(x).diagonal(dim1=-2, dim2=-1)[..., 1:]
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
    return None if inner is None else _sum_last(inner, d.reinterpreted_batch_ndims)


def _mixture(d: td.MixtureSameFamily, chart: Chart, x: Tensor) -> Tensor | None:
    """Of components in one chart; where their supports differ, each density counts where it has its own."""
    log_weights = torch.log_softmax(d.mixture_distribution.logits, -1)
    component = d.component_distribution
    if chart.kind == "circle":
        return None
    edges: list[Any] = [getattr(_support(component), name, None) for name in ("lower_bound", "upper_bound")]
    if any(isinstance(edge, Tensor) and edge.ndim for edge in edges):
        z = d._pad(chart.value(x))
        support = _support(component)
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
    *before, last = _flattened(d.transforms)
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
            return log_density(inner, below, x / 2) - _sum_last(torch.full_like(x, math.log(2)), chart.event_dim)
        case ("real", "simplex") if forward is transforms.StickBreakingTransform:
            return log_density(inner, below, x)
        case ("real", "log") if forward is transforms.SoftplusTransform:
            # y = log(exp(z) - 1), dy/dz = 1/(1 - exp(-z))
            log_slope = x - _log_one_minus_exp(x)
            y = chart.value(x) + _log_one_minus_exp(x)
            return log_density(inner, below, y) + _sum_last(log_slope, chart.event_dim)
        case ("log", "log") if forward is transforms.PowerTransform and _is_zero(below.low):
            power = torch.as_tensor(last.exponent)
            log_slope = _sum_last(-power.abs().log() + torch.zeros_like(x), chart.event_dim)
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
# in torch since 2.8
_GENERALIZED_PARETO = tuple(getattr(td, name) for name in ("GeneralizedPareto",) if hasattr(td, name))
_DENSITIES |= dict.fromkeys(_GENERALIZED_PARETO, _generalized_pareto)


def _flattened(parts: Any) -> list[Any]:
    return [each for part in parts for each in (_flattened(part.parts) if hasattr(part, "parts") else [part])]


def _without_events(d: td.Distribution) -> td.Distribution:
    while isinstance(d, td.Independent):
        d = d.base_dist
    return d


def _is_zero(edge: Any) -> bool:
    return not isinstance(edge, Tensor) and edge == 0


def _sum_last(each: Tensor, n: int) -> Tensor:
    return each.sum(tuple(range(-n, 0))) if n > 0 else each


def _all_last(each: Tensor, n: int) -> Tensor:
    return each.flatten(-n).all(-1) if n > 0 else each


def _log_cosh(x: Tensor) -> Tensor:
    return x.abs() + F.softplus(-2 * x.abs()) - math.log(2)


def _log_cosh_sums(x: Tensor) -> Tensor:
    """Of the entries below a diagonal, row by row, the sums of ``log cosh`` up to each: ``[..., n, n]``, and further."""
    n = math.isqrt(2 * x.shape[-1]) + 1
    rows = iter(_log_cosh(x).split(list(range(1, n)), -1))
    zero = x.new_zeros(*x.shape[:-1], n)
    each = [zero] + [torch.cat([row, zero[..., : n - row.shape[-1]]], -1) for row in rows]
    return torch.stack(each, -2).cumsum(-1)


def _log_softplus(x: Tensor) -> Tensor:
    """``log log(1 + exp(x))``, which is x far below 0."""
    near = x.clamp_min(-30)
    return torch.where(x < -30, x, F.softplus(near).log())


def _log_one_minus_exp(t: Tensor) -> Tensor:
    """``log(1 - exp(-exp(t)))``, which is t far below 0."""
    near = t.clamp(-30, 30)
    return torch.where(t < -30, t, torch.log(-torch.expm1(-near.exp())))
