"""The program of a constrained transition makes the transitions of the kernel itself, for every structure and solver."""

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
    observe = dgm.pixels(torch.tensor([True, False, False, True, False, False]))
    return dgm.condition(Network(*layers).double(), [0.1, 0, 0, 0.2, 0, 0], observe=observe)


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
        assert torch.equal(fast_info.tuning.retried, info.tuning.retried)
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


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("name", "solver"), cases(CASES, quick=QUICK))
def test_a_program_makes_the_transitions_of_its_kernel(name, solver, split):
    problem = PROBLEMS[name]()
    pairs = pairs_of_transitions(problem, kernel_of(solver, split=split))
    assert largest_difference(pairs) < rounding(problem)
    # the control: other random numbers make other transitions
    positions = [state.position for (state, _), _ in pairs]
    assert (positions[0] - positions[-1]).abs().max() > 0.01


@pytest.mark.parametrize(
    "name", cases(dict.fromkeys(("dense", "pairs", "scalar units, a mask a problem")), quick=("dense",))
)
def test_machine_code_makes_the_transitions_of_its_kernel(name): ...
