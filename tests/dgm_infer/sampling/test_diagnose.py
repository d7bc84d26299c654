"""Draws say what is wrong with them, how bad it is and what to do; those that are fine say that nothing is."""

import math
import re
import warnings
from typing import Any

import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.kernels.hmc import TRAJECTORY
from tests.dgm_infer.sampling.short_runs import fibre
from tests.oracles import FLOAT, linear_gaussian_model
from tests.quick import some

CHAINS, DRAWS = 4, 500
QUIET = ("diverging", "projection_failed", "reversal_failed")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def held(x: torch.Tensor, kernel: Any = None, ancestors=None, interrupted=False, **stats) -> dgm.Draws:
    """Draws ``[chains, draws, *batch, D]`` of a latent z, by a kernel of trajectories, with good statistics."""
    shape = x.shape[:-1]
    fine = {name: torch.zeros(shape, dtype=torch.bool) for name in QUIET}
    fine |= {"acceptance_rate": torch.ones(shape, dtype=FLOAT), "n_steps": torch.full(shape, 5)}
    fine |= {"energy": normal(*shape, seed=9), "constraint_error": torch.zeros(shape, dtype=FLOAT)}
    return dgm.Draws(
        inputs=None,
        latents={"z": x},
        stats=fine | stats,
        kernel=kernel or dgm.ConstrainedHMC(step_size=0.3, n_steps=5),
        seed=0,
        ancestors=ancestors,
        interrupted=interrupted,
    )


def failing(share: float, shape=(CHAINS, DRAWS)) -> torch.Tensor:
    """True at this share of the draws, evenly spaced."""
    index = torch.arange(shape[0] * shape[1]).reshape(shape)
    return ((index + 1) * share).floor() > (index * share).floor()


def autoregressive(rate: float, *shape: int, seed: int = 0) -> torch.Tensor:
    """Chains of unit variance with that correlation between neighbouring draws."""
    lag = torch.arange(shape[1])[:, None] - torch.arange(shape[1])
    weights = (torch.tensor(rate, dtype=FLOAT) ** lag.clamp_min(0)).tril()
    weights[:, 1:] *= (1 - rate**2) ** 0.5
    return torch.einsum("ij,cj...->ci...", weights, normal(*shape, seed=seed))


# ------------------------------------------------------------------------------------------------------------- nothing


def test_independent_draws_have_nothing_wrong():
    found = held(normal(CHAINS, DRAWS, 3, 5)).diagnose()
    assert not found
    assert str(found).startswith("nothing is wrong: R-hat at most 1.0")
    for words in (" (bulk) and ", " (tail), ", "0 % of 6000 transitions diverged", "constraint error at most 0"):
        assert words in str(found)


@pytest.mark.parametrize("rate", some([0.5, -0.5], quick=[0.5]))
def test_false_alarms_are_rare(rate):
    """Of 60 runs of 20 latents, at most 3 for chains that mix well; R-hat > 1.01 alone would alarm in more of them."""
    alarms = [held(autoregressive(rate, 8, 300, 20, seed=seed)).diagnose() for seed in range(60)]
    assert sum(map(bool, alarms)) <= 3


def test_control_the_limit_of_r_hat_alone_raises_false_alarms():
    largest = []
    for seed in range(20):
        x = autoregressive(0.5, 8, 300, 20, seed=seed)
        largest.append(held(x).summary()["r_hat"].max())
    assert sum(value > 1.01 for value in largest) > 10


# --------------------------------------------------------------------------------------------------------------- mixing


def test_chains_that_have_not_mixed_are_named_with_their_worst_latent():
    x = autoregressive(0.9, CHAINS, DRAWS, 2, 3)
    # of one latent of the second problem the chains have their own means
    x[..., 1, 2] += torch.tensor([-1.0, -0.5, 0.5, 1.0])[:, None]
    (first, *others) = held(x).diagnose()
    assert first.severity == "misleading"
    assert "for z[2] of problem 1" in first.what
    assert "above 1.05 for 1 of 6 (latent, problem) pairs of problem 1" in first.what
    assert "(warmup=, draws=)" in first.remedy
    assert first.problems == (1,)
    assert all("R-hat" not in each.what or "1.01" in each.what for each in others)


def test_chains_that_stand_still_apart_have_no_finite_r_hat():
    x = torch.arange(CHAINS, dtype=FLOAT).reshape(CHAINS, 1, 1).expand(CHAINS, 20, 1).clone()
    assert any("R-hat is inf for z[0]" in each.what for each in held(x).diagnose())


