"""The fibre ``{u : A(g_x(u)) = y}`` of a batch of observations, and the posterior density on it (J 6, T 4.7)."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import allocatable, context, flag, function, positive, random_generator, whole_number
from ..arguments.values import plural
from ..autodiff.pytrees import take, tree_map
from ..autodiff.row_execution import PLAIN, SETTINGS, Computation, FibreGraphs, evaluate
from ..html import block, text
from ..structures import Dense, Evaluation, JacobianMap, Units
from .marginal import NoiseMarginal
from .observed import ObservedModel, magnitude
from .projection import solver_tolerance
from .start_points import find_starts


class Linearisation(NamedTuple):
    """A point of the fibre as the integrator needs it, one row per chain."""

    jacobian: JacobianMap
    energy: Tensor
    """``phi(u) = -log p_u(u) + log|J J^T| / 2``, ``[...]``."""
    gradient: Tensor
    """``grad phi``, ``[..., D]``; of a fibre without Gram force ``-grad log p_u``."""
    constraint_error: Tensor
    """``max|c|``, ``[...]``, each constraint in its unit."""

    def where(self, condition: Tensor, other: "Linearisation") -> "Linearisation":
        """This one where the condition ``[...]`` holds, else the other."""
        return Linearisation(
            self.jacobian.where(condition, other.jacobian),
            torch.where(condition, self.energy, other.energy),
            torch.where(condition.unsqueeze(-1), self.gradient, other.gradient),
            torch.where(condition, self.constraint_error, other.constraint_error),
        )


class Fibre:
    """Posterior of a generative model given exact observations, in its input space.

    Constraint ``c(u) = A(g_x(u)) - y``, outputs that hardly vary in units of their variation (math 3.3); density with
    respect to the Hausdorff measure on ``{c = 0}`` ``pi(u) ~ p_u(u) |J J^T|^(-1/2)`` (J 6). Positions are
    ``[..., *batch_shape, dim]``.

    Args:
        observed: the model through its observation operator.
        values: ``[*batch, Dy]`` observed values.
        computation: how derivatives are computed.
    """

    can_complete = True
    """Whether :meth:`complete` can generate outputs, which not every target can."""

    def __init__(
        self,
        observed: ObservedModel,
        values: Tensor,
        computation: Computation = PLAIN,
        *,
        coarse: ObservedModel | None = None,
        graphs: FibreGraphs | None = None,
    ):
        self.observed = observed
        self.values = values
        self.computation = computation
        # what other rows and other computations of the same problem share
        self._coarse = observed.to(torch.float32) if coarse is None and computation.float32 else coarse
        self.graphs = graphs
        self.batch_shape = values.shape[:-1]
        self.dim = observed.dim
        self.structure = observed.structure if observed.structure.pays(values.shape[-1]) else Dense()
        self._rows: tuple[int, Fibre] | None = None
        self._variants: dict[Computation, Fibre] = {}

    def __repr__(self) -> str:
        sizes = [plural(self.dim, "input"), plural(self.values.shape[-1], "observed value")]
        sizes += [plural(self.batch_shape.numel(), "problem")] if self.batch_shape else []
        structure = type(self.structure).__name__.lower()
        return f"{type(self).__name__}({type(self.model).__name__}: {', '.join(sizes)}; structure: {structure})"

    def _repr_html_(self) -> str:
        return block(f'<p class="said">{text(self)}</p>')

    @property
    def model(self):
        return self.observed.model

    @property
    def units(self) -> Units | None:
        """Sizes of the units that the Jacobian splits into; None if it is dense."""
        return self.structure.units

    @cached_property
    def marginal(self) -> NoiseMarginal | None:
        """The posterior of the global inputs, if the local ones are additive normal noise, else None."""
        return NoiseMarginal.of(self.observed, self.values, self._coarse)

    @cached_property
    def prefers_float32(self) -> bool:
        """Whether float32 derivatives pay off: convolutions in float64 take 2 to 4 times as long on a CPU, and more on
        a device, and so do other networks whose Jacobian has many entries."""
        large = isinstance(self.structure, Dense) and self.values.shape[-1] * self.dim >= SETTINGS.many
        return self.values.dtype == torch.float64 and (self.observed.convolves or (large and self.observed.is_network))

    @property
    def searches(self) -> bool:
        """Whether starting points are found by annealing the misfit: no structure says where they are."""
        return isinstance(self.structure, Dense) and not self.model.has_local_inputs

    @property
    def has_low_points(self) -> bool:
        """Whether chains start above modes, at low points of the fibre: searched for, and with normal inputs, whose
        density says what is low."""
        return self.searches and self.model.input_density.is_standard_normal

    @property
    def for_searches(self) -> "Fibre":
        """The same fibre with the derivatives that searches use: those in float32 lead as well to where only the
        constraint tells."""
        return self.computed(float32=self.prefers_float32)

    @property
    def scale(self) -> Tensor:
        """``max(1, |y|_max)`` per problem, ``[*batch]``: tolerances are relative to it."""
        return magnitude(self.values)

    def rows(self, chains: int) -> "Fibre":
        """The fibre of ``chains`` copies of every problem in one flat batch of ``chains * prod(batch)`` rows."""
        if self._rows is None or self._rows[0] != chains:
            problems = torch.arange(self.batch_shape.numel(), device=self.values.device)
            self._rows = (chains, self.take(problems.repeat(chains)))
        return self._rows[1]

    def take(self, problems: Tensor) -> "Fibre":
        """The fibre of the listed problems (flat indices), one row each."""
        return self.with_data(*take(self.data, self.batch_shape, problems))

    def computed(self, **changes: Any) -> "Fibre":
        """The same fibre with its derivatives :class:`computed <Computation>` in another way, made once."""
        computation = replace(self.computation, **changes)
        if self.values.dtype == torch.float32:
            computation = replace(computation, float32=False)
        if computation == self.computation:
            return self
        if computation not in self._variants:
            graphs = (self.graphs or FibreGraphs()) if computation.traced else None
            coarse = self._coarse if computation.float32 else None
            variant = type(self)(self.observed, self.values, computation, coarse=coarse, graphs=graphs)
            self._variants[computation] = variant
        return self._variants[computation]

    @property
    def traces(self) -> bool:
        """Whether traced derivatives spare time: of networks with convolutions whose Jacobian has no structure, on a
        CPU."""
        return self.searches and self.observed.convolves and self.values.device.type == "cpu"

    def __getstate__(self) -> dict[str, Any]:
        # what is made on first use is made again
        own = {name: value for name, value in vars(self).items() if name != "marginal"}
        return {**own, "_rows": None, "_variants": {}, "graphs": self.graphs and FibreGraphs()}

    def evaluate(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(fibre, *arguments)`` without gradients, see :func:`~dgm_infer.autodiff.row_execution.evaluate`."""
        return evaluate(self, function, arguments)

    @property
    def data(self) -> tuple[Any, ...]:
        """The data of each problem: a tree of tensors ``[*batch, ...]``."""
        return self.values, self.observed.data

    def with_data(self, values: Tensor, data: tuple[Any, ...]) -> "Fibre":
        """The same fibre with the data of other problems."""
        coarse = self._coarse and self._coarse.with_data(tree_map(_to_float32, data))
        observed = self.observed.with_data(data)
        return type(self)(observed, values, self.computation, coarse=coarse, graphs=self.graphs)

    def with_noise_scale(self, scale: Tensor | None) -> "Fibre":
        """The fibre of the same observations with local inputs that spread ``scale`` times as wide, ``[*batch]``."""
        coarse = self._coarse and self._coarse.with_noise_scale(scale if scale is None else scale.float())
        observed = self.observed.with_noise_scale(scale)
        return type(self)(observed, self.values, self.computation, coarse=coarse, graphs=self.graphs)

    def constraint(self, u: Tensor) -> Tensor:
        """``c(u)``: ``[..., *batch, D] -> [..., *batch, Dy]``."""
        return self.observed.residual(u, self.values)

    def constraint_error(self, u: Tensor) -> Tensor:
        """``max|c(u)|``, each constraint in its unit: ``[..., *batch]``."""
        with torch.no_grad():
            return self.constraint(u).abs().amax(-1)

    def jacobian(self, u: Tensor) -> JacobianMap:
        """The factorised Jacobian of the constraint at ``u``."""
        return self.structure.factorise(self._entries(u).entries)

    def linearise(self, u: Tensor) -> Linearisation:
        """Jacobian, energy and gradient at ``u``, from one evaluation of the Jacobian."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            with torch.set_grad_enabled(self.computation.gram_force):
                value, entries = self.entries(u)
            jacobian = self.structure.factorise(tuple(e.detach() for e in entries))
            log_density = self.observed.log_density(u)
            # the gradient of this scalar is grad phi; its value is not phi
            scalar = -log_density.sum()
            if self.computation.gram_force:
                for weight, entry in zip(self._gram_cotangent(jacobian), entries, strict=True):
                    scalar = scalar + (weight * entry).sum()
            (gradient,) = torch.autograd.grad(scalar, u)
        energy = self._gram_energy(jacobian) - log_density.detach()
        return Linearisation(jacobian, energy, gradient, value.detach().abs().amax(-1))

    def entries(self, u: Tensor) -> Evaluation:
        """The constraint and the raw entries of its Jacobian at ``u``, differentiably."""
        value, entries = self._entries(u)
        return Evaluation(value if self._coarse is None else self.constraint(u.detach()), entries)

    def _entries(self, u: Tensor) -> Evaluation:
        """:meth:`entries` with the value of the model that derivatives are computed with."""
        coarse = self._coarse
        if coarse is None:
            return self.structure.entries(self.constraint, u)
        value, entries = self.structure.entries(lambda v: coarse.residual(v, self.values.float()), u.float())
        return Evaluation(value, tuple(entry.to(u) for entry in entries))

    # The Gram term and its cotangent, which must agree.
    def _gram_energy(self, jacobian: JacobianMap) -> Tensor:
        return 0.5 * jacobian.log_det

    def _gram_cotangent(self, jacobian: JacobianMap) -> tuple[Tensor, ...]:
        return jacobian.log_det_cotangent()

    def latents(self, u: Tensor) -> dict[str, Tensor]:
        """Latent variables at inputs ``u``, each ``[..., *batch, *shape]``."""
        with torch.no_grad():
            return self.observed.latents(u)

    def complete(self, u: Tensor, rng: torch.Generator, mean: bool = False) -> Tensor:
        """Complete outputs ``[..., *batch, *output_shape]``: the observed part as observed, the rest generated."""
        return self.observed.complete(u, self.values, rng, mean)

    def start(
        self,
        chains: int,
        rng: torch.Generator,
        *,
        tolerance: float | None = None,
        attempts: int = 20,
        typical: bool = True,
        report: Callable[[str], None] = lambda text: None,
    ) -> Tensor:
        """Points on the fibre near prior draws, ``[chains, *batch, D]`` (math 5, J 8.4): see :func:`find_starts`.

        A tolerance of None is that of solvers, 1e-8 in float64 and 1e-5 in float32.

        Raises:
            ArgumentError: an argument is outside its range.
            StartError: after ``attempts`` rounds a problem has no point; the message names the best residual.
        """
        call = "Fibre.start"
        context(call)
        whole_number(call, "chains", chains)
        random_generator(call, "rng", rng)
        whole_number(call, "attempts", attempts)
        flag(call, "typical", typical)
        function(call, "report", report, "print")
        allocatable(
            call, "chains", chains, chains * self.batch_shape.numel() * self.dim, "fewer chains", like=self.values
        )
        tolerance = solver_tolerance(self.values.dtype) if tolerance is None else positive(call, "tolerance", tolerance)
        return find_starts(self, chains, rng, tolerance=tolerance, attempts=attempts, typical=typical, report=report)


def _to_float32(data: Tensor) -> Tensor:
    return data.float() if data.is_floating_point() else data
