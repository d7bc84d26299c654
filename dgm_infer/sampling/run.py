"""A sampling run under way: what its next transition needs, what it has drawn, and its draws at the end."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..conditioning.fibre import Fibre
from ..conditioning.subject import LIMITS
from ..diagnosis import DiagnosisWarning
from ..errors import ModelError, StartError, cause, warn
from ..kernels import Info, Kernel
from ..kernels.kernel import State, Tunable
from ..kernels.mode_jumps import Jumps, ModeJumps
from ..progress import SETTINGS as PROGRESS
from ..progress import Progress, foretell
from ..target import Target, reference
from .draws import Draws
from .execution import Execution
from .plan import RunInputs, RunOutcome, RunPlan
from .preflight import check_energy, check_latents, check_resolved
from .starts import starting_points
from .stored import check_energies
from .verdict import check_derivatives, verdict
from .warmup import WarmUp


class RunState(NamedTuple):
    """Where a run is after a transition; replaced whole, so that an interrupt finds all of it or none."""

    state: State
    transitions: int
    """Those of the plan, warm-up included, that are made, or spared because warm-up had adapted the kernel."""
    stayed: Tensor
    """Whether each chain is where its main run began, and was at every kept draw: ``[chains, *batch]``."""
    random: Tensor
    """State of the generator of random numbers."""


class SamplingRun:
    """Chains on their way through warm-up and the main run.

    It can be put down after any transition and taken up again in another process, with the same draws: everything but
    the problem and the draws is in its pickle, and :meth:`resume` gives it those.

    Attributes:
        kernel: the kernel of the main run: adapted once the warm-up is over.
        now: the :class:`RunState` that the next transition begins at.
        kept: what is kept of the draws from :attr:`first` on, each ``[chains, n, ...]``, n at least those made.
        first: the first draw that is in memory.
    """

    def __init__(
        self,
        problem: Fibre | Target,
        kernel: Kernel,
        plan: RunPlan,
        state: State,
        rng: torch.Generator,
        *,
        typical: bool = False,
        ancestors: Tensor | None = None,
        modes: Jumps | None = None,
    ):
        self.problem, self.kernel, self.plan, self._rng = problem, kernel, plan, rng
        self.ancestors, self.modes = ancestors, modes
        self._execution = Execution(problem, plan.warmup, plan.seconds)
        self.adapts = isinstance(kernel, Tunable) and kernel.tuning(problem).step_size
        self.kept: dict[str, Tensor] = {}
        self.first = 0
        self._first: Tensor | None = None
        # a machine without room for the draws says so before the warm-up, not after it
        self._make_room(self._positions(state.position))
        self._warm: WarmUp | None
        with self._execution.evaluating(kernel, state):
            self._warm = WarmUp(
                kernel,
                problem,
                state,
                rng,
                iterations=plan.warmup,
                target_acceptance=plan.target_acceptance,
                typical=typical,
                is_open=plan.is_open,
            )
        stayed = torch.ones_like(state.energy, dtype=torch.bool)
        self.now = RunState(state, 0, stayed, rng.get_state())

    @classmethod
    def begin(cls, run_inputs: RunInputs, plan: RunPlan, bar: Progress) -> Self:
        """Chains at their starting points.

        Raises:
            StartError: no starting points were found.
        """
        problem, kernel, initial, undecided = run_inputs
        rng = torch.Generator(device_of(problem, initial)).manual_seed(plan.seed)
        start = starting_points(
            problem,
            kernel,
            plan.chains,
            rng,
            initial,
            anneal=plan.warmup > 0,
            target_acceptance=plan.target_acceptance,
            report=bar.say,
        )
        if isinstance(problem, Target) and initial is not None:
            check_energy(problem, kernel, start.position.device, start.position)
        if isinstance(problem, Fibre):
            check_derivatives(problem, start.position[: LIMITS.derivatives])
            check_resolved(problem, start.position)
        kernel = _jumping(kernel, start.jumps, undecided)
        if undecided:
            inner = kernel.kernel if isinstance(kernel, ModeJumps) else kernel
            bar.note(f"kernel: {type(inner).__name__}" + (" with jumps between modes" if inner is not kernel else ""))
        held = plan.keep == "latents" and plan.block is None
        check_latents(problem, start.position, plan.draws if held else 0)
        began = time.monotonic()
        state = kernel.init(problem, start.position)
        took = time.monotonic() - began
        if state.energy.dtype.itemsize > state.position.dtype.itemsize:
            # a density of more digits than its starts; a network of 32 bits takes no others
            with suppress(RuntimeError, ModelError):
                state = kernel.init(problem, start.position.to(state.energy.dtype))
        if not bar.is_most:
            _foretell(problem, kernel, start.position, plan.transitions, took)
        lost = int((~state.energy.isfinite()).sum())
        if lost:
            raise StartError(
                f"the energy is not finite at {lost} of {state.energy.numel()} starting points: check the density "
                "there, or pass initial=; of variables with bounds use logs or logits, or kernels.RandomWalk()"
            )
        modes = None if isinstance(kernel, ModeJumps) else start.jumps
        return cls(problem, kernel, plan, state, rng, typical=start.typical, ancestors=start.ancestors, modes=modes)

    @property
    def count(self) -> int:
        """Draws made so far."""
        return max(0, self.now.transitions - self.plan.warmup) // self.plan.thin

    @property
    def warms_up(self) -> bool:
        """Whether the kernel is still open."""
        return self._warm is not None

    def draws(self, first: int = 0) -> dict[str, Tensor]:
        """What is in memory of the draws from the ``first`` one on, each ``[chains, count - first, ...]``."""
        within = slice(max(first - self.first, 0), self.count - self.first)
        return {name: value[:, within] for name, value in self.kept.items()}

    @property
    def held(self) -> int:
        """Bytes of the draws in memory."""
        return sum(value.nbytes for value in self.draws().values())

    def forget(self) -> None:
        """Drop the draws so far, which are in a file."""
        self.first, self.kept = self.count, {}

    def outcome(self) -> RunOutcome:
        """What the run has come to."""
        return RunOutcome(
            self.problem,
            self.kernel,
            self.plan,
            self.draws(),
            self.count,
            self.ancestors,
            self.modes,
            self.now.stayed,
            self.adapts,
        )

    def advance(self, bar: Progress, after_each: "Callable[[SamplingRun], None]") -> None:
        """Make the transitions that are left, and call ``after_each`` with the run after every one of them."""
        kernel = self.kernel if self._warm is None else self._warm.kernel
        with self._execution.evaluating(kernel, self.now.state, bar.note):
            self.warm_up(bar, after_each)
            self.draw(bar, after_each)

    def warm_up(self, bar: Progress, after_each: "Callable[[SamplingRun], None]") -> None:
        """Adapt the kernel, and freeze it."""
        plan = self.plan
        while self._warm is not None and self.now.transitions < plan.warmup:
            state, info = self._execution.step(
                self._warm.kernel,
                self.now.state,
                self._rng,
                lasting=self._warm.keeps_form,
                ahead=self._warm.ahead + self._expected(plan.draws * plan.thin),
                report=bar.note,
            )
            self._make_room(_statistics(info))
            self._warm.update(info, state)
            self._move(state, self.now.stayed)
            bar.update("warm-up", _without_ends(info))
            spared = plan.warmup - self.now.transitions
            if spared and self._warm.is_over:
                bar.note(f"warm-up: settled after {self.now.transitions} of at most {plan.warmup} iterations")
                bar.expect(-spared)
                self.now = self.now._replace(transitions=plan.warmup)
            after_each(self)
        if self._warm is not None:
            kernel = self._warm.frozen()
            self.kernel, self._first, self._warm = kernel, self.now.state.position, None

    def draw(self, bar: Progress, after_each: "Callable[[SamplingRun], None]") -> None:
        """The main run."""
        plan = self.plan
        while self.now.transitions < plan.transitions:
            left = plan.transitions - self.now.transitions
            state, states, infos, n = self._execution.several(
                self.kernel, self.now.state, self._rng, left, self._expected(left), bar.note
            )
            stayed = self.now.stayed & self._keep(states.position, infos)
            self._move(state, stayed, n)
            bar.update("sampling", _without_ends(infos), n)
            after_each(self)

    def _expected(self, left: int) -> int:
        """Transitions of the main run to come: as many as were made, where it ends nobody knows when."""
        return self.now.transitions if self.plan.is_limit else left

    def _keep(self, position: Tensor, infos: Info) -> Tensor:
        """Store what is kept of transitions ``[n, chains, ...]``; whether each chain stayed, ``[chains, *batch]``."""
        done = self.now.transitions - self.plan.warmup
        kept = slice((-done - 1) % self.plan.thin, None, self.plan.thin)
        position = position[kept]
        if len(position):
            record = {**self._positions(position), **_statistics(infos)}
            for name in record:
                record[name] = record[name] if name.startswith(("inputs", "latents.")) else record[name][kept]
            at = self.count - self.first
            self._make_room({name: value[0] for name, value in record.items()}, at + len(position))
            for name, value in record.items():
                self.kept[name][:, at : at + len(position)] = value.movedim(0, 1)
        return (position == self._first).all(-1).all(0)

    def _move(self, state: State, stayed: Tensor, transitions: int = 1) -> None:
        self.now = RunState(state, self.now.transitions + transitions, stayed, self._rng.get_state())

    def resume(self, problem: Fibre | Target, draws: dict[str, Tensor], plan: RunPlan) -> None:
        """Go on where a pickle was made, with the draws made by then, each ``[chains, count, ...]``, or without any."""
        check_energies(problem, self.kernel, self.now.state)
        self.problem, self.plan, self.first = problem, plan, 0 if draws else self.count
        self._rng = torch.Generator(self.now.state.position.device)
        self._rng.set_state(self.now.random)
        self._execution.resume(problem)
        if self._warm is not None:
            self._warm.resume(problem, self._rng)
        self._make_room(self._positions(self.now.state.position))
        for name, value in draws.items():
            self._make_room({name: value[:, 0]}, value.shape[1])
            self.kept[name][:, : value.shape[1]] = value

    def take_back(self, draws: dict[str, Tensor]) -> None:
        """Hold draws again that were dropped: the first ones, each ``[chains, n, ...]``, before those in memory."""
        for name, value in draws.items():
            later = self.kept.get(name, value[:, :0])[:, : self.count - self.first]
            self.kept[name] = torch.cat([value[:, : self.first], later], 1)
        self.first = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "problem": None, "_rng": None, "kept": {}}

    def _positions(self, position: Tensor) -> dict[str, Tensor]:
        if self.plan.keep == "inputs":
            return {"inputs": position}
        return _prefix("latents.", self.problem.latents(position))

    def _make_room(self, record: dict[str, Tensor], draws: int = 0) -> None:
        """Have room for so many draws of every per-iteration value ``[chains, ...]``: at once for all that are held."""
        most = self.plan.draws
        if self.plan.block is not None:
            most = min(most, self.plan.block // max(1, sum(value.nbytes for value in record.values())) + 1)
        for name, value in record.items():
            old = self.kept.get(name)
            there = 0 if old is None else old.shape[1]
            if old is not None and there >= draws:
                continue
            self.kept[name] = value.new_empty(value.shape[0], max(most, draws), *value.shape[1:])
            if old is not None:
                self.kept[name][:, :there] = old


def run_until_stopped(
    sampling: SamplingRun, bar: Progress, after_each: Callable[[SamplingRun], None] = lambda sampling: None
) -> str | None:
    """Make the transitions that are left; what stopped them after the first draw, None if nothing did.

    Before the first draw an interrupt, or an exception of the model, passes.
    """
    try:
        sampling.advance(bar, after_each)
    except (KeyboardInterrupt, Exception) as error:
        if sampling.count == 0:
            raise
        return "interrupted" if isinstance(error, KeyboardInterrupt) else named(error)
    return None


def _foretell(problem: Any, kernel: Kernel, position: Tensor, transitions: int, seconds: float) -> None:
    """Say how long a run of so many transitions will take, by the time of an evaluation, if that is above a day."""
    # where trajectories have no length, as those of trees, the number of steps is a limit
    given = getattr(kernel, "n_steps", None) if hasattr(kernel, "trajectory_length") else None
    steps = sum(given) / 2 if isinstance(given, tuple) else given or 1
    what = f"sample: {transitions} transitions of {steps:g} steps"
    if steps * transitions * seconds > PROGRESS.long:
        # the first evaluation has preparations
        began = time.monotonic()
        kernel.init(problem, position)
        foretell(what, steps * transitions * (time.monotonic() - began))


def _jumping(kernel: Kernel, jumps: Jumps | None, undecided: bool) -> Kernel:
    """The kernel with jumps between the modes that were found, where it is to jump or was not chosen by the user."""
    if isinstance(kernel, ModeJumps) and kernel.modes is None:
        return kernel.kernel if jumps is None else kernel.replace(modes=jumps)
    several = undecided and jumps is not None and bool((jumps.counts > 1).any())
    return ModeJumps(kernel, jumps) if several else kernel


def named(error: Exception) -> str:
    """An exception of the model in a line."""
    return f"stopped by {type(error).__name__} ({cause(error)})"


def device_of(problem: Any, initial: Any = None) -> torch.device:
    """The device of a problem, or of the given starting points; the CPU if neither has one."""
    values = reference(problem)
    like = initial if values is None else values
    return like.device if isinstance(like, Tensor) else torch.device("cpu")


def _statistics(info: Info) -> dict[str, Tensor]:
    return _prefix("stats.", info.all_stats())


def _prefix(prefix: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in values.items()}


def diagnostics(news: list[Info]) -> str:
    """Means over these transitions, for the progress bar."""
    acceptance = torch.stack([i.acceptance_rate.mean() for i in news]).mean().item()
    failures = torch.stack([(i.status != 0).double().mean() for i in news]).mean().item()
    text = f"accept {acceptance:.2f}, failed {100 * failures:.1f} %"
    errors = [i.stats["constraint_error"].max() for i in news if "constraint_error" in i.stats]
    if errors:
        text += f", constraint {torch.stack(errors).max().item():.0e}"
    return text


def _without_ends(info: Info) -> Info:
    """What the bar keeps: diagnostics are small, the ends of trajectories are not."""
    return dataclasses.replace(info, tuning=None)


def as_draws(outcome: RunOutcome) -> Draws:
    """The draws of a run, finished or not."""
    return Draws(
        inputs=outcome.draws.get("inputs"),
        latents=_strip("latents.", outcome.draws) or None,
        stats=_strip("stats.", outcome.draws),
        kernel=outcome.kernel,
        seed=outcome.plan.seed,
        problem=outcome.problem,
        interrupted=outcome.made < outcome.plan.draws,
        ancestors=outcome.ancestors,
        modes=outcome.modes,
    )


def finalise(outcome: RunOutcome, stopped_by: str | None) -> Draws:
    """The draws of a run, with warnings for what stopped it and for what makes them useless."""
    plan = outcome.plan
    if stopped_by is not None:
        warn(f"{stopped_by}: {outcome.made} of {plan.draws} draws were made and are kept")
    result = as_draws(outcome)
    result.interrupted |= stopped_by is not None
    transitions = outcome.made * plan.thin
    try:
        lines = [each.line for each in verdict(result, outcome.problem, outcome.stayed, transitions, outcome.adapted)]
    except KeyboardInterrupt:
        result.interrupted, lines = True, ["interrupted after the last draw: all of them are kept"]
    except Exception as error:
        # the draws are there, whatever becomes of the look at them
        lines = [f"the draws could not be checked: {named(error)}"]
    for line in lines:
        warn(f"sample(): {line}", DiagnosisWarning)
    return result


def _strip(prefix: str, values: dict) -> dict:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