@pytest.mark.parametrize("draws", [20, 100, 333, DRAWS])
def test_chains_that_stand_still_have_no_r_hat_of_sixteen_digits(draws):
    still = held(normal(CHAINS, 1, 2).expand(CHAINS, draws, 2).clone())
    assert (still.summary()["r_hat"].to_numpy() == math.inf).all()
    found = still.diagnose()
    assert "R-hat at most inf" in found.numbers
    assert not re.search(r"\d{9}", f"{found} {found.numbers}")
    # the control: chains that move, each about a point of its own
    moving = held(normal(CHAINS, 1, 2) + 1e-3 * normal(CHAINS, draws, 2, seed=1))
    assert moving.summary()["r_hat"].between(1.5, 10).all()


def test_a_latent_that_the_observation_determines_is_no_fault():
    x = normal(CHAINS, DRAWS, 2)
    x[..., 1] = 3.0
    assert not held(x).diagnose()
    # but NaN is
    x[0, 0, 1] = torch.nan
    (found,) = held(x).diagnose()
    assert found.severity == "useless"
    assert found.what == "latents are NaN or infinite in 0.05 % of the draws"


def test_differences_between_chains_beyond_chance_are_named():
    shift = torch.tensor([-0.2, -0.1, 0.1, 0.2])[:, None, None]
    (found,) = held(normal(CHAINS, DRAWS, 1) + shift).diagnose()
    assert found.severity == "imprecise"
    assert "above 1.01 for 1 of 1 latents" in found.what


def test_few_effective_draws_are_named_with_how_many_are_missing():
    bulk, tail = held(autoregressive(0.9, CHAINS, DRAWS, 1)).diagnose()
    for found, kind in ((bulk, "bulk"), (tail, "tail")):
        assert found.severity == "imprecise"
        assert f"effective draws ({kind}) for z[0], and fewer than 400 for 1 of 1 latents" in found.what
        assert "times as many (draws=, chains=)" in found.remedy


def test_one_chain_or_two_draws_have_no_r_hat():
    (found,) = held(normal(1, 1000, 1)).diagnose()
    assert found.what == "there is one chain, and no R-hat"
    (found,) = held(normal(CHAINS, 2, 1)).diagnose()
    assert found.what == "2 draws per chain"


def test_groups_of_chains_are_named_once():
    x = normal(CHAINS, DRAWS, 2, 1)
    x[:2, :, 1] += 20
    (found,) = held(x).diagnose()
    assert found.severity == "misleading"
    assert found.what == "chains of problem 1 form 2 groups that never overlap (2 and 2 chains)"
    assert "draws.chain_groups" in found.remedy


def test_what_an_observation_determines_is_not_judged_by_the_rounding_of_solvers():
    x = normal(CHAINS, DRAWS, 2)
    # chains that differ, by less than a solver's tolerance
    shift = torch.arange(CHAINS, dtype=FLOAT).view(-1, 1) * 1e-9
    x[..., 1] = 0.2 + shift + 1e-11 * x[..., 1]
    fibre = dgm.condition(generators.from_module(torch.nn.Linear(3, 2).eval(), latent=3), torch.zeros(2))
    draws = held(x)
    assert draws.diagnose()
    assert not held_on(fibre, x).diagnose()
    # the control: of their own scale
    x[..., 1] -= 0.2
    assert held_on(fibre, x).diagnose()


def held_on(problem, x):
    draws = held(x)
    draws.problem = problem
    return draws


# ---------------------------------------------------------------------------------------------------------- transitions


@pytest.mark.parametrize(
    ("name", "share", "severity", "words"),
    [
        ("diverging", 0.01, "misleading", "20 transitions of 2000 diverged (1 %)"),
        ("projection_failed", 0.2, "imprecise", "projections fail in 20 % of the transitions"),
        ("reversal_failed", 0.2, "imprecise", "reversals fail in 20 % of the transitions"),
    ],
)
def test_failures_are_named_from_a_share_on(name, share, severity, words):
    x = normal(CHAINS, DRAWS, 1)
    (found,) = held(x, **{name: failing(share)}).diagnose()
    assert (found.severity, found.what) == (severity, words)
    assert "smaller steps" in found.remedy
    assert ("n_geodesic=" in found.remedy) == (name != "diverging")
    assert not held(x, **{name: failing(share / 20)}).diagnose()


