"""What a Jacobian looks like: the interface of all structures, the dense one, and those of units (math 4.6, J 8.2)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..autodiff.jacobian_products import pull_back, push_forward
from ..errors import ModelError
from .jacobian import Evaluation, JacobianMap, log_det_cholesky, mv


class Units(NamedTuple):
    """Sizes of a Jacobian ``[A | blockdiag(D_1, ..., D_U)]``."""

    n_global: int
    """Columns of A: the global inputs."""
    inputs: int = 1
    """Local inputs per unit, columns of every D."""
    outputs: int = 1
    """Outputs per unit, rows of every D."""

    @property
    def is_scalar(self) -> bool:
        return self.inputs == self.outputs == 1


class Structure(ABC):
    """The form of the Jacobian of a constraint, declared by a model: immutable, without tensors.

    A new structure defines :attr:`jacobian`, :meth:`entries` and :meth:`row_size`; the defaults of the rest suit a
    structure that saves only the factorisation. Methods that need outputs take the model that declares the structure:
    anything with the methods of :class:`dgm_infer.DirectedModel`.
    """

    jacobian: ClassVar[type[JacobianMap]]
    """The class of the map made from the entries."""

    @abstractmethod
    def entries(self, function: Callable[[Tensor], Tensor], u: Tensor) -> Evaluation:
        """``function [..., D] -> [..., N]`` at ``u [..., D]`` and the raw entries of its Jacobian, differentiably."""

    def factorise(self, entries: tuple[Tensor, ...]) -> JacobianMap:
        """The map of raw entries."""
        return self.jacobian.factorise(*entries)

    @abstractmethod
    def row_size(self, n_outputs: int, n_inputs: int) -> int:
        """Number of entries of one row's Jacobian, ``N x D``."""

    @property
    def units(self) -> Units | None:
        """Sizes of the units with their own local inputs; None if there are none."""
        return None

    @property
    def is_cheap(self) -> bool:
        """Whether a solver can afford a new Jacobian per iteration."""
        return False

    def pays(self, n_outputs: int) -> bool:
        """Whether the structure can be factorised for this many outputs, and is cheaper than a dense Jacobian."""
        return True

    @property
    def is_separable(self) -> bool:
        """Whether some units can be observed without the local inputs of the others."""
        return False

    @property
    def can_be_scaled(self) -> bool:
        """Whether scaling the local inputs preserves the structure."""
        return False

    def outputs(self, model: Any, u: Tensor, observed: Tensor) -> Tensor:
        """The model's outputs at inputs ``u``, as the constraint uses them: ``[..., Du] -> [..., Dx]``.

        Args:
            observed: the outputs ``[..., Dx]`` fixed by the constraint; the result equals them if and only if
                ``model.observed(u)`` does.
        """
        return model.observed(u)

    def solve_local(self, constraint: Callable[[Tensor], Tensor], u: Tensor, tolerance: Tensor) -> Tensor:
        """``u [R, D]`` with local inputs that solve ``constraint``, as far as units can be solved individually.

        Args:
            constraint: ``[R, D] -> [R, N]``.
            tolerance: ``[R]``, on ``max|c|``.
        """
        return u

    def has_full_rank(self, function: Callable[[Tensor], Tensor], u: Tensor, tolerance: float) -> bool:
        """Whether the structure alone shows that the Jacobian has full row rank at some of the points ``u [n, D]``.

        Args:
            tolerance: singular values below this, relative to the largest, count as zero.
        """
        return False

    def check(self, model: Any, u: Tensor) -> None:
        """Compare the structure with the model that declares it.

        Args:
            u: draws of the model's inputs, ``[n, Du]``.

        Raises:
            ModelError: the model has another structure.
        """
        return


@dataclass(frozen=True)
class DenseJacobian(JacobianMap):
    """``J`` as a matrix, ``[..., N, D]``; O(D N^2 + N^3) per factorisation."""

    matrix: Tensor
    cholesky: Tensor
    log_det: Tensor

    @classmethod
    def factorise(cls, *entries):
        (matrix,) = entries
        factor, info = torch.linalg.cholesky_ex(matrix @ matrix.mT)
        return cls(matrix, factor, log_det_cholesky(factor, info))

    def is_deficient(self):
        # the part of every row of J not explained by earlier rows, which rounding keeps above zero
        unexplained = self.cholesky.diagonal(dim1=-2, dim2=-1).square() / self.matrix.square().sum(-1)
        small = (unexplained < 4 * torch.finfo(self.matrix.dtype).eps).any(-1)
        return small | super().is_deficient()

    def forward(self, v):
        return mv(self.matrix, v)

    def transpose(self, c):
        return mv(self.matrix.mT, c)

    def solve(self, c):
        return torch.cholesky_solve(c.unsqueeze(-1), self.cholesky).squeeze(-1)

    def oblique_inverse(self, entries, c):
        return self.transpose(torch.linalg.solve_ex(entries[0] @ self.matrix.mT, c)[0])

    def damped_step(self, c, damping):
        gram = self.matrix @ self.matrix.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(damping.unsqueeze(-1))
        return self.transpose(torch.linalg.solve_ex(gram, c)[0])

    def log_det_cotangent(self):
        return (torch.cholesky_solve(self.matrix, self.cholesky),)


@dataclass(frozen=True)
class Dense(Structure):
    """No structure: fits every function."""

    jacobian = DenseJacobian

    def entries(self, function: Callable[[Tensor], Tensor], u: Tensor) -> Evaluation:
        """By N reverse-mode products: a constraint has fewer outputs than inputs."""
        value, rows = pull_back(function, u)
        return Evaluation(value, (rows.movedim(0, -2),))

    def row_size(self, n_outputs, n_inputs):
        return n_outputs * n_inputs


