"""Loops that are found again in what they did: the same values and derivatives from the operations of one step."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.autodiff.captured import CapturedTarget
from dgm_infer.autodiff.programs import Program
from dgm_infer.autodiff.pytrees import flatten
from dgm_infer.autodiff.rolled import rolled
from dgm_infer.sampling.execution import evaluation
from tests.oracles import FLOAT

ROWS = 3


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def decay(steps, *, read="all", noise=False, drift=False, forcing=False):
    """A nonlinear recursion of two states, written as a loop; its outputs are read at some steps."""
    force = numbers(steps, seed=5) if forcing else None

    def function(u):
        rate = (0.1 * u[..., 0]).exp()
        x, y = u[..., 1], torch.ones_like(rate)
        kept = []
        for k in range(steps):
            slope = torch.tanh(y - rate * x)
            x, y = x + 0.05 * slope, y - 0.02 * (rate * y - x.sin())
            x = x + (0.01 * k if drift else 0.01)
            y = y + 0.1 * u[..., 2 + k] if noise else y + 0.01 * u[..., 2]
            x = x + 0.1 * force[k] if force is not None else x
            kept.append(torch.stack([x, y], -1))
        kept = {"all": kept, "some": kept[3::17], "end": kept[-1:]}[read]
        outputs = torch.stack(kept, -2).flatten(-2)
        return 0.5 * (outputs - 0.3).square().sum(-1) + 0.5 * u.square().sum(-1) + 0.1 * x, (outputs, 2 * rate)

    return function


def expected(function, u):
    u = u.clone().requires_grad_()
    value, others = function(u)
    (gradient,) = torch.autograd.grad(value.sum(), u)
    return [value.detach(), gradient, *(other.detach() for other in others)]


KINDS = [
    {"steps": 30},
    {"steps": 64, "noise": True},
    {"steps": 65, "read": "end"},
    {"steps": 100, "read": "some", "drift": True},
    {"steps": 101, "noise": True, "forcing": True},
    {"steps": 379, "read": "some", "forcing": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_loop_computes_what_its_steps_did(kind):
    function, dim = decay(**kind), 2 + kind["steps"]
    loop = rolled(function, numbers(ROWS, dim))
    assert loop is not None
    # of a few steps, and what is around them, however many there are
    assert loop.size < 1000
    assert loop.calls > 10 * kind["steps"]
    other = numbers(ROWS, dim, seed=1)
    with torch.no_grad():
        found, energy = loop.both(other), loop.energy(other)
    for a, b in zip(found, expected(function, other), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(energy[0], found[0])


def test_a_control_that_forgets_what_was_collected_fails():
    function, u = decay(40), numbers(ROWS, 42)
    loop = rolled(function, u)
    assert loop is not None
    loop._given = lambda buffer, place, k: torch.zeros_like(buffer[0])  # type: ignore[method-assign]
    with torch.no_grad():
        found = loop.both(u)
    assert not torch.allclose(found[1], expected(function, u)[1], rtol=1e-3)


def in_place(u):
    out = u.new_zeros(*u.shape[:-1], 60)
    x = u[..., 0]
    for k in range(60):
        x = x + 0.1 * (u[..., 1] * x).sin().cos().tanh()
        out[..., k] = x
    return out.square().sum(-1), (out,)


def of_two_steps(u):
    """Each state depends on the two before it."""
    states = [u[..., 0], u[..., 1]]
    for _ in range(80):
        states.append(states[-1] + 0.1 * (states[-2] - u[..., 2] * states[-1]).sin().tanh().cos())
    return torch.stack(states, -1).square().sum(-1), ()


def at_random(u):
    x = u[..., 0]
    for _ in range(60):
        x = x + 0.1 * (u[..., 1] * x).sin().cos().tanh() * torch.randn((), dtype=u.dtype)
    return x.square(), ()


def of_two_beginnings(u):
    """At first the steps read two constants, and then one state."""
    x, y = torch.ones(ROWS, dtype=FLOAT), 2 * torch.ones(ROWS, dtype=FLOAT)
    for _ in range(60):
        z = (u[..., 0] * x).sin() + 0.1 * (u[..., 1] * y).cos().tanh()
        x = y = z
    return x.square(), ()


@pytest.mark.parametrize("function", [in_place, at_random, lambda u: (u.square().sum(-1), ())])
def test_what_is_no_loop_is_not_taken_for_one(function):
    assert rolled(function, numbers(ROWS, 3)) is None


@pytest.mark.parametrize("function", [of_two_beginnings, of_two_steps])
def test_steps_that_reach_back_by_two_are_a_loop_of_several(function):
    loop = rolled(function, numbers(ROWS, 3))
    assert loop is not None
    target = dgm.Target(lambda u: function(u)[0], 3)
    value, gradient = CapturedTarget(target).energy_and_gradient(numbers(ROWS, 3, seed=2))
    truth = expected(function, numbers(ROWS, 3, seed=2))
    torch.testing.assert_close(value, truth[0])
    torch.testing.assert_close(gradient, truth[1])


@pytest.mark.parametrize("steps", [40, 80])
def test_a_transition_on_a_simulator_is_a_program_of_one_step(steps):
    function = decay(steps, read="some")
    target = dgm.Target(lambda u: function(u)[0], 3)
    kernel = dgm.HMC(step_size=torch.tensor(0.1, dtype=FLOAT), n_steps=4)
    state = kernel.init(target, numbers(ROWS, 3))
    program = Program(lambda given, source: given[0].step(target, given[1], source), (kernel, state))
    drawn = program._numbers.draw(torch.Generator().manual_seed(7))
    given = iter(program._numbers.apart(drawn))

    class Given:
        def take(self, drawn):
            return next(given)

    there, info = kernel.step(target, state, Given())  # type: ignore[arg-type]
    found, told = program((kernel, state), torch.Generator().manual_seed(7))
    torch.testing.assert_close(found.position, there.position)
    torch.testing.assert_close(told.acceptance_rate, info.acceptance_rate)
    sizes = [len(part.graph.nodes) for _, part in program._module.named_modules() if hasattr(part, "graph")]
    assert sum(sizes) < 900
    assert flatten(found)[0][0].shape == (ROWS, 3)


def test_what_is_evaluated_often_is_compiled_where_it_is_a_long_loop(monkeypatch):
    function = decay(200, read="some")
    target, u = dgm.Target(lambda u: function(u)[0], 3), numbers(ROWS, 3)
    assert evaluation(target, u, 3) == target.energy_and_gradient
    compiled = []
    monkeypatch.setattr(Program, "compile", lambda self, most=1: compiled.append(self))
    fast = evaluation(target, u, 1000)
    assert len(compiled) == 1
    for found, truth in zip(fast(numbers(ROWS, 3, seed=4)), expected(function, numbers(ROWS, 3, seed=4)), strict=False):
        torch.testing.assert_close(found, truth)
