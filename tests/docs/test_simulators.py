"""The examples of docs/simulators.md run, and their posteriors are the exact ones."""

import math
import warnings
from typing import Any

import frankik
import numpy as np
import pytest
import torch

import dgm_infer as dgm
from tests.curves import Curve, Equations, pieces
from tests.docs.pages import examples, few_iterations
from tests.oracles import FLOAT, compare

JOINTS = np.array([0.5, 0.3, -0.4, -1.6, 0.8, 2.2, -0.5])


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names of the page after a run in few iterations."""
    names: dict[str, Any] = {"__name__": "simulators"}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in examples("simulators.md"):
            exec(compile(few_iterations(block), "docs/simulators.md", "exec"), names)
    return names


def columns(z: dict[str, torch.Tensor], names) -> torch.Tensor:
    """Latents side by side, ``[..., D]``."""
    return torch.cat([z[name] if z[name].ndim > 2 else z[name].unsqueeze(-1) for name in names], -1)


def moments(x):
    return np.concatenate([x, x**2], -1) if isinstance(x, np.ndarray) else torch.cat([x, x**2], -1)


def piece_of(curves: list[Curve], points: torch.Tensor) -> torch.Tensor:
    """The index of the piece that each chain ``[chains, draws, D]`` is on, at all its draws."""
    distances = np.stack([curve.distance(points.flatten(0, 1).numpy()) for curve in curves])
    assert distances.min(0).max() < 0.02, "a draw is on none of the curves"
    nearest = torch.from_numpy(distances.argmin(0)).reshape(points.shape[:2])
    assert (nearest == nearest[:, :1]).all(), "a chain has jumped between curves"
    return nearest[:, 0]


def assert_exact_on_each_piece(curves, points, *, at_most=4.0, least_ess=100) -> None:
    own = piece_of(curves, points)
    assert len(own.unique()) == len(curves)
    for i, curve in enumerate(curves):
        z, ess = compare(moments(points[own == i]), torch.from_numpy(curve.mean(moments)))
        assert ess.min() >= least_ess
        assert z.abs().max() <= at_most, f"piece {i}: {z.abs().max():.1f} standard errors off"


# ----------------------------------------------------------------------------------------------------------- the quasar


def lens_equations(page, images: torch.Tensor) -> Equations:
    names, light = list(page["light"]), page["light"]

    def lens(z: np.ndarray) -> dict[str, Any]:
        cx, cy, ratio, angle, radius, along, across = torch.from_numpy(z).unsqueeze(-1).unbind(1)
        return dict(zip(names, ((cx, cy), ratio, angle, radius, (along, across)), strict=True))

    def residual(z):
        at = page["source"](lens(z), *images.T)
        return (at[..., 1:] - at[..., :1]).movedim(0, 1).flatten(1).numpy()

    def log_prob(z):
        parts = zip(light.values(), torch.from_numpy(z).split([2, 1, 1, 1, 2], -1), strict=True)
        return torch.stack([d.log_prob(x).sum(-1) for d, x in parts]).sum(0).numpy()

    low, high = np.full(7, -np.inf), np.full(7, np.inf)
    # inside the bounds as rounded to 32 bits
    low[2], high[2], low[4] = 0.4 + 1e-7, 0.95 - 1e-7, 1e-7
    return Equations(residual, log_prob, low, high, step=0.01)


def images_of(page, lens: dict[str, torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """The four images of a source, by Newton's method from a grid."""

    def misses(x):
        return page["source"](lens, *x) - at

    axis = torch.linspace(-2, 2, 41, dtype=FLOAT)
    x = torch.cartesian_prod(axis, axis)
    for _ in range(50):
        step = torch.linalg.solve(torch.func.vmap(torch.func.jacrev(misses))(x), torch.func.vmap(misses)(x))
        x = x - step * (0.3 / step.norm(dim=-1, keepdim=True)).clamp(max=1)
    x = x[torch.func.vmap(misses)(x).norm(dim=-1) < 1e-12]
    found = [x[0]]
    for point in x:
        if all((point - other).norm() > 1e-4 for other in found):
            found.append(point)
    return torch.stack(found)


def test_four_images_have_one_source(page):
    z = {name: value.flatten(0, 1) for name, value in page["lenses"].latents.items()}
    for i in range(len(z["ratio"])):
        at = page["source"]({name: value[i] for name, value in z.items()}, *page["images"].double().T)
        assert (at - at[:, :1]).abs().max() < 1e-7


