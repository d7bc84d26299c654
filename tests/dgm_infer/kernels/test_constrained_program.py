"""The program of a constrained transition makes those of the kernel itself, for every structure and solver."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dgm_infer as dgm
from dgm_infer.autodiff import row_execution
from dgm_infer.autodiff.programs import Program
from dgm_infer.autodiff.pytrees import flatten
from dgm_infer.autodiff.randomness import Replayed
from dgm_infer.conditioning import projection
from dgm_infer.errors import Status
from dgm_infer.kernels import constrained
from dgm_infer.sampling import execution as executions
from dgm_infer.sampling.execution import CompilationSettings, Execution
from tests.models import Bent, BentPairs, Network, Stretched, Walk
from tests.oracles import FLOAT, Circle, Ellipse, Wave
from tests.quick import cases

ROW = torch.tensor([True, False, True, True, True])


def under_a_mask_a_problem():
    masks = torch.stack([ROW, ROW.flip(0)])
    return dgm.condition(Bent(), torch.linspace(-0.8, 0.8, 10).reshape(2, 5), observe=dgm.pixels(masks))


def convolutions():
    torch.manual_seed(0)
    layers = nn.Unflatten(-1, (1, 2, 3)), nn.Conv2d(1, 1, 3, padding=1), nn.Tanh(), nn.Flatten()
    observe = dgm.pixels(torch.tensor([True, False, False, True, False]))
    return dgm.condition(Network(*layers).double(), [0.1, 0, 0, 0.2, 0], observe=observe)


PROBLEMS = {
    "scalar units, a mask a problem": under_a_mask_a_problem,
    "pairs": lambda: dgm.condition(BentPairs(), torch.linspace(-0.8, 0.8, 6)),
    "walk": lambda: dgm.condition(Walk(), torch.linspace(-0.8, 0.8, 16).reshape(2, 8)),
    "dense": lambda: dgm.condition(Ellipse(), [2.0]),
    "not normal": lambda: dgm.condition(Stretched(), torch.linspace(-0.8, 0.8, 5)),
    "sums": lambda: dgm.condition(Bent(), [0.3, -0.2], observe=dgm.linear([[0.5, 0, 0, 0.5, 0], [0, 2, 0, 0, -1.0]])),
    "strongly bent": lambda: dgm.condition(Wave(), [0.0]),
    "32 bits": lambda: dgm.condition(Bent(), torch.linspace(-0.8, 0.8, 5), dtype=torch.float32),
}
CASES = {f"{name}, newton": (name, "newton") for name in PROBLEMS}
CASES |= {f"{name}, broyden": (name, "broyden") for name in ("scalar units, a mask a problem", "walk", "strongly bent")}
CASES |= {"pairs, quasi_newton": ("pairs", "quasi_newton")}
QUICK = ("dense, newton", "strongly bent, broyden")


def states(problem, kernel, chains=5):
    """Where a kernel's chains are after a few transitions."""
    rng = torch.Generator().manual_seed(0)
    state = kernel.init(problem, problem.start(chains, rng))
    for _ in range(3):
        state, _ = kernel.step(problem, state, rng)
    return state


def program(problem, kernel, state, compiled=False):
    made = Program(lambda given, rng: given[0].step(problem, given[1], rng), (kernel, state), len(flatten(state)[0]))
    if compiled:
        made.compile()
    return made


def pairs_of_transitions(problem, kernel, *, n=4, compiled=False):
    """Transitions of the kernel, and those of its program from the same states with the same random numbers."""
    state = states(problem, kernel)
    fast, pairs = program(problem, kernel, state, compiled), []
    for seed in range(n):
        numbers = fast._numbers.apart(fast._numbers.draw(torch.Generator().manual_seed(seed)))
        expected = kernel.step(problem, state, Replayed(numbers))
        pairs.append((expected, fast((kernel, state), torch.Generator().manual_seed(seed))))
        state = expected[0]
    return pairs


def largest_difference(pairs):
    """Between positions and energies; statuses, counts and decisions must be equal."""
    differences = []
    for (state, info), (fast, fast_info) in pairs:
        for name in ("n_steps", "solver_iterations", "projection_failed", "reversal_failed"):
            assert torch.equal(fast_info.stats[name], info.stats[name]), name
        assert torch.equal(fast_info.status, info.status)
        moved = (fast.position - state.position, fast.energy - state.energy)
        moved += (
            fast_info.acceptance_rate - info.acceptance_rate,
            fast_info.tuning.end.momentum - info.tuning.end.momentum,
        )
        differences += [each.abs().max().item() for each in moved]
    return max(differences)


def rounding(problem):
    return 1e-8 if problem.values.dtype == FLOAT else 1e-3


