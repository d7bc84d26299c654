"""What Hamiltonian kernels share: steps and lengths, exact rejections, and failures that stay with their chain."""

import dataclasses
import math
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import Status
from dgm_infer.kernels import HMC, NUTS, ConstrainedHMC
from dgm_infer.kernels.hmc import TRAJECTORY
from tests.models import Bent, Stretched, Walk
from tests.oracles import FLOAT, GaussianTarget, linear_gaussian_model
from tests.quick import some

BATCHES = [(), (3,), (2, 3)]
CHAINS = 6


def gaussian_problem(batch):
    scale = torch.linspace(0.5, 2, max(1, math.prod(batch)), dtype=FLOAT).reshape(batch)
    return GaussianTarget(scale, torch.tensor([1.0, -1.0], dtype=FLOAT), torch.eye(2, dtype=FLOAT))


def observations(batch, size):
    return torch.randn(*batch, size, generator=torch.Generator().manual_seed(50), dtype=FLOAT)


def low_rank_problem(batch):
    return dgm.condition(linear_gaussian_model(), observations(batch, 6))


def dense_problem(batch):
    return dgm.condition(Bent("dense"), 0.3 * observations(batch, 5))


def walk_problem(batch):
    return dgm.condition(Walk(), 0.3 * observations(batch, 8))


CASES = {
    "HMC": (HMC(step_size=0.3, n_steps=(2, 4)), gaussian_problem),
    "HMC, by length": (HMC(step_size=0.3, trajectory_length=0.8), gaussian_problem),
    "NUTS": (NUTS(step_size=0.3, n_steps=3), gaussian_problem),
    "ConstrainedHMC, straight": (
        ConstrainedHMC(step_size=0.3, n_steps=(2, 4), n_geodesic=2, split=False), low_rank_problem
    ),
    "ConstrainedHMC, circular": (ConstrainedHMC(step_size=0.2, n_steps=(2, 4), n_geodesic=2), walk_problem),
    "ConstrainedHMC, dense": (ConstrainedHMC(step_size=0.2, n_steps=(2, 4), n_geodesic=2, split=False), dense_problem),
    "ConstrainedHMC, newton": (ConstrainedHMC(step_size=0.2, n_steps=2, solver="newton", split=False), dense_problem),
    "ConstrainedHMC, by length": (ConstrainedHMC(step_size=0.2, trajectory_length=0.5), walk_problem),
}  # fmt: skip


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    return request.param


@pytest.fixture(params=some(BATCHES, quick=[(2, 3)]))
def batch(request):
    return request.param


def points(problem, chains=CHAINS):
    """Given as starts, these spare a run the annealing of its own, which takes most of a short one."""
    return problem.start(chains, torch.Generator().manual_seed(51))


def start(kernel, problem, chains=CHAINS):
    return kernel.init(problem, points(problem, chains))


def rng(seed=52):
    return torch.Generator().manual_seed(seed)


def tensors(state):
    """All tensors of a state, however nested."""
    for value in state:
        if isinstance(value, torch.Tensor):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from (getattr(value, f.name) for f in dataclasses.fields(value))
        else:
            yield from tensors(value)


# -------------------------------------------------------------------------------------------------------- shapes


def test_state_and_info_have_one_entry_a_chain_and_problem(case, batch):
    kernel, make = case
    problem = make(batch)
    state, info = kernel.step(problem, start(kernel, problem), rng())
    assert state.position.shape == (CHAINS, *batch, problem.dim)
    assert state.position.dtype == FLOAT
    for value in (info.status, info.tuning.step_size, *info.all_stats().values()):
        assert value.shape == (CHAINS, *batch)
    # what warm-up adapts a length by
    end = info.tuning.end
    assert (end is None) == isinstance(kernel, NUTS)
    for value in () if end is None else (end.start, end.position, end.momentum):
        assert value.shape == state.position.shape
    assert end is None or end.fraction.shape == batch
    assert ((info.acceptance_rate >= 0) & (info.acceptance_rate <= 1)).all()
    assert (info.status == Status.OK).all()
    # from a range, except for trajectories that end at a U-turn
    n_steps = info.stats["n_steps"]
    assert ((n_steps >= (1 if isinstance(kernel, NUTS) else 2)) & (n_steps <= 4)).all()
    assert info.energy.isfinite().all()


