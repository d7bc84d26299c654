"""Machine code by XLA: whole graphs, calls, processes, threads and the settings of JAX."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import dgm_infer as dgm
from dgm_infer.autodiff import xla
from dgm_infer.autodiff.loops import repeat
from dgm_infer.autodiff.programs import Program
from dgm_infer.autodiff.pytrees import flatten
from dgm_infer.autodiff.randomness import normal, uniform
from dgm_infer.autodiff.xla import Machine
from dgm_infer.errors import ModelError

FLOAT = torch.float64


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=rng(seed), dtype=FLOAT)


def program_of(function, *examples: Tensor) -> Program:
    program = Program(lambda given, source: function(*given), examples)
    program.compile()
    return program


def hmc(target=None, chains=4) -> tuple[Program, list[Tensor]]:
    """A program of transitions, and what it begins with."""
    target = target or dgm.Target(lambda x: (x.square() + 0.1 * x**4).sum(-1), 3)
    kernel = dgm.HMC(step_size=torch.tensor(0.3, dtype=FLOAT), n_steps=(2, 6))
    state = kernel.init(target, randn(chains, target.dim))
    carried = len(flatten(state)[0])
    program = Program(lambda given, source: given[0].step(target, given[1], source), (kernel, state), carried)
    return program, flatten((kernel, state))[0]


def in_place(x: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[..., 1:] = x[..., :-1]
    z[0].add_(y)
    z.view(-1)[::2].mul_(2)
    w = z.clone()
    w[w > 1] = 0.5
    w.clamp_(min=-1).t_()
    return w.t() + z.sum()


def test_operations_in_place_are_carried_out_on_views_too():
    inputs = randn(3, 4), randn(4, seed=1)
    module = make_fx(lambda *x: [in_place(*x)], tracing_mode="fake")(*inputs)
    found = Machine(module, inputs, 0, 0, 0, 1)(inputs, lambda: [], 1)[0][0]
    torch.testing.assert_close(found, in_place(*inputs))


def test_operations_in_place_within_loops():
    def function(x: Tensor, n: Tensor) -> Tensor:
        def body(k, carried, const):
            z = carried[0].clone()
            z[..., 0] += 1
            z[1:].mul_(0.5)
            return (z,)

        before = x.clone()
        before[0] = 3.0
        return repeat(n, body, (before,))[0].mul_(2)

    x = randn(3, 2)
    program = program_of(function, x, torch.tensor(2))
    for n in (0, 1, 5):
        expected = x.clone()
        expected[0] = 3.0
        for _ in range(n):
            expected[..., 0] += 1
            expected[1:].mul_(0.5)
        torch.testing.assert_close(program((x, torch.tensor(n)), rng()), expected * 2)


def test_loops_within_loops():
    def function(x: Tensor, n: Tensor) -> Tensor:
        def inner(k, carried, const):
            return (carried[0] + const[0] * k,)

        def outer(k, carried, const):
            return (repeat(k + 1, inner, (carried[0].sin(),), (const[0],))[0],)

        return repeat(n, outer, (x,), (x.cos(),))[0]

    x = randn(3)
    program = program_of(function, x, torch.tensor(2))
    for n in (0, 1, 4):
        expected = x
        for k in range(n):
            expected = expected.sin()
            for j in range(k + 1):
                expected = expected + x.cos() * j
        torch.testing.assert_close(program((x, torch.tensor(n)), rng()), expected)


UNKNOWN = {
    "a mask as an index": (lambda x: x[x > 0].sum(), "torch.where"),
    "what is written at a mask": (lambda x: torch.zeros_like(x).index_put([x > 0], x[:2]), "torch.where"),
    "complex numbers": (lambda x: torch.fft.fft(x).abs(), "fft"),
    "an operation of its own": (lambda x: torch.ops.aten.special_bessel_j0(x), "special_bessel_j0"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_unknown_is_named_in_one_line(name):
    function, named = UNKNOWN[name]
    x = torch.tensor([1.0, 2.0, -3.0], dtype=FLOAT)
    mode = "symbolic" if name == "a mask as an index" else "fake"
    try:
        module = make_fx(lambda x: [function(x)], tracing_mode=mode)(x)
    except Exception:
        # the capture refuses it already
        with pytest.raises(ModelError) as refusal:
            Program(lambda x, source: function(x), x)
        assert "\n" not in str(refusal.value)
        return
    with pytest.raises(ModelError, match=named) as refusal:
        Machine(module, [x], 0, 0, 0, 1)
    assert "\n" not in str(refusal.value)
    program = Program(lambda x, source: function(x), x)
    with pytest.raises(ModelError, match=named) as refusal:
        program.compile()
    assert "\n" not in str(refusal.value)


def test_what_torch_refuses_is_nan():
    x, bad = randn(3, 3), torch.tensor([0, 5])
    good = torch.tensor([0, 1])
    program = program_of(lambda x, i: (x.index_select(0, i), x[i], x.index_add(0, i, x[:2])), x, good)
    for found, expected in zip(program((x, good), rng()), (x[good], x[good], x.index_add(0, good, x[:2])), strict=True):
        assert torch.equal(found, expected)
    chosen, indexed, added = program((x, bad), rng())
    assert chosen[1].isnan().all()
    assert indexed[1].isnan().all()
    assert added.isnan().all()
    spd = x @ x.mT + torch.eye(3, dtype=FLOAT)
    program = program_of(torch.linalg.cholesky, spd)
    assert program((-spd,), rng()).isnan().any()


def test_a_block_is_its_transitions_one_by_one_and_draws_do_not_depend_on_how_it_is_cut():
    program, leaves = hmc()
    program.compile(8)
    own = len(leaves) - program._carried

    def positions(cuts):
        source, given, found = rng(5), list(leaves), []
        for n in cuts:
            states, _ = program.iterate(given, source, n)
            tensors = flatten(states)[0]
            found.append(tensors[0])
            given = [*given[:own], *(t[-1] for t in tensors)]
        return torch.cat(found)

    at_once = positions([8, 8])
    assert len(at_once) == 16
    assert torch.equal(positions([1] * 16), at_once)
    assert torch.equal(positions([3, 5, 7, 1]), at_once)
    plain, _ = hmc()
    states, _ = plain.iterate(leaves, rng(5), 8)
    torch.testing.assert_close(states.position, at_once[:8])
    # the control: chains move
    assert (at_once[1:] != at_once[:-1]).any()


def test_results_are_ones_own():
    program = Program(lambda x, source: (x, x + normal((3,), x, source), x > 0), randn(3))
    program.compile()
    x = randn(3)
    first = program(x, rng())
    kept = [t.clone() for t in first]
    second = program(x, rng(1))
    first[0].fill_(7.0)
    assert torch.equal(x, randn(3))
    assert torch.equal(first[1], kept[1])
    assert torch.equal(second[0], kept[0])
    again = program(x, rng())
    for own, other in zip(again, kept, strict=True):
        assert torch.equal(own, other)
    x.fill_(1.0)
    assert torch.equal(again[0], kept[0])


def memory() -> int:
    """Bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_calls_keep_no_memory():
    # 80 kB a call: what is kept of ten thousand is 800 MB
    program = Program(
        lambda x, source: (x + uniform((100,), x[0], source), x.sum()), torch.zeros(100, 100, dtype=FLOAT)
    )
    program.compile(4)
    x, source = torch.zeros(100, 100, dtype=FLOAT), rng()
    for _ in range(500):
        program(x, source)
    before = memory()
    for _ in range(10_000):
        program(x, source)
    assert memory() - before < 20e6


