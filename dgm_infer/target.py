"""Unconstrained targets: anything with an energy on R^D."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from .arguments import allocatable, default_type, function, random_generator, sizes, whole_number
from .arguments.distributions import without_validation
from .arguments.values import plural, shown
from .errors import ArgumentError
from .html import block, text

__all__ = ["Block", "Density", "Target", "as_target", "check_density", "reference"]

_NO_GRADIENTS = "sample by a kernel that needs no gradient, such as kernels.RandomWalk()"


@runtime_checkable
class Density(Protocol):
    """A normalised density that can be drawn from: an ``InputDensity`` on R^D, or a ``Gaussian`` per problem."""

    @property
    def dim(self) -> int: ...

    def log_prob(self, u: Tensor, /) -> Tensor:
        """``[..., D] -> [...]``."""
        ...

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws: ``[*shape, D]``, of a Gaussian per problem ``[*shape, *batch, D]``."""
        ...


def check_density(call: str, name: str, value: Any) -> None:
    """Raise :class:`ArgumentError` unless an argument is a density."""
    if isinstance(value, type) or not isinstance(value, Density):
        raise ArgumentError(
            f"{call}({name}={shown(value)}): must be a density with dim, sample and log_prob, such as "
            "dgm.StandardNormal(2)"
        )


class Block(NamedTuple):
    """Neighbouring coordinates ``start, ..., stop - 1`` of a position."""

    start: int
    stop: int
    prior: Density | None = None
    """Their density a priori, if it is known and independent of the others."""


