"""Structures of units, each with its own local inputs: ``J = [A | blockdiag(D_1, ..., D_U)]`` (math 4.6, J 8.2)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..autodiff.jacobian_products import push_forward
from ..errors import ModelError
from .structure import Structure, Units

# Global inputs up to which a new Jacobian per iteration is cheap.
_FEW_COLUMNS = 8


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
        # a simulator may overflow at most prior draws: the tamest of many shows its structure best
        x = model.observed(u)
        tamest = x.abs().amax(-1).nan_to_num(nan=torch.inf).argmin().unsqueeze(0)
        u, x = u[tamest], x[tamest]
        self.view.check(model, u, x)
        u1, u2 = model.split(u)

        def local(v: Tensor) -> Tensor:
            return self.view.outputs(model, torch.cat([u1.expand(*v.shape[:-1], -1), v], -1), x)

        rng = torch.Generator(u.device).manual_seed(1)
        direction = torch.randn(u2.shape[-1], generator=rng, dtype=u.dtype, device=u.device)
        product = push_forward(local, u2, direction.unsqueeze(0))[1][0]
        expected = self.local_product(local, u2, direction)
        error = (product - expected).abs().max()
        if error > 1e3 * torch.finfo(u.dtype).eps ** 0.75 * expected.abs().max():
            raise ModelError(
                f"{type(model).__name__} declares structure {model.structure!r}, but {self.mismatch} "
                f"(directional derivatives differ by {error.item():.3g}): declare larger units (unit_inputs, "
                "unit_outputs), or structure = 'dense'"
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
