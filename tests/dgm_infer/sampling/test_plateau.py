"""Warm-up shrinks step sizes as long as acceptance responds to them, and no longer."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import Status
from dgm_infer.kernels import Info
from dgm_infer.kernels.kernel import Tuning
from dgm_infer.sampling.adaptation import AcceptancePlateau
from dgm_infer.sampling.warmup import WarmUp
from dgm_infer.settings import Settings
from tests.kernels import Place

FLOAT = torch.float64
CHAINS, PROBLEMS = 8, 3


def flat(step_size):
    """Four of ten, of any size: what jumps of the density leave."""
    return torch.full_like(step_size, 0.4)


def smooth(step_size):
    """Acceptance 0.8 at a step of 0.01, whose error falls with its square."""
    return torch.special.erfc((step_size / 0.01).square() * 0.179)


def stiff(step_size):
    """Half the chains as above, and half that need steps a hundred times as small to move at all."""
    chain = torch.arange(CHAINS).unsqueeze(-1) < CHAINS // 2
    return torch.where(chain, smooth(step_size), smooth(100 * step_size))


@dataclass(frozen=True, eq=False)
class Curve(Settings):
    """Accepts at random, with mean ``acceptance(step_size)``, and never moves."""

    acceptance: Any
    step_size: Any = None

    def check(self, problem):
        pass

    def tuning(self, problem):
        return Tuning(step_size=True)

    def probe(self, step_size, n_steps):
        # single steps are always accepted: only trajectories meet the jumps
        return self.replace(step_size=step_size, acceptance=lambda step: 0.8 + 0 * step)

    def init(self, problem, position):
        return Place(position, position.sum(-1))

    def step(self, problem, state, rng):
        step_size = torch.as_tensor(self.step_size, dtype=FLOAT).expand_as(state.energy)
        mean = self.acceptance(step_size)
        noise = (torch.rand(mean.shape, generator=rng, dtype=FLOAT) - 0.5) * mean.minimum(1 - mean)
        return state, Info(mean + noise, torch.full(mean.shape, int(Status.OK)), state.energy)


def warmed(acceptance, problems=PROBLEMS, iterations=200, problem=None):
    """The step sizes after warm-up from 0.1, ``[problems]``, and what was said."""
    kernel, rng = Curve(acceptance), torch.Generator().manual_seed(0)
    state = kernel.init(None, torch.zeros(CHAINS, problems, 2, dtype=FLOAT))
    warm = WarmUp(kernel, problem, state, rng, iterations=iterations, target_acceptance=0.8, typical=True)
    warm._chain_step_size = torch.full((CHAINS, problems), 0.1, dtype=FLOAT)
    for _ in range(iterations):
        state, info = warm.kernel.step(None, state, rng)
        warm.update(info, state)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        frozen: Any = warm.frozen()
    return frozen.step_size, [str(warning.message) for warning in said]


def test_steps_stop_shrinking_where_acceptance_does_not_respond():
    step_size, (words,) = warmed(flat)
    # and grow again, up to four times the first ones
    assert ((step_size > 0.1) & (step_size < 0.5)).all()
    assert 0.3 < float(words.split("stays at about ")[1].split(",")[0]) < 0.5
    assert "problems 0, 1 and 2" in words


def test_what_helps_against_jumps_goes_by_the_problem():
    _, (of_a_target,) = warmed(flat, problem=dgm.Target(lambda x: x.square().sum(-1), 2))
    _, (of_a_model,) = warmed(flat)
    assert "where()" in of_a_target
    assert "check(model)" not in of_a_target
    assert "from_module(smooth=10)" in of_a_model
    assert "where()" not in of_a_model


def test_steps_shrink_as_far_as_it_takes_where_acceptance_responds():
    step_size, said = warmed(smooth)
    torch.testing.assert_close(smooth(step_size), torch.full((PROBLEMS,), 0.8, dtype=FLOAT), atol=0.05, rtol=0)
    assert said == []


def test_chains_that_do_not_move_do_not_stop_the_shrinking():
    step_size, said = warmed(stiff)
    # of half the chains nearly all must be accepted, so that some of the others are
    assert (step_size < 0.005).all()
    assert said == []


def half_smooth(step_size):
    """Half of it is lost to jumps, and more by steps above 0.05."""
    return 0.5 * torch.exp(-((step_size / 0.05) ** 2))


def test_steps_grow_again_as_far_as_that_costs_little_acceptance():
    step_size, (words,) = warmed(half_smooth)
    assert "warm-up stopped shrinking" in words
    assert ((step_size > 0.008) & (half_smooth(step_size) > 0.35)).all()


def few_trials():
    """One of six for a dozen trials, as of chains that chance lets move, and smooth from then on."""
    made = 0

    def acceptance(step_size):
        nonlocal made
        made += 1
        return torch.full_like(step_size, 0.16) if made <= 14 else smooth(step_size)

    return acceptance


def test_a_plateau_that_few_trials_have_made_up_is_given_up(monkeypatch):
    step_size, said = warmed(few_trials())
    torch.testing.assert_close(smooth(step_size), torch.full((PROBLEMS,), 0.8, dtype=FLOAT), atol=0.05, rtol=0)
    assert said == []
    # control
    monkeypatch.setattr(AcceptancePlateau, "none", -1.0)
    step_size, said = warmed(few_trials())
    assert (smooth(step_size) < 0.01).all()
    assert len(said) == 1


def test_every_problem_is_judged_by_its_own_chains():
    def both(step_size):
        return torch.stack([flat(step_size[:, 0]), smooth(step_size[:, 1])], -1)

    step_size, (words,) = warmed(both, problems=2)
    assert step_size[0] > 0.02
    assert abs(smooth(step_size)[1] - 0.8) < 0.05
    assert "others" not in words
    assert "problem 0" in words


def test_control_without_the_response_steps_shrink_for_ever(monkeypatch):
    monkeypatch.setattr(AcceptancePlateau, "rise", -1.0)
    step_size, said = warmed(flat)
    assert (step_size < 1e-3).all()
    assert said == []


@pytest.mark.parametrize("slack", [0.0, 0.05])
def test_an_acceptance_near_the_target_is_good_enough(slack):
    _, said = warmed(lambda step: torch.full_like(step, 0.8 - slack))
    assert said == []
