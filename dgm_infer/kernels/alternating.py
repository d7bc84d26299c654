"""Two kernels in turn, each on a block of the coordinates given the others (math 8.12)."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..arguments.values import is_sequence, shown
from ..errors import ArgumentError, Status
from ..settings import Settings
from ..target import Block, Target
from .hmc import check_target
from .kernel import Info, Kernel, Trial, Tunable, Tuning
from .metropolis import Point, RandomWalk, point_at
from .slice import EllipticalSlice


class Conditional(Target):
    """The density of one block of a target's coordinates given the others, which keep their values.

    Args:
        problem: the target of all coordinates.
        block: those that vary.
        at: present points; None for a target that is only checked, not evaluated.
    """

    def __init__(self, problem: Target, block: Block, at: Point | None = None):
        super().__init__(None, block.stop - block.start, problem.batch_shape)
        self.prior = block.prior
        self._problem, self._block, self._at = problem, block, at
        if at is not None:
            self.position = at.position[..., block.start : block.stop]
            """The block of the present points, whose energy is known."""

    def join(self, x: Tensor) -> Tensor:
        """All coordinates, with x in place of the block: ``[..., block] -> [..., D]``."""
        assert self._at is not None
        others = self._at.position.expand(*x.shape[:-1], -1)
        return torch.cat([others[..., : self._block.start], x, others[..., self._block.stop :]], -1)

    def energy(self, x):
        if self._at is not None and x is self.position:
            return self._at.energy
        return self._problem.energy(self.join(x))


@dataclass(frozen=True, eq=False)
class Alternating(Settings):
    """One transition of ``first``, then one of ``second``, each on its block given the rest (math 8.12).

    With a block of an estimator's noise and one of its variables it is auxiliary pseudo-marginal sampling. Statistics
    of each transition are kept under the name of its block, as ``noise_acceptance_rate``.

    Args:
        first: kernel of the first block; None for ``RandomWalk()``.
        second: kernel of the second one; None for ``EllipticalSlice()``. Warm-up can adapt one step size: that of the
            other is a number.
        blocks: for each kernel the name of a block of the target, or a range (start, stop) of coordinates; None for
            the target's own two blocks, in their order, or all coordinates for both if it has none.
    """

    # not Kernel: configurations name kernels by class path, which a protocol with types does not take
    first: Any = None
    second: Any = None
    blocks: tuple[str | tuple[int, int], str | tuple[int, int]] | None = None

    def __post_init__(self):
        # the class is frozen
        for name, default in (("first", RandomWalk), ("second", EllipticalSlice)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default())
        for name, kernel in (("first", self.first), ("second", self.second)):
            if isinstance(kernel, type) or not isinstance(kernel, Kernel):
                raise ArgumentError(f"Alternating({name}={shown(kernel)}): must be a kernel, such as RandomWalk()")
        if self.blocks is not None and (not is_sequence(self.blocks) or len(self.blocks) != 2):
            raise ArgumentError(f"Alternating(blocks={shown(self.blocks)}): must be two names or (start, stop) ranges")

    def check(self, problem) -> None:
        check_target("Alternating", problem)
        for kernel, block in zip((self.first, self.second), self._blocks(problem).values(), strict=True):
            kernel.check(Conditional(problem, block))
        other = "first" if self._tuned == "second" else "second"
        if _open(getattr(self, other), problem).step_size:
            raise ArgumentError(
                f"Alternating({other}={type(getattr(self, other)).__name__}(step_size=None)): warm-up adapts one step "
                "size: give that of the other kernel as a number"
            )

    def tuning(self, problem: Target) -> Tuning:
        return _open(getattr(self, self._tuned), problem)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, of its own or of the kernel that warm-up tunes."""
        own = {f.name for f in dataclasses.fields(self)}
        inner = {name: changes.pop(name) for name in list(changes) if name not in own}
        other = super().replace(**changes)
        if inner:
            name = other._tuned
            other = dataclasses.replace(other, **{name: getattr(other, name).replace(**inner)})
        return other

    def probe(self, step_size: Tensor, n_steps: int) -> Self:
        name = self._tuned
        return dataclasses.replace(self, **{name: getattr(self, name).probe(step_size, n_steps)})

    def init(self, problem: Target, position: Tensor) -> Point:
        # a kernel may move a position to where the target is defined
        for kernel, block in zip((self.first, self.second), self._blocks(problem).values(), strict=True):
            whole = Conditional(problem, block, Point(position, position[..., 0]))
            position = whole.join(kernel.init(whole, position[..., block.start : block.stop].clone()).position)
        return point_at(problem, position)

    def step(self, problem: Target, state: Point, rng: torch.Generator) -> tuple[Point, Info]:
        infos: dict[str, Info] = {}
        for kernel, (name, block) in zip((self.first, self.second), self._blocks(problem).items(), strict=True):
            conditional = Conditional(problem, block, state)
            after, infos[name] = kernel.step(conditional, kernel.init(conditional, conditional.position), rng)
            state = Point(conditional.join(after.position), after.energy)
        both = list(infos.values())
        tuned = both[self._tuned == "second"]
        tuning = (tuned.tuning or Trial())._replace(acceptance=tuned.tuned_acceptance)
        own = {name: {"acceptance_rate": info.acceptance_rate, **info.stats} for name, info in infos.items()}
        stats = {f"{name}_{key}": value for name, values in own.items() for key, value in values.items()}
        if "step_size" in tuned.stats:
            stats["step_size"] = tuned.stats["step_size"]
        status = torch.where(both[0].status == Status.OK, both[1].status, both[0].status)
        acceptance = torch.stack([info.acceptance_rate for info in both]).mean(0)
        return state, Info(acceptance, status, state.energy, stats=stats, tuning=tuning)

    def _blocks(self, problem: Target) -> dict[str, Block]:
        """The two blocks by name."""
        named = problem.blocks
        if self.blocks is None:
            if len(named) == 2:
                return dict(named)
            return {"first": Block(0, problem.dim, problem.prior), "second": Block(0, problem.dim, problem.prior)}
        found: dict[str, Block] = {}
        for default, block in zip(("first", "second"), self.blocks, strict=True):
            if isinstance(block, str):
                if block not in named:
                    known = ", ".join(map(repr, named)) or "none"
                    raise ArgumentError(f"Alternating(blocks={block!r}): the target's blocks are {known}")
                found[block if block not in found else default] = named[block]
                continue
            start, stop = block
            if not 0 <= start < stop <= problem.dim:
                raise ArgumentError(
                    f"Alternating(blocks=({start}, {stop})): must be a range (start, stop) within 0 and {problem.dim}"
                )
            found[default] = Block(start, stop)
        return found

    @property
    def _tuned(self) -> str:
        """The field of the kernel that warm-up tunes; adapted step sizes are tensors, and given ones numbers."""
        step_size = getattr(self.first, "step_size", 0.0)
        other = hasattr(self.second, "step_size") or not isinstance(self.first, Tunable)
        return "second" if isinstance(step_size, int | float) and other else "first"


def _open(kernel: Kernel, problem: Target) -> Tuning:
    return kernel.tuning(problem) if isinstance(kernel, Tunable) else Tuning()
