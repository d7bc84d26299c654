"""Runs that go on until the posterior is known, or for a time."""

import math
import re
import warnings
from dataclasses import replace

import pytest
import torch

import dgm_infer as dgm
from dgm_infer import progress
from dgm_infer.runs import chains
from dgm_infer.sampling.inference_data import effective_draws
from dgm_infer.sampling.plan import LOOK, Until
from tests.dgm_infer.runs.same import DRAWS, Well, assert_same, quick_run, run


@pytest.mark.parametrize(
    ("until", "said"),
    [
        ({"ess": 60}, "bulk effective draws at least"),
        ({"ess": 30, "r_hat": 1.3, "mcse": {"x": 0.2}}, "R-hat at most .* of 1.3, Monte Carlo error of x .* of 0.2"),
        ({"seconds": 1e-9, "ess": 1e9}, "0 s of 1e-09"),
    ],
)
def test_a_run_goes_on_until_what_is_asked_for(tmp_path, monkeypatch, until, said):
    """And is then the run that was asked for so many draws: resumed, extended and collected."""
    # looked at with every checkpoint, whatever share of the time that takes
    monkeypatch.setattr(chains, "LOOK", replace(LOOK, share=math.inf, growth=1.0))

    def sampled(draws, **options):
        kernel = dgm.HMC(n_steps=3, step_size=0.8)
        return dgm.sample(Well(1.0), kernel, warmup=0, draws=draws, seed=7, progress=False, **options)

    draws = sampled(3000, run=tmp_path / "run", until=until, checkpoint_every=1e-9)
    n = draws.shape[1]
    assert n < 3000
    assert not draws.interrupted
    assert draws.stopped_by is not None
    assert re.search(said, draws.stopped_by)
    if "ess" in until and "seconds" not in until:
        # the latest checkpoint but one had not reached it
        values = draws.latents["x"]
        assert effective_draws(values, "bulk").min() >= until["ess"]
        assert n == 4 or Until(**until).reached(sampled(n - 1), 0.0)[0] is False
    assert_same(draws, sampled(n))
    assert_same(dgm.collect(tmp_path / "run"), draws)
    assert_same(dgm.resume(tmp_path / "run", progress=False), draws)
    assert_same(dgm.extend(tmp_path / "run", 5, progress=False), sampled(n + 5))


@pytest.mark.parametrize("until", [{"ess": 20_000}, {"mcse": {"x": 0.006}}], ids=["ess", "mcse"])
def test_goals_that_take_more_draws_than_a_look_has_can_be_reached(until):
    x = torch.randn(4, 30_000, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert len(x) * LOOK.draws < 20_000
    assert Until(**until).reached(drawn(x), 0.0)[0]
    # controls: a seventh of the draws are too few, and so are as many that are correlated
    assert not Until(**until).reached(drawn(x[:, :4000]), 0.0)[0]
    assert not Until(**until).reached(drawn(x[:, :2000].repeat_interleave(15, 1)), 0.0)[0]


def drawn(x):
    accepted = torch.ones_like(x[..., 0])
    stats = {"acceptance_rate": accepted}
    return dgm.Draws(inputs=None, latents={"x": x}, stats=stats, kernel=dgm.HMC(), seed=0)


def test_a_goal_ends_a_run_between_checkpoints():
    draws = dgm.sample(Well(1.0), warmup=50, draws=10**6, chains=4, seed=7, progress=False, until={"ess": 400})
    assert draws.stopped_by is not None
    assert 50 < draws.shape[1] < 10_000


def test_a_time_ends_a_run_between_checkpoints_and_the_most_draws_are_no_forecast(monkeypatch):
    # a minute is long, and said at once
    monkeypatch.setattr(progress, "SETTINGS", replace(progress.SETTINGS, after=0.0, long=60.0))

    def sampled(draws, **options):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made = dgm.sample(Well(1.0), dgm.HMC(), warmup=5, draws=draws, seed=7, progress=False, **options)
        return made, ["at this rate" in str(each.message) for each in said]

    draws, said = sampled(10**7, until={"seconds": 0.3})
    assert 1 <= draws.shape[1] < 10**6
    assert re.fullmatch(r"until: \d+ s of 0.3", draws.stopped_by or "")
    assert said == []
    # all draws made sooner than that are nothing to warn of
    draws, said = sampled(20, until={"seconds": 600})
    assert (draws.shape[1], draws.stopped_by, said) == (20, None, [])


def test_a_goal_that_the_draws_do_not_reach_is_said(tmp_path):
    with pytest.warns(dgm.diagnosis.DiagnosisWarning, match=r"until= is not reached with 20 draws \(bulk effective"):
        draws = quick_run(run=tmp_path / "run", until={"ess": 1e6})
    assert draws.shape[1] == DRAWS
    assert draws.stopped_by is None


@pytest.mark.parametrize(
    ("until", "line"),
    [
        ({"ESS": 3}, "must be a dict such as"),
        ({}, "must be a dict such as"),
        (400, "must be a dict such as"),
        ({"r_hat": 0.9}, "must be above 1"),
        ({"ess": -1}, "until ess"),
        ({"mcse": {"w": 0.1}}, "there are the latents z"),
    ],
)
def test_a_goal_that_is_none_is_refused_before_the_run(tmp_path, until, line):
    with pytest.raises(dgm.errors.ArgumentError, match=line):
        run(run=tmp_path / "run", until=until)
    with pytest.raises(dgm.errors.ArgumentError, match="looks at all chains together"):
        run(run=tmp_path / "run", until={"ess": 3}, shards=2)
    assert not (tmp_path / "run").exists()