class Target:
    """An unnormalised density ``exp(-energy(x))`` on R^D, for every problem of a batch.

    A subclass may define ``energy``, ``dim`` and ``batch_shape`` instead of passing them.

    Args:
        energy: ``[..., *batch_shape, D] -> [..., *batch_shape]``, differentiable.
        dim: D.
        batch_shape: shape of the batch of independent problems.
    """

    dim: int
    prior: Any = None
    """The prior of x, a :class:`Density`, if the density is one times a likelihood."""

    has_gradient: bool = True
    """Whether the energy has a useful gradient; kernels that need none sample the target otherwise."""

    _energy: Callable[[Tensor], Tensor] | None = None
    batch_shape = torch.Size()
    standardised: bool = False
    """Whether the coordinates have a prior of mean zero and unit variance, of which ``initial_draws`` are draws."""
    coarse: "Target | None" = None
    """The same density in float32, if gradients are computed by that one."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        for name in ("energy", "energy_and_gradient"):
            if inspect.isfunction(own := vars(cls).get(name)):
                setattr(cls, name, without_validation(own))

    def __init__(
        self,
        energy: Callable[[Tensor], Tensor] | None = None,
        dim: int | None = None,
        batch_shape: tuple[int, ...] | None = None,
    ):
        name = type(self).__name__
        if energy is not None or not self._defines_energy:
            function(name, "energy", energy, "lambda x: 0.5 * x.square().sum(-1)")
        self._energy = energy
        self.dim = whole_number(name, "dim", getattr(self, "dim", None) if dim is None else dim)
        batch_shape = self.batch_shape if batch_shape is None else batch_shape
        self.batch_shape = torch.Size(sizes(name, "batch_shape", batch_shape, empty=True))

    @property
    def _defines_energy(self) -> bool:
        return type(self).energy is not Target.energy or "energy" in vars(self)

    def energy(self, x: Tensor) -> Tensor:
        """``[..., *batch_shape, D] -> [..., *batch_shape]``."""
        assert self._energy is not None
        return without_validation(self._energy)(x)

    def energy_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Energy ``[...]`` and gradient ``[..., D]``, detached."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            try:
                energy = self.energy(x)
            except RuntimeError as error:
                if "requires grad" not in str(error):
                    raise
                raise ArgumentError(
                    f"the energy of a {type(self).__name__} has no gradient, as it leaves torch (numpy()): compute "
                    f"with torch's functions, or {_NO_GRADIENTS}"
                ) from error
            if energy.shape != x.shape[:-1] or not energy.requires_grad:
                what = f"of shape {tuple(energy.shape)}" if energy.requires_grad else "without a gradient"
                remedy = "" if energy.requires_grad else f", or {_NO_GRADIENTS}"
                raise ArgumentError(
                    f"the energy of a {type(self).__name__} at x of shape {tuple(x.shape)} is {what}: expected one "
                    f"differentiable value per point, shape {tuple(x.shape[:-1])}{remedy}"
                )
            (gradient,) = torch.autograd.grad(energy.sum(), x)
        return energy.detach(), gradient

    def energy_and_extra(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """:meth:`energy` and the extra of :meth:`energy_gradient_and_extra`, differentiable in ``x``."""
        return self.energy(x), ()

    def energy_gradient_and_extra(self, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """:meth:`energy_and_gradient`, and what else a target keeps of its work at ``x``, ``[...]`` or ``[..., E]``."""
        return *self.energy_and_gradient(x), ()

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient ``[..., D]`` alone, for targets that compute it at less cost than with the energy.

        Trajectories need the energy of their ends only, which decides whether they are accepted; between them an
        approximation will do, if it is a function of ``x``.
        """
        return self.energy_and_gradient(x)[1]

    def own_fault(self, x: Tensor) -> str | None:
        """What a target finds wrong with its own form at points ``[n, *batch, D]``; None if nothing."""
        return None

    def latents(self, x: Tensor) -> dict[str, Tensor]:
        """Named variables at ``x``, each ``[..., *batch_shape, *shape]``."""
        return {"x": x}

    @property
    def blocks(self) -> Mapping[str, Block]:
        """Named parts of x, which :class:`~dgm_infer.kernels.Alternating` can update in turn."""
        return {}

    @property
    def can_take(self) -> bool:
        """Whether :meth:`take` is defined, so that a large batch can be evaluated in chunks."""
        return type(self).take is not Target.take

    def take(self, problems: Tensor) -> "Target":
        """The target of the problems with flat indices ``[N]``; its batch shape is ``[N]``."""
        raise ArgumentError(f"a {type(self).__name__} does not define take(problems), the target of some problems")

    @property
    def can_complete(self) -> bool:
        """Whether :meth:`complete` is defined, so that outputs can be generated."""
        return type(self).complete is not Target.complete

    def __repr__(self) -> str:
        batch = f", *batch = {tuple(self.batch_shape)}" if self.batch_shape else ""
        return f"{type(self).__name__}({plural(self.dim, 'dimension')}{batch})"

    def _repr_html_(self) -> str:
        return block(f'<p class="said">{text(self)}</p>')

    def complete(self, u: Tensor, rng: torch.Generator, mean: bool = False) -> Tensor:
        """Complete outputs at positions ``[..., *batch, D]``: the observed part as observed, the rest generated."""
        raise ArgumentError(f"a {type(self).__name__} has no outputs to generate")

    def initial_draws(self, n: int, rng: torch.Generator) -> Tensor:
        """Where chains may start, ``[n, *batch, D]``: standard normal draws, unless a subclass knows better."""
        like = reference(self)
        dtype = default_type() if like is None else like.dtype
        return torch.randn(n, *self.batch_shape, self.dim, generator=rng, dtype=dtype, device=rng.device)

    def start(self, chains: int, rng: torch.Generator, attempts: int = 100) -> Tensor:
        """:meth:`initial_draws`, made again up to ``attempts`` times where the energy is not finite.

        Raises:
            ArgumentError: an argument is outside its range.
        """
        call = f"{type(self).__name__}.start"
        whole_number(call, "chains", chains)
        whole_number(call, "attempts", attempts)
        random_generator(call, "rng", rng)
        allocatable(call, "chains", chains, chains * self.batch_shape.numel() * self.dim, "fewer chains")
        x = self.initial_draws(chains, rng)
        for _ in range(attempts):
            with torch.no_grad():
                finite = self.energy(x).isfinite()
            if finite.all():
                break
            x = torch.where(finite.unsqueeze(-1), x, self.initial_draws(chains, rng))
        return x


class Posterior(Target):
    """``p(u | y)``: a prior of inputs u times a likelihood whose power can rise from 0 to 1; chains start from that."""

    standardised = True

    @property
    def values(self) -> Tensor:
        """The observed values, whose type and device are those of the computation."""
        raise NotImplementedError

    @property
    def n_outputs(self) -> int:
        """Numbers that the model computes for every problem: those of a Jacobian are so many times D."""
        raise NotImplementedError

    @property
    def convolves(self) -> bool:
        """Whether the model has layers that are convolutions, whose gradients take long."""
        raise NotImplementedError

    def tempered_energy(self, u: Tensor, beta: Tensor, /) -> Tensor:
        """``-beta log p(y | u) - log p(u)`` up to a constant, differentiable in both: ``[..., D], [...] -> [...]``."""
        raise NotImplementedError

    def precision(self, u: Tensor, /) -> Tensor | None:
        """``I + K^T K``, that of the posterior about u if the outputs were linear, ``[..., D, D]`` in float64; None if
        the likelihood's information is not known.

        It takes as many forward derivatives of the model as there are inputs.
        """
        raise NotImplementedError

    def to(self, dtype: torch.dtype) -> Self:
        """The same in another type."""
        raise NotImplementedError


