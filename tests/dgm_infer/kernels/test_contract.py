"""What every kernel promises. A kernel is covered by being listed in ``dgm_infer.kernels``, and nothing else."""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer import kernels
from dgm_infer.conditioning.abc_kernels import InputPosterior
from dgm_infer.errors import ArgumentError, Status
from dgm_infer.kernels import Kernel
from dgm_infer.kernels.kernel import Tunable
from dgm_infer.runs.chains import Keeper
from tests.gradient_free_oracles import gaussian_latent
from tests.kernels import CarelessWalk, RandomWalk, Wanderer
from tests.oracles import (
    FLOAT,
    Ellipse,
    GaussianTarget,
    Oracle,
    assert_agrees,
    assert_refuted,
    correlated_gaussian,
    ellipse,
    linear_gaussian,
    soft_gaussian,
)
from tests.quick import marks, some
from tests.states import tensors

CHAINS, DRAWS = 6, 8
BATCHES = [(), (2,)]

PUBLISHED = [getattr(kernels, name) for name in kernels.__all__]
PUBLISHED = [kind for kind in PUBLISHED if kind is not Kernel and issubclass(kind, Kernel)]
KINDS = [*PUBLISHED, RandomWalk, Wanderer]


# One problem of every kind; a kernel gets the first that it does not refuse.


def gaussians(batch):
    scale = torch.linspace(0.5, 2, max(1, math.prod(batch)), dtype=FLOAT).reshape(batch)
    return GaussianTarget(scale, torch.tensor([1.0, -1.0], dtype=FLOAT), torch.eye(2, dtype=FLOAT))


def ellipses(batch):
    return dgm.condition(Ellipse(), torch.full((*batch, 1), 2.0, dtype=FLOAT))


def noisy_ellipses(batch):
    return dgm.condition(dgm.WithNoise(Ellipse(), 0.3), torch.full((*batch, 1), 2.0, dtype=FLOAT))


def soft_ellipses(batch):
    return dgm.condition(Ellipse(), torch.full((*batch, 1), 2.0, dtype=FLOAT), tolerance=0.5)


class EdgeTarget(dgm.Target):
    """A standard normal that is not a number beyond the plane x1 = 2."""

    dim = 2

    def energy(self, x):
        return torch.where(x[..., 0] > 2, math.nan, 0.5 * x.square().sum(-1))

    def start(self, chains, rng):
        return torch.tensor([1.9, 0.0], dtype=FLOAT).repeat(chains, 1)


class Edge(dgm.GenerativeModel):
    """A sum of squares that is not a number beyond the plane u4 = 2."""

    input_density = dgm.StandardNormal(4)

    def observed(self, u):
        return torch.where(u[..., 3:] > 2, math.nan, u[..., :2].square() + 0.5 * u[..., 2:3])


def noisy_edge():
    # the inputs of Edge first, then a noise for either output
    return dgm.condition(dgm.WithNoise(Edge(), 0.5), [1.0, 1.0])


def soft_edge():
    return dgm.condition(Edge(), [1.0, 1.0], tolerance=0.5)


def estimated(batch, edge=False):
    """A normal density times an estimate of 1, that is not a number beyond the plane x1 = 2."""

    def log_estimate(x, u):
        return torch.where(x[..., 0] > 2, math.nan, 0.5 * u[..., 0] - 0.125)

    class Estimated(dgm.kernels.PseudoMarginal):
        def initial_draws(self, n, rng):
            return super().initial_draws(n, rng).to(FLOAT)

        def _check_estimates(self): ...

    class Edged(Estimated):
        def initial_draws(self, n, rng):
            return torch.tensor([1.9, 0.0, 0.0], dtype=FLOAT).expand(n, 3)

    return (Edged if edge else Estimated)(log_estimate, dgm.StandardNormal(1), dgm.StandardNormal(2), batch)


PROBLEMS = (gaussians, ellipses, noisy_ellipses, soft_ellipses, estimated)


@functools.cache
def suited(kind, *problems) -> Any:
    for make in problems:
        problem = make()
        try:
            kind().check(problem.problem if isinstance(problem, Oracle) else problem)
        except ArgumentError:
            continue
        return problem
    raise AssertionError(f"no problem here suits {kind.__name__}: give this suite one of its kind")


@functools.cache
def problem_for(kind, batch) -> Any:
    return suited(kind, *(functools.partial(make, batch) for make in PROBLEMS))


def run(kind, batch, seed=1, **changes):
    arguments = {"chains": CHAINS, "warmup": 5, "draws": DRAWS, "progress": False} | changes
    return dgm.sample(problem_for(kind, batch), kind(), seed=seed, **arguments)