@pytest.mark.slow
def test_lenses_are_distributed_as_by_quadrature_along_their_curve(page):
    truth = {"centre": [0.02, -0.03], "ratio": 0.7, "angle": 1.0, "radius": 1.1, "shear": [0.04, -0.03]}
    lens = {name: torch.tensor(value, dtype=FLOAT) for name, value in truth.items()}
    images = images_of(page, lens, torch.tensor([0.05, 0.03], dtype=FLOAT))
    assert images.shape == (4, 2)
    model = dgm.from_simulator(page["differences"], page["light"], images)
    kernel = dgm.ConstrainedHMC(step_size=0.5, n_steps=(2, 5), n_geodesic=2)
    problem = dgm.condition(model, torch.zeros(6))
    draws = dgm.sample(problem, kernel, chains=64, warmup=20, draws=40, seed=1, progress=False)
    points = columns(draws.latents, truth)
    equations = lens_equations(page, images)
    true = np.array([0.02, -0.03, 0.7, 1.0, 1.1, 0.04, -0.03])
    curves = pieces(equations, np.concatenate([true[None], points[:, 0].numpy()]))
    assert_exact_on_each_piece(curves, points, at_most=5)
    # the control
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_exact_on_each_piece([curve.without_gram() for curve in curves], points, at_most=5)


# -------------------------------------------------------------------------------------------------------------- the arm


def pose_equations() -> Equations:
    """The pose of the hand by frankik's forward kinematics, with joints uniform within their limits."""
    wanted = frankik.fk(JOINTS)

    def miss(joints):
        pose = frankik.fk(joints)
        turn = pose[:3, :3] @ wanted[:3, :3].T
        axis = [turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]
        return [*(pose[:3, 3] - wanted[:3, 3]), *axis]

    limits = np.array(frankik.q_min_fr3), np.array(frankik.q_max_fr3)
    return Equations(lambda q: np.array([miss(row) for row in q]), lambda q: np.zeros(len(q)), *limits, step=0.01)


def branches(q7: float) -> np.ndarray:
    """frankik's solutions within the joint limits at a value of the last joint; its inverse takes the flange's pose."""
    turn = math.sqrt(0.5)
    hand = np.array([[turn, turn, 0, 0], [-turn, turn, 0, 0], [0, 0, 1, 0.1034], [0, 0, 0, 1]])
    found = frankik.ik_full(frankik.fk(JOINTS) @ np.linalg.inv(hand), np.zeros(7), q7, is_fr3=True)
    return found[~np.isnan(found).any(1)]


@pytest.fixture(scope="module")
def arm_curves() -> list[Curve]:
    equations = pose_equations()
    starts = [branches(q7) for q7 in np.linspace(equations.low[6], equations.high[6], 402)[1:-1]]
    return pieces(equations, np.concatenate(starts))


def test_the_hand_is_where_frankik_says(page):
    low, high = page["LOW"].double(), page["HIGH"].double()
    assert torch.allclose(low, torch.tensor(frankik.q_min_fr3, dtype=FLOAT), atol=1e-6)
    assert torch.allclose(high, torch.tensor(frankik.q_max_fr3, dtype=FLOAT), atol=1e-6)
    for joints in low + (high - low) * torch.rand(20, 7, generator=torch.Generator().manual_seed(1), dtype=FLOAT):
        turn, place = page["forward"](joints)
        pose = torch.from_numpy(frankik.FrankaKinematics("fr3").forward(joints.numpy()))
        assert torch.allclose(turn, pose[:3, :3], atol=1e-12)
        assert torch.allclose(place, pose[:3, 3], atol=1e-12)


def test_the_arm_has_three_curves_whose_masses_are_those_of_the_branches(arm_curves):
    # dq7 = |n_7| ds for the unit null vector n of J, and |n_7| |J J^T|^(1/2) = |det J without its last column|; both
    # sides count n_7^2, without which the density in q7 has poles where a curve turns back
    assert len(arm_curves) == 3
    equations = pose_equations()

    def last(joints):
        return np.linalg.svd(equations.jacobian(joints))[2][-1, -1]

    width = (equations.high[6] - equations.low[6]) / 2000
    mass = np.zeros(3)
    for q7 in equations.low[6] + width * (np.arange(2000) + 0.5):
        for joints in branches(q7):
            piece = np.argmin([curve.distance(joints[None])[0] for curve in arm_curves])
            mass[piece] += width * last(joints) ** 2 / abs(np.linalg.det(equations.jacobian(joints)[:, :6]))
    along = [curve.weights @ [last(joints) ** 2 for joints in curve.points] for curve in arm_curves]
    np.testing.assert_allclose(along, mass, rtol=5e-3)


