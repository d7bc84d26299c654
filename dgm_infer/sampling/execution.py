"""How the transitions of a run are computed: by the kernel itself, or by programs that are compiled of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..autodiff.capture import operations
from ..autodiff.captured import CapturedTarget, captured
from ..autodiff.programs import Program
from ..autodiff.pytrees import flatten, tree_map
from ..autodiff.rolled import rolled
from ..conditioning.fibre import Fibre
from ..errors import ModelError
from ..kernels import Info, Kernel
from ..kernels.kernel import Compilable, State
from ..target import Target

__all__ = ["Execution", "evaluation"]

Report = Callable[[str], None]


def _nothing(text: str) -> None:
    pass


# Seconds that an operation of a captured gradient takes when the target computes it as it stands (33 to 43 operations
# take 240 to 380 us on digits_vae and mnist_vae; the decision was judged on no others), and operations around a
# trajectory.
_CALL, _AROUND = 1e-5, 150
# Seconds that a program takes to compile (10 to 25 on these), and those that every operation of a gradient adds: half a
# minute to a minute and a half for 1 600. On a GPU it is captured and recorded, which takes one or two.
_COMPILES, _EACH = 12.0, 0.1
_RECORDS, _EACH_RECORDED = 2.0, 0.005
# Operations of an energy that are captured unasked, at most, unless they are a loop: a thousand take a minute and a
# half to compile.
_LONGEST = 3000
# Transitions of compiled programs between which nothing else is done.
_BLOCK = 32
# Transitions after which the length of trajectories is known well enough.
_FIRST = 10


class Execution:
    """Transitions of one problem, as fast as they can be had.

    A kernel whose step can be captured is compiled where the time that this saves in the transitions left is longer
    than the time that it takes, both counted in operations, so that what is done depends on the problem and the numbers
    of the run alone.

    Args:
        problem: what is sampled.
        transitions: those of the run.
    """

    def __init__(self, problem: Fibre | Target, transitions: int):
        self._problem, self._left = problem, transitions
        self._steps: list[float] = []
        self._energy: int | None = None
        self._compiles: bool | None = None
        self._programs: dict[Any, Program] = {}

    def step(
        self, kernel: Kernel, state: State, rng: torch.Generator, *, lasting: bool, report: Report = _nothing
    ) -> tuple[State, Info]:
        """A transition of every chain.

        Args:
            lasting: whether the kernel will keep its form, that is everything but the values of its tensors.
            report: called with a line before a compilation.

        Raises:
            ModelError: the kernel asks to be compiled, and the model can't be.
        """
        self._left -= 1
        if lasting and self._decided(kernel, state, report):
            tensors, program = self._program(kernel, state)
            return program.of_leaves(tensors, rng)
        state, info = kernel.step(self._problem, state, rng)
        if lasting and "n_steps" in info.stats and self._compiles is None:
            self._steps.append(float(info.stats["n_steps"].max()))
        return state, info

    def several(
        self, kernel: Kernel, state: State, rng: torch.Generator, most: int, report: Report = _nothing
    ) -> tuple[State, State, Info, int]:
        """Transitions of a kernel of the main run, as many as are best made at once.

        Args:
            most: at most.
            report: as of :meth:`step`.

        Returns:
            The last state; all of them and their diagnostics, each with a first dimension; and how many there are.

        Raises:
            ModelError: as :meth:`step`.
        """
        if not self._decided(kernel, state, report):
            state, info = self.step(kernel, state, rng, lasting=True, report=report)
            return state, *tree_map(lambda t: t.unsqueeze(0), (state, info)), 1
        n = min(most, _BLOCK)
        self._left -= n
        tensors, program = self._program(kernel, state)
        states, infos = program.iterate(tensors, rng, n, carried=len(flatten(state)[0]))
        return tree_map(lambda t: t[-1], states), states, infos, n

    def resume(self, problem: Fibre | Target) -> None:
        """Go on from a pickle, which does not hold the problem."""
        self._problem = problem

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_problem": None, "_programs": {}}

    def _decided(self, kernel: Any, state: State, report: Report) -> bool:
        if self._compiles is None:
            if not isinstance(kernel, Compilable) or not kernel.is_program(self._problem):
                self._compiles = False
            elif kernel.compile is not None:
                self._compiles = kernel.compile
            elif len(self._steps) >= _FIRST or self._spent(state) > _COMPILES:
                self._compiles = self._pays(state)
            if self._compiles:
                report("compiling transitions, once per machine and problem (compile= chooses)")
                try:
                    self._program(kernel, state)
                except ModelError:
                    if kernel.compile:
                        raise
                    self._compiles = False
        return bool(self._compiles)

    def _spent(self, state: State) -> float:
        """Seconds that the steps so far took, by count: a gradient is three energies."""
        if not self._steps:
            return 0.0
        if self._energy is None:
            target, position = self._target(state)
            self._energy = 0 if target is None else operations(target.energy, position)
        return 3 * _CALL * self._energy * sum(self._steps)

    def _target(self, state: State) -> tuple[Target | None, Tensor]:
        """Whose gradients transitions are made of, and where; None on a fibre without additive noise."""
        target, position = self._problem, state.position
        if isinstance(target, Fibre):
            target = target.marginal
            return target, position if target is None else position[..., : target.dim]
        return target, position

    def _pays(self, state: State) -> bool:
        steps = self._left * sum(self._steps) / len(self._steps)
        once, each = (_RECORDS, _EACH_RECORDED) if state.position.is_cuda else (_COMPILES, _EACH)
        # before anything is counted: of gradients of a hundred operations
        if 100 * _CALL * steps + _AROUND * _CALL * self._left < once:
            return False
        operations = self._operations(state)
        if operations is None:
            return False
        calls, size = operations
        return _CALL * (calls * steps + _AROUND * self._left) > once + each * size

    def _operations(self, state: State) -> tuple[int, int] | None:
        """Operations of a gradient, those made and those compiled; None if it is not to be captured."""
        target, position = self._target(state)
        if target is None:
            return None
        return _counted(target, position)

    def _program(self, kernel: Any, state: State) -> tuple[list[Tensor], Program]:
        """The tensors of a kernel and a state, and the program of such."""
        tensors, form = flatten((kernel, state))
        key = form, tuple((t.shape, t.dtype, t.device) for t in tensors)
        if key not in self._programs:
            problem = self._problem
            program = Program(lambda given, rng: given[0].step(problem, given[1], rng), (kernel, state))
            program.compile()
            self._programs[key] = program
        return tensors, self._programs[key]


def evaluation(target: Target, x: Tensor, times: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The energy and gradient of a target at positions of the shape of ``x``, compiled where ``times`` of it pay."""
    # before anything is captured: a gradient takes about three energies
    if 3 * _CALL * operations(target.energy, x) * times < 2 * _COMPILES or _counted(target, x) is None:
        return target.energy_and_gradient
    try:
        program = Program(lambda x, rng: captured(target).energy_and_gradient(x), x)
        program.compile()
    except ModelError:
        return target.energy_and_gradient
    return lambda x: program(x, torch.Generator(x.device))


def _counted(target: Target, x: Tensor) -> tuple[int, int] | None:
    """Operations of a gradient, those made and those compiled; None if it is not to be captured."""
    try:
        if operations(target.energy, x) > _LONGEST and rolled(target.energy_and_extra, x) is None:
            return None
        return CapturedTarget(target).operations(x)
    except ModelError:
        return None
