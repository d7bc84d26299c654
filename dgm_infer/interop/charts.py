"""Coordinates on R^n for random variables."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions import constraints, transforms
from torch.nn import functional as F

from ..errors import ModelError

Kind = Literal["real", "log", "logit", "simplex", "correlation", "circle", "other"]

# in torch since 2.8
GENERALIZED_PARETO = tuple(getattr(td, name) for name in ("GeneralizedPareto",) if hasattr(td, name))
# Pyro's by name, as plain simulators must not load it.
_CIRCULAR = {"VonMises", "SineBivariateVonMises", "SineSkewed"}


@dataclass(frozen=True)
class Chart:
    """A smooth map from coordinates x to values z, of every element of a variable.

    ``real``: z = x. ``log``: ``low + exp(x)``. ``logit``: ``low + (high - low) sigmoid(x)``. ``simplex``: broken
    sticks. ``correlation``: the bijection to Cholesky factors of correlations. ``circle``: the angle of a point x of
    the plane, or a function of it, so that z never leaves one turn and has no edge.

    Attributes:
        kind: one of these, or ``other``.
        shape: of x, of all elements.
        event_dim: number of the last dimensions of z that make one event.
        low: an edge of the support.
        high: the other edge.
        bijection: the map of kinds ``correlation`` and ``other``, and that of angles; None for the angles themselves.
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
                angle = torch.atan2(x[..., 1], x[..., 0])
                return angle if self.bijection is None else self.bijection(angle)
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
            given = self._over_events(-0.5 * x.square().sum(-1), 0)
            if self.bijection is None:
                return given
            angle = torch.atan2(x[..., 1], x[..., 0])
            slope = self.bijection.log_abs_det_jacobian(angle, self.bijection(angle))
            return given + self._over_events(slope, self.bijection.codomain.event_dim)
        if self.kind == "correlation":
            sums = log_cosh_sums(x)
            return self._over_events(-sums.tril(-2).sum((-2, -1)) - 2 * log_cosh(x).sum(-1), 2)
        if self.kind == "other":
            each = self.bijection.log_abs_det_jacobian(x, self.bijection(x))
            return self._over_events(each, self.bijection.codomain.event_dim)
        each = torch.zeros_like(x) if self.kind == "real" else x
        if self.kind == "logit":
            each = F.logsigmoid(x) + F.logsigmoid(-x) + torch.as_tensor(self.high - self.low).log()
        return self._over_events(each, 0)

    def _over_events(self, each: Tensor, n_summed: int) -> Tensor:
        return sum_last(each, self.event_dim - n_summed)


def chart_of(d: td.Distribution) -> Chart:
    """The chart of a distribution: the standard bijection of its support, except on circles and for mixtures.

    Raises:
        ModelError: it is discrete, or has no such bijection.
    """
    check_not_rounded(d)
    shape, event_dim = torch.Size(d.batch_shape + d.event_shape), len(d.event_shape)
    if is_circular(d):
        parts = _functions_of_angles(d)
        bijection = transforms.ComposeTransform(parts) if parts else None
        return Chart("circle", torch.Size((*shape, 2)), event_dim, bijection=bijection)
    if isinstance(without_events(d), GENERALIZED_PARETO):
        return Chart("other", shape, event_dim, bijection=_OfExponential(without_events(d)))
    support = support_of(d)
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


def check_not_rounded(d: td.Distribution) -> None:
    """Raise :class:`ModelError` for what draws rounded values, with the density and the gradient of others."""
    name = type(without_events(d)).__name__
    if name.endswith("StraightThrough"):
        relaxed = name.removesuffix("StraightThrough")
        raise ModelError(
            f"{name} rounds its values: use {relaxed}, or the discrete variable itself, which is summed out"
        )


def is_circular(d: td.Distribution) -> bool:
    """Whether a distribution is one of angles or functions of them, whose support torch and Pyro give as real."""
    while not _is_of_angles(d) and (inner := _inner(d)) is not None:
        d = inner
    return _is_of_angles(d)


def _is_of_angles(d: td.Distribution) -> bool:
    return any(kind.__name__ in _CIRCULAR for kind in type(d).__mro__)