@pytest.mark.parametrize(
    ("reached", "smaller"),
    [(0.9, "target_acceptance=0.95"), (0.95, "target_acceptance=0.99"), (0.995, "step_size=")],
)
def test_steps_are_to_be_smaller_than_those_of_the_run(reached, smaller):
    x = normal(CHAINS, DRAWS, 1)
    rate = torch.where(failing(0.01), 0.0, reached).double()
    (found,) = held(x, diverging=failing(0.01), acceptance_rate=rate).diagnose()
    assert f"use smaller steps ({smaller})" in found.remedy


def test_trajectories_whose_energy_errs_by_twenty_nats_have_diverged():
    x, rate = normal(CHAINS, DRAWS, 1), torch.where(failing(0.01), 1e-9, 0.9).double()
    (found,) = held(x, acceptance_rate=rate).diagnose()
    assert found.severity == "misleading"
    assert found.what.startswith("20 transitions of 2000 diverged (1 %)")
    # controls: rejections as they come, and others where projections fail, which are rejected too
    assert not held(x, acceptance_rate=rate.clamp_min(1e-8)).diagnose()
    assert not held(x, acceptance_rate=rate, projection_failed=failing(0.01)).diagnose()


def test_zero_density_at_proposals_of_a_random_walk_is_no_fault():
    draws = held(normal(CHAINS, DRAWS, 1), kernel=dgm.kernels.RandomWalk(step_size=0.3), diverging=failing(0.3))
    del draws.stats["n_steps"]
    assert not draws.diagnose()


def test_trajectories_that_leave_a_kernel_of_bounded_width_are_rejections():
    class Slanted(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(2)

        def observed(self, u):
            return u[..., :1] + 0.5 * u[..., 1:]

    model = Slanted()
    problem = dgm.condition(model, [1.5], tolerance=0.4, kernel="epanechnikov")
    draws = dgm.sample(problem, dgm.HMC(), chains=16, warmup=100, draws=300, seed=1, progress=False)
    assert draws.stats["diverging"].double().mean() > 0.02
    assert "diverged" not in str(draws.diagnose())
    # the sum is normal with variance 1.25, times the kernel
    x = torch.linspace(1.1, 1.9, 20001, dtype=FLOAT)
    weights = (-x.square() / 2.5).exp() * (1 - ((x - 1.5) / 0.4).square())
    mean = (weights * x).sum() / weights.sum()
    found = model.observed(draws.inputs)[..., 0]
    assert abs(found.mean() - mean) < 4 * found.std() / 40
    # the control: draws without their problem
    draws.problem = None
    assert "diverged" in str(draws.diagnose())


def test_energies_that_change_slowly_are_named():
    slow = autoregressive(0.97, CHAINS, DRAWS)
    (found,) = held(normal(CHAINS, DRAWS, 1), energy=slow).diagnose()
    assert found.what.startswith("E-BFMI is 0.0")
    assert not held(normal(CHAINS, DRAWS, 1), energy=autoregressive(0.5, CHAINS, DRAWS)).diagnose()


def test_chains_of_few_ancestors_are_named():
    x = normal(8, DRAWS, 2, 1)
    ancestors = torch.arange(8).unsqueeze(-1).expand(8, 2).clone()
    assert not held(x, ancestors=ancestors).diagnose()
    ancestors[:, 1] = 3
    (found,) = held(x, ancestors=ancestors).diagnose()
    assert found.what == "the 8 chains of problem 1 descend from 1 starting point"
    assert found.problems == (1,)


def test_an_interrupted_run_is_named():
    (found,) = held(normal(CHAINS, DRAWS, 1), interrupted=True).diagnose()
    assert found.what == f"the run was interrupted after {DRAWS} draws per chain"


# ---------------------------------------------------------------------------------- what a run says, from its file too


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (dgm.HMC(step_size=1e4, n_steps=3), f"{CHAINS} of {CHAINS} chains never moved: in 100 %"),
        (
            dgm.HMC(step_size=1e-3, trajectory_length=1.5),
            f"trajectories are at their longest, {TRAJECTORY.most_steps} steps",
        ),
    ],
    ids=["stuck", "short steps"],
)
def test_what_a_run_warns_of_is_found_again_in_its_file(kernel, words, tmp_path):
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    settings: dict[str, Any] = {
        "chains": CHAINS,
        "warmup": 0,
        "draws": 50,
        "seed": 1,
        "initial": normal(CHAINS, 2),
        "progress": False,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws = dgm.sample(target, kernel, **settings)
    (line,) = [str(warning.message) for warning in caught if words in str(warning.message)]
    draws.save(tmp_path / "draws.nc")
    for each in (draws, dgm.Draws.load(tmp_path / "draws.nc"), dgm.Draws.load(tmp_path / "draws.nc", target)):
        assert line.removeprefix("sample(): ") in [found.line for found in each.diagnose()]


def test_a_run_warns_of_nothing_that_only_its_diagnosis_names():
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draws = dgm.sample(target, chains=1, warmup=20, draws=60, seed=1, progress=False)
    assert draws.diagnose()


def test_draws_off_the_fibre_are_named():
    problem = fibre(())
    kernel = dgm.ConstrainedHMC(step_size=0.3, n_steps=2, n_geodesic=1)
    start = problem.start(CHAINS, torch.Generator().manual_seed(3))
    draws = dgm.sample(problem, kernel, chains=CHAINS, warmup=0, draws=5, seed=1, initial=start, progress=False)
    assert not any("miss the observation" in each.what for each in draws.diagnose())
    draws.stats["constraint_error"][0, 1] = 0.55
    found = draws.diagnose()[0]
    assert found.severity == "useless"
    assert found.what.startswith("draws miss the observation by 0.55, more than the tolerance")


@pytest.mark.parametrize("keep", ["inputs", "latents"])
def test_a_posterior_that_is_sampled_well_has_nothing_wrong(keep):
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 3, (2,))
    draws = dgm.sample(target, chains=CHAINS, warmup=200, draws=DRAWS, seed=1, keep=keep, progress=False)
    assert not draws.diagnose(), draws.diagnose()


