"""Captured programs as machine code, by XLA, the compiler of JAX."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..errors import ModelError
from .xla_lowering import lowered
from .xla_operations import array_type
from .xla_packing import Packing, Results, as_numpy

# Bytes of the results of calls within one, and of their random numbers: what is not called is made nevertheless.
_LARGEST = 2**22


class Machine:
    """A graph as machine code, which is called again and again with its own results within one call.

    Args:
        module: a graph of constants, arguments and random numbers, whose loops are those of
            :func:`~dgm_infer.autodiff.loops.repeat`.
        example: its inputs.
        constants, numbers: how many first inputs are constants, and how many last ones random numbers, all vectors.
        carried: how many of the last arguments are the first results of the call before.
        most: calls at most within one; fewer where their results or random numbers are large.
        last: whether the results of the last call suffice; all of them are carried.

    Raises:
        ModelError: an operation is not known, or JAX is not installed.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        example: Sequence[Tensor],
        constants: int,
        numbers: int,
        carried: int,
        most: int,
        *,
        last: bool = False,
    ):
        jax = _jax()
        results = _results(module)
        self._results = Results(results)
        first = len(example) - numbers
        drawn = example[first:]
        size = max(0 if last else self._results.size, sum(t.numel() * t.element_size() for t in drawn), 1)
        self.most = most = max(1, min(most, _LARGEST // size))
        self._last = last
        self._given = Packing(example[constants:first])
        fixed, self._drawn = Packing(example[:constants]), Packing([t.unsqueeze(0) for t in drawn], whole=True)
        graph = lowered(module)
        packed = [fixed.joined(example[:constants]), self._given.joined(example[constants:first])]
        counts = [len(each) for each in packed]

        def block(n: Any, *inputs: Any) -> Any:
            own = fixed.apart(inputs[: counts[0]])
            given = self._given.apart(inputs[counts[0] : sum(counts)])
            rows = inputs[sum(counts) :]
            plain, carry = given[: len(given) - carried], given[len(given) - carried :]

            def turn(state: Any) -> Any:
                k, carry, kept = state
                drawn = [jax.lax.dynamic_slice_in_dim(each, k, 1) for each in rows]
                found = graph(*own, *plain, *carry, *(each[0] for each in self._drawn.apart(drawn)))
                if not last:
                    kept = [
                        jax.lax.dynamic_update_slice_in_dim(all_, row[None], k, 0)
                        for all_, row in zip(kept, self._results.joined(found), strict=True)
                    ]
                return k + 1, list(found[:carried]), kept

            kept = [] if last else self._results.empty(most)
            _, carry, kept = jax.lax.while_loop(lambda state: state[0] < n, turn, (0, carry, kept))
            return [each[None] for each in self._results.joined(carry)] if last else kept

        with _alone(jax):
            rows = [(most, *t.shape[1:]) for t in self._drawn.joined([t.unsqueeze(0) for t in drawn])]
            types = [kind for kind, _ in self._drawn.groups]
            inputs = [
                jax.ShapeDtypeStruct((), "int64"),
                *(jax.ShapeDtypeStruct(tuple(t.shape), array_type(t.dtype)) for part in packed for t in part),
                *(jax.ShapeDtypeStruct(shape, array_type(kind)) for shape, kind in zip(rows, types, strict=True)),
            ]
            program = jax.jit(block, keep_unused=True).lower(*inputs)
            self._program = program.compile(compiler_options=_options(jax))
            self._constants = [jax.device_put(as_numpy(t)) for t in packed[0]]
        self._rows = list(zip(rows, self._drawn.groups, strict=True))

    def __call__(self, arguments: Sequence[Tensor], draw: Callable[[], list[Tensor]], n: int) -> list[Tensor]:
        """The results of n calls, each ``[n, ...]``, or of the last, ``[1, ...]``: numbers of their own."""
        jax = _jax()
        drawn = [draw() for _ in range(n)]
        numbers = []
        for shape, (kind, places) in self._rows:
            rows = torch.empty(shape, dtype=kind)
            torch.cat([each[k] for each in drawn for k in places], out=rows[:n].view(-1))
            numbers.append(as_numpy(rows))
        given = [as_numpy(t) for t in self._given.joined(arguments)]
        with _undisturbed(jax):
            found = self._program(np.int64(n), *self._constants, *given, *numbers)
            return self._results.apart([np.asarray(each)[: 1 if self._last else n].copy() for each in found])


def compiler_version() -> str:
    """That of JAX, on which the last digits of compiled programs depend; empty if it is not installed."""
    try:
        return version("jax")
    except PackageNotFoundError:
        return ""


def _results(module: fx.GraphModule) -> list[Tensor]:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return [node.meta["val"] for node in output.args[0]]


class _Process:
    """Whether this one is a fork of one with JAX, whose threads it has not: who waits for them waits for ever."""

    forked = False

    @classmethod
    def begin(cls) -> None:
        cls.forked = "jax" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Process.begin)


def _jax() -> Any:
    if _Process.forked:
        raise ModelError("this process is a fork of one that used JAX: start it by spawn, or set compile=False")
    try:
        if "jax" not in sys.modules:
            # where JAX has a GPU, it would take most of its memory for itself
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            # of what is forked from here, nothing waits for JAX's threads: programs are refused there
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            import jax

            with _threads(torch.get_num_threads()):
                jax.local_devices(backend="cpu")
        import jax
    except ImportError as error:
        raise ModelError("code is generated by XLA, which is not installed: pip install jax") from error
    return jax


@cache
def _options(jax: Any) -> dict[str, str]:
    """Sums are not shared among threads, on whose number their bits would depend, where XLA knows how to say so."""
    kinds = "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
    options = {"xla_cpu_experimental_ynn_fusion_type": kinds}
    try:
        jax.jit(abs).lower(1.0).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError:  # a version that has it not: bits may then depend on the number of threads
        return {}
    return options


@contextmanager
def _threads(n: int) -> Iterator[None]:
    """XLA, which reads it once from its environment, begins with n threads, unless the environment says how many."""
    if "NPROC" in os.environ:
        yield
        return
    os.environ["NPROC"] = str(n)
    try:
        yield
    finally:
        del os.environ["NPROC"]


@contextmanager
def _undisturbed(jax: Any) -> Iterator[None]:
    """With 64 bits, whatever JAX is set to elsewhere in the process, as calls are."""
    with jax.enable_x64(True), jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard_host_to_device("allow"):
        yield


@contextmanager
def _alone(jax: Any) -> Iterator[None]:
    """The same for what is compiled, and on the CPU."""
    with (
        _undisturbed(jax),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.disable_jit(False),
        jax.default_device(jax.local_devices(backend="cpu")[0]),
    ):
        yield
