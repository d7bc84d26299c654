"""What a run of chains is asked for and until when, the kernel it gets where none is given, what it has come to."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..arguments import choice, fraction, positive, random_seed, whole_number
from ..arguments.values import shown
from ..conditioning.abc_kernels import InputPosterior
from ..conditioning.fibre import Fibre
from ..conditioning.marginal import NoiseMarginal
from ..errors import ArgumentError
from ..kernels import HMC, ConstrainedHMC, EllipticalSlice, Kernel, LiftedHMC, RiemannianHMC
from ..kernels.mode_jumps import Jumps
from ..target import Target
from .chain_groups import side_by_side
from .draws import Draws
from .inference_data import effective_draws, r_hat


@dataclass(frozen=True)
class LookSettings:
    """How much of a run is looked at while it goes on."""

    draws: int = 2000
    """Draws per chain, evenly spaced, that are judged: fewer draws look less effective, never more."""
    spare: float = 4.0
    """How many times the draws that would be enough if they were independent are judged, where that is more."""
    columns: int = 64
    """Numbers of each that are shown: a picture has thousands."""
    block: int = 2**20
    """Bytes of them that are judged together: ranks and autocorrelations take some ten times as much."""
    share: float = 0.02
    """Share of the time that looks of a run ``until=`` may take: all draws are read for one."""
    growth: float = 1.25
    """How many times the draws of one look the next has: at many looks a goal is reached by chance."""


LOOK = LookSettings()


def _judged(draws: Draws, most: int = LOOK.draws) -> dict[str, Tensor]:
    """Some draws of the latents, or else of the inputs, evenly spaced, at most so many per chain."""
    step = -(-draws.shape[1] // most)
    if draws.inputs is not None:
        inputs = draws.inputs[:, ::step]
        return (draws.problem.latents(inputs) if draws.problem is not None else {}) or {"inputs": inputs}
    return {name: value[:, ::step] for name, value in draws.latents.items()}


@torch.no_grad()
def worst_mixing(draws: Draws) -> tuple[float, float]:
    """The largest R-hat and the fewest bulk effective draws, by some draws of the first numbers of the latents."""
    rates, effective, batch = [], [], len(draws.shape) - 2
    for values in _by_columns(_judged(draws), batch):
        effective.append(effective_draws(values, "bulk").nan_to_num(0.0).min().item())
        rates.append(r_hat(values).nan_to_num(torch.inf).max().item() if len(values) > 1 else torch.inf)
    return max(rates), min(effective)


def _by_columns(latents: dict[str, Tensor], batch: int) -> Iterator[Tensor]:
    """The first numbers of latents ``[chains, draws, *batch, *shape]`` in blocks ``[chains, draws, n]`` of one size,
    so that what a look takes does not grow with their number."""
    left = LOOK.columns
    for value in latents.values():
        columns = value.unsqueeze(-1).flatten(2 + batch).flatten(2)[..., :left]
        left -= columns.shape[-1]
        each = max(1, LOOK.block // (8 * columns.shape[0] * columns.shape[1]))
        yield from (part.double() for part in columns.split(each, -1) if part.shape[-1])


@dataclass(frozen=True)
class Until:
    """What a run goes on until; a time ends it whatever it has reached.

    Attributes:
        ess: smallest bulk effective sample size of all latents.
        r_hat: largest R-hat of all latents.
        mcse: by the name of a latent, the largest Monte Carlo error of its means, in its units.
        seconds: wall-clock seconds.
    """

    ess: float | None = None
    r_hat: float | None = None
    mcse: Mapping[str, float] | None = None
    seconds: float | None = None

    @classmethod
    def checked(cls, call: str, until: Any, latents: Sequence[str] | None = None) -> Self:
        """What ``until=`` says, given as a dict.

        Args:
            latents: names of those of the problem, if they are known.

        Raises:
            ArgumentError: it names something else, or a number outside its range.
        """
        known = [field.name for field in fields(cls)]
        example = "a dict such as dict(ess=400, r_hat=1.01, mcse={'z': 0.01}, seconds=600)"
        if not isinstance(until, Mapping) or not until or not set(until) <= set(known):
            raise ArgumentError(f"{call}(until={shown(until)}): must be {example}")
        values = dict(until)
        for name in {"ess", "seconds"} & set(values):
            values[name] = positive(call, f"until {name}", values[name])
        if "r_hat" in values and not (isinstance(values["r_hat"], int | float) and values["r_hat"] > 1):
            raise ArgumentError(f"{call}(until r_hat={shown(values['r_hat'])}): must be above 1, such as 1.01")
        if "mcse" in values:
            errors = values["mcse"]
            if not isinstance(errors, Mapping) or not errors:
                raise ArgumentError(f"{call}(until mcse={shown(errors)}): must be {example}")
            values["mcse"] = {n: positive(call, f"until mcse of {n}", value) for n, value in errors.items()}
            for name in errors:
                if latents is not None and name not in latents:
                    raise ArgumentError(f"{call}(until mcse of {name!r}): there are the latents {', '.join(latents)}")
        return cls(**values)

    @property
    def is_time_alone(self) -> bool:
        """Whether nothing of the draws is asked for."""
        return self.ess is None and self.r_hat is None and self.mcse is None

    def is_over(self, seconds: float) -> bool:
        """Whether the time is."""
        return self.seconds is not None and seconds >= self.seconds

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def _most(self, kept: dict[str, Tensor]) -> int:
        """Draws per chain that tell whether there are enough, by some that are judged in any case."""
        needed = [self.ess or 0.0]
        for name, most in (self.mcse or {}).items():
            spread = kept[name].double().flatten(0, 1).std(0).nan_to_num(0.0)
            needed.append(float(spread.max() / most) ** 2 if spread.numel() else 0.0)
        chains = len(next(iter(kept.values())))
        return max(LOOK.draws, math.ceil(LOOK.spare * max(needed) / chains))

    @torch.no_grad()
    def reached(self, draws: Draws | None, seconds: float) -> tuple[bool, str]:
        """Whether it is, and where the run is, in words; of a time alone without the draws."""
        if draws is None:
            return self.is_over(seconds), f"{seconds:.0f} s of {self.seconds:g}"
        said, is_reached = [], True
        kept = _judged(draws)
        if (most := self._most(kept)) > LOOK.draws:
            kept = _judged(draws, most)
        batch, enough = len(draws.shape) - 2, draws.shape[1] >= 4
        values = side_by_side(kept, batch)
        if self.ess is not None:
            found = effective_draws(values, "bulk").nan_to_num(0.0).min().item() if enough else 0.0
            is_reached &= found >= self.ess
            said.append(f"bulk effective draws at least {found:.0f} of {self.ess:g}")
        if self.r_hat is not None:
            found = r_hat(values).nan_to_num(torch.inf).max().item() if enough else torch.inf
            is_reached &= found <= self.r_hat
            said.append(f"R-hat at most {found:.3f} of {self.r_hat:g}")
        for name, most in (self.mcse or {}).items():
            own = side_by_side({name: kept[name]}, batch)
            error = own.flatten(0, 1).std(0) / effective_draws(own, "mean").sqrt() if enough else None
            found = torch.inf if error is None else error.nan_to_num(torch.inf).max().item()
            is_reached &= found <= most
            said.append(f"Monte Carlo error of {name} {found:.2g} of {most:g}")
        if self.seconds is not None:
            # it ends the run whatever the others are
            is_reached |= self.is_over(seconds)
            said.append(f"{seconds:.0f} s of {self.seconds:g}")
        return is_reached, ", ".join(said)


@dataclass(frozen=True)
class RidgeSettings:
    """When a posterior is a ridge so narrow that kernels with Jacobians cost less than HMC.

    HMC takes steps of the width of a ridge, :class:`ConstrainedHMC` and :class:`RiemannianHMC` move along it. On
    ``dgm-infer bench samplers`` HMC no longer mixes from a stretch of about 40, with one row.
    """

    prior_draws: int = 8
    """At which the stretch is measured: how much narrower a posterior is across the ridge than on their average."""
    step: float = 5
    """Steps of HMC per step with a Jacobian of no rows, in time."""
    row: float = 2
    """The same for every row of the Jacobian: a backward pass."""

    def least(self, rows: int) -> float:
        """The stretch from which a ridge is narrow."""
        return self.step + self.row * rows


_RIDGE = RidgeSettings()


def default_kernel(problem: Fibre | Target) -> Kernel:
    """The default kernel for this kind of problem."""
    if isinstance(problem, Fibre):
        narrow = problem.marginal is None or _is_ridge(problem, problem.marginal)
        return ConstrainedHMC() if narrow else LiftedHMC()
    if not problem.has_gradient:
        return EllipticalSlice()
    if isinstance(problem, InputPosterior) and _is_narrow(problem):
        return RiemannianHMC()
    return HMC()


def _is_ridge(problem: Fibre, marginal: NoiseMarginal) -> bool:
    """Whether additive noise is narrow, and leaves most directions of the global inputs free.

    Where it fixes most of them an adapted metric suffices: a predator-prey series of 104 inputs and 100 values, and
    digits of 12 latents and 9 pixels, mix no better on the fibre. So it does for ridges that are straight: signals of
    64 increments given 26 values make 4 to 30 times the effective draws a second by :class:`LiftedHMC`.
    """
    rows = problem.values.shape[-1]
    if 2 * rows > marginal.dim:
        return False
    u1 = marginal.initial_draws(_RIDGE.prior_draws, torch.Generator(problem.values.device).manual_seed(0))
    precision = marginal.precision(u1).double()
    # a simulator may overflow at prior draws, which says nothing
    told = precision.isfinite().all(-1).all(-1)
    usable = told[..., None, None]
    precision = torch.where(usable, precision, torch.eye(marginal.dim).to(precision))
    # in the coordinates of one metric for all, which makes a straight ridge round; rounding would stop Cholesky
    values, axes = torch.linalg.eigh(precision)
    covariance = (axes / values.clamp_min(1.0).unsqueeze(-2)) @ axes.mT
    values, axes = torch.linalg.eigh((covariance * usable).sum(0) / usable.sum(0).clamp_min(1))
    root = axes * values.clamp_min(0.0).sqrt().unsqueeze(-2)
    stretch = torch.linalg.eigvalsh(root.mT @ precision @ root)[..., -1].clamp_min(0.0).sqrt()
    return bool(told.any()) and stretch[told].median().item() > _RIDGE.least(rows)


def _is_narrow(problem: InputPosterior) -> bool:
    """Whether a tolerance is so small that its steps cost HMC more than Jacobians cost :class:`RiemannianHMC`."""
    if problem.embedding is None:
        return False
    u = problem.initial_draws(_RIDGE.prior_draws, torch.Generator(problem.values.device).manual_seed(0))
    rows = min(problem.embedding.fibre.values.shape[-1], problem.dim)
    return problem.embedding.stretch(u).nanmedian().item() > _RIDGE.least(rows)


# Iterations of a warm-up whose length is not given, at most: 340 make the positions for a metric of a hundred
# dimensions with four chains, and step sizes and lengths settle after it.
LONGEST_WARMUP = 500


@dataclass(frozen=True)
class RunPlan:
    """The numbers of a run, as :func:`sample` takes them."""

    chains: int
    warmup: int
    draws: int
    thin: int
    seed: int
    keep: str
    target_acceptance: float | None
    is_open: bool = False
    """Whether the warm-up may end sooner."""
    block: int | None = None
    """Bytes of draws that are held in memory; None for all of them."""
    is_limit: bool = False
    """Whether the run ends before so many draws, once it has reached something."""
    seconds: float | None = None
    """Those after which it ends."""

    @classmethod
    def checked(
        cls,
        *,
        chains: int,
        warmup: int | None,
        draws: int,
        thin: int,
        seed: int | None,
        keep: str,
        target_acceptance: float | None,
    ) -> Self:
        """The plan of these arguments of ``sample``; a random seed for None.

        Raises:
            ArgumentError: one is outside its range.
        """
        return cls(
            chains=whole_number("sample", "chains", chains, 1),
            warmup=LONGEST_WARMUP if warmup is None else whole_number("sample", "warmup", warmup, 0),
            draws=whole_number("sample", "draws", draws, 1),
            thin=whole_number("sample", "thin", thin, 1),
            seed=random_seed("sample", seed),
            keep=choice("sample", "keep", keep, ("inputs", "latents")),
            target_acceptance=(
                None if target_acceptance is None else fraction("sample", "target_acceptance", target_acceptance)
            ),
            is_open=warmup is None,
        )

    @property
    def transitions(self) -> int:
        return self.warmup + self.draws * self.thin


class Keeping(NamedTuple):
    """Where a run is kept, and who makes it: arguments of the functions that begin one."""

    run: str | os.PathLike | None
    checkpoint_every: float
    devices: Any
    executor: Any

    @classmethod
    def checked(cls, call: str, run: Any, checkpoint_every: float, devices: Any = None, executor: Any = None) -> Self:
        """These arguments of a function.

        Raises:
            ArgumentError: ``checkpoint_every`` is not positive.
        """
        return cls(run, positive(call, "checkpoint_every", checkpoint_every), devices, executor)

    @property
    def is_asked_for(self) -> bool:
        return any(each is not None for each in (self.run, self.devices, self.executor))


class RunInputs(NamedTuple):
    """What a run begins with."""

    problem: Fibre | Target
    kernel: Kernel
    initial: Tensor | None
    """Given starting points, ``[chains, *batch, D]``."""
    undecided: bool
    """Whether the kernel is the default one, which jumps where several modes are found."""


class RunOutcome(NamedTuple):
    """What a run has come to."""

    problem: Fibre | Target | None
    """None if it is not at hand."""
    kernel: Kernel
    plan: RunPlan
    draws: dict[str, Tensor]
    """``inputs`` or ``latents.*``, and ``stats.*``: each ``[chains, draws, ...]``."""
    made: int
    """Draws so far."""
    ancestors: Tensor | None
    modes: Jumps | None
    """Those that were found where the chains start, if the kernel has none."""
    stayed: Tensor
    adapted: bool
    """Whether warm-up chose the step size."""
