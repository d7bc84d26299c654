"""How the transitions of a run are computed: by the kernel itself, or by programs that are compiled of it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..autodiff.capture import calls_and_numbers, operations
from ..autodiff.captured import CapturedTarget, evaluated_by
from ..autodiff.programs import CompiledTarget, Program
from ..autodiff.pytrees import flatten, tree_map
from ..conditioning.fibre import Fibre
from ..errors import ModelError, warn
from ..kernels import Info, Kernel
from ..kernels.kernel import Compilable, Counted, State
from ..target import Target

Report = Callable[[str], None]


def _nothing(text: str) -> None:
    pass


def _asked(kernel: Any) -> str:
    return f"{type(getattr(kernel, 'kernel', kernel)).__name__}(compile=True)"


@dataclass(frozen=True)
class CompilationSettings:
    """When transitions are compiled: if those to come take, counted in operations, as long as compiling takes.

    Measured on ``digits_vae``, ``mnist_vae`` and ``mnist_latent_flow``; results do not depend on them beyond rounding.
    """

    call: float = 1e-5
    """Seconds of an operation of a gradient that the target computes as it stands: 33 to 43 take 240 to 380 us."""
    call_projecting: float = 5e-6
    """The same of a transition that projects onto a fibre: 3.6 us on a simulator of 20 steps, 5.7 on ``digits_vae``."""
    number: float = 1e-9
    """Seconds that a number takes to make: an elementwise operation of a million takes one millisecond."""
    around: int = 150
    """Operations of a transition around its trajectory."""
    step: int = 15
    """The same of a step around its gradient."""
    gradient: int = 3
    """Energies that a gradient takes: one forwards, and two products for each backwards."""
    compiles: float = 2.0
    """Seconds that a program takes to capture and compile: 2.0 on ``digits_vae``, with the import of JAX."""
    each: float = 0.012
    """Seconds that every operation of a gradient adds: 6.6 in all for the 403 of ``mnist_latent_flow``."""
    projects: float = 6.0
    """Seconds for a transition that projects onto a fibre."""
    each_projecting: float = 0.016
    """Seconds that every operation of a linearisation adds: in all 10 for the 332 of ``digits_gan``, 16 for 1 344 of
    a generalised lambda, 72 for the 3 428 of a robot's arm."""
    projects_on_gpu: float = 1.0
    """The same on a GPU, where it takes five, and an operation 44 us, as the host waits: quantiles, on an H200."""
    records: float = 2.0
    """Seconds that a program takes to be recorded on a GPU: one or two."""
    each_recorded: float = 0.005
    """The same for every operation of a gradient."""
    longest: int = 3000
    """Most operations of an energy without loops, of which a thousand take half a minute to compile."""
    block: int = 32
    """Transitions of compiled programs between which nothing else is done, such as drawing a bar."""
    apart: float = 1.0
    """Seconds by count between which calls of other functions can be interrupted; code is faster than the count."""


_SETTINGS = CompilationSettings()


