"""Input densities p_u: unbounded, of unit variance, independent over coordinates (T appendix D)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..arguments import instance, lead_shape, points, whole_number
from ..errors import ArgumentError, ModelError

STANDARD_LOGISTIC = math.pi / math.sqrt(3)
"""A unit-variance logistic variable times this is a standard logistic one (T appendix D)."""


class InputDensity(ABC):
    """A density of independent coordinates, ``log p(u) = sum_i log p_i(u_i)``."""

    dim: int

    @property
    def is_standard_normal(self) -> bool:
        """Whether every coordinate is N(0, 1)."""
        return False

    @abstractmethod
    def coordinate_log_prob(self, u: Tensor) -> Tensor:
        """Log density of each coordinate: ``[..., D] -> [..., D]``."""

    @abstractmethod
    def sample(
        self,
        shape: tuple[int, ...] = (),
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Independent draws, ``[*shape, D]``."""

    def log_prob(self, u: Tensor) -> Tensor:
        """Log density ``[..., D] -> [...]``.

        Raises:
            ArgumentError: u is not a real tensor whose last dimension is D.
        """
        value = self.coordinate_log_prob(points(f"{type(self).__name__}.log_prob", "u", u, self.dim)).sum(-1)
        # the gradient of a constant, as of a uniform density, is 0
        return value if value.requires_grad or not u.requires_grad else value + 0.0 * u.sum(-1)


@dataclass(frozen=True)
class _Iid(InputDensity):
    """``dim`` coordinates with the same density."""

    dim: int

    def __post_init__(self):
        # 0 of a model without parameters, or without noise
        whole_number(type(self).__name__, "dim", self.dim, 0)

    def _lead(self, shape: Any, generator: Any, dtype: Any, device: Any) -> tuple[int, ...]:
        call = f"{type(self).__name__}.sample"
        return lead_shape(call, shape, self.dim, generator=generator, dtype=dtype, device=device)


@dataclass(frozen=True)
class StandardNormal(_Iid):
    """``N(0, 1)`` in every coordinate."""

    @property
    def is_standard_normal(self):
        return True

    def coordinate_log_prob(self, u):
        return -0.5 * u.square() - 0.5 * math.log(2 * math.pi)

    def sample(self, shape=(), *, generator=None, dtype=None, device=None):
        lead = self._lead(shape, generator, dtype, device)
        return torch.randn(*lead, self.dim, generator=generator, dtype=dtype, device=device)


@dataclass(frozen=True)
class Logistic(_Iid):
    """Logistic of unit variance (scale ``sqrt(3)/pi``) in every coordinate.

    ``log p(v) = log(pi / (4 sqrt 3)) - 2 log cosh(pi v / (2 sqrt 3))``
    """

    def coordinate_log_prob(self, u):
        a = (math.pi / (2 * math.sqrt(3))) * u.abs()
        # log cosh a without overflow
        log_cosh = a + F.softplus(-2 * a) - math.log(2)
        return math.log(math.pi / (4 * math.sqrt(3))) - 2 * log_cosh

    def sample(self, shape=(), *, generator=None, dtype=None, device=None):
        lead = self._lead(shape, generator, dtype, device)
        uniform = torch.rand(*lead, self.dim, generator=generator, dtype=dtype, device=device)
        # torch.rand can return exactly 0, which represents any number below its spacing
        uniform = uniform.clamp_min(torch.finfo(uniform.dtype).eps / 2)
        return (math.sqrt(3) / math.pi) * torch.logit(uniform)


class Product(InputDensity):
    """Concatenation of densities: ``p(u) = prod_j p_j(u_j)``, ``u = [u_1, u_2, ...]``."""

    def __init__(self, *factors: InputDensity):
        if not factors:
            raise ArgumentError("Product() needs at least one density")
        for factor in factors:
            instance("Product", "factors", factor, InputDensity, "StandardNormal(2)")
        self.factors = factors
        self.dims = tuple(factor.dim for factor in factors)
        self.dim = sum(self.dims)

    def coordinate_log_prob(self, u):
        parts = u.split(self.dims, -1)
        return torch.cat([f.coordinate_log_prob(v) for f, v in zip(self.factors, parts, strict=True)], -1)

    def sample(self, shape=(), *, generator=None, dtype=None, device=None):
        lead = lead_shape("Product.sample", shape, self.dim, generator=generator, dtype=dtype, device=device)
        parts = [f.sample(lead, generator=generator, dtype=dtype, device=device) for f in self.factors]
        return torch.cat(parts, -1)

    @property
    def is_standard_normal(self):
        return all(factor.is_standard_normal for factor in self.factors)

    def __repr__(self):
        return f"Product({', '.join(map(repr, self.factors))})"


# Draws, and points between their quartiles, by which a density of one's own is judged.
_DRAWS, _POINTS = 1000, 257


def check_normalised(name: str, density: InputDensity) -> None:
    """Raise ModelError where a density of one's own has another mass between the quartiles of its draws than a half.

    A constant that is left out would be in every log evidence. Coordinates are independent: one quadrature each.
    """
    if isinstance(density, Product):
        for factor in density.factors:
            check_normalised(name, factor)
        return
    if isinstance(density, StandardNormal | Logistic) or not 0 < density.dim <= 10_000:
        return
    try:
        draws = density.sample((_DRAWS,), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        ordered = draws.detach().cpu().double().sort(0).values
        low, high = ordered[_DRAWS // 4], ordered[3 * _DRAWS // 4]
        at = torch.lerp(low, high, torch.linspace(0, 1, _POINTS, dtype=torch.float64).unsqueeze(-1))
        with torch.no_grad():
            mass = torch.trapezoid(density.coordinate_log_prob(at).exp(), at, dim=0)
    except Exception:
        # on another device, or faulty: conditioning evaluates both, and says what is raised
        return
    # quartiles of so many draws are right to 0.02
    if (wrong := ~((mass - 0.5).abs() < 0.1)).any():
        raise ModelError(
            f"{name}: coordinate_log_prob gives a mass of {mass[wrong][0]:.3g} between the quartiles of its draws, "
            "where a density has 0.5: add its constant, log of 1 over the integral, or draw from it in sample()"
        )
