"""Programs: functions of trees of tensors and random numbers, captured whole, and compiled to machine code."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import ModelError, cause
from .capture import Graph, bound, coarsest_type, quiet, recorded_graphs, reproducible, traced, uncollected
from .captured import CapturedTarget, agree, captured_targets
from .loops import capturing
from .pytrees import Form, flatten, tree_map, unflatten
from .randomness import Numbers, Recorded, Replayed
from .replay import records, replayed
from .simplify import lift_constants, simplified
from .xla import Machine

# Sets of random numbers at which code may differ from its graph: of as many chains, one may be accepted by the one and
# rejected by the other, within rounding.
_ATTEMPTS = 3
# Times that a graph with coarse numbers is computed again at inputs that differ by rounding: one may happen to change
# nothing.
_NEARBY = 2


class Program:
    """A function ``function(arguments, rng) -> result`` of trees, as one graph of tensor operations with fixed shapes.

    Args:
        function: without decisions by values of tensors, but for the loops of :func:`repeat`; all it draws, it draws
            by :func:`normal` and :func:`uniform`.
        arguments: examples, a tree of tensors.
        carried: how many of the last arguments are the first results, where calls follow one another.
        known: targets that are captured already.

    Raises:
        ModelError: it cannot be captured.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        arguments: Any,
        carried: int = 0,
        known: Sequence[CapturedTarget] = (),
    ):
        leaves, form = flatten(arguments)
        leaves = _plain(leaves)
        rng = torch.Generator(leaves[0].device).manual_seed(0)
        rehearsed = Recorded(rng)
        with captured_targets(known), uncollected(), reproducible():
            with torch.no_grad(), capturing("rehearsal"), recorded_graphs() as graphs:
                result, self._result = flatten(function(unflatten(leaves, form), rehearsed))
            self._numbers = Numbers.of(rehearsed.drawn)
            inputs = [*leaves, *self._numbers.joined(rehearsed.values)]
            self._module, self._constants = _traced(function, form, inputs, self._numbers, graphs)
            self._inputs, self._carried = inputs, carried

            def plain(*tensors: Tensor) -> list[Tensor]:
                rest = tensors[len(self._constants) :]
                numbers = Replayed(self._numbers.apart(rest[len(leaves) :]))
                with capturing("rehearsal"):
                    return flatten(function(unflatten(rest[: len(leaves)], form), numbers))[0]

            with torch.no_grad():
                same = agree(self._module(*self._constants, *inputs), result)
                # a GPU adds in any order: compared as code is
                if not (same or (leaves[0].is_cuda and self._agrees(self._module, plain))):
                    raise ModelError("its graph computes something else")
        self._run: Callable[..., list[Tensor]] = self._module
        self._machine: Machine | None = None

    def __call__(self, arguments: Any, rng: torch.Generator) -> Any:
        """The result for arguments of the same form and shapes as the examples."""
        return self.of_leaves(flatten(arguments)[0], rng)

    def of_leaves(self, leaves: list[Tensor], rng: torch.Generator) -> Any:
        """The result for the tensors of arguments."""
        leaves = _plain(leaves)
        if self._machine is not None:
            return unflatten([t[0] for t in self._machine(leaves, self._drawing(rng), 1)], self._result)
        with torch.no_grad():
            return unflatten(self._run(*self._constants, *leaves, *self._numbers.draw(rng)), self._result)

    def iterate(self, leaves: list[Tensor], rng: torch.Generator, n: int) -> Any:
        """The results of n calls at most, stacked: each takes its carried arguments from the one before.

        A program compiled for the last call has its results alone, as the only ones.
        """
        leaves = _plain(leaves)
        if self._machine is not None:
            return unflatten(self._machine(leaves, self._drawing(rng), min(n, self._machine.most)), self._result)
        first = len(leaves) - self._carried
        fixed, last = [*self._constants, *leaves[:first]], leaves[first:]
        results = []
        with torch.no_grad():
            for _ in range(n):
                values = self._run(*fixed, *last, *self._numbers.draw(rng))
                results.append(values)
                last = values[: self._carried]
            return unflatten([torch.stack(each) for each in zip(*results, strict=True)], self._result)

    def _drawing(self, rng: torch.Generator) -> Callable[[], list[Tensor]]:
        return lambda: self._numbers.draw(rng)

    @property
    def most(self) -> int:
        """Calls that are made at once."""
        return 1 if self._machine is None else self._machine.most

    def compile(self, most: int = 1, *, last: bool = False) -> None:
        """Generate machine code; on a GPU record the operations, unless a loop has loops within.

        Args:
            most: calls that :meth:`iterate` makes at once.
            last: whether the results of the last call suffice; all of them are carried.

        Raises:
            ModelError: the compiler fails, or an operation cannot be recorded.
        """
        example = [*self._constants, *self._inputs]
        constants, numbers = len(self._constants), len(self._numbers.kinds)
        machine: Machine | None = None
        try:
            with torch.no_grad(), uncollected(), reproducible():
                if example[0].is_cuda and records(self._module):
                    run: Callable[..., list[Tensor]] = replayed(self._module, example, constants)
                else:
                    machine = Machine(self._module, example, constants, numbers, self._carried, most, last=last)
                    run = partial(_once, machine, constants, numbers)
                same = self._agrees(run, self._module)
        except Exception as error:
            raise ModelError(f"its compiler fails ({cause(error)})") from error
        if not same:
            raise ModelError("its compiler makes code of it that computes something else")
        self._run, self._machine = run, machine

    def _agrees(self, run: Callable[..., list[Tensor]], reference: Callable[..., list[Tensor]]) -> bool:
        """Whether a function of constants and inputs computes what another does, to its coarsest numbers' rounding."""
        own, leaves = self._constants, self._inputs[: len(self._inputs) - len(self._numbers.kinds)]
        numbers, coarsest = self._inputs[len(leaves) :], coarsest_type(self._module)
        rng = torch.Generator(self._inputs[0].device).manual_seed(0)
        for _ in range(_ATTEMPTS):
            found, expected = run(*own, *leaves, *numbers), reference(*own, *leaves, *numbers)
            if agree(found, expected, coarsest):
                return True
            nearby = [self._module(*own, *_moved(leaves, coarsest, rng), *numbers) for _ in range(_NEARBY)]
            if coarsest != torch.float64 and agree(found, expected, coarsest, nearby):
                return True
            numbers = self._numbers.draw(rng)
        return False