# Global inputs up to which a new Jacobian per iteration is cheap.
_FEW_COLUMNS = 8
# Prior draws at which a structure is looked for, about; and how much larger than the smallest their outputs may be.
_ROWS, _WILD = 8, 1e3


@dataclass(frozen=True)
class View:
    """The units of a model as the constraint sees them: here, as the model simulates them."""

    names: ClassVar[str] = "outputs"
    """Name of the units in messages."""
    is_separable: ClassVar[bool] = True
    """Whether a unit depends only on the global inputs and its own local ones."""

    def outputs(self, model: Any, u: Tensor, observed: Tensor) -> Tensor:
        """See :meth:`Structure.outputs`."""
        return model.observed(u)

    def check(self, model: Any, u: Tensor, x: Tensor) -> None:
        """Raise :class:`ModelError` if this view does not hold for the model, with outputs ``x`` at inputs ``u``."""


SIMULATED = View()


def _tame(x: Tensor) -> Tensor:
    """Rows of outputs ``[n, Dx]`` that show a structure: a branch may be taken at some of them alone.

    A simulator may overflow at most prior draws; of those far larger than the tamest, rounding hides the structure.
    """
    sizes = x.abs().amax(-1).nan_to_num(nan=torch.inf)
    order = sizes.argsort()
    usable = order[sizes[order] <= _WILD * (1 + sizes[order[0]])]
    few = max(1, len(usable) // _ROWS)
    return usable[::few] if len(usable) else order[:1]


@dataclass(frozen=True)
class UnitStructure(Structure):
    """``J = [A | D]``: columns of the global inputs, which affect all outputs, then those of the local inputs.

    A subclass defines D by :attr:`jacobian`, :meth:`entries` and :meth:`row_size`.
    """

    sizes: Units
    view: View = SIMULATED

    @property
    def units(self) -> Units:
        return self.sizes

    @property
    def is_cheap(self):
        return self.sizes.n_global <= _FEW_COLUMNS

    def pays(self, n_outputs):
        # with more columns than outputs the structure saves nothing
        return self.sizes.n_global <= n_outputs

    @property
    def is_separable(self):
        return self.view.is_separable

    @property
    def can_be_scaled(self):
        return True

    def outputs(self, model, u, observed):
        return self.view.outputs(model, u, observed)

    def check(self, model, u):
        """``J [0, r]`` must be ``D r`` for a random r: units then share no local inputs."""
        self._check_sizes(model)
        x = model.observed(u)
        those = _tame(x)
        # some functions of torch are differentiated for several rows and not for one, which solvers have, too
        for rows in (those[:1], those):
            self._check_rows(model, u[rows], x[rows])

    def _check_rows(self, model, u: Tensor, x: Tensor) -> None:
        self.view.check(model, u, x)
        u1, u2 = model.split(u)

        def local(v: Tensor) -> Tensor:
            return self.view.outputs(model, torch.cat([u1.expand(*v.shape[:-1], -1), v], -1), x)

        rng = torch.Generator(u.device).manual_seed(1)
        direction = torch.randn(u2.shape[-1], generator=rng, dtype=u.dtype, device=u.device)
        product = push_forward(local, u2, direction.unsqueeze(0))[1][0]
        expected = self.local_product(local, u2, direction)
        error = (product - expected).abs().amax(-1)
        wrong = error > 1e3 * torch.finfo(u.dtype).eps ** 0.75 * expected.abs().amax(-1)
        if wrong.any():
            declared = f"{type(model).__name__} declares structure {model.structure!r}"
            remedy = "declare larger units (unit_inputs, unit_outputs), or structure = 'dense'"
            if hasattr(model, "found"):
                # nobody declared what was found by itself
                declared = f"{model.name} has {model.found} at random inputs"
                remedy = 'convert it with structure="dense"'
            raise ModelError(
                f"{declared}, but {self.mismatch} "
                f"(directional derivatives differ by {error[wrong].max().item():.3g}): {remedy}"
            )

    def local_product(self, local: Callable[[Tensor], Tensor], u2: Tensor, direction: Tensor) -> Tensor:
        """``D r`` from the entries of the structure, as for a model without global inputs.

        Args:
            local: outputs as a function of the local inputs, ``[..., N] -> [..., Dx]``.
            u2: ``[1, N]``.
            direction: r, ``[N]``.
        """
        alone = replace(self, sizes=self.sizes._replace(n_global=0))
        return alone.factorise(alone.entries(local, u2).entries).forward(direction.expand_as(u2))

    @property
    def mismatch(self) -> str:
        """Description of the fault if the local derivatives differ."""
        return f"its {self.view.names} depend on each other's local inputs"

    def _check_sizes(self, model: Any) -> None:
        name, (n_global, inputs, outputs) = type(model).__name__, self.sizes
        n_local, n_outputs = model.local_density.dim, torch.Size(model.output_shape).numel()
        if n_global != model.global_density.dim:
            raise ModelError(
                f"{name} declares structure {model.structure!r} of {n_global} global inputs, but global_density has "
                f"{model.global_density.dim}: make them agree"
            )
        if n_local % inputs or n_outputs % outputs or n_local // inputs != n_outputs // outputs:
            raise ModelError(
                f"{name} declares structure {model.structure!r} with {n_local} local inputs in units of {inputs} for "
                f"{n_outputs} outputs in units of {outputs}: as many units of inputs as of outputs are needed, or "
                "structure = 'dense'"
            )
