"""Captured programs as machine code, by XLA, the compiler of JAX: compiled once, kept on disk, and called."""

import hashlib
import os
import pickle
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..errors import ModelError
from ..files import write_file
from .xla_lowering import lowered
from .xla_operations import array_type
from .xla_packing import Packing, Results, as_array

FOLDER = "DGM_INFER_CACHE"
"""Environment variable that names the folder of compiled programs; empty for none."""

# Programs that are kept there, of half a megabyte to two each: those that were used last.
_KEPT = 200
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
        self._device = example[0].device
        place = _place(jax, self._device)
        results = _results(module)
        self._results = Results(results, self._device)
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

        with _alone(jax, place):
            rows = [(most, *t.shape[1:]) for t in self._drawn.joined([t.unsqueeze(0) for t in drawn])]
            types = [kind for kind, _ in self._drawn.groups]
            inputs = [
                jax.ShapeDtypeStruct((), "int64"),
                *(jax.ShapeDtypeStruct(tuple(t.shape), array_type(t.dtype)) for part in packed for t in part),
                *(jax.ShapeDtypeStruct(shape, array_type(kind)) for shape, kind in zip(rows, types, strict=True)),
            ]
            program = jax.jit(block, keep_unused=True).lower(*inputs)
            self._program = compiled(program, _options(jax, place.platform), place)
            self._constants = [jax.device_put(as_array(t)) for t in packed[0]]
        self._rows = list(zip(rows, self._drawn.groups, strict=True))

    def __call__(self, arguments: Sequence[Tensor], draw: Callable[[], list[Tensor]], n: int) -> list[Tensor]:
        """The results of n calls, each ``[n, ...]``, or of the last, ``[1, ...]``: numbers of their own."""
        jax = _jax()
        drawn = [draw() for _ in range(n)]
        rows = [torch.empty(shape, dtype=kind, device=self._device) for shape, (kind, _) in self._rows]
        for own, (_, (_, places)) in zip(rows, self._rows, strict=True):
            torch.cat([each[k] for each in drawn for k in places], out=own[:n].view(-1))
        with _undisturbed(jax):
            given = [as_array(t) for t in (*self._given.joined(arguments), *rows)]
            found = self._program(np.int64(n), *self._constants, *given)
            return self._results.apart(found, 1 if self._last else n)


def compiler_version() -> str:
    """That of JAX, on which the last digits of compiled programs depend; empty if it is not installed."""
    try:
        return version("jax")
    except PackageNotFoundError:
        return ""


def compiles(device: torch.device) -> bool:
    """Whether programs of a device can become machine code: of a GPU where JAX has been installed for GPUs."""
    if device.type == "cpu":
        return True
    try:
        _place(_jax(), device)
    except ModelError:
        return False
    return True


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


def _place(jax: Any, device: torch.device) -> Any:
    """JAX's device of a device of torch.

    Raises:
        ModelError: JAX has none.
    """
    if device.type == "cpu":
        return jax.local_devices(backend="cpu")[0]
    try:
        own = {each.local_hardware_id: each for each in jax.local_devices(backend="gpu")}
    except RuntimeError as error:
        raise ModelError("JAX is installed without GPUs: pip install 'jax[cuda13]'") from error
    if device.index not in own:
        raise ModelError(f"JAX has no device {device}")
    return own[device.index]


# By platform. Sums are not shared among threads or raced for, on whose order their bits would depend. A GPU gets
# loops as CUDA graphs: it decides itself whether they go on, and does not wait for the host at every turn. Less
# optimised code of a CPU takes 15 to 30 % less time to compile, and none more to run.
_KINDS = "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
_RECORDED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": _KINDS, "xla_backend_optimization_level": 1},
    "gpu": {
        "xla_gpu_exclude_nondeterministic_ops": True,
        "xla_gpu_enable_command_buffer": _RECORDED,
        "xla_gpu_graph_min_graph_size": 1,
    },
}


@cache
def _options(jax: Any, kind: str) -> dict[str, Any]:
    """For the compiler, where its version knows them."""
    options = _OPTIONS.get(kind, {})
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
def _alone(jax: Any, place: Any) -> Iterator[None]:
    """The same for what is compiled, for a device, where products have all digits of their type."""
    with (
        _undisturbed(jax),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.disable_jit(False),
        jax.default_matmul_precision("highest"),
        jax.default_device(place),
    ):
        yield


def compiled(program: Any, options: Mapping[str, Any], place: Any) -> Any:
    """The code of a lowered program for a device of JAX: from disk, if this machine has compiled it before.

    A folder that cannot be used, and a file that cannot be read, cost the time of compiling and nothing else.

    Args:
        program: what ``jax.jit(f).lower(...)`` returns.
        options: the compiler's.
    """
    from jax.experimental import serialize_executable

    folder = _folder() if place.platform == "cpu" else None
    if folder is None:
        return program.compile(compiler_options=dict(options))
    path = folder / _key(program.as_text(), options)
    # the trees of arguments are pickled with the code
    with suppress(Exception):
        content = path.read_bytes()
        code = content[32:]
        if hashlib.sha256(code).digest() == content[:32]:
            found = serialize_executable.deserialize_and_load(
                *pickle.loads(code), backend=place.client, execution_devices=[place]
            )
            os.utime(path)
            return found
    made = program.compile(compiler_options=dict(options))
    # programs of some constants cannot be written
    with suppress(Exception):
        code = pickle.dumps(serialize_executable.serialize(made))
        _write(path, hashlib.sha256(code).digest() + code)
    return made


def _folder() -> Path | None:
    """Where programs are kept: loading one runs code, so in a folder that nobody else writes to."""
    given = os.environ.get(FOLDER)
    if given == "":
        return None
    # every user has one of his own
    with suppress(OSError, RuntimeError):
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(given) if given else Path(base) / "dgm_infer" / "programs"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022):
            return folder
    return None


def _key(text: str, options: Mapping[str, Any]) -> str:
    """The name of a program's file: of all that its code depends on."""
    given = text, sorted(options.items()), os.environ.get("XLA_FLAGS", ""), torch.get_num_threads(), _processor()
    return hashlib.sha256(repr(given).encode()).hexdigest()


@cache
def _processor() -> str:
    """Compiler and processor: code of another one may hold instructions that this one has not."""
    words = [version("jax"), version("jaxlib"), platform.machine(), platform.processor(), os.environ.get("NPROC", "")]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        words += sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))})
    return "\n".join(words)


def _write(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all, and no more files than are kept."""
    write_file(path, content)
    kept = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
    for each in kept[_KEPT:]:
        each.unlink(missing_ok=True)