def test_the_statistics_are_those_that_draws_promise(case):
    kernel, make = case
    batch = (2, 3)
    problem = make(batch)
    _, info = kernel.step(problem, start(kernel, problem), rng())
    names = {"acceptance_rate", "diverging", "n_steps", "step_size", "energy"}
    if isinstance(problem, dgm.Fibre):
        names |= {"constraint_error", "projection_failed", "reversal_failed", "solver_iterations"}
    stats = info.all_stats()
    assert stats.keys() == names
    assert {value.shape for value in stats.values()} == {(CHAINS, *batch)}
    for name in names & {"diverging", "projection_failed", "reversal_failed"}:
        assert stats[name].dtype == torch.bool


def test_a_step_size_a_problem_and_a_step_size_a_chain_reach_their_chains(case):
    kernel, make = case
    problem = make((3,))
    state = start(kernel, problem)
    sizes = torch.tensor([0.1, 0.2, 0.3], dtype=FLOAT)
    _, info = kernel.replace(step_size=sizes).step(problem, state, rng())
    assert sizes_used(info, sizes.expand(CHAINS, 3))
    sizes = torch.linspace(0.1, 0.2, CHAINS * 3, dtype=FLOAT).reshape(CHAINS, 3)
    _, info = kernel.replace(step_size=sizes).step(problem, state, rng())
    assert sizes_used(info, sizes)


def sizes_used(info, sizes):
    """Whether steps are of these sizes; or, of a trajectory of given length, as long as fits equally below them."""
    n_steps, step_size, end = info.stats["n_steps"], info.stats["step_size"], info.tuning.end
    if end is None or (end.fraction == 1).all():
        return torch.equal(step_size, sizes)
    fewest = (n_steps * step_size / sizes).sub(1e-9).ceil().clamp_min(1)
    return bool((n_steps == fewest).all())


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_every_sub_step_on_a_bent_fibre_solves_there_and_back(batch):
    problem = walk_problem(batch)
    kernel = ConstrainedHMC(step_size=0.3, n_steps=3, n_geodesic=2)
    _, info = kernel.step(problem, start(kernel, problem), rng())
    assert (info.status == Status.OK).all()
    assert (info.stats["solver_iterations"] >= 2 * 3 * 2).all()
    # the control: tangents of a linear fibre stay on it
    problem, straight = low_rank_problem(batch), kernel.replace(split=False)
    _, info = straight.step(problem, start(straight, problem), rng())
    assert (info.stats["solver_iterations"] == 0).all()


BY_LENGTH = {
    "HMC": (HMC(step_size=0.1, trajectory_length=2.0), gaussian_problem),
    "ConstrainedHMC": (ConstrainedHMC(step_size=0.1, trajectory_length=2.0), low_rank_problem),
}


@pytest.fixture(params=BY_LENGTH.values(), ids=BY_LENGTH.keys())
def by_length(request):
    return request.param


def durations(kernel, problem, transitions):
    state = start(kernel, problem, chains=2)
    for seed in range(transitions):
        state, info = kernel.step(problem, state, rng(seed))
        duration = info.stats["n_steps"] * info.stats["step_size"]
        # the chains of a problem take the same time
        torch.testing.assert_close(duration[0], duration[1])
        yield duration[0]


@pytest.mark.slow
def test_trajectories_last_between_half_and_one_and_a_half_times_their_length(by_length):
    kernel, make = by_length
    length = torch.tensor([0.5, 1.0, 2.0], dtype=FLOAT)
    # half as many steps as elsewhere: what lasts is independent of them
    kernel = kernel.replace(trajectory_length=length, step_size=0.2)
    times = torch.stack(list(durations(kernel, make((3,)), 60))) / length
    assert ((times > 0.5) & (times < 1.5)).all()
    assert (times.amin(0) < 0.6).all()
    assert (times.amax(0) > 1.4).all()
    assert (times.mean(0) - 1).abs().max() < 5 / 12**0.5 / 60**0.5
    # the longest trajectory sets the pace: all problems have the same share of theirs
    torch.testing.assert_close(times, times[:, :1].expand_as(times))


def test_a_trajectory_takes_no_more_steps_than_it_may(by_length):
    kernel, make = by_length
    problem = make(())
    _, info = kernel.replace(step_size=1e-6).step(problem, start(kernel, problem), rng())
    assert (info.stats["n_steps"] == TRAJECTORY.most_steps).all()
    assert (info.stats["step_size"] == 1e-6).all()