def test_threads_call_one_program():
    program, leaves = hmc()
    program.compile(4)
    expected = [flatten(program.iterate(leaves, rng(k), 4))[0] for k in range(4)]
    wrong = []

    def work(k):
        for _ in range(50):
            found = flatten(program.iterate(leaves, rng(k), 4))[0]
            if not all(map(torch.equal, found, expected[k])):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("wide", [False, True])
def test_settings_of_jax_are_left_alone_and_do_not_matter(wide):
    import jax
    import jax.numpy as jnp

    program, leaves = hmc()
    program.compile(4)
    expected = program.iterate(leaves, rng(1), 4)[0].position
    strict = (
        jax.enable_x64(wide),
        jax.debug_nans(True),
        jax.transfer_guard("disallow"),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    )
    own = jnp.arange(3.0)
    kind = own.dtype
    with strict[0]:
        theirs = jnp.arange(3.0)
        with strict[1], strict[2], strict[3], strict[4]:
            assert torch.equal(program.iterate(leaves, rng(1), 4)[0].position, expected)
            other, _ = hmc()
            other.compile(4)
            assert torch.equal(other.iterate(leaves, rng(1), 4)[0].position, expected)
            nan = program_of(lambda x: x.log(), randn(3).abs())
            assert nan((-torch.ones(3, dtype=FLOAT),), rng()).isnan().all()
        assert jax.config.jax_enable_x64 is wide  # type: ignore[reportAttributeAccessIssue]
        assert theirs.dtype == (jnp.float64 if wide else jnp.float32)
        assert jnp.arange(3.0).dtype == theirs.dtype
    assert own.dtype == kind
    assert own.tolist() == [0.0, 1.0, 2.0]