def as_target(target) -> Target:
    """Anything with ``energy``, ``dim`` and ``batch_shape``, as a :class:`Target`.

    For a fibre with additive normal noise that is the posterior of the other inputs, whose evidence is ``log p(y)``.

    Raises:
        ArgumentError: one of them is missing, or of the wrong kind.
    """
    if hasattr(target, "constraint") and isinstance(marginal := getattr(target, "marginal", None), Target):
        return marginal
    if not isinstance(target, Target):
        return _Adapted(target)
    if not isinstance(target.batch_shape, torch.Size):
        # of a subclass with an __init__ of its own
        target.batch_shape = torch.Size(sizes(type(target).__name__, "batch_shape", target.batch_shape, empty=True))
    if not hasattr(target, "dim"):
        name = type(target).__name__
        raise ArgumentError(f"{name} has no dim: set it, or call super().__init__(dim=...) in the __init__ of {name}")
    return target


def first_points(target: Target, n: int, rng: torch.Generator) -> Tensor:
    """Points ``[n, *batch, D]`` near the density: of the target's own ``start``, if nothing else says where that is."""
    kind = type(target)
    own = kind.start is not Target.start and kind.initial_draws is Target.initial_draws
    return (target.start if own else target.initial_draws)(n, rng)


def reference(target) -> Tensor | None:
    """A tensor of the type and on the device that a target computes with, as its ``values`` are; None if unknown.

    An energy whose data are of one type, as of a matrix product with float64, takes positions of this type alone.
    """
    own = getattr(target, "_target", target)
    values = getattr(own, "values", None)
    if isinstance(values, Tensor) and values.is_floating_point():
        return values
    dtype, device = getattr(own, "dtype", None), getattr(own, "device", None)
    if dtype is None:
        dtype = _only_type(own if isinstance(own, Target) else target)
    return torch.empty(0, dtype=dtype, device=device) if isinstance(dtype, torch.dtype) else None


@torch.no_grad()
def _only_type(target: Any) -> torch.dtype | None:
    """The type of positions without which an energy fails, of two that it is tried with once; None of one that takes
    both, or neither."""
    if not isinstance(target, Target):
        return None
    # vars(), as a target may be a module, too
    known = vars(target)
    if "_only_type" not in known:
        taken = []
        for dtype in (torch.float32, torch.float64):
            with suppress(Exception):
                target.energy(torch.full((1, *target.batch_shape, target.dim), 0.5, dtype=dtype))
                taken.append(dtype)
        known["_only_type"] = taken[0] if len(taken) == 1 else None
    return known["_only_type"]


class _Adapted(Target):
    """A target that is not a subclass: uses what it defines, and :class:`Target` for the rest."""

    def __init__(self, target: Any):
        if hasattr(target, "constraint"):
            raise ArgumentError(
                f"expected a Target, not a {type(target).__name__}: an exact observation leaves a surface without a "
                "density on R^D, unless the noise of every value is normal and added: give the model such noise, "
                "WithNoise(model, sd=...), or write the observation as a likelihood (for Pyro programs: "
                "target_from_pyro)"
            )
        has_all = all(hasattr(target, name) for name in ("energy", "dim", "batch_shape"))
        if isinstance(target, nn.Module) and not has_all:
            raise ArgumentError(
                f"expected a Target, not a {type(target).__name__}: what condition(model, data) returns, or for "
                "log_evidence a pair, log_evidence((model, images))"
            )
        if not has_all:
            raise ArgumentError(
                f"expected a Target, not a {type(target).__name__}: what condition() returns, or anything with "
                "energy(x), dim and batch_shape"
            )
        # whatever its class, it has these
        given: Any = target
        super().__init__(given.energy, given.dim, given.batch_shape)
        self._target, self.prior = target, getattr(target, "prior", None)
        self.standardised = getattr(target, "standardised", False)

    def energy_and_gradient(self, x):
        return self._own("energy_and_gradient")(x)

    def gradient(self, x):
        return without_validation(self._own("gradient"))(x)

    def latents(self, x):
        return self._own("latents")(x)

    @property
    def blocks(self):
        return getattr(self._target, "blocks", {})

    def initial_draws(self, n, rng):
        # the target's own starting points: nothing else says where the density is
        return self._own("start" if hasattr(self._target, "start") else "initial_draws")(n, rng)

    def start(self, chains, rng, attempts=100):
        return self._own("start")(chains, rng)

    @property
    def can_take(self):
        return hasattr(self._target, "take")

    def take(self, problems):
        return as_target(self._own("take")(problems))

    @property
    def can_complete(self):
        return hasattr(self._target, "complete")

    def complete(self, u, rng, mean=False):
        return self._own("complete")(u, rng, mean=True) if mean else self._own("complete")(u, rng)

    def _own(self, name: str) -> Callable:
        """The method of the adapted target, or the default one of :class:`Target`."""
        return getattr(self._target if hasattr(self._target, name) else super(), name)