@functools.cache
def ran(kind, batch, seed=1):
    return run(kind, batch, seed)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture(params=some(BATCHES, quick=[(2,)]))
def batch(request):
    return request.param


def one_step(kernel, problem, chains=CHAINS, seed=3):
    state = kernel.init(problem, problem.start(chains, torch.Generator().manual_seed(2)))
    return state, *kernel.step(problem, state, torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------- the distribution


def law(kind):
    oracle = suited(kind, correlated_gaussian, ellipse, linear_gaussian, soft_gaussian, gaussian_latent)
    # a transition with projections costs more, and moves farther than a random walk
    projects = isinstance(oracle.problem, dgm.Fibre) and oracle.problem.marginal is None
    chains, warmup, draws = (80, 20, 25) if projects else (600, 60, 60)
    return oracle, dgm.sample(oracle.problem, kind(), chains=chains, warmup=warmup, draws=draws, seed=1, progress=False)


# the ellipse of constrained HMC is that of test_posteriors; the law of trees is that of test_nuts
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=kind.__name__, marks=marks(kind not in (dgm.ConstrainedHMC, dgm.NUTS))) for kind in KINDS],
    indirect=True,
)
def test_draws_have_the_expectations_of_the_target(kind):
    assert_agrees(*law(kind))


def test_control_a_walk_that_takes_every_proposal_has_others():
    assert_refuted(*law(CarelessWalk))


# ------------------------------------------------------------------------------------------------------ states and Info


def test_states_and_infos_have_an_entry_per_chain_and_problem(kind, batch):
    problem = problem_for(kind, batch)
    before, after, info = one_step(ran(kind, batch).kernel, problem)
    for state in (before, after):
        assert state.position.shape == (CHAINS, *batch, problem.dim)
        assert state.position.dtype == FLOAT
        assert state.energy.shape == (CHAINS, *batch)
        assert state.energy.isfinite().all()
    for value in (info.status, *info.all_stats().values()):
        assert value.shape == (CHAINS, *batch)
    assert ((info.acceptance_rate >= 0) & (info.acceptance_rate <= 1)).all()
    assert info.energy.isfinite().all()


def test_the_energy_of_a_state_is_that_of_its_position(kind):
    problem = problem_for(kind, (2,))
    kernel = ran(kind, (2,)).kernel
    _, after, _ = one_step(kernel, problem)
    torch.testing.assert_close(after.energy, kernel.init(problem, after.position).energy)


def test_statistics_of_every_kernel_and_of_its_family_are_kept(kind, batch):
    draws = ran(kind, batch)
    _, _, info = one_step(draws.kernel, problem_for(kind, batch))
    assert not {"acceptance_rate", "diverging", "energy"} & info.stats.keys()
    assert draws.stats.keys() == {"acceptance_rate", "diverging", "energy", *info.stats}
    assert {value.shape for value in draws.stats.values()} == {(CHAINS, DRAWS, *batch)}
    if isinstance(problem_for(kind, batch), dgm.Fibre):
        assert {"constraint_error", "projection_failed", "reversal_failed"} <= info.stats.keys()


def test_a_step_leaves_the_state_it_started_from_unchanged(kind, batch):
    problem, kernel = problem_for(kind, batch), ran(kind, batch).kernel
    state = kernel.init(problem, problem.start(5 * CHAINS, torch.Generator().manual_seed(2)))
    before = [tensor.clone() for tensor in tensors(state)]
    after, _ = kernel.step(problem, state, torch.Generator().manual_seed(3))
    assert len(before) >= 2
    assert not torch.equal(after.position, state.position)
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), before, strict=True))


# ----------------------------------------------------------------------------------------------------------- randomness


def test_the_same_seed_gives_the_same_draws_and_another_seed_others(kind, batch):
    first, other = ran(kind, batch), ran(kind, batch, seed=2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = run(kind, batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.inputs, again.inputs)
    for name, value in first.stats.items():
        assert torch.equal(value, again.stats[name])
    assert not torch.equal(first.inputs, other.inputs)


# -------------------------------------------------------------------------------------------------------- configuration


CONFIGURED = [kind for kind in KINDS if dataclasses.is_dataclass(kind)]


@pytest.mark.parametrize("kind", CONFIGURED, ids=lambda kind: kind.__name__)
def test_the_configuration_is_frozen_and_replace_makes_another(kind):
    kernel, name = kind(), dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kernel, name, 1.0)
    adapted: Any = ran(kind, (2,)).kernel
    tuned = isinstance(kernel, Tunable) and kernel.tuning(problem_for(kind, (2,))).step_size
    assert (adapted != kernel) == tuned
    assert adapted == adapted.replace()
    fields = {f.name: getattr(adapted, f.name) for f in dataclasses.fields(adapted)}
    assert kernel.replace(**fields) == adapted
    assert kernel == kind()