PROGRAM = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
import torch
sys.path.insert(0, {root!r})
torch.set_num_threads(int(sys.argv[1]))
from tests.dgm_infer.autodiff.test_xla import products
print(products())
"""


def products() -> str:
    """The bits of what a program of matrix products gives, and how many cores it took."""
    x = randn(300, 300) / 17

    def turn(k, c, _):
        long = c[0].reshape(1, -1) @ c[0].reshape(-1, 1)  # a sum that threads could share
        return ((c[0] @ c[0]).tanh() + 1e-3 * long.sin(),)

    program = Program(lambda x, source: repeat(torch.tensor(40), turn, (x,)), x)
    program.compile()
    program(x, rng())
    wall, cpu = time.perf_counter(), time.process_time()
    (found,) = program(x, rng())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return f"{found.view(torch.int64).sum().item()} {cpu / wall:.2f}"


def in_process(text: str, *args: str) -> str:
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    done = subprocess.run(
        [sys.executable, "-c", text.format(root=root), *args], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen")
def test_bits_do_not_depend_on_cores_and_one_thread_takes_one_core():
    ways = ("1", "1"), ("1", "2"), ("2", "2")
    found = [in_process(PROGRAM, *way).split() for way in ways]
    assert len({bits for bits, _ in found}) == 1
    assert all(float(taken) < 1.2 for (threads, _), (_, taken) in zip(ways, found, strict=True) if threads == "1")


FORKS = """
import os, sys, torch, warnings
sys.path.insert(0, {root!r})
warnings.simplefilter("ignore")
from tests.dgm_infer.autodiff.test_xla import hmc, rng, ModelError
program, leaves = hmc()
program.compile(4)
child = os.fork()
if child == 0:
    code = 1
    try:
        other, _ = hmc()
        other.iterate(leaves, rng(1), 4)
        try:
            other.compile(4)
        except ModelError as error:
            code = 2 if "spawn" in str(error) else 3
        try:
            program.iterate(leaves, rng(1), 4)
        except ModelError as error:
            code = 0 if code == 2 and "spawn" in str(error) else 4
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_fork_refuses_and_does_not_hang():
    assert in_process(FORKS) == "0"


def test_without_jax_what_need_not_be_compiled_runs_as_it_stands(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    program, leaves = hmc()
    with pytest.raises(ModelError, match="pip install jax") as refusal:
        program.compile(4)
    assert "\n" not in str(refusal.value)
    assert len(program.iterate(leaves, rng(), 3)[0].position) == 3
    target = dgm.Target(lambda x: x.square().sum(-1), 2)
    settings = {"warmup": 10, "draws": 10, "seed": 1, "progress": False}
    assert dgm.sample(target, dgm.HMC(), **settings).inputs.isfinite().all()
    with pytest.raises(ModelError, match="pip install jax"):
        dgm.sample(target, dgm.HMC(compile=True), **settings)


def test_blocks_are_small_where_results_are_large():
    x = torch.zeros(1000, 300, dtype=FLOAT)
    program = Program(lambda x, source: (x + 1,), x, carried=1)
    program.compile(32)
    assert program._machine is not None
    assert program._machine.most == xla._LARGEST // x.nbytes
    (found,) = program.iterate([x], rng(), 32)
    assert len(found) == program._machine.most
    assert found[-1].eq(len(found)).all()
