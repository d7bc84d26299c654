"""Transitions captured as programs, and compiled, make the draws that kernels make."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.autodiff.captured import CapturedTarget
from dgm_infer.autodiff.loops import repeat
from dgm_infer.autodiff.programs import CompiledTarget, Program
from dgm_infer.autodiff.pytrees import flatten, unflatten
from dgm_infer.autodiff.randomness import normal
from dgm_infer.errors import ModelError
from dgm_infer.kernels.mode_jumps import Jumps
from dgm_infer.linear_maps import DiagonalMap, TriangularMap
from dgm_infer.sampling import execution as executions
from dgm_infer.sampling.execution import CompilationSettings, Execution
from tests.oracles import FLOAT, assert_agrees, linear_gaussian


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def quartic(batch=()):
    return dgm.Target(lambda x: (x.square() + 0.1 * x**4).sum(-1), 3, batch)


def stepped(target, kernel, chains=4, seed=1):
    state = kernel.init(target, torch.randn(chains, *target.batch_shape, target.dim, generator=rng(3), dtype=FLOAT))
    program = Program(lambda given, source: given[0].step(target, given[1], source), (kernel, state))
    return program, kernel, state


METRICS = {
    "identity": "identity",
    "diagonal": DiagonalMap(torch.tensor([[0.5, 1.0, 2.0], [1.0, 1.0, 0.3]], dtype=FLOAT)),
    "dense": TriangularMap(torch.tensor([[[1.0, 0, 0], [0.5, 0.8, 0], [0, 0.2, 0.6]]] * 2, dtype=FLOAT)),
}


@pytest.mark.parametrize("metric", METRICS)
def test_a_program_takes_the_steps_of_its_kernel(metric):
    target = quartic((2,))
    kernel = dgm.HMC(
        step_size=torch.tensor([0.3, 0.2], dtype=FLOAT),
        trajectory_length=torch.tensor([1.0, 1.5], dtype=FLOAT),
        metric=METRICS[metric],
    )
    program, kernel, state = stepped(target, kernel)
    for seed in range(3):
        # the numbers of a program are drawn at once, those of a step one after the other: those of the program are used
        numbers = iter(program._numbers.apart(program._numbers.draw(rng(seed))))

        class Given:
            def take(self, drawn, numbers=numbers):
                return next(numbers)

        expected, info = kernel.step(target, state, Given())  # type: ignore[arg-type]
        found, told = program((kernel, state), rng(seed))
        torch.testing.assert_close(found.position, expected.position)
        torch.testing.assert_close(found.energy, expected.energy)
        torch.testing.assert_close(told.acceptance_rate, info.acceptance_rate)
        assert torch.equal(told.stats["n_steps"], info.stats["n_steps"])
        assert len(set(told.stats["n_steps"].flatten().tolist())) > 1 or metric != "identity"
        state = expected


def test_other_values_of_the_same_form_need_no_new_program():
    target = quartic()
    program, kernel, state = stepped(target, dgm.HMC(step_size=torch.tensor(0.3, dtype=FLOAT), n_steps=3))
    longer = kernel.replace(step_size=torch.tensor(1e-6, dtype=FLOAT))
    found, _ = program((longer, state), rng())
    assert (found.position - state.position).abs().max() < 1e-4
    found, _ = program((kernel, state), rng())
    assert (found.position - state.position).abs().max() > 1e-2


def test_loops_of_a_program_are_loops():
    def function(given, source):
        x, n = given
        noise = normal(x.shape, x, source)
        return repeat(n, lambda k, c, const: (0.5 * c[0] + const[0] + k,), (x,), (noise,))

    x = torch.ones(3, dtype=FLOAT)
    program = Program(function, (x, torch.tensor(2)))
    calls = sum(node.op == "call_function" for node in program._module.graph.nodes)
    for n in (0, 1, 7):
        (found,) = program((x, torch.tensor(n)), rng(1))
        noise, expected = torch.randn(3, generator=rng(1), dtype=FLOAT), x
        for k in range(n):
            expected = 0.5 * expected + noise + k
        torch.testing.assert_close(found, expected)
    assert calls < 12


def test_a_decision_by_values_cannot_be_captured():
    with pytest.raises(ModelError, match="one graph"):
        Program(lambda given, source: given if bool((given > 0).all()) else -given, torch.ones(2, dtype=FLOAT))


def test_trees_are_rebuilt_as_they_were():
    kernel = dgm.HMC(step_size=torch.tensor(0.1), metric=METRICS["dense"])
    tensors, form = flatten((kernel, {"a": torch.ones(2), "b": (torch.zeros(1), 3, None)}))
    again, rest = unflatten(tensors, form)
    assert again == kernel
    assert dataclasses.fields(again) == dataclasses.fields(kernel)
    assert rest["b"][1:] == (3, None)
    assert hash(form) == hash(flatten((kernel, rest))[1])


def test_a_kernel_is_compiled_if_its_transitions_to_come_take_as_long(monkeypatch):
    made = []
    monkeypatch.setattr(Program, "compile", lambda self, most=1: made.append(self))
    target, kernel = quartic(), dgm.HMC(step_size=torch.tensor(0.3, dtype=FLOAT), n_steps=5)
    execution, state = Execution(target, 0), kernel.init(target, torch.zeros(4, 3, dtype=FLOAT))
    for _ in range(12):
        state, _ = execution.step(kernel, state, rng(), lasting=True, ahead=12)
    assert not made
    monkeypatch.setattr(executions, "_SETTINGS", CompilationSettings(compiles=1e-3, each=0.0))
    execution.step(kernel, state, rng(), lasting=True, ahead=12)
    assert len(made) == 1


def test_a_kernel_that_cannot_be_compiled_as_asked_says_so(monkeypatch):
    target, kernel = quartic(), dgm.HMC(step_size=torch.tensor(0.3, dtype=FLOAT), n_steps=5)
    state = kernel.init(target, torch.zeros(4, 3, dtype=FLOAT))
    monkeypatch.setattr(dgm.HMC, "is_program", lambda self, problem: False)
    with pytest.warns(UserWarning, match=r"HMC\(compile=True\): .* compile=None"):
        Execution(target, 0).step(kernel.replace(compile=True), state, rng(), lasting=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Execution(target, 0).step(kernel, state, rng(), lasting=True)


def loop(steps=200):
    """A simulator of many steps, observed at its end."""

    class Steps(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(2)

        def observed(self, u):
            x, y = 1 + 0.1 * u[..., 0], torch.ones_like(u[..., 0])
            for _ in range(steps):
                x, y = x + 0.01 * (y - x * y).sin(), y + 0.01 * (x.tanh() - u[..., 1] * y)
            return torch.stack([x, y], -1)

    return dgm.condition(Steps(), [1.0, 0.5], noise=0.1)


@pytest.mark.slow
def test_a_long_simulator_is_evaluated_by_code_from_the_first_transition_on_with_the_same_draws(monkeypatch):
    made, compiled = [], CompiledTarget.__init__
    monkeypatch.setattr(executions, "_SETTINGS", CompilationSettings(compiles=0.5, around=0, step=0))
    monkeypatch.setattr(CompiledTarget, "__init__", lambda self, *args: (made.append(self), compiled(self, *args))[1])
    settings = {"chains": 4, "warmup": 20, "draws": 10, "seed": 1, "progress": False}
    plain = dgm.sample(loop(), dgm.LiftedHMC(compile=False), **settings)
    assert not made
    by_code = dgm.sample(loop(), dgm.LiftedHMC(), **settings)
    # the density of the start, and that of the transitions
    assert len(made) == 2
    torch.testing.assert_close(by_code.inputs, plain.inputs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_code_of_some_positions_evaluates_any_number_of_them():
    target, x = loop(50).marginal, torch.randn(3, 2, generator=rng(), dtype=FLOAT)
    code = CompiledTarget(CapturedTarget(target), x)
    for n in (1, 3, 7):
        points = torch.randn(n, 2, generator=rng(n), dtype=FLOAT)
        for own, other in zip(code.energy_and_gradient(points), target.energy_and_gradient(points), strict=True):
            torch.testing.assert_close(own, other)


def test_what_cannot_be_captured_is_sampled_as_it_is_and_refused_if_asked_to_compile():
    target = dgm.Target(lambda x: x.square().sum(-1) * (1.0 if float(x.detach().sum()) < 1e9 else 2.0), 2)
    draws = dgm.sample(target, dgm.HMC(), warmup=10, draws=10, seed=1, progress=False)
    assert draws.inputs.isfinite().all()
    with pytest.raises(ModelError, match="captured"):
        dgm.sample(target, dgm.HMC(compile=True), warmup=10, draws=10, seed=1, progress=False)
    with pytest.raises(dgm.errors.ArgumentError, match="compile"):
        dgm.HMC(compile="yes")  # type: ignore[arg-type]
    with pytest.raises(dgm.errors.ArgumentError, match="trees are not compiled"):
        dgm.LiftedHMC(trajectory="nuts", compile=True)


@pytest.mark.slow
def test_compiled_code_is_right_at_every_number_of_steps():
    target = quartic((2,))
    kernel = dgm.HMC(step_size=torch.tensor([0.3, 0.2], dtype=FLOAT), trajectory_length=torch.tensor(0.3, dtype=FLOAT))
    program, kernel, state = stepped(target, kernel)
    program.compile()
    seen = set()
    for seed in range(60):
        numbers = program._numbers.draw(rng(seed))
        scaled = kernel.replace(trajectory_length=torch.tensor(0.1 + 0.03 * seed, dtype=FLOAT))
        inputs = [*program._constants, *flatten((scaled, state))[0], *numbers]
        found, expected = program._run(*inputs), program._module(*inputs)
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other)
        (state, info) = unflatten(expected, program._result)
        seen |= set(info.stats["n_steps"].flatten().tolist())
    assert {1, 2, 3} < seen


def as_network(model: Any) -> Any:
    """A linear Gaussian model as a layer of weights."""
    layer = torch.nn.Linear(*reversed(model.weight.shape)).double()
    layer.load_state_dict({"weight": model.weight, "bias": model.bias})
    return generators.from_module(layer, layer.in_features, noise=model.sd.item())


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [None, as_network])
def test_compiled_draws_follow_the_law_with_float32_gradients_and_without(wrap):
    oracle = linear_gaussian(problems=(2,), wrap=wrap)
    draws = dgm.sample(
        oracle.problem, dgm.LiftedHMC(compile=True), chains=50, warmup=80, draws=70, thin=2, seed=1, progress=False
    )
    assert draws.inputs.shape[1] == 70
    assert_agrees(oracle, draws)
    assert draws.stats["constraint_error"].max() < 1e-8


@pytest.mark.slow
def test_two_modes_keep_their_weights_and_seeds_their_draws():
    def energy(x):
        return -torch.logaddexp(-0.5 * (x - 4).square().sum(-1), 1.0986 - 0.5 * (x + 4).square().sum(-1))

    target = dgm.Target(energy, 2)
    centres = torch.tensor([[4.0, 4.0], [-4.0, -4.0]], dtype=FLOAT)
    jumps = Jumps(centres, torch.eye(2, dtype=FLOAT).expand(2, 2, 2), torch.full((2,), -0.7, dtype=FLOAT))
    kernel = dgm.ModeJumps(dgm.HMC(step_size=0.5, n_steps=(2, 5), compile=True), jumps)
    start = torch.zeros(64, 2, dtype=FLOAT)
    settings = {"chains": 64, "warmup": 20, "draws": 300, "initial": start, "progress": False}
    draws = dgm.sample(target, kernel, seed=1, **settings)
    share = (draws.inputs[..., 0] < 0).double().mean(1)
    assert abs(share.mean() - 0.75) < 5 * share.std() / 8
    again = dgm.sample(target, kernel, seed=1, **settings)
    assert torch.equal(again.inputs, draws.inputs)


def test_gradients_of_networks_are_float32_in_programs_and_energies_their_own():
    fibre = linear_gaussian(problems=(2,), wrap=as_network).problem
    kernel = dgm.LiftedHMC(step_size=torch.tensor([0.2, 0.3], dtype=FLOAT), n_steps=3, metric="identity")
    fine, coarse = (kernel.replace(float32_gradients=flag) for flag in (False, True))
    x = fibre.start(4, rng(1))
    found = {}
    for name, own in {"open": kernel, "fine": fine, "coarse": coarse}.items():
        state = own.init(fibre, x)
        program = Program(lambda given, source: given[0].step(fibre, given[1], source), (own, state))
        after, _ = program((own, state), rng(2))
        numbers = iter(program._numbers.apart(program._numbers.draw(rng(2))))

        class Given:
            def take(self, drawn, numbers=numbers):
                return next(numbers)

        expected, _ = (coarse if own is kernel else own).step(fibre, state, Given())  # type: ignore[arg-type]
        torch.testing.assert_close(after.position, expected.position, rtol=1e-5, atol=1e-5)
        exact = fibre.marginal.energy(after.marginal.position)
        torch.testing.assert_close(after.marginal.energy, exact, rtol=1e-12, atol=0)
        found[name] = after.position
    torch.testing.assert_close(found["open"], found["coarse"], rtol=1e-6, atol=1e-6)
    # the control: float32 leaves its traces
    assert (found["fine"] - found["coarse"]).abs().max() > 1e-10


def test_a_target_that_has_changed_is_captured_anew_and_nothing_is_left_on_it():
    class Moved(dgm.Target):
        dim = 2

        def __init__(self):
            super().__init__()
            self.centre = torch.zeros(2, dtype=FLOAT)

        def energy(self, x):
            return (x - self.centre).square().sum(-1)

    target = Moved()
    before = set(vars(target))
    stepped(target, dgm.HMC(step_size=torch.tensor(0.1, dtype=FLOAT), n_steps=3))
    assert set(vars(target)) == before
    target.centre = torch.full((2,), 5.0, dtype=FLOAT)
    program, kernel, state = stepped(target, dgm.HMC(step_size=torch.tensor(0.1, dtype=FLOAT), n_steps=3))
    for seed in range(20):
        state, _ = program((kernel, state), rng(seed))
    torch.testing.assert_close(state.energy, target.energy(state.position))
