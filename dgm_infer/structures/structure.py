"""The interface of structures: the form of a Jacobian, and everything that depends on it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from .jacobian import Evaluation, JacobianMap


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