def _inner(d: Any) -> td.Distribution | None:
    """What a distribution is made of, if its values are those of one other or functions of them."""
    if isinstance(d, td.MixtureSameFamily):
        return d.component_distribution
    return d.base_dist if isinstance(d, td.Independent | td.TransformedDistribution) or is_masked(d) else None


def is_masked(d: td.Distribution) -> bool:
    """Whether it is Pyro's wrapper of a distribution that leaves the density of some elements out."""
    return type(d).__name__ == "MaskedDistribution"


def _functions_of_angles(d: Any) -> list[Any]:
    """The transforms between angles and a variable, in order.

    Raises:
        ModelError: components of a mixture have some of their own.
    """
    parts: list[Any] = []
    while not _is_of_angles(d):
        if isinstance(d, td.MixtureSameFamily) and _functions_of_angles(d.component_distribution):
            raise _no_chart(d)
        parts = [*getattr(d, "transforms", ()), *parts]
        d = _inner(d)
    return parts


def has_chart(d: td.Distribution) -> bool:
    """Whether a distribution is continuous, with a map from the real numbers."""
    try:
        chart_of(d)
    except ModelError:
        return False
    return True


def has_fewer_dimensions(d: td.Distribution) -> bool:
    """Whether values lie on a surface, as those of a Dirichlet distribution do, whose entries sum to 1.

    Distributions without a chart count as such: those of matrices and directions.
    """
    size = torch.Size(d.batch_shape + d.event_shape).numel()
    return not has_chart(d) or chart_of(d).shape.numel() < size


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


def support_of(d: td.Distribution) -> Any:
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
    inner = without_events(d)
    if support is constraints.real and isinstance(inner, td.TransformedDistribution):
        return _support_of_affine(inner)
    return support


def _support_of_affine(d: td.TransformedDistribution) -> Any:
    """The support of ``loc + scale z``, which torch gives as all real numbers whatever that of z is."""
    *before, last = flattened(d.transforms)
    if not isinstance(last, transforms.AffineTransform):
        return constraints.real
    inner = support_of(td.TransformedDistribution(d.base_dist, before) if before else d.base_dist)
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
    support = support_of(d.component_distribution)
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


def flattened(parts: Any) -> list[Any]:
    return [each for part in parts for each in (flattened(part.parts) if hasattr(part, "parts") else [part])]


def without_events(d: Any) -> Any:
    while isinstance(d, td.Independent):
        d = d.base_dist
    return d


# functions of logarithms that do not round where their arguments do


def log_simplex(x: Tensor) -> Tensor:
    """``log z`` of the stick-breaking bijection, ``[..., K - 1] -> [..., K]``."""
    left = torch.arange(x.shape[-1], 0, -1, dtype=x.dtype, device=x.device)
    t = x - left.log()
    rest = F.logsigmoid(-t).cumsum(-1)
    zero = torch.zeros_like(x[..., :1])
    return torch.cat([F.logsigmoid(t), zero], -1) + torch.cat([zero, rest], -1)


def log_cosh(x: Tensor) -> Tensor:
    return x.abs() + F.softplus(-2 * x.abs()) - math.log(2)


def log_cosh_sums(x: Tensor) -> Tensor:
    """Sums of ``log cosh`` up to each column of a matrix whose entries below the diagonal are x, ``[..., n, n]``."""
    n = math.isqrt(2 * x.shape[-1]) + 1
    rows = iter(log_cosh(x).split(list(range(1, n)), -1))
    zero = x.new_zeros(*x.shape[:-1], n)
    each = [zero] + [torch.cat([row, zero[..., : n - row.shape[-1]]], -1) for row in rows]
    return torch.stack(each, -2).cumsum(-1)


def log_softplus(x: Tensor) -> Tensor:
    """``log log(1 + exp(x))``, which is x far below 0."""
    near = x.clamp_min(-30)
    return torch.where(x < -30, x, F.softplus(near).log())


def log_one_minus_exp(t: Tensor) -> Tensor:
    """``log(1 - exp(-exp(t)))``, which is t far below 0."""
    near = t.clamp(-30, 30)
    return torch.where(t < -30, t, torch.log(-torch.expm1(-near.exp())))


def sum_last(each: Tensor, n: int) -> Tensor:
    return each.sum(tuple(range(-n, 0))) if n > 0 else each
