"""A captured program on a GPU: its operations are recorded once as CUDA graphs, and replayed.

A small network's operations take a GPU a few microseconds each, and the host five to ten to launch one: a program of
hundreds is bound by its launches, not by its arithmetic. A recorded graph is launched as a whole. A loop is a graph of
its body, replayed as often as its counter says, for which the host waits once per loop.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function of fixed memory, and returns what repeats it."""


class RecordedProgram:
    """A graph of tensor operations in memory of its own: called with new inputs, it returns new outputs.

    Args:
        module: a graph with inputs and outputs of fixed shapes, whose loops are those of
            :func:`~dgm_infer.autodiff.loops.repeat`.
        example: inputs; those that never change are ``fixed`` first ones, which are used where they are.
        fixed: how many.
        record: how a stretch of operations is repeated; None for CUDA graphs.

    Raises:
        RuntimeError: an operation cannot be recorded, as one whose result's shape depends on values.
    """

    def __init__(self, module: fx.GraphModule, example: Sequence[Tensor], fixed: int, record: Recorder | None = None):
        self._inputs = [t if i < fixed else t.clone() for i, t in enumerate(example)]
        self._fixed = fixed
        self._record = _cuda_recorder(example[0].device) if record is None else record
        self._stages: list[Callable[[], None]] = []
        self._values: dict[fx.Node, Any] = {}
        with torch.no_grad():
            self._outputs = self._recorded(module, self._inputs)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        new = list(inputs[self._fixed :])
        if new:
            _copy(self._inputs[self._fixed :], new)
        for stage in self._stages:
            stage()
        results = [torch.empty_like(t) for t in self._outputs]
        _copy(results, self._outputs)
        return results

    def _recorded(self, module: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
        """Record the stretches between loops, and the loops; returns where the results will be."""
        values = self._values
        nodes = list(module.graph.nodes)
        holders = (node for node in nodes if node.op == "placeholder")
        values.update(zip(holders, inputs, strict=True))
        stretch: list[fx.Node] = []
        outputs: list[Tensor] = []
        for node in nodes:
            if node.op == "output":
                self._stages += self._stretch(module, stretch)
                outputs = self._tensors(node.args[0])
            elif _is_loop(node):
                self._stages += [*self._stretch(module, stretch), self._loop(module, node)]
                stretch = []
            elif node.op != "placeholder":
                stretch.append(node)
        return outputs

    def _tensors(self, argument: Any) -> list[Tensor]:
        """The tensors that a node has as an argument."""
        return list(map_arg(argument, lambda n: self._values[n]))

    def _stretch(self, module: fx.GraphModule, nodes: list[fx.Node]) -> list[Callable[[], None]]:
        return [self._record(lambda: _evaluate(module, nodes, self._values))] if nodes else []

    def _loop(self, module: fx.GraphModule, node: fx.Node) -> Callable[[], None]:
        """A loop: the carried tensors have memory of their own, which every round overwrites."""
        body = getattr(module, str(node.args[1].target))  # type: ignore[union-attr]
        assert isinstance(body, fx.GraphModule)
        given, others = (self._tensors(arg) for arg in node.args[2:4])
        carried = [torch.empty_like(t) for t in given]
        # the counter is carried first; how far it goes is the first of the others
        length = others[0]
        inner = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), (*carried, *others), strict=True))
        own = [n for n in body.graph.nodes if n.op not in ("placeholder", "output")]
        (result,) = (n for n in body.graph.nodes if n.op == "output")
        if any(map(_is_loop, own)):
            raise RuntimeError("a loop within a loop is not recorded")

        def enter() -> None:
            _copy(carried, given)

        def once() -> None:
            values = dict(inner)
            _evaluate(body, own, values)
            after: Any = map_arg(result.args[0], lambda n: values[n])
            _copy(carried, list(after))

        entered, turned = self._record(enter), self._record(once)
        self._values[node] = carried

        def run() -> None:
            entered()
            for _ in range(int(length)):
                turned()

        run()
        return run


def _evaluate(module: fx.GraphModule, nodes: list[fx.Node], values: dict[fx.Node, Any]) -> None:
    """Values of nodes, in order, added to those of what they read."""
    for node in nodes:
        if node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(module)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    """All at once, in one launch."""
    torch._foreach_copy_(into, values)  # type: ignore[reportPrivateImportUsage]


def _is_loop(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "while_loop"


def _cuda_recorder(device: torch.device) -> Recorder:
    """Records CUDA graphs, which share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                work()
            # recording computes nothing
            graph.replay()
        return graph.replay

    return record


def records(module: fx.GraphModule) -> bool:
    """Whether a graph can be recorded: one whose loops have none within."""
    bodies = [part for name, part in module.named_modules() if name and isinstance(part, fx.GraphModule)]
    return not any(_is_loop(node) for body in bodies for node in body.graph.nodes)


def replayed(module: fx.GraphModule, example: Sequence[Tensor], fixed: int) -> RecordedProgram:
    """The graph on the device of its inputs, after a rehearsal that loads what its operations need."""
    with torch.no_grad():
        module(*example)
    return RecordedProgram(module, example, fixed)