# -------------------------------------------------------------------------------------------------------------- misfit


def test_data_that_the_model_does_not_make_are_named_with_their_problem():
    data = torch.tensor([[0.1, 0.2, 0.3, 0.1, 0.2, 0.0], [10.0, -10.0, 10.0, -10.0, 10.0, -10.0]], dtype=FLOAT)
    problem = dgm.condition(linear_gaussian_model(), data)
    draws = dgm.sample(problem, dgm.LiftedHMC(), chains=4, warmup=30, draws=10, seed=1, progress=False)
    found = [finding for finding in draws.diagnose().findings if "miss the data" in str(finding)]
    assert [finding.problems for finding in found] == [(1,)]
    noise = draws.inputs[:, :, 1, problem.marginal.dim :].square().mean().sqrt()
    assert noise > 3
    assert f"by {noise:.2g} standard deviations of the noise of problem 1" in str(found[0])


@pytest.mark.parametrize("through", ["noise=", "WithNoise"])
def test_noise_that_hides_the_model_is_named(through):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 20), torch.nn.Sigmoid()).eval()
    model = generators.from_module(net, latent=2, output_range=(0, 1))
    y = model.generate(n=1, seed=1).images[0]
    found = {}
    for sd in (0.05, 12.75):
        given, noise = (dgm.WithNoise(model, sd), None) if through == "WithNoise" else (model, sd)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            problem = dgm.condition(given, y, noise=noise)
        draws = dgm.sample(problem, chains=4, warmup=20, draws=20, seed=1, progress=False)
        found[sd] = [each.severity for each in draws.diagnose() if "hides the data" in each.what]
        assert any("hides the data" in str(each.message) for each in caught) == (sd > 1)
    assert found == {0.05: [], 12.75: ["misleading"]}


@pytest.mark.parametrize("weight", [1.0, 1e-4])
def test_a_network_that_has_collapsed_is_called_so(weight):
    torch.manual_seed(0)
    layer = torch.nn.Linear(2, 20)
    with torch.no_grad():
        layer.weight.mul_(weight)
        layer.bias.fill_(-1.0)
    net = torch.nn.Sequential(layer, torch.nn.Sigmoid()).eval()
    model = generators.from_module(net, latent=2, output_range=(0, 1))
    found = str(dgm.check(model, torch.rand(20), noise=3.0))
    assert "hides the data" in found
    assert ("collapsed in training" in found) == (weight < 1)


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_a_single_draw_is_too_few(batch):
    (first, *_) = held(normal(CHAINS, 1, *batch, 2)).diagnose()
    assert first.what == "1 draw per chain"
