"""Programs recorded on a GPU: stretches of operations in fixed memory, replayed; here on a double that repeats them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dgm_infer as dgm
from dgm_infer.autodiff.loops import repeat
from dgm_infer.autodiff.programs import Program
from dgm_infer.autodiff.randomness import normal
from dgm_infer.autodiff.replay import RecordedProgram, records
from tests.oracles import FLOAT


class Recorder(TorchDispatchMode):
    """Repeats operations as a CUDA graph does: on the memory that they read and wrote when they were recorded."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, result))
        return result

    def __call__(self, work):
        self.made = made = []
        with self:
            work()

        def replay():
            for func, args, kwargs, result in made:
                for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


def recording(program):
    example = [*program._constants, *program._inputs]
    return RecordedProgram(program._module, example, len(program._constants), Recorder())


def assert_replays(program, makes):
    """Replayed with other inputs, and again with the first, it returns what the graph does, in new memory."""
    recorded = recording(program)
    kept = []
    for seed in (1, 2, 1):
        leaves = makes(seed)
        inputs = [*program._constants, *leaves, *program._numbers.draw(torch.Generator().manual_seed(seed))]
        with torch.no_grad():
            expected = program._module(*inputs)
        found = recorded(*inputs)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        kept.append(found)
    first, other, again = (torch.cat([t.double().flatten() for t in each]) for each in kept)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("lengths", [(3, 0), (1, 5)])
def test_loops_take_as_many_rounds_as_their_counter_says(lengths):
    scale = torch.tensor([1.0, 2.0], dtype=FLOAT)

    def function(given, source):
        x, n = given
        x = x + normal(x.shape, x, source)
        x = repeat(n[0], lambda k, x, c: 1.1 * x + c, x, scale)
        return repeat(n[1], lambda k, x, c: x * c, x, scale).cumsum(-1), x.mean()

    def makes(seed):
        n = torch.tensor(lengths) + seed - 1
        return [torch.randn(2, generator=torch.Generator().manual_seed(seed), dtype=FLOAT), n]

    assert_replays(Program(function, tuple(makes(1))), makes)


def test_a_transition_is_replayed():
    target = dgm.Target(lambda x: (x.square() + 0.1 * x**4).sum(-1), 3)
    kernel = dgm.HMC(step_size=torch.tensor(0.3, dtype=FLOAT), trajectory_length=torch.tensor(1.5, dtype=FLOAT))

    def makes(seed):
        rng = torch.Generator().manual_seed(seed)
        state = kernel.init(target, torch.randn(4, 3, generator=rng, dtype=FLOAT))
        return [kernel.step_size, kernel.trajectory_length, *state[:3]]

    state = kernel.init(target, makes(1)[2])
    program = Program(lambda given, source: given[0].step(target, given[1], source), (kernel, state))
    assert_replays(program, makes)


def test_a_control_that_forgets_its_inputs_fails():
    program = Program(lambda x, source: x.square() + 1.0, torch.ones(3, dtype=FLOAT))
    recorded = recording(program)
    recorded._fixed = len(recorded._inputs)
    other = [torch.full((3,), 2.0, dtype=FLOAT)]
    with torch.no_grad():
        assert not torch.equal(recorded(*other)[0], program._module(*other)[0])


def test_a_loop_within_a_loop_is_not_recorded():
    def once(x, source):
        return repeat(2, lambda k, x, c: 1.1 * x, x)

    def nested(x, source):
        return repeat(2, lambda k, x, c: repeat(3, lambda k, x, c: 1.1 * x, x), x)

    flat, deep = (Program(function, torch.ones(3, dtype=FLOAT)) for function in (once, nested))
    assert records(flat._module)
    assert not records(deep._module)
    with pytest.raises(RuntimeError, match="a loop within a loop"):
        recording(deep)