def test_what_is_left_open_suits_the_problem():
    normal, dense = low_rank_problem(()), dense_problem(())
    wide = dgm.condition(linear_gaussian_model(n_latents=9, n_outputs=12), torch.zeros(12))
    stretched = dgm.condition(Stretched(), torch.zeros(5))
    kernel = ConstrainedHMC()
    assert [kernel.solvers(p)[0] for p in (normal, dense, wide)] == ["newton", "broyden", "broyden"]
    assert [kernel.sub_steps(p) for p in (normal, dense, wide)] == [1, 2, 2]
    assert [kernel.splits(p) for p in (normal, dense, stretched)] == [True, True, False]
    # and what is not left open is as it says
    told = ConstrainedHMC(solver="quasi_newton", n_geodesic=3, split=False)
    assert told.solvers(normal) == ("quasi_newton", "newton")
    assert told.sub_steps(normal) == 3
    assert not told.splits(normal)
    assert told.replace(split=True).splits(stretched)


def test_of_many_rows_without_structure_failures_are_rejected():
    def of_rows(n):
        return dgm.condition(Waves(n), torch.zeros(n))

    assert ConstrainedHMC().solvers(of_rows(16)) == ("broyden", "newton")
    assert ConstrainedHMC().solvers(of_rows(17)) == ("broyden",)
    assert ConstrainedHMC(solver="broyden").solvers(of_rows(17)) == ("broyden", "newton")


class Waves(dgm.GenerativeModel):
    """Waves of twenty inputs, without structure."""

    input_density = dgm.StandardNormal(20)

    def __init__(self, n_outputs):
        super().__init__()
        self.output_shape = (n_outputs,)
        self.weight = torch.randn(20, n_outputs, generator=rng(), dtype=FLOAT)

    def observed(self, u):
        return torch.sin(u @ self.weight.to(u))


# --------------------------------------------------------------------------------------- determinism, immutability


# the same seed without a warm-up, and global randomness left alone: the contract of kernels


# of kernels with the same warm-up one: constrained ones by length adapt a length on circular flows as well
ADAPTED = ("HMC", "HMC, by length", "NUTS", "ConstrainedHMC, straight", "ConstrainedHMC, by length")


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[name] for name in ADAPTED], ids=ADAPTED)
def test_the_same_seed_gives_the_same_draws_after_adapting(case):
    kernel, make = case
    problem = make((2,))
    kernel, initial = kernel.replace(step_size=None), points(problem, 3)
    first, second = (
        dgm.sample(problem, kernel, chains=3, warmup=5, draws=3, seed=7, initial=initial, progress=False)
        for _ in range(2)
    )
    assert torch.equal(first.inputs, second.inputs)
    adapted: list[Any] = [first.kernel, second.kernel]
    assert torch.equal(adapted[0].step_size, adapted[1].step_size)


def test_a_step_leaves_the_state_it_started_from_unchanged(case):
    kernel, make = case
    problem = make((3,))
    state = start(kernel, problem)
    before = [tensor.clone() for tensor in tensors(state)]
    assert len(before) >= 3
    new, _ = kernel.step(problem, state, rng())
    assert not torch.equal(new.position, state.position)
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), before, strict=True))


def test_the_configuration_is_frozen_and_replace_makes_another(case):
    kernel, _ = case
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel.step_size = 1.0
    other = kernel.replace(step_size=0.123)
    assert other.step_size == 0.123
    assert kernel.step_size != 0.123


# ----------------------------------------------------------------------------------------------- rejections, failures


# arcs, and trajectories of given length, take no steps that nothing survives
DEADLY = ["HMC", "NUTS", "ConstrainedHMC, straight", "ConstrainedHMC, dense", "ConstrainedHMC, newton"]


@pytest.mark.parametrize("name", DEADLY)
def test_a_rejected_chain_stays_exactly_where_it_was(name):
    kernel, make = CASES[name]
    problem = make((3,))
    state = start(kernel, problem)
    # one chain of every problem takes steps that nothing survives
    sizes = torch.full((CHAINS, 3), float(kernel.step_size), dtype=FLOAT)
    sizes[2] = 1e3
    kernel = kernel.replace(step_size=sizes)
    first = state
    for seed in range(5):
        state, info = kernel.step(problem, state, rng(seed))
        assert (info.status[2] != Status.OK).all()
        assert (info.acceptance_rate[2] == 0).all()
    assert torch.equal(state.position[2], first.position[2])
    moved = (state.position != first.position).any(-1)
    assert moved[torch.arange(CHAINS) != 2].double().mean() > 0.9
    # what the state carries along is still that of the position
    for kept, fresh in zip(tensors(state), tensors(kernel.init(problem, state.position)), strict=True):
        torch.testing.assert_close(kept, fresh, rtol=1e-10, atol=1e-10)