@pytest.fixture(scope="module")
def postures(page) -> dgm.Draws:
    # as it stands: compiling takes as long as all of its transitions
    kernel = dgm.ConstrainedHMC(step_size=0.25, n_steps=(3, 6), n_geodesic=1, compile=False)
    with pytest.warns(UserWarning, match="form 3 groups that never overlap"):
        # the control without the Gram term is 3.9 standard errors off after 64 draws, 6 after these
        return dgm.sample(page["reach"], kernel, chains=64, warmup=4, draws=160, seed=1, progress=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found no start of their own")
def test_postures_on_each_curve_are_those_of_quadrature(arm_curves, postures):
    assert_exact_on_each_piece(arm_curves, postures.latents["z"])


@pytest.mark.slow
def test_the_run_says_which_curve_its_chains_are_on(arm_curves, postures):
    own, group = piece_of(arm_curves, postures.latents["z"]), postures.chain_groups
    assert group.amax() == 2
    for i in range(3):
        assert len(own[group == i].unique()) == 1
    assert (group >= 0).double().mean() > 0.5


@pytest.mark.slow
def test_control_without_the_gram_term_postures_are_others(arm_curves, postures):
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_exact_on_each_piece([curve.without_gram() for curve in arm_curves], postures.latents["z"])


# ----------------------------------------------------------------------------------------------------------- equations

PRIOR_MEAN, PRIOR_SD = torch.tensor([0.0, -0.7], dtype=FLOAT), 0.5
STEPS, EVERY, DT, HIDDEN = 12, 4, 0.25, 5
# log rate and log noise
GRID = torch.cartesian_prod(*[m + PRIOR_SD * torch.linspace(-4, 4, 25, dtype=FLOAT) for m in PRIOR_MEAN])


def decay(z):
    x, path = torch.tensor(1.0), []
    for _ in range(STEPS):
        x = x - z["rate"] * x * DT + z["noise"] * math.sqrt(DT) * torch.randn(())
        path.append(x)
    return torch.stack(path)


def paths_of(model, seen, step_size=0.4, **changes):
    y = torch.full((STEPS,), torch.nan)
    y[EVERY - 1 :: EVERY] = torch.tensor(seen)
    kernel = dgm.ConstrainedHMC(step_size=step_size, n_steps=(2, 5), n_geodesic=1)
    settings = {"chains": 256, "warmup": 10, "draws": 20, "seed": 1, "progress": False} | changes
    return dgm.sample(dgm.condition(model, y, observe=dgm.pixels(~y.isnan())), kernel, **settings)


def path_statistics(draws) -> torch.Tensor:
    parameters = torch.stack([draws.latents["rate"], draws.latents["noise"]], -1).log()
    hidden = draws.generate()[..., HIDDEN, None]
    return torch.cat([moments(parameters), parameters.prod(-1, keepdim=True), moments(hidden)], -1)


def expected_statistics(log_likelihood, hidden_mean, hidden_square) -> torch.Tensor:
    """Expectations from values on the grid of parameters, each ``[G]``."""
    weight = torch.softmax(log_likelihood - (GRID - PRIOR_MEAN).square().sum(-1) / (2 * PRIOR_SD**2), 0)
    return weight @ torch.cat([moments(GRID), torch.stack([GRID.prod(-1), hidden_mean, hidden_square], -1)], -1)


def log_normal(x, mean, variance):
    return -0.5 * ((x - mean) ** 2 / variance + variance.log())


def of_decay(seen: list[float], wrong: float = 1.0) -> torch.Tensor:
    """In closed form: ``x_t | x_s ~ N(a^n x_s, v_n)``, and the Kalman smoother between two observations."""
    rate, noise = GRID.exp().unbind(-1)
    a = 1 - rate * DT * wrong

    def variance(n):
        return noise**2 * DT * sum(a ** (2 * k) for k in range(n))

    states, log_likelihood = [1.0, *seen], torch.zeros(len(GRID), dtype=FLOAT)
    for before, after in zip(states, seen, strict=False):
        log_likelihood += log_normal(after, a**EVERY * before, variance(EVERY))
    since = HIDDEN - (EVERY - 1)
    until = EVERY - since
    mean, spread = a**since * seen[0], variance(since)
    gain = spread * a**until / (a ** (2 * until) * spread + variance(until))
    mean = mean + gain * (seen[1] - a**until * mean)
    return expected_statistics(log_likelihood, mean, mean**2 + (1 - gain * a**until) * spread)


def test_paths_of_a_linear_equation_are_those_of_the_kalman_smoother():
    seen = [0.3, -0.5, 0.1]
    model = dgm.from_simulator(
        decay, {"rate": torch.distributions.LogNormal(0.0, 0.5), "noise": torch.distributions.LogNormal(-0.7, 0.5)}
    )
    values = path_statistics(paths_of(model, seen))
    z, ess = compare(values, of_decay(seen))
    assert ess.min() > 300
    assert z.abs().max() <= 5
    # the control: an equation that is a third faster
    assert compare(values, of_decay(seen, wrong=1.33)).z.abs().max() > 5


def test_paths_go_through_what_was_seen(page):
    complete, seen = page["complete"], page["seen"]
    known = ~seen.isnan()
    assert torch.allclose(complete[..., known], seen[known].double().expand(*complete.shape[:2], 3))
    assert (complete[..., ~known].std((0, 1)) > 0).all()