def _moved(leaves: list[Tensor], coarsest: torch.dtype, rng: torch.Generator) -> list[Tensor]:
    """Tensors that differ by rounding."""
    eps = torch.finfo(coarsest).eps
    return [
        leaf * (1 + eps * torch.randn(leaf.shape, generator=rng, dtype=leaf.dtype, device=leaf.device))
        if leaf.is_floating_point()
        else leaf
        for leaf in leaves
    ]


class CompiledTarget(CapturedTarget):
    """A target whose energy and gradient are machine code.

    Args:
        target: of the same density; what it has captured serves here.
        x: positions ``[n, *batch, D]`` of the usual number; others are evaluated in parts of this size.

    Raises:
        ModelError: they cannot be captured or compiled.
    """

    def __init__(self, target: CapturedTarget, x: Tensor):
        super().__init__(target._target, target._longest)
        self._graphs = target._graphs
        self._n, self._rng = len(x), torch.Generator(x.device)
        graphs = super()
        self._program = Program(lambda x, rng: graphs.energy_gradient_and_extra(x), x)
        self._program.compile()

    def energy(self, x):
        return self.energy_gradient_and_extra(x)[0]

    def energy_and_extra(self, x):
        energy, _, extra = self.energy_gradient_and_extra(x)
        return energy, extra

    def energy_and_gradient(self, x):
        return self.energy_gradient_and_extra(x)[:2]

    def gradient(self, x):
        return self.energy_gradient_and_extra(x)[1]

    def energy_gradient_and_extra(self, x):
        if len(x) == self._n:
            return self._program(x, self._rng)
        filled = torch.cat([x, x[-1:].expand(-len(x) % self._n, *x.shape[1:])])
        parts = [self._program(part, self._rng) for part in filled.split(self._n)]
        return tree_map(lambda *each: torch.cat(each)[: len(x)], *parts)


def _traced(
    function: Callable[[Any, Any], Any],
    form: Form,
    inputs: list[Tensor],
    numbers: Numbers,
    graphs: list[Graph],
) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph of constants and inputs, and the constants."""
    shared, places = _distinct([tensor for graph in graphs for tensor in graph.constants])
    n_leaves = len(inputs) - len(numbers.kinds)

    def flat(*tensors: Tensor) -> list[Tensor]:
        constants, rest = tensors[: len(shared)], tensors[len(shared) :]
        with bound(graphs, [constants[k] for k in places]):
            result = function(unflatten(rest[:n_leaves], form), Replayed(numbers.apart(rest[n_leaves:])))
        return [t.clone(memory_format=torch.contiguous_format) for t in flatten(result)[0]]

    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # loops can be traced with fake tensors only
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with quiet(), torch.no_grad(), capturing("trace"):
        try:
            fake = [mode.from_tensor(t, static_shapes=True) for t in (*shared, *inputs)]
            with mode:
                module = traced(flat)(*fake)
        except Exception as error:
            raise ModelError(f"it cannot be captured as one graph ({cause(error)})") from error
    module, constants = lift_constants(module, given=shared)
    return simplified(module, constants)


def _distinct(tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The tensors without repetitions, and which of them each is; none shares memory with another."""
    distinct: list[Tensor] = []
    places = []
    for tensor in tensors:
        same = (k for k, own in enumerate(distinct) if _is_same(own, tensor))
        place = next(same, len(distinct))
        if place == len(distinct):
            storages = {own.untyped_storage().data_ptr() for own in distinct}
            distinct.append(tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor)
        places.append(place)
    return distinct, places


def _is_same(a: Tensor, b: Tensor) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device
    return alike and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def _plain(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Without derivatives, and in the one layout that code is for."""
    return [leaf.detach().contiguous() for leaf in leaves]


def _once(machine: Machine, constants: int, numbers: int, *inputs: Tensor) -> list[Tensor]:
    """Code for the inputs that its graph has."""
    last = len(inputs) - numbers
    return [t[0] for t in machine(inputs[constants:last], lambda: list(inputs[last:]), 1)]
