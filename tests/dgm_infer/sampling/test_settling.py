"""A warm-up whose length is not given ends when it has adapted the kernel, and not before."""

import math
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.sampling.plan import LONGEST_WARMUP
from dgm_infer.sampling.warmup import Settling, WarmUp, is_level
from tests.oracles import FLOAT, correlated_gaussian, linear_gaussian

CHAINS = 4


def autoregressive(transitions, correlation=0.5, chains=CHAINS, seed=0, drift=0.0):
    """Energies of stationary chains, to which a drift per transition is added."""
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(transitions, chains, 2, generator=rng, dtype=FLOAT)
    values = [noise[0]]
    for each in noise[1:]:
        values.append(correlation * values[-1] + math.sqrt(1 - correlation**2) * each)
    return [value + drift * i for i, value in enumerate(values)]


def settled(values, energies, accepted=1.0):
    settling = Settling()
    for value, energy in zip(values, energies, strict=True):
        settling.update(value, energy, torch.tensor([1.0, accepted], dtype=FLOAT))
    return settling.reached


def test_energies_of_chains_that_have_settled_are_level_nineteen_times_of_twenty():
    level = sum(is_level(autoregressive(20, seed=seed)) for seed in range(400))
    # three standard errors of a share of 0.95, and what the correlation is not known to
    assert 0.9 * 400 < level < 0.985 * 400


@pytest.mark.parametrize("drift", [0.3, -0.3])
def test_energies_that_rise_or_fall_by_three_standard_deviations_are_not_level(drift):
    assert not any(is_level(autoregressive(20, seed=seed, drift=drift)) for seed in range(50))


def test_energies_that_are_no_numbers_are_not_level():
    assert not is_level([torch.full((CHAINS, 2), torch.nan, dtype=FLOAT)] * 30)


def test_values_that_stay_have_settled_and_values_that_move_have_not():
    energies = autoregressive(60, seed=1)
    still = [torch.ones(1, 2, dtype=FLOAT)] * 60
    assert is_level(energies)
    assert settled(still, energies)
    # by a factor of e in all, on one of two problems: a third of that in the latest third
    moving = [
        torch.stack([torch.ones(1, dtype=FLOAT), torch.tensor([i / 60], dtype=FLOAT).exp()], -1) for i in range(60)
    ]
    assert not settled(moving, energies)
    assert not settled(still[: Settling.fewest - 1], energies[: Settling.fewest - 1])


def test_chains_that_hardly_move_have_not_settled():
    """The energies of such chains are level: of a signal of Student-t increments none moved after its warm-up."""
    energies, still = autoregressive(60, seed=1), [torch.ones(1, 2, dtype=FLOAT)] * 60
    assert settled(still, energies, 0.6)
    for accepted in (0.4, 0.0, math.nan):
        assert not settled(still, energies, accepted)


class Counted(dgm.HMC):
    """HMC that counts its transitions."""

    made = 0

    def step(self, problem: Any, state: Any, rng: torch.Generator):
        Counted.made += 1
        return super().step(problem, state, rng)


def transitions(kernel=None, draws=10, **changes):
    """Transitions of a run on a Gaussian; searching for a first step size takes a few."""
    Counted.made = 0
    problem = correlated_gaussian((0.5, 2.0)).problem
    kernel = Counted(metric="identity") if kernel is None else kernel
    arguments: dict[str, Any] = {"chains": 8, "draws": draws, "seed": 1, "progress": False} | changes
    result = dgm.sample(problem, kernel, **arguments)
    assert result.stats["acceptance_rate"].shape == (8, draws, 2)
    return Counted.made, result


def test_a_warm_up_of_open_length_ends_sooner_with_the_acceptance_on_target():
    made, _ = transitions()
    assert Settling.fewest <= made < LONGEST_WARMUP / 2

    def acceptance(**target):
        """The mean of twelve, of a standard deviation of about 0.03 each; steps are up to the adapted size."""
        runs = [transitions(draws=60, seed=seed, **target)[1] for seed in range(6)]
        return torch.stack([each.stats["acceptance_rate"].mean((0, 1)) for each in runs]).mean()

    assert 0.88 < acceptance() < 0.98
    # the control: another target
    assert acceptance(target_acceptance=0.7) < 0.88
    # and a given length is what is made
    assert transitions(warmup=150)[0] >= 160


def test_a_warm_up_that_adapts_a_metric_takes_all_of_its_windows():
    assert transitions(Counted(metric="dense"))[0] >= LONGEST_WARMUP


def test_a_metric_that_is_known_at_the_start_is_refined_and_then_settles(monkeypatch):
    problem, made = linear_gaussian(problems=(2,)).problem, []
    update = WarmUp.update
    monkeypatch.setattr(WarmUp, "update", lambda self, *given: (made.append(self), update(self, *given)))
    draws = dgm.sample(problem, dgm.LiftedHMC(), chains=8, draws=200, seed=1, progress=False)
    windows = made[-1]._windows
    assert windows is not None
    # the iteration that ends the window counts
    assert windows.last + Settling.fewest - 1 <= len(made) < LONGEST_WARMUP / 2
    assert (draws.stats["acceptance_rate"].mean((0, 1)) - 0.9).abs().max() < 0.1


def test_chains_that_start_far_away_have_come_near_when_it_ends():
    far = torch.full((8, 2, 3), 1000.0, dtype=FLOAT)
    problem = correlated_gaussian((0.5, 2.0)).problem
    _, result = transitions(Counted(n_steps=1), draws=1, initial=far)
    assert result.inputs is not None
    start, end = problem.energy(far).mean(0), problem.energy(result.inputs[:, 0]).mean(0)
    least = problem.energy(torch.tensor([1.0, -2.0, 0.5], dtype=FLOAT).expand(1, 2, 3))[0]
    # of three dimensions: 1.5 nats above the mode on average, with a standard error of 0.43 over eight chains
    assert (start - least).min() > 1e4
    assert (end - least - 1.5).abs().max() < 4 * 0.43


def test_a_stopped_run_with_an_open_warm_up_goes_on_with_the_same_draws(tmp_path, monkeypatch):
    problem = correlated_gaussian((0.5, 2.0)).problem
    arguments: dict[str, Any] = {"chains": 8, "draws": 10, "seed": 1, "progress": False}
    whole = dgm.sample(problem, dgm.HMC(metric="identity"), **arguments)

    class Stop(Exception):
        pass

    step, left = dgm.HMC.step, [30]

    def stopped(self, *inputs):
        left[0] -= 1
        if left[0] < 0:
            raise Stop
        return step(self, *inputs)

    monkeypatch.setattr(dgm.HMC, "step", stopped)
    with pytest.raises(Stop):
        dgm.sample(problem, dgm.HMC(metric="identity"), run=tmp_path / "run", checkpoint_every=1e-9, **arguments)
    monkeypatch.undo()
    resumed = dgm.resume(tmp_path / "run", problem=problem, progress=False)
    assert resumed.inputs is not None
    assert whole.inputs is not None
    assert torch.equal(resumed.inputs, whole.inputs)


def test_a_kernel_that_tunes_nothing_takes_a_warm_up_of_the_longest_length():
    assert transitions(Counted(step_size=0.1, n_steps=2))[0] == LONGEST_WARMUP + 10
