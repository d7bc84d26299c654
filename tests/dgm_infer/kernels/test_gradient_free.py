"""Kernels on targets, above all without gradients: moments on every oracle, joint laws, and planted errors."""

import math
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError
from dgm_infer.kernels import slice as slices
from dgm_infer.kernels.metropolis import Point
from dgm_infer.target import Block
from tests.gradient_free_oracles import Coin, Cube, TwoModes, coin, cube, two_modes
from tests.oracles import FLOAT, Ellipse, correlated_gaussian, funnel
from tests.quick import marks


def deviations(values, expected):
    """Differences of means ``[independent chains, K]`` from their expectations, in standard errors."""
    return (values.mean(0) - expected) * len(values) ** 0.5 / values.std(0)


def assert_agree(z):
    assert z.abs().max() <= 5, z.tolist()


# --------------------------------------------------------------------------------------------------------- the table

WIDE = dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 3.0)
ORACLES: dict[str, Any] = {
    "gaussian": correlated_gaussian,
    "funnel": funnel,
    "two modes": two_modes,
    "cube": cube,
    "coin": coin,
}
PAIRS = {
    ("gaussian", "RandomWalk"): dgm.kernels.RandomWalk(),
    ("gaussian", "EllipticalSlice"): dgm.kernels.EllipticalSlice(scale=2.0),
    ("gaussian", "LinearSlice"): dgm.kernels.LinearSlice(),
    ("gaussian", "Alternating"): dgm.kernels.Alternating(
        dgm.kernels.RandomWalk(), dgm.kernels.LinearSlice(), blocks=((0, 2), (1, 3))
    ),
    ("funnel", "RandomWalk"): dgm.kernels.RandomWalk(),
    ("funnel", "EllipticalSlice"): dgm.kernels.EllipticalSlice(),
    ("funnel", "LinearSlice"): dgm.kernels.LinearSlice(),
    ("two modes", "RandomWalk"): dgm.kernels.RandomWalk(step_size=2.5, metric="identity"),
    ("two modes", "Independence"): dgm.kernels.Independence(WIDE),
    ("two modes", "EllipticalSlice"): dgm.kernels.EllipticalSlice(scale=2.0),
    ("two modes", "LinearSlice"): dgm.kernels.LinearSlice(width=torch.tensor(4.0)),
    ("cube", "RandomWalk"): dgm.kernels.RandomWalk(step_size=0.4, metric="identity"),
    ("cube", "LinearSlice"): dgm.kernels.LinearSlice(width=1.0, max_steps=1, reflect=True),
    ("coin", "RandomWalk"): dgm.kernels.RandomWalk(),
    ("coin", "Independence"): dgm.kernels.Independence(dgm.StandardNormal(2)),
    ("coin", "EllipticalSlice"): dgm.kernels.EllipticalSlice(),
    ("coin", "LinearSlice"): dgm.kernels.LinearSlice(),
    ("coin", "Alternating"): dgm.kernels.Alternating(
        dgm.kernels.RandomWalk(), dgm.kernels.EllipticalSlice(), blocks=((0, 1), (1, 2))
    ),
}
QUICK = [
    ("gaussian", "RandomWalk"),
    ("two modes", "Independence"),
    ("cube", "LinearSlice"),
    ("coin", "EllipticalSlice"),
]


def dispersed(problem, chains):
    """Starts three times as wide as the target's own, but on the cube, where they are uniform."""
    draws = problem.start(chains, torch.Generator().manual_seed(4)).to(FLOAT)
    return draws if isinstance(problem, Cube) else 3 * draws


@pytest.mark.parametrize("pair", [pytest.param(p, id=" ".join(p), marks=marks(p in QUICK)) for p in PAIRS])
def test_moments_are_right_from_over_dispersed_starts(pair):
    oracle, chains = ORACLES[pair[0]](), 400
    start = dispersed(oracle.problem, chains)
    settings = {"chains": chains, "warmup": 100, "draws": 60, "seed": 1, "progress": False}
    draws = dgm.sample(oracle.problem, PAIRS[pair], initial=start, **settings)
    assert draws.inputs is not None
    assert_agree(deviations(oracle.statistics(draws.inputs).mean(1), oracle.expected))


# ------------------------------------------------------------------------------------------- the joint law (Geweke)

EPS = 0.5
KERNELS = {
    "RandomWalk": dgm.kernels.RandomWalk(step_size=0.8),
    "Independence": dgm.kernels.Independence(),
    "EllipticalSlice": dgm.kernels.EllipticalSlice(mean=0.3, scale=1.5),
    "LinearSlice": dgm.kernels.LinearSlice(width=3.0, max_steps=3),
    "HMC": dgm.HMC(0.1, n_steps=3),
    "NUTS": dgm.NUTS(0.1, 7),
    "RiemannianHMC": dgm.kernels.RiemannianHMC(0.3, n_steps=2),
    "Alternating": dgm.kernels.Alternating(
        dgm.kernels.RandomWalk(0.8), dgm.kernels.LinearSlice(), blocks=((0, 1), (1, 2))
    ),
}