def kernel_of(solver, **settings):
    return dgm.ConstrainedHMC(0.3, n_steps=(2, 3), n_geodesic=2, solver=solver, **settings)


# Every structure on circular flows; on straight ones, whose drift has the same code for all, one without units, one
# of larger units, and the other solvers.
WITH_FLOWS = {f"{name}-True": (*case, True) for name, case in CASES.items()}
WITH_FLOWS |= {
    f"{name}-False": (*CASES[name], False)
    for name in ("dense, newton", "strongly bent, broyden", "walk, newton", "pairs, quasi_newton")
}
QUICK_FLOWS = [f"{name}-{split}" for name in QUICK for split in (True, False)]


@pytest.mark.parametrize(("name", "solver", "split"), cases(WITH_FLOWS, quick=QUICK_FLOWS))
def test_a_program_makes_the_transitions_of_its_kernel(name, solver, split):
    problem = PROBLEMS[name]()
    pairs = pairs_of_transitions(problem, kernel_of(solver, split=split))
    assert largest_difference(pairs) < rounding(problem)
    # the control: other random numbers make other transitions
    positions = [state.position for (state, _), _ in pairs]
    assert (positions[0] - positions[-1]).abs().max() > 0.01


# code is made of what was captured: one problem of every structure, and the other solvers
CODE = {name: CASES[name] for name in ("dense, newton", "pairs, quasi_newton", "walk, broyden")}


@pytest.mark.parametrize(("name", "solver"), cases(CODE, quick=("dense, newton",)))
def test_machine_code_makes_the_transitions_of_its_kernel(name, solver):
    problem = PROBLEMS[name]()
    assert largest_difference(pairs_of_transitions(problem, kernel_of(solver), compiled=True)) < rounding(problem)


@pytest.mark.slow
@pytest.mark.parametrize("gram_force", [True, False])
def test_derivatives_in_float32_are_those_of_the_kernel(gram_force):
    problem = convolutions()
    assert problem.prefers_float32
    kernel = kernel_of("broyden", gram_force=gram_force)
    assert largest_difference(pairs_of_transitions(problem, kernel)) < 1e-3


def failing(problem, kernel, statuses, n=6):
    """Transitions of which some fail, compared."""
    pairs = pairs_of_transitions(problem, kernel, n=n)
    found = {int(status) for (_, info), _ in pairs for status in info.status.flatten()}
    assert set(map(int, statuses)) <= found
    return largest_difference(pairs)


def test_rows_that_fail_have_the_statuses_and_counts_of_the_kernel():
    problem = PROBLEMS["strongly bent"]()
    kernel = dgm.ConstrainedHMC(1.2, n_steps=3, n_geodesic=1, solver="broyden", split=False)
    assert failing(problem, kernel, (Status.OK, Status.PROJECTION_FAILED)) < 1e-7


def test_the_second_solver_has_the_rows_on_which_the_first_one_fails():
    problem = PROBLEMS["strongly bent"]()
    kernel = dgm.ConstrainedHMC(0.9, n_steps=3, n_geodesic=1, solver="quasi_newton", split=False)
    pairs = pairs_of_transitions(problem, kernel, n=6)
    # which makes all the updates that it may before the second one begins
    retried = torch.stack([info.stats["solver_iterations"] > kernel.max_iterations for (_, info), _ in pairs])
    assert retried.any()
    assert not retried.all()
    assert largest_difference(pairs) < 1e-7


def test_a_drift_that_does_not_return_is_seen_in_a_program(monkeypatch):
    problem, kernel = PROBLEMS["dense"](), kernel_of("newton")
    state = states(problem, kernel)
    rng = torch.Generator().manual_seed(0)
    assert (program(problem, kernel, state)((kernel, state), rng)[1].status == Status.OK).all()
    # the control: the way back is measured from somewhere else
    near = constrained.geodesic

    def strict(*args, **options):
        fibre, position, momentum, here, step_size, n_steps, n_geodesic, solver, _ = args
        return near(fibre, position, momentum, here, step_size, n_steps, n_geodesic, solver, 0.0, **options)

    monkeypatch.setattr(constrained, "geodesic", strict)
    found = program(problem, kernel, state)((kernel, state), rng)[1]
    assert (found.status == Status.REVERSAL_FAILED).all()
    assert torch.equal(found.stats["reversal_failed"], torch.ones_like(found.status, dtype=torch.bool))