class Execution:
    """Transitions of one problem, as fast as they can be had.

    A kernel whose step can be captured is compiled if its transitions to come take as long as that takes, both counted
    in operations: what is done depends on the problem, the plan and the transitions so far alone, so that
    a run that is stopped and goes on has the same draws. One that is extended may have been compiled later than a
    longer one, or not at all: its draws are then the same up to rounding.

    Args:
        problem: what is sampled.
        warmup: transitions of the warm-up, at most.
        seconds: those after which the run ends, if any: compiling must take less than half of them.
    """

    def __init__(self, problem: Fibre | Target, warmup: int, seconds: float | None = None):
        self._problem, self._warmup = problem, warmup
        self._most = math.inf if seconds is None else seconds / 2
        self._spent, self._made = 0.0, 0
        self._each: float | None = None
        self._energy: int | None = None
        self._compiles: bool | None = None
        self._linearises: int | None = None
        self._programs: dict[Any, Program] = {}
        self._loop: CompiledTarget | None = None
        self._captured: list[CapturedTarget] = []
        self._looked = False

    @contextmanager
    def evaluating(self, kernel: Kernel, state: State, report: Report = _nothing) -> Iterator[None]:
        """Kernels called within evaluate a long simulator by machine code, before their transitions are programs."""
        target, position = self._target(state)
        if not self._looked:
            self._looked, self._loop = True, self._compiled_loop(kernel, target, position, report)
        if target is None or self._loop is None:
            yield
            return
        with evaluated_by(target, self._loop):
            yield

    def _compiled_loop(
        self, kernel: Kernel, target: Target | None, position: Tensor, report: Report
    ) -> CompiledTarget | None:
        if target is None or position.is_cuda or not (isinstance(kernel, Compilable) and kernel.compile is not False):
            return None
        if isinstance(kernel, Counted) or not kernel.is_program(self._problem):
            return None
        # at least two steps per transition
        self._energy = operations(target.energy, position)
        if _SETTINGS.call * _SETTINGS.gradient * self._energy * 2 * self._warmup < 2 * _SETTINGS.compiles:
            return None
        try:
            own = CapturedTarget(target, _SETTINGS.longest)
            if not own.is_loop(position):
                # which transitions are made of
                self._captured = [own]
                return None
            report("compiling the simulator (compile= chooses)")
            return CompiledTarget(own, position)
        except ModelError:
            return None

    def step(
        self,
        kernel: Kernel,
        state: State,
        rng: torch.Generator,
        *,
        lasting: bool,
        ahead: int = 0,
        report: Report = _nothing,
    ) -> tuple[State, Info]:
        """A transition of every chain.

        Args:
            lasting: whether the kernel will keep its form, that is everything but the values of its tensors.
            ahead: transitions that are expected to come, this one included.
            report: called with a line before a compilation.

        Raises:
            ModelError: the kernel asks to be compiled, and the model can't be.
        """
        if lasting and self._decided(kernel, state, ahead, report):
            tensors, program = self._program(kernel, state)
            return program.of_leaves(tensors, rng)
        if self._compiles is None and self._each is None and _is_counted(kernel):
            made: list[tuple[State, Info]] = []
            calls = operations(lambda: made.append(kernel.step(self._problem, state, rng)))
            state, info = made[0]
            self._each = calls / _steps(info)
        else:
            state, info = kernel.step(self._problem, state, rng)
        if self._compiles is None:
            call = _SETTINGS.call_projecting if _is_counted(kernel) else _SETTINGS.call
            self._spent, self._made = self._spent + call * self._operations(kernel, state, info), self._made + 1
        return state, info

    def several(
        self, kernel: Kernel, state: State, rng: torch.Generator, most: int, ahead: int = 0, report: Report = _nothing
    ) -> tuple[State, State, Info, int]:
        """Transitions of a kernel of the main run, as many as are best made at once.

        Args:
            most: at most.
            ahead, report: as of :meth:`step`.

        Returns:
            The last state; all of them and their diagnostics, each with a first dimension; and how many there are.

        Raises:
            ModelError: as :meth:`step`.
        """
        if not self._decided(kernel, state, ahead, report):
            state, info = self.step(kernel, state, rng, lasting=True, report=report)
            return state, *tree_map(lambda t: t.unsqueeze(0), (state, info)), 1
        tensors, program = self._program(kernel, state)
        states, infos = program.iterate(tensors, rng, min(most, _SETTINGS.block))
        n = len(flatten(states)[0][0])
        return tree_map(lambda t: t[-1], states), states, infos, n

    def resume(self, problem: Fibre | Target) -> None:
        """Go on from a pickle, which does not hold the problem."""
        self._problem = problem

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_problem": None, "_programs": {}, "_loop": None, "_looked": False, "_captured": []}

    def _decided(self, kernel: Any, state: State, ahead: int, report: Report) -> bool:
        if self._compiles is None:
            if not hasattr(kernel, "is_program") or not kernel.is_program(self._problem):
                self._compiles = False
                if getattr(kernel, "compile", None):
                    warn(f"{_asked(kernel)}: transitions of this problem are never compiled, compile=None is the same")
            elif kernel.compile is not None:
                self._compiles = kernel.compile
            elif self._worth(kernel, state, min(self._spent * ahead / max(self._made, 1), self._most)):
                self._compiles = True
            if self._compiles:
                report("compiling transitions (compile= chooses)")
                try:
                    self._program(kernel, state)
                except ModelError as error:
                    if kernel.compile:
                        raise ModelError(f"{_asked(kernel)}: {error}: compile=None does without") from error
                    self._compiles = False
        return bool(self._compiles)

    def _operations(self, kernel: Kernel, state: State, info: Info) -> float:
        """Operations of a transition that was made."""
        if self._each is not None:
            # the first ones of a warm-up are short
            return self._each * _steps(info)
        if self._energy is None:
            target, position = self._target(state)
            self._energy = 0 if target is None else operations(target.energy, position)
        # a loop is code already
        each = _SETTINGS.step if self._loop is not None else _SETTINGS.gradient * self._energy
        return each * float(info.stats.get("n_steps", torch.zeros(1)).max()) + _SETTINGS.around

    def _worth(self, kernel: Any, state: State, spent: float) -> bool:
        """Whether so many seconds are as many as compiling takes."""
        if _is_counted(kernel):
            if not kernel.saves_calls(self._problem):
                self._compiles = False
                return False
            if state.position.is_cuda:
                return spent > _SETTINGS.projects_on_gpu
            if spent > _SETTINGS.projects and self._linearises is None:
                self._linearises = operations(lambda: kernel.init(self._problem, state.position))
            return spent > _SETTINGS.projects + _SETTINGS.each_projecting * (self._linearises or 0)
        once, each = (
            (_SETTINGS.records, _SETTINGS.each_recorded)
            if state.position.is_cuda
            else (_SETTINGS.compiles, _SETTINGS.each)
        )
        # before anything is captured
        if spent <= once:
            return False
        target, position = self._target(state)
        if target is None:
            self._compiles = False
            return False
        try:
            if self._loop is None and not self._captured:
                self._captured = [CapturedTarget(target, _SETTINGS.longest)]
            own = self._loop or self._captured[0]
            return spent > once + each * own.operations(position)[1]
        except ModelError:
            self._compiles = False
            return False

    def _target(self, state: State) -> tuple[Target | None, Tensor]:
        """Whose gradients transitions are made of, and where; None on a fibre without additive noise."""
        target, position = self._problem, state.position
        if isinstance(target, Fibre):
            target = target.marginal
            return target, position if target is None else position[..., : target.dim]
        return target, position

    def _program(self, kernel: Any, state: State) -> tuple[list[Tensor], Program]:
        """The tensors of a kernel and a state, and the program of such."""
        tensors, form = flatten((kernel, state))
        key = form, tuple((t.shape, t.dtype, t.device) for t in tensors)
        if key not in self._programs:
            problem = self._problem
            carried = len(flatten(state)[0])
            program = Program(
                lambda given, rng: given[0].step(problem, given[1], rng), (kernel, state), carried, self._captured
            )
            program.compile(_SETTINGS.block)
            self._programs[key] = program
        return tensors, self._programs[key]