def joint(kernel, steps=4, n=20_000):
    """Statistics of inputs and data after transitions from exact draws of both: ``[n, K]`` before and after."""
    rng = torch.Generator().manual_seed(7)
    u = torch.randn(n, 2, generator=rng, dtype=FLOAT)
    y = Ellipse().observed(u) + EPS * torch.randn(n, 1, generator=rng, dtype=FLOAT)
    target = dgm.condition(Ellipse(), y, tolerance=EPS)
    state = kernel.init(target, u.unsqueeze(0))
    for _ in range(steps):
        state, _ = kernel.step(target, state, rng)

    def statistics(u):
        x = Ellipse().observed(u)
        return torch.cat([u, u.square(), x.clamp_max(10) * y.clamp_max(10), (x - y).square().clamp_max(4)], -1)

    return statistics(u), statistics(state.position[0])


def drift(kernel):
    before, after = joint(kernel)
    return deviations(after - before, 0.0)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name != "RiemannianHMC")) for name in KERNELS])
def test_transitions_leave_the_joint_law_of_inputs_and_data_as_it_is(name):
    assert_agree(drift(KERNELS[name]))


class WithoutHastings(dgm.kernels.Independence):
    """The mistake: asymmetric proposals are accepted as if they were symmetric."""

    def log_hastings(self, problem, here, there):
        return torch.zeros_like(here.energy)


def test_control_a_missing_hastings_ratio_is_noticed():
    assert drift(WithoutHastings()).abs().max() > 5


def shrink_away(monkeypatch):
    """The mistake: brackets shrink to the side that does not hold the present point."""

    def away(low, high, t):
        return torch.where(t < 0, low, t), torch.where(t < 0, t, high)

    monkeypatch.setattr(slices, "narrowed", away)
    monkeypatch.setattr(slices, "_MOST_SHRINKS", 30)


def test_control_a_slice_that_does_not_shrink_to_the_present_point_is_noticed(monkeypatch):
    shrink_away(monkeypatch)
    assert drift(KERNELS["EllipticalSlice"]).abs().max() > 5


# along a line brackets lie at random around the present point, so that it takes slices of unequal parts to notice


def drift_between_unequal_modes(kernel, n=20_000, narrow=0.1):
    """Of the mean, the square and the share of the narrow mode of an even mixture of ``N(0, narrow^2), N(3, 1)``."""
    rng = torch.Generator().manual_seed(3)
    z = torch.randn(n, 1, generator=rng, dtype=FLOAT)
    start = torch.where(torch.rand(n, 1, generator=rng) < 0.5, narrow * z, 3 + z)

    def energy(x):
        first = -0.5 * (x / narrow).square() - math.log(narrow)
        return -torch.logaddexp(first, -0.5 * (x - 3).square()).squeeze(-1)

    def statistics(x):
        return torch.cat([x, x.square(), (x < 0.5).to(x)], -1)

    target = dgm.Target(energy, 1)
    state = kernel.init(target, start)
    for _ in range(12):
        state, _ = kernel.step(target, state, rng)
    return deviations(statistics(state.position) - statistics(start), 0.0)


def test_slices_along_lines_keep_the_shares_of_unequal_modes(monkeypatch):
    kernel = dgm.kernels.LinearSlice(width=6.0, max_steps=1)
    assert_agree(drift_between_unequal_modes(kernel))
    shrink_away(monkeypatch)
    assert drift_between_unequal_modes(kernel).abs().max() > 5


@pytest.mark.slow
def test_control_a_metric_without_its_volume_is_noticed(monkeypatch):
    monkeypatch.setattr(dgm.Fibre, "_gram_energy", lambda self, jacobian: torch.zeros_like(jacobian.log_det))
    assert drift(KERNELS["RiemannianHMC"]).abs().max() > 5


# ------------------------------------------------------------------------------------------------------------ details


def test_warm_up_brings_a_walk_to_its_own_acceptance_and_the_covariance():
    oracle = correlated_gaussian((0.1, 10.0))
    draws = dgm.sample(
        oracle.problem, dgm.kernels.RandomWalk(), chains=32, warmup=150, draws=40, seed=1, progress=False
    )
    assert (draws.stats["acceptance_rate"].mean((0, 1)) - 0.234).abs().max() < 0.08
    metric: Any = draws.kernel
    assert metric.metric.sd.shape == (2, 3)