def test_broyden_forgets_where_a_program_does(monkeypatch):
    """Of a solve of many updates; the control remembers fewer in the program."""
    problem, kernel = PROBLEMS["strongly bent"](), dgm.ConstrainedHMC(1.0, n_steps=2, solver="broyden", split=False)
    state = states(problem, kernel)
    fast = program(problem, kernel, state)
    numbers = fast._numbers.apart(fast._numbers.draw(torch.Generator().manual_seed(0)))
    found = fast((kernel, state), torch.Generator().manual_seed(0))[1]
    expected = kernel.step(problem, state, Replayed(list(numbers)))[1]
    assert torch.equal(found.stats["solver_iterations"], expected.stats["solver_iterations"])
    monkeypatch.setattr(projection, "SETTINGS", replace(projection.SETTINGS, memory=2))
    other = kernel.step(problem, state, Replayed(list(numbers)))[1]
    assert not torch.equal(found.stats["solver_iterations"], other.stats["solver_iterations"])


class Undecided(Circle):
    """Its output is computed in a way that depends on values."""

    def observed(self, u):
        x = super().observed(u)
        return 1 * x if bool((x > 100).any()) else x


def test_a_model_that_cannot_be_captured_is_refused_in_one_line():
    problem, kernel = dgm.condition(Undecided(), [1.0]), dgm.ConstrainedHMC(0.3, n_steps=2, compile=True)
    settings = {"chains": 2, "warmup": 0, "draws": 1, "seed": 0, "progress": False}
    with pytest.raises(dgm.errors.ModelError) as caught:
        dgm.sample(problem, kernel, **settings)
    assert "\n" not in str(caught.value)
    # the control: it can be sampled without
    dgm.sample(problem, kernel.replace(compile=None), **settings)


def test_too_many_rows_for_one_program_are_told(monkeypatch):
    problem, kernel = PROBLEMS["pairs"](), kernel_of("newton")
    state = states(problem, kernel)
    row_size = problem.structure.row_size(problem.values.shape[-1], problem.dim)
    monkeypatch.setattr(row_execution, "SETTINGS", row_execution.ExecutionSettings(elements=3 * row_size))
    with pytest.raises(dgm.errors.ModelError, match="5 rows are too many"):
        program(problem, kernel, state)


def test_a_kernel_is_compiled_if_its_transitions_to_come_take_as_long(monkeypatch):
    made = []
    monkeypatch.setattr(Program, "compile", lambda self, most: made.append(self))
    problem, kernel = PROBLEMS["dense"](), kernel_of("newton")
    execution, state = Execution(problem, 0), states(problem, kernel)
    rng = torch.Generator().manual_seed(0)
    state, _ = execution.step(kernel, state, rng, lasting=True, ahead=1)
    assert not made
    # hundreds of operations of five microseconds, and a second more for every one that is compiled
    monkeypatch.setattr(executions, "_SETTINGS", CompilationSettings(projects=1e-3, each_projecting=1.0))
    execution.step(kernel, state, rng, lasting=True, ahead=1)
    assert not made
    monkeypatch.setattr(executions, "_SETTINGS", CompilationSettings(projects=1e-3, each_projecting=0.0))
    # of a run that ends sooner than twice as long nothing would be left
    limited = Execution(problem, 0, seconds=1.9e-3)
    for _ in range(2):
        limited.step(kernel, state, rng, lasting=True, ahead=1)
    assert not made
    execution.step(kernel, state, rng, lasting=True, ahead=1)
    assert len(made) == 1
    # a network's arithmetic takes the time
    assert kernel.saves_calls(problem)
    assert not kernel.saves_calls(convolutions())


class Looking(Network):
    """A network that looks at the values of its inputs."""

    def prepare(self, u):
        if bool((u > 1e3).all()):
            raise ValueError("far away")
        return u


def test_derivatives_of_networks_with_convolutions_are_graphs_where_they_can_be(monkeypatch):
    made, draws, captured = [], [], row_execution._captured
    monkeypatch.setattr(row_execution, "_captured", lambda *args: made.append(captured(*args)) or made[-1])
    kernel = dgm.ConstrainedHMC(0.3, n_steps=(2, 3), compile=False)
    for network in (Network, Looking):
        torch.manual_seed(0)
        convolved = nn.Unflatten(-1, (1, 2, 3)), nn.Conv2d(1, 1, 3, padding=1), nn.Flatten()
        fibre = dgm.condition(
            network(*convolved).double(),
            [0.1, 0, 0, 0.2, 0],
            observe=dgm.pixels(torch.tensor([True, False, False, True, False])),
        )
        assert fibre.traces
        draws.append(dgm.sample(fibre, kernel, chains=5, warmup=0, draws=4, seed=3, progress=False).inputs)
    assert made
    assert draws[0].diff(dim=1).abs().max() > 0.01
    # derivatives of convolutions are in float32
    torch.testing.assert_close(*draws, rtol=0, atol=1e-4)