def test_proposals_rejected_by_energy_alone_stay_too(case):
    kernel, make = case
    problem = make((3,))
    state = start(kernel, problem, chains=60)
    seen = 0
    for factor in (2, 4, 8):
        new, info = kernel.replace(step_size=factor * kernel.step_size).step(problem, state, rng())
        stayed = (new.position == state.position).all(-1)
        by_energy = stayed & (info.status == Status.OK)
        assert (info.acceptance_rate[by_energy] < 1).all()
        # and nothing else stays
        assert torch.equal(stayed | (info.acceptance_rate > 0), torch.ones_like(stayed))
        seen += int(by_energy.sum())
    assert seen > 0


class Edge(dgm.GenerativeModel):
    """A sum of squares that is not a number beyond the plane u3 = 2."""

    input_density = dgm.StandardNormal(4)

    def observed(self, u):
        x = u[..., :2].square() + 0.5 * u[..., 2:3]
        return torch.where(u[..., 3:] > 2, math.nan, x)


class EdgeTarget(dgm.Target):
    """A standard normal that is not a number beyond the plane x1 = 2."""

    def __init__(self):
        super().__init__(None, 2)

    def energy(self, x):
        return torch.where(x[..., 0] > 2, math.nan, 0.5 * x.square().sum(-1))


EDGES = {
    "HMC": (HMC(step_size=0.3, n_steps=4), EdgeTarget, [2.5, 0.0], [1.9, 0.0]),
    "NUTS": (NUTS(step_size=0.3), EdgeTarget, [2.5, 0.0], [1.9, 0.0]),
    "ConstrainedHMC": (
        ConstrainedHMC(step_size=0.3, n_steps=4, n_geodesic=1),
        lambda: dgm.condition(Edge(), [1.0, 1.0]),
        [1.0, -1.0, 0.0, 2.5],
        [1.0, -1.0, 0.0, 1.9],
    ),
}


@pytest.mark.parametrize("where", ["beyond the edge", "near the edge"])
@pytest.mark.parametrize("name", EDGES)
def test_a_poisoned_chain_neither_raises_nor_disturbs_the_others(name, where):
    kernel, make, beyond, near = EDGES[name]
    problem = make()
    healthy = torch.zeros(CHAINS, problem.dim, dtype=FLOAT)
    healthy += torch.tensor(near, dtype=FLOAT)
    healthy[:, -1 if name == "ConstrainedHMC" else 0] = -1.0
    poisoned = healthy.clone()
    poisoned[1] = torch.tensor(beyond if where == "beyond the edge" else near, dtype=FLOAT)
    others = torch.arange(CHAINS) != 1

    def run(position):
        state, statuses = kernel.init(problem, position), []
        for seed in range(8):
            state, info = kernel.step(problem, state, rng(seed))
            statuses.append(info.status)
        return state.position, torch.stack(statuses)

    position, status = run(poisoned)
    expected, expected_status = run(healthy)
    assert (status[:, 1] != Status.OK).any()
    if where == "beyond the edge":
        assert torch.equal(position[1], poisoned[1])
        assert (status[:, 1] != Status.OK).all()
    assert position[1].isfinite().all()
    assert torch.equal(status[:, others], expected_status[:, others])
    torch.testing.assert_close(position[others], expected[others], rtol=0, atol=1e-9)
    assert (position[others] != healthy[others]).any(-1).all()


@pytest.mark.parametrize("energy", [math.nan, math.inf, -math.inf])
def test_a_proposal_without_a_finite_energy_is_a_divergence(energy):
    target = dgm.Target(lambda x: torch.where(x[..., 0] > 1, energy, 0.5 * x.square().sum(-1)), 1)
    state = HMC(step_size=0.5).init(target, torch.full((200, 1), 0.9, dtype=FLOAT))
    new, info = HMC(step_size=0.5, n_steps=1).step(target, state, rng())
    assert (info.status == Status.DIVERGED).double().mean() > 0.2
    assert (new.position <= 1).all()
    assert new.energy.isfinite().all()
