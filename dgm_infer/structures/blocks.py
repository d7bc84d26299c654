"""Jacobians of independent units, beside the global inputs', diagonal or in blocks; and what models declare by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..autodiff.jacobian_products import push_forward
from ..errors import ModelError, cause
from .jacobian import Evaluation, JacobianMap, factorise_capacity, log_det_cholesky, mv, solve_capacity, vm
from .structure import SIMULATED, Dense, Structure, Units, UnitStructure, View


@dataclass(frozen=True)
class LowRankPlusDiagonal(JacobianMap):
    """``J = [A | diag(d)]`` with ``A [..., N, L]``, ``d [..., N]``; O(N L^2) per factorisation (math 4.2, J 8.2).

    With ``S = diag(d^2)``, ``C = I + A^T S^-1 A = K K^T``, ``B = S^-1 A K^-T``:
    ``G^-1 = S^-1 - B B^T``, ``log|G| = sum log d^2 + log|C|``, ``A^T G^-1 = K^-T B^T``.
    N x L matrices are stored transposed, so that sums over the N outputs run along contiguous memory.
    """

    columns: Tensor
    """A^T, ``[..., L, N]``."""
    diagonal: Tensor
    """d."""
    half: Tensor
    """B^T, ``[..., L, N]``."""
    inverse_factor: Tensor
    """K^-T, ``[..., L, L]``."""
    log_det: Tensor

    @classmethod
    def factorise(cls, *entries):
        columns, diagonal = entries
        scaled = columns / diagonal.square().unsqueeze(-2)
        inverse, log_det = factorise_capacity(columns @ scaled.mT)
        log_det = log_det + diagonal.square().log().sum(-1)
        return cls(columns, diagonal, inverse.mT @ scaled, inverse, log_det)

    def forward(self, v):
        v1, v2 = _split(v, self.columns.shape[-2])
        return vm(v1, self.columns) + self.diagonal * v2

    def transpose(self, c):
        return torch.cat([mv(self.columns, c), self.diagonal * c], -1)

    def solve(self, c):
        return c / self.diagonal.square() - vm(mv(self.half, c), self.half)

    def pseudo_inverse(self, c):
        # A^T G^-1 c has its own identity: A^T (S^-1 c - B B^T c) would cancel where d is small
        weights = mv(self.half, c)
        local = c / self.diagonal - self.diagonal * vm(weights, self.half)
        return torch.cat([mv(self.inverse_factor, weights), local], -1)

    def oblique_inverse(self, entries, c):
        # J' J^T = diag(d' d) + A' A^T; with w = c / (d' d) and (I + A^T diag(d' d)^-1 A') x = A^T w the step is
        # [x, d (w - diag(d' d)^-1 A' x)]
        columns, diagonal = entries
        s = diagonal * self.diagonal
        w = c / s
        x = solve_capacity(self.columns @ (columns / s.unsqueeze(-2)).mT, mv(self.columns, w))
        return torch.cat([x, (c - vm(x, columns)) / diagonal], -1)

    def damped_step(self, c, damping):
        s = self.diagonal.square() + damping.unsqueeze(-1)
        w = c / s
        x = solve_capacity(self.columns @ (self.columns / s.unsqueeze(-2)).mT, mv(self.columns, w))
        return torch.cat([x, self.diagonal * (w - vm(x, self.columns) / s)], -1)

    def log_det_cotangent(self):
        # G^-1 A = S^-1 A C^-1 = B K^-1; diag(G^-1) = 1/d^2 - rowsum B^2
        inverse_diagonal = self.diagonal.square().reciprocal() - self.half.square().sum(-2)
        return self.inverse_factor @ self.half, self.diagonal * inverse_diagonal


@dataclass(frozen=True)
class Diagonal(UnitStructure):
    """``J = [A | diag(d)]``: every output has its own local input."""

    jacobian = LowRankPlusDiagonal

    def entries(self, function: Callable[[Tensor], Tensor], u: Tensor) -> Evaluation:
        """By L products ``J t`` for A and one for d."""
        n_columns = self.sizes.n_global
        n_local = u.shape[-1] - n_columns
        one = torch.eye(n_columns + 1, dtype=u.dtype, device=u.device)
        # all local inputs at once, without writing into views, which captured graphs cannot
        tangents = torch.cat([one[:, :n_columns], one[:, n_columns:].expand(-1, n_local)], -1)
        value, products = push_forward(function, u, tangents)
        if n_local != value.shape[-1]:
            raise ValueError(f"{n_local} local inputs for {value.shape[-1]} outputs")
        return Evaluation(value, (products[:n_columns].movedim(0, -2).contiguous(), products[n_columns]))

    def row_size(self, n_outputs, n_inputs):
        return n_outputs * (self.sizes.n_global + 1)

    def solve_local(self, constraint, u, tolerance):
        return solve_local_inputs(constraint, u, self.sizes.n_global, tolerance)

    def has_full_rank(self, function, u, tolerance):
        """Whether no d is zero: every output then varies with its own input."""
        size = self.entries(function, u).entries[1].abs()
        return bool((size > tolerance * size.amax(-1, keepdim=True)).all(-1).any())


def solve_local_inputs(
    constraint: Callable[[Tensor], Tensor],
    u: Tensor,
    n_global: int,
    tolerance: Tensor,
    *,
    newton: int = 20,
    bisections: int = 80,
) -> Tensor:
    """Solve ``c_i(u1, u2_i) = 0`` for every local input, with ``u1`` fixed.

    Newton first (one step suffices for additive noise), then bisection in the units that have not converged, from a
    bracket grown around 0. A unit without a sign change keeps its best iterate.

    Args:
        constraint: ``[R, L + N] -> [R, N]``; unit i depends on ``u1`` and ``u2_i``.
        u: ``[R, L + N]``.
        tolerance: ``[R]``, on ``|c_i|``.
    """
    u1, best = u[:, :n_global], u[:, n_global:]
    tolerance = tolerance.unsqueeze(-1)

    def units(v: Tensor) -> Tensor:
        return constraint(torch.cat([u1.expand(*v.shape[:-1], -1), v], -1))

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


@dataclass(frozen=True)
class LowRankPlusBlocks(JacobianMap):
    """``J = [A | blockdiag(D_1, ..., D_U)]``: U units of m outputs and k local inputs each; O(N L^2 + N m^2).

    ``S = blockdiag(D_i D_i^T)`` has the Cholesky factors ``R_i``.
    """

    columns: Tensor
    """A^T, ``[..., L, N]``, N = U m."""
    blocks: Tensor
    """D, ``[..., U, m, k]``."""
    block_factor: Tensor
    """R, ``[..., U, m, m]``."""
    half: Tensor
    """B^T, ``[..., L, N]``."""
    inverse_factor: Tensor
    """K^-T, ``[..., L, L]``."""
    log_det: Tensor

    @classmethod
    def factorise(cls, *entries):
        columns, blocks = entries
        factor, info = torch.linalg.cholesky_ex(blocks @ blocks.mT)
        scaled = _solve_blocks(factor, columns)
        inverse, log_det = factorise_capacity(columns @ scaled.mT)
        log_det = log_det + log_det_cholesky(factor, info).sum(-1)
        return cls(columns, blocks, factor, inverse.mT @ scaled, inverse, log_det)

    def forward(self, v):
        v1, v2 = _split(v, self.columns.shape[-2])
        local = mv(self.blocks, v2.unflatten(-1, (-1, self.blocks.shape[-1])))
        return vm(v1, self.columns) + local.flatten(-2)

    def transpose(self, c):
        return torch.cat([mv(self.columns, c), self._local_transpose(c)], -1)

    def solve(self, c):
        return _solve_blocks(self.block_factor, c.unsqueeze(-2)).squeeze(-2) - vm(mv(self.half, c), self.half)

    def pseudo_inverse(self, c):
        # as in the diagonal case, A^T G^-1 c has its own identity
        return torch.cat([mv(self.inverse_factor, mv(self.half, c)), self._local_transpose(self.solve(c))], -1)

    def oblique_inverse(self, entries, c):
        columns, blocks = entries
        cross = blocks @ self.blocks.mT
        # one solve for c and the columns of A'
        right = torch.cat([c.unsqueeze(-2), columns], -2)
        w, scaled = _apply_blocks(lambda x: torch.linalg.solve_ex(cross, x)[0], right, cross.shape[-1]).split(
            [1, columns.shape[-2]], -2
        )
        w = w.squeeze(-2)
        x = solve_capacity(self.columns @ scaled.mT, mv(self.columns, w))
        return torch.cat([x, self._local_transpose(w - vm(x, scaled))], -1)

    def damped_step(self, c, damping):
        gram = self.blocks @ self.blocks.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(damping[..., None, None])
        factor = torch.linalg.cholesky_ex(gram)[0]
        w = _solve_blocks(factor, c.unsqueeze(-2)).squeeze(-2)
        scaled = _solve_blocks(factor, self.columns)
        x = solve_capacity(self.columns @ scaled.mT, mv(self.columns, w))
        return torch.cat([x, self._local_transpose(w - vm(x, scaled))], -1)

    def log_det_cotangent(self):
        # block i of G^-1 J: S_i^-1 D_i - B_i B_i^T D_i
        half = self.half.unflatten(-1, (-1, self.blocks.shape[-2])).movedim(-3, -1)
        local = torch.cholesky_solve(self.blocks, self.block_factor) - half @ (half.mT @ self.blocks)
        return self.inverse_factor @ self.half, local

    def _local_transpose(self, c):
        return mv(self.blocks.mT, c.unflatten(-1, (-1, self.blocks.shape[-2]))).flatten(-2)


@dataclass(frozen=True)
class Blocks(UnitStructure):
    """``J = [A | blockdiag(D_1, ..., D_U)]``: the outputs of a unit share its own local inputs."""

    jacobian = LowRankPlusBlocks

    def entries(self, function: Callable[[Tensor], Tensor], u: Tensor) -> Evaluation:
        """By L products ``J t`` for A and k for the blocks."""
        n_columns, n_inputs = self.sizes.n_global, self.sizes.inputs
        n_units = (u.shape[-1] - n_columns) // n_inputs
        one = torch.eye(n_columns + n_inputs, dtype=u.dtype, device=u.device)
        # the j-th local input of every unit at once, without writing into views, which captured graphs cannot
        tangents = torch.cat([one[:, :n_columns], one[:, n_columns:].repeat(1, n_units)], -1)
        value, products = push_forward(function, u, tangents)
        blocks = products[n_columns:].unflatten(-1, (n_units, -1)).movedim(0, -1)
        return Evaluation(value, (products[:n_columns].movedim(0, -2).contiguous(), blocks))

    def row_size(self, n_outputs, n_inputs):
        return n_outputs * (self.sizes.n_global + self.sizes.inputs)

    def pays(self, n_outputs):
        # with fewer inputs than outputs D_i D_i^T is singular, though J J^T need not be
        return self.sizes.inputs >= self.sizes.outputs and super().pays(n_outputs)

    def has_full_rank(self, function, u, tolerance):
        """Whether all blocks have full row rank: every unit by its own inputs."""
        if self.sizes.inputs < self.sizes.outputs:
            return False
        values = torch.linalg.svdvals(self.entries(function, u).entries[1])
        return bool((values > tolerance * values.amax((-1, -2), keepdim=True)).flatten(1).all(-1).any())


def _split(v: Tensor, n_global: int) -> tuple[Tensor, Tensor]:
    """The parts of the global inputs and of the local ones."""
    return v[..., :n_global], v[..., n_global:]


def _apply_blocks(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """``function`` of ``[..., U, m, K]``, for K rows ``[..., K, U m]``."""
    return function(rows.unflatten(-1, (-1, size)).movedim(-3, -1)).movedim(-1, -3).flatten(-2)


def _solve_blocks(factor: Tensor, rows: Tensor) -> Tensor:
    """``(R_i R_i^T)^-1`` on the units of every row, ``[..., K, U m]``."""
    return _apply_blocks(lambda x: torch.cholesky_solve(x, factor), rows, factor.shape[-1])


def of_units(sizes: Units, view: View = SIMULATED) -> UnitStructure:
    """The structure of units of these sizes."""
    return Diagonal(sizes, view) if sizes.is_scalar else Blocks(sizes, view)


def independent(model: Any) -> UnitStructure:
    """Single outputs, or ``unit_outputs`` consecutive ones, given the global inputs (math 4.6, J 8.2)."""
    return of_units(Units(model.global_density.dim, model.unit_inputs or 1, model.unit_outputs or 1))


@dataclass(frozen=True)
class OneStepAhead(View):
    """Every state as one step from the previous observed state (math 4.7).

    ``c_t(u) = f(y_{t-1}, z(u1), u2_t) - y_t`` has the zeros of ``g_x(u) - y`` and, at these, the same ``|J J^T|`` and
    row space of J; but its steps are independent units.
    """

    names = "steps"
    is_separable = False

    def outputs(self, model, u, observed):
        return model.one_step_ahead(u, observed)

    def check(self, model, u, x):
        """Steps from the simulated states must reproduce the simulated states."""
        name = type(model).__name__
        try:
            miss = ((model.one_step_ahead(u, x) - x).abs().amax(-1) / x.abs().amax(-1).clamp_min(1)).max()
        except Exception as error:
            raise ModelError(
                f"{name} declares structure 'markov', but transition() fails for all steps at once: "
                f"{cause(error)} (states have one shape, and leading dimensions broadcast)"
            ) from error
        if miss > torch.finfo(x.dtype).eps ** 0.75:
            raise ModelError(
                f"{name} declares structure 'markov', but its transitions from the observed states differ from the "
                f"simulated ones (by {miss.item():.3g} of the largest): derive simulate() from transition(), or "
                "declare structure = 'dense'"
            )


def markov(model: Any) -> UnitStructure:
    """Whole steps, or the components of a step if ``unit_inputs`` and ``unit_outputs`` declare them.

    Raises:
        ModelError: the model has no local inputs.
    """
    if model.n_steps == 0:
        raise ModelError(
            f"{type(model).__name__} declares structure 'markov' without local inputs: give local_density a dimension, "
            "or declare structure = 'dense'"
        )
    state = torch.Size(model.output_shape).numel() // model.n_steps
    sizes = Units(model.global_density.dim, model.unit_inputs or model.step_inputs, model.unit_outputs or state)
    return of_units(sizes, OneStepAhead())


STRUCTURES: dict[str, Callable[[Any], Structure]] = {
    "independent": independent,
    "markov": markov,
    "dense": lambda model: Dense(),
}
"""The structures that a model can declare by name, as functions of the model."""


def validate_structure(model: Any) -> None:
    """Raise :class:`ModelError` unless the model declares a name of :data:`STRUCTURES` or a :class:`Structure`."""
    declared = model.structure
    known = declared in STRUCTURES if isinstance(declared, str) else isinstance(declared, Structure)
    if not known:
        raise ModelError(f"{type(model).__name__}.structure = {declared!r} is not one of {', '.join(STRUCTURES)}")


def declared_structure(model: Any) -> Structure:
    """The structure that a model's attribute ``structure`` names or is."""
    declared = model.structure
    return STRUCTURES[declared](model) if isinstance(declared, str) else declared