def refusal(kernel, problem):
    try:
        kernel.check(problem)
    except ArgumentError as error:
        return str(error)
    return None


def test_what_does_not_fit_is_refused_in_one_line(kind):
    assert isinstance(kind(), Kernel)
    refusals = {type(problem).__name__: refusal(kind(), problem) for problem in (gaussians(()), ellipses(()), object())}
    assert refusals["object"] is not None
    for name, message in refusals.items():
        assert message is None or ("\n" not in message and name in message)


# ------------------------------------------------------------------------------------------------------------- failures


def test_what_a_chain_runs_into_is_a_status_and_a_rejection_of_that_chain(kind):
    near = torch.tensor([1.0, -1.0, 0.0, 1.9, 0.0, 0.0], dtype=FLOAT)
    problem = suited(
        kind,
        EdgeTarget,
        lambda: dgm.condition(Edge(), [1.0, 1.0]),
        noisy_edge,
        soft_edge,
        lambda: estimated((), edge=True),
    )
    chains, fibre = 40, isinstance(problem, dgm.Fibre)
    near = near[: problem.dim].repeat(chains, 1)
    start = near if fibre or isinstance(problem, InputPosterior) else problem.start(chains, torch.Generator())
    draws = dgm.sample(problem, kind(), initial=start, chains=chains, warmup=0, draws=2, seed=1, progress=False)
    state, failed = draws.kernel.init(problem, start), 0
    for seed in range(4):
        before = state
        state, info = draws.kernel.step(problem, state, torch.Generator().manual_seed(seed))
        bad = info.status != Status.OK
        failed += int(bad.sum())
        # a tree of which a part failed may still move; what is refused stays
        stayed = bad & (info.acceptance_rate == 0)
        assert torch.equal(state.position[stayed], before.position[stayed])
        assert state.position.isfinite().all()
        assert state.energy.isfinite().all()
    assert failed > 0
    assert draws.inputs.isfinite().all()


# ---------------------------------------------------------------------------------------------------------------- files


def test_draws_are_saved_and_loaded_with_their_kernel(kind, tmp_path):
    draws = ran(kind, (2,))
    draws.save(tmp_path / "draws.nc")
    loaded = dgm.Draws.load(tmp_path / "draws.nc")
    assert type(loaded.kernel) is kind
    assert torch.equal(loaded.inputs, draws.inputs)
    assert loaded.stats.keys() == draws.stats.keys()
    if dataclasses.is_dataclass(kind):
        assert loaded.kernel == draws.kernel


# a problem of this suite that cannot be stored is given again
@pytest.mark.filterwarnings("ignore:.*cannot be stored")
@pytest.mark.parametrize("transition", [3, 9])
def test_a_run_that_is_killed_goes_on_with_the_same_draws(kind, tmp_path, monkeypatch, transition):
    """In warm-up and after it: all that the next transition needs is in a checkpoint."""

    class Killed(BaseException):
        pass

    def kill(self, course):
        write(self, course)
        if course.now.transitions == transition:
            raise Killed

    write = Keeper.write
    monkeypatch.setattr(Keeper, "write", kill)
    with pytest.raises(Killed):
        run(kind, (2,), run=tmp_path / "run", checkpoint_every=1e-9)
    monkeypatch.undo()
    draws = dgm.resume(tmp_path / "run", problem_for(kind, (2,)), progress=False)
    whole = ran(kind, (2,))
    assert torch.equal(draws.inputs, whole.inputs)
    for name, value in whole.stats.items():
        assert torch.equal(draws.stats[name], value), name


# -------------------------------------------------------------------------------------------------------------- warm-up


def test_warm_up_tunes_a_step_size_alone_and_leaves_a_kernel_without_parameters():
    problem = correlated_gaussian((0.1, 10.0)).problem
    draws = dgm.sample(problem, RandomWalk(), chains=32, warmup=150, draws=40, seed=1, progress=False)
    walk: Any = draws.kernel
    assert walk.step_size.shape == (2,)
    assert 50 < walk.step_size[1] / walk.step_size[0] < 200
    assert (draws.stats["acceptance_rate"].mean((0, 1)) - 0.8).abs().max() < 0.1
    kernel = Wanderer()
    draws = dgm.sample(problem, kernel, chains=4, warmup=5, draws=2, seed=1, progress=False)
    assert draws.kernel is kernel
    assert draws.stats.keys() == {"acceptance_rate", "diverging", "energy"}