def _is_counted(kernel: Any) -> bool:
    """``isinstance(kernel, Counted)`` in a hundredth of its time, which is a tenth of that of a short transition."""
    return hasattr(kernel, "saves_calls")


def _steps(info: Info) -> float:
    """Steps of the longest trajectory of a transition."""
    return max(1.0, float(info.stats.get("n_steps", torch.ones(1)).max()))


def evaluation(target: Target, x: Tensor, times: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The energy and gradient of a target at positions ``[n, *batch, D]``, of any number n.

    Args:
        x: positions of the usual number, a program for which is compiled where ``times`` of it pay.
    """
    # before anything is captured
    spared = _SETTINGS.gradient * _SETTINGS.call * operations(target.energy, x) * times
    if spared < 2 * _SETTINGS.compiles:
        return target.energy_and_gradient
    try:
        own = CapturedTarget(target, _SETTINGS.longest)
        if spared < 2 * (_SETTINGS.compiles + _SETTINGS.each * own.operations(x)[1]):
            return target.energy_and_gradient
        return CompiledTarget(own, x).energy_and_gradient
    except ModelError:
        return target.energy_and_gradient


class RepeatedCall:
    """A function ``function(arguments, rng) -> result`` of trees that is called many times, with the same shapes.

    It is compiled at once where the calls to come take twice as long, by count, as compiling does, and otherwise when
    those that were made have taken as long.

    Args:
        function: as of :class:`Program`.
        target: what its calls evaluate.
        gradients: of the target at its positions, which a call takes.
        carries: whether ``arguments`` are ``(fixed, state)``, and the result is the next state.
    """

    def __init__(self, function: Callable[[Any, Any], Any], target: Target, gradients: int, *, carries: bool = False):
        self._function, self._target, self._gradients, self._carries = function, target, gradients, carries
        self._programs: dict[str, Program | None] = {}
        self._costs: dict[str, tuple[float, float]] = {}

    def __call__(
        self, arguments: Any, rng: torch.Generator, key: str, at: Tensor, spent: dict[str, float], times: int
    ) -> Any:
        """The result.

        Args:
            key: of the function and of the shapes of its arguments.
            at: positions of the target.
            spent: seconds by count, by key; kept by the caller, so that what goes on after a stop does the same.
            times: calls that are known to come, this one included.
        """
        program = self._program(arguments, key, at, spent, times)
        return self._function(arguments, rng) if program is None else program(arguments, rng)

    def several(
        self, arguments: Any, rng: torch.Generator, key: str, at: Tensor, spent: dict[str, float], most: int
    ) -> tuple[Any, int]:
        """The state after as many calls as are best made at once, and how many these are; arguments as of a call.

        Args:
            most: at most, that are known to come.
        """
        program = self._program(arguments, key, at, spent, most)
        if program is None:
            return self._function(arguments, rng), 1
        n = min(most, program.most)
        return tree_map(lambda t: t[-1], program.iterate(flatten(arguments)[0], rng, n)), n

    def _program(self, arguments: Any, key: str, at: Tensor, spent: dict[str, float], times: int) -> Program | None:
        """The program, once it is worth its compilation."""
        if key not in self._costs:
            self._costs[key] = self._cost(at)
        each, compiling = self._costs[key]
        before = spent.get(key, 0.0)
        # a call that never ends is never compiled: it says itself how long it takes
        if before > compiling or times * each > 2 * compiling > 2 * each:
            # for good: what goes on after a stop has fewer calls to come
            spent[key] = math.inf
            if key not in self._programs:
                self._programs[key] = self._compiled(arguments, each)
        else:
            spent[key] = before + each
        return self._programs.get(key)

    def _cost(self, at: Tensor) -> tuple[float, float]:
        """Seconds of a call, and of compiling it."""
        calls, numbers = calls_and_numbers(self._target.energy, at)
        size = _SETTINGS.gradient * calls
        if at.is_cuda or calls > _SETTINGS.longest:
            return 0.0, 1.0
        each = size * _SETTINGS.call + _SETTINGS.gradient * numbers * _SETTINGS.number
        return self._gradients * each, _SETTINGS.compiles + _SETTINGS.each * size

    def _compiled(self, arguments: Any, each: float) -> Program | None:
        carried = len(flatten(arguments[1])[0]) if self._carries else 0
        try:
            program = Program(self._function, arguments, carried)
            most = min(_SETTINGS.block, int(_SETTINGS.apart / each)) if self._carries else 1
            program.compile(max(1, most), last=self._carries)
        except ModelError:
            return None
        return program
