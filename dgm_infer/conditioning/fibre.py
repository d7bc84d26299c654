"""The fibre ``{u : A(g_x(u)) = y}`` of a batch of observations, and the posterior density on it (J 6, T 4.7)."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import StartError
from ..models import DirectedModel
from ..structures.jacobian import (
    DenseJacobian,
    Evaluation,
    JacobianMap,
    LowRankPlusBlocks,
    LowRankPlusDiagonal,
    push_forward,
)
from .projection import damped_gauss_newton
from .reduced import ObservedModel

if TYPE_CHECKING:
    from .compilation import Compiler

__all__ = ["Fibre", "Linearisation"]

# Of the Jacobians that are evaluated at once: the graph that their gradient needs is some thirty times as large.
_ELEMENTS = 2**22


class Linearisation(NamedTuple):
    """A point of the fibre as the integrator needs it, one row a chain."""

    jacobian: JacobianMap
    energy: Tensor
    """``phi(u) = -log p_u(u) + log|J J^T| / 2``, ``[...]``."""
    gradient: Tensor
    """``grad phi``, ``[..., D]``."""
    constraint_error: Tensor
    """``max|c|``, ``[...]``."""


class Fibre:
    """Posterior of a generative model given exact observations, in its input space.

    Constraint ``c(u) = A(g_x(u)) - y``; density with respect to the Hausdorff measure on ``{c = 0}``
    ``pi(u) ~ p_u(u) |J J^T|^(-1/2)`` (J 6). Positions are ``[..., *batch_shape, dim]``.

    Args:
        observed: the model through its observation operator.
        values: ``[*batch, Dy]`` observed values.
    """

    can_complete = True
    """Whether :meth:`complete` has outputs to give, which a target may not have."""

    def __init__(self, observed: ObservedModel, values: Tensor, compiler: "Compiler | None" = None):
        self.observed = observed
        self.values = values
        self.batch_shape = values.shape[:-1]
        self.dim = observed.dim
        # with more columns than outputs the structure saves nothing
        structured = observed.units is not None and observed.units.n_global <= values.shape[-1]
        self.units = observed.units if structured else None
        self._compiler = compiler
        self._rows: tuple[int, Fibre] | None = None
        self._compiled: Fibre | None = None

    @property
    def model(self):
        return self.observed.model

    @property
    def scale(self) -> Tensor:
        """``max(1, |y|_max)`` of every problem, ``[*batch]``: tolerances are relative to it."""
        return self.values.abs().amax(-1).clamp_min(1)

    def rows(self, chains: int) -> "Fibre":
        """The fibre of ``chains`` copies of every problem in one flat batch of ``chains * prod(batch)`` rows."""
        if self._rows is None or self._rows[0] != chains:
            problems = torch.arange(self.batch_shape.numel(), device=self.values.device)
            self._rows = (chains, self.take(problems.repeat(chains)))
        return self._rows[1]

    def take(self, problems: Tensor) -> "Fibre":
        """The fibre of the listed problems (flat indices), one row each."""
        batch = self.batch_shape
        rows = {
            name: data.reshape(batch.numel(), *data.shape[len(batch) :])[problems] for name, data in self._data.items()
        }
        return self._with(**rows)

    def compiled(self) -> "Fibre":
        """The same fibre with its inner functions compiled by ``torch.compile``, each when it is first needed."""
        if self._compiled is None:
            from .compilation import Compiler

            self._compiled = type(self)(self.observed, self.values, Compiler())
        return self._compiled

    def evaluate(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(fibre, *arguments)`` without gradients, compiled where this fibre is.

        Many rows are worked off in parts, so that derivatives need little more memory than their results.

        Args:
            function: of a fibre of R rows and trees of tensors of R rows; returns such a tree.
        """
        n_rows, size = len(self.values), max(1, _ELEMENTS // self._row_elements)
        if n_rows <= size:
            return self._evaluate(function, *arguments)
        parts = []
        for rows in torch.arange(n_rows, device=self.values.device).split(size):
            first, last = int(rows[0]), int(rows[-1]) + 1
            part = pytree.tree_map(lambda t, a=first, b=last: t[a:b], arguments)
            parts.append(self.take(rows)._evaluate(function, *part))
        return pytree.tree_map(lambda *tensors: torch.cat(tensors), *parts)

    @property
    def _row_elements(self) -> int:
        """Numbers in the Jacobian of a row."""
        columns = self.dim if self.units is None else self.units.n_global + self.units.inputs
        return self.values.shape[-1] * columns

    def _evaluate(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._compiler is None:
            with torch.no_grad():
                return function(self, *arguments)

        def of_tensors(data: dict[str, Tensor], *arguments: Any) -> Any:
            return function(self._with(**data), *arguments)

        return self._compiler(function, of_tensors, self._data, *arguments)

    # What differs from problem to problem.
    @property
    def _data(self) -> dict[str, Tensor]:
        data = {"values": self.values, "index": self.observed.index, "heat": self.observed.heat}
        return {name: value for name, value in data.items() if value is not None}

    def _with(self, values: Tensor, index: Tensor | None = None, heat: Tensor | None = None) -> "Fibre":
        return type(self)(self.observed.with_data(index, heat), values, self._compiler)

    def heated(self, heat: Tensor | None) -> "Fibre":
        """The fibre of the same observations with local inputs that spread ``heat`` times as wide, ``[*batch]``."""
        return self._with(self.values, self.observed.index, heat)

    def constraint(self, u: Tensor) -> Tensor:
        """``c(u)``: ``[..., *batch, D] -> [..., *batch, Dy]``."""
        return self.observed.residual(u, self.values)

    def constraint_error(self, u: Tensor) -> Tensor:
        """``max|c(u)|``: ``[..., *batch]``."""
        with torch.no_grad():
            return self.constraint(u).abs().amax(-1)

    def jacobian(self, u: Tensor) -> JacobianMap:
        """The factorised Jacobian of the constraint at ``u``."""
        return self._factorise(self.entries(u).entries)

    def linearise(self, u: Tensor) -> Linearisation:
        """Jacobian, energy and gradient at ``u``, from one evaluation of the Jacobian."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            value, entries = self.entries(u)
            jacobian = self._factorise(tuple(e.detach() for e in entries))
            log_density = self.observed.log_density(u)
            # the gradient of this scalar is grad phi; its value is not phi
            scalar = -log_density.sum()
            for weight, entry in zip(self._gram_cotangent(jacobian), entries, strict=True):
                scalar = scalar + (weight * entry).sum()
            (gradient,) = torch.autograd.grad(scalar, u)
        energy = self._gram_energy(jacobian) - log_density.detach()
        return Linearisation(jacobian, energy, gradient, value.detach().abs().amax(-1))

    def entries(self, u: Tensor) -> Evaluation:
        """The constraint and the raw entries of its Jacobian at ``u``, differentiably."""
        if self.units is None:
            return DenseJacobian.entries(self.constraint, u)
        if self.units.is_scalar:
            return LowRankPlusDiagonal.entries(self.constraint, u, self.units.n_global)
        return LowRankPlusBlocks.entries(self.constraint, u, self.units.n_global, self.units.inputs)

    # The Gram term, in two pieces that belong together.
    def _gram_energy(self, jacobian: JacobianMap) -> Tensor:
        return 0.5 * jacobian.log_det

    def _gram_cotangent(self, jacobian: JacobianMap) -> tuple[Tensor, ...]:
        return jacobian.log_det_cotangent()

    def _factorise(self, entries: tuple[Tensor, ...]) -> JacobianMap:
        if self.units is None:
            return DenseJacobian.factorise(*entries)
        return (LowRankPlusDiagonal if self.units.is_scalar else LowRankPlusBlocks).factorise(*entries)

    def latents(self, u: Tensor) -> dict[str, Tensor]:
        """Latent variables at inputs ``u``, each ``[..., *batch, *shape]``."""
        with torch.no_grad():
            return self.observed.latents(u)

    def complete(self, u: Tensor, rng: torch.Generator) -> Tensor:
        """Complete outputs ``[..., *batch, *output_shape]``: the observed part as observed, the rest generated."""
        return self.observed.complete(u, self.values, rng)

    def start(self, chains: int, rng: torch.Generator, *, tolerance: float = 1e-8, attempts: int = 20) -> Tensor:
        """Points on the fibre near prior draws, ``[chains, *batch, D]`` (J 8.4).

        Independent structure: ``u1`` is a prior draw and every ``u2_i`` solves its own scalar equation. Otherwise
        a damped Gauss-Newton solve from a prior draw. Chains without a solution draw again; one that never finds any
        starts where another chain of its problem does, with a warning.

        Raises:
            StartError: after ``attempts`` rounds some problem has no point; names the best residual.
        """
        flat = self.rows(chains)
        tol = tolerance * flat.scale
        position = self.values.new_empty(len(tol), self.dim)
        best = torch.full_like(tol, torch.inf)
        deficient = torch.zeros_like(tol, dtype=torch.bool)
        rows = torch.arange(len(tol), device=tol.device)
        for _ in range(attempts):
            part = flat.take(rows)
            draw = part.observed.sample_inputs((len(rows),), rng, self.values)
            with torch.no_grad():
                if part.observed.units is not None and part.observed.units.is_scalar:
                    draw = solve_local_inputs(part.constraint, draw, part.observed.units.n_global, tol[rows])
                point, residual = damped_gauss_newton(part, draw, tolerance=tol[rows])
                singular = part.jacobian(point).is_deficient()
                possible = part.observed.log_density(point).isfinite()
            deficient[rows] |= singular & (residual < tol[rows])
            residual = residual.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(singular | ~possible, torch.inf)
            better = residual < best[rows]
            position[rows[better]], best[rows[better]] = point[better], residual[better]
            rows = (best >= tol).nonzero().squeeze(-1)
            if len(rows) == 0:
                break
        found = (best < tol).reshape(chains, -1)
        if not found.any(0).all():
            problem = int((~found.any(0)).nonzero()[0])
            own = slice(problem, None, found.shape[1])
            raise StartError(self._no_start(problem, best[own].min().item(), bool(deficient[own].any()), attempts))
        position = position.reshape(chains, -1, self.dim)
        if not found.all():
            warnings.warn(f"{int((~found).sum())} chains found no start of their own and share another's", stacklevel=3)
            position = torch.where(found.unsqueeze(-1), position, position.take_along_dim(_first(found), 0))
        return position.reshape(chains, *self.batch_shape, self.dim)

    def _no_start(self, problem: int, residual: float, deficient: bool, attempts: int) -> str:
        where = f" of problem {problem}" if self.batch_shape else ""
        if deficient:
            return (
                f"the observed outputs{where} do not vary independently (the Jacobian is rank-deficient where the "
                "model generates the observation): observe fewer, or give the model noise, WithNoise(model, sd=...)"
            )
        if residual == float("inf"):
            return (
                f"outputs or density{where} are infinite or NaN at all the inputs tried ({attempts} attempts a chain): "
                "keep the model's parameters in a range where it can be evaluated"
            )
        remedy = "check that the model can produce it"
        if not isinstance(self.model, DirectedModel):
            remedy += ", or let it: WithNoise(model, sd=...)"
        return (
            f"no inputs were found that generate the observation{where}: the smallest residual of {attempts} attempts "
            f"a chain is {residual:.3g}; {remedy}"
        )


def _first(found: Tensor) -> Tensor:
    """For every problem the first chain that found a point: ``[chains, B] -> [1, B, 1]``."""
    return found.to(torch.int8).argmax(0)[None, :, None]


def solve_local_inputs(
    constraint: Callable[[Tensor], Tensor],
    u: Tensor,
    n_global: int,
    tolerance: Tensor,
    *,
    newton: int = 20,
    bisections: int = 80,
) -> Tensor:
    """Solve ``c_i(u1, u2_i) = 0`` for every local input, with ``u1`` held.

    Newton first (exact at once for additive noise); bisection in the units it leaves, from a bracket grown around
    0. A unit without a sign change keeps its best iterate.

    Args:
        constraint: ``[R, L + N] -> [R, N]``, unit i depending on ``u1`` and ``u2_i``.
        u: ``[R, L + N]``.
        tolerance: ``[R]``, on ``|c_i|``.
    """
    u1, best = u[:, :n_global], u[:, n_global:]
    tolerance = tolerance.unsqueeze(-1)

    def units(v: Tensor) -> Tensor:
        return constraint(torch.cat([u1, v], -1))

    smallest = units(best).abs().nan_to_num(nan=torch.inf)

    def keep_better(v: Tensor) -> Tensor:
        nonlocal best, smallest
        value = units(v)
        better = value.abs() < smallest
        best, smallest = torch.where(better, v, best), torch.where(better, value.abs(), smallest)
        return value

    for _ in range(newton):
        value, (slope,) = push_forward(units, best, best.new_ones(1, best.shape[-1]))
        previous = smallest
        keep_better(best - (value / slope).nan_to_num(0, 0, 0))
        if not (smallest < 0.5 * previous).any():
            break
    if (smallest < tolerance).all():
        return torch.cat([u1, best], -1)

    low, high = torch.full_like(best, -1.0), torch.full_like(best, 1.0)
    for _ in range(10):
        at_low = units(low)
        outside = at_low.sign() * units(high).sign() > 0
        if not outside.any():
            break
        low, high = torch.where(outside, 2 * low, low), torch.where(outside, 2 * high, high)
    at_low = units(low)
    for _ in range(bisections):
        middle = 0.5 * (low + high)
        left = keep_better(middle).sign() == at_low.sign()
        low, high = torch.where(left, middle, low), torch.where(left, high, middle)
    return torch.cat([u1, best], -1)