def test_slices_of_chains_that_are_done_cost_no_new_points():
    seen = set()

    def energy(x):
        seen.update(row.numpy().tobytes() for row in x.detach().reshape(-1, 3))
        return 2 * x.square().sum(-1)

    kernel = dgm.kernels.LinearSlice(20.0, max_steps=1, metric="identity")
    start = torch.zeros(50, 3)
    draws = dgm.sample(
        dgm.Target(energy, 3), kernel, chains=50, warmup=0, draws=5, seed=1, initial=start, progress=False
    )
    # besides, the start, 32 points around it, 32 far away, 11 for flat directions and one in two types are looked at
    assert len(seen) <= draws.stats["slice_evaluations"].sum() + 78


def test_evaluations_of_slices_are_counted():
    calls = []

    def energy(x):
        calls.append(len(x))
        return 0.5 * x.square().sum(-1)

    target = dgm.Target(energy, 2)
    for kernel in (dgm.kernels.EllipticalSlice(scale=3.0), dgm.kernels.LinearSlice(width=0.5, max_steps=1)):
        rng = torch.Generator().manual_seed(2)
        state = kernel.init(target, torch.zeros(1, 2, dtype=FLOAT))
        calls.clear()
        _, info = kernel.step(target, state, rng)
        assert info.stats["slice_evaluations"].tolist() == [len(calls)]
    # two ends of a bracket are stepped out at once
    state = kernel.init(target, torch.zeros(500, 2, dtype=FLOAT))
    _, narrow = dgm.kernels.LinearSlice(width=0.1, max_steps=50).step(target, state, rng)
    _, wide = dgm.kernels.LinearSlice(width=5.0).step(target, state, rng)
    counts = [info.stats["slice_evaluations"].double().mean() for info in (narrow, wide)]
    assert counts[0] > 3 * counts[1]


def test_a_block_leaves_the_other_coordinates_and_reports_under_its_name():
    class Named(TwoModes):
        @property
        def blocks(self):
            return {"place": Block(0, 1), "noise": Block(1, 2)}

    kernel = dgm.kernels.Alternating(
        dgm.kernels.RandomWalk(1.0), dgm.kernels.EllipticalSlice(), blocks=("noise", (1, 2))
    )
    state = kernel.init(Named(), torch.zeros(9, 2, dtype=FLOAT))
    after, info = kernel.step(Named(), state, torch.Generator().manual_seed(1))
    assert (after.position[:, 0] == 0).all()
    assert (after.position[:, 1] != 0).any()
    assert set(info.stats) == {
        "noise_acceptance_rate", "noise_step_size", "second_acceptance_rate", "second_slice_evaluations", "step_size"
    }  # fmt: skip
    torch.testing.assert_close(after.energy, Named().energy(after.position))


def test_points_that_nothing_accepts_keep_a_slice_where_it_is():
    target = dgm.Target(lambda x: torch.where((x == 0).all(-1), 0.0, math.inf), 2)
    state = Point(torch.zeros(3, 2, dtype=FLOAT), torch.zeros(3, dtype=FLOAT))
    after, info = dgm.kernels.LinearSlice().step(target, state, torch.Generator().manual_seed(1))
    assert torch.equal(after.position, state.position)
    assert (info.acceptance_rate == 0).all()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: dgm.kernels.RandomWalk(target_acceptance=1.0), "target_acceptance=1.0"),
        (lambda: dgm.kernels.LinearSlice(width=None), "width=None"),  # type: ignore[arg-type]
        (lambda: dgm.kernels.LinearSlice(max_steps=0), "max_steps=0"),
        (lambda: dgm.kernels.EllipticalSlice(scale=-1.0), "scale=-1"),
        (lambda: dgm.kernels.Independence(2.0), "proposal=2.0"),  # type: ignore[arg-type]
        (lambda: dgm.kernels.Independence().check(Coin()), "does not know its prior"),
        (lambda: dgm.kernels.Independence(WIDE).check(Cube()), "of 2 coordinates"),
        (lambda: dgm.kernels.Alternating(dgm.kernels.RandomWalk), "first="),  # type: ignore[arg-type]
        (lambda: dgm.kernels.Alternating(blocks=("noise", "target")).check(Coin()), "'noise'"),
        (lambda: dgm.kernels.Alternating(blocks=((0, 1), (1, 3))).check(Coin()), r"\(1, 3\)"),
        (
            lambda: dgm.kernels.Alternating(dgm.kernels.RandomWalk(), dgm.kernels.RandomWalk()).check(Coin()),
            "one step size",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, named):
    with pytest.raises(ArgumentError, match=named):
        make()
