"""The default kernel of a fibre: picked by counted costs, said in one line, and otherwise as if it had been given."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.sampling import pilot
from dgm_infer.sampling import run as run_module
from tests.oracles import FLOAT, Wave, circle, linear_gaussian


def narrow(sd=0.002):
    """One of two inputs' wave is known but for a little noise: a curve, which is thin for the lifted kernel."""
    return dgm.condition(dgm.WithNoise(Wave(), sd), [0.0])


def run(problem, kernel=None, *, seed=1, progress=False, chains=4, warmup=20, draws=5, **more):
    return dgm.sample(problem, kernel, chains=chains, warmup=warmup, draws=draws, seed=seed, progress=progress, **more)


def pick(problem, chains=8, transitions=800):
    return pilot.pick_kernel(problem, chains, transitions=transitions, target_acceptance=0.8, report=lambda text: None)


def test_wide_noise_is_integrated_out():
    assert pick(linear_gaussian().problem).kernel == dgm.LiftedHMC()


@pytest.mark.slow
def test_narrow_noise_on_a_curve_is_not():
    assert pick(narrow()).kernel == dgm.ConstrainedHMC()


def test_the_pilot_of_the_constrained_kernel_is_a_fifth_of_the_run_at_most(monkeypatch):
    steps = {}
    measured, longest = pilot._measured, pilot._longest

    def recorded(kernel, *arguments):
        steps[type(kernel)] = counts = []

        def counted(info):
            counts.append(longest(info))
            return counts[-1]

        monkeypatch.setattr(pilot, "_longest", counted)
        return measured(kernel, *arguments)

    monkeypatch.setattr(pilot, "_measured", recorded)
    fibre, transitions = narrow(), 40
    reason = pick(fibre, transitions=transitions).reason
    assert reason.startswith("LiftedHMC picked")
    assert "would take more than a fifth of the run" in reason
    draws = steps[dgm.LiftedHMC][-pilot._DRAWS :]
    run = transitions * pilot._GRADIENT * sum(draws) / len(draws)
    cost, pilots = pilot._constrained_step(dgm.ConstrainedHMC(), fibre), steps[dgm.ConstrainedHMC]
    # it ends with the transition that goes beyond
    assert cost * sum(pilots[:-1]) <= 0.2 * run < cost * sum(pilots)


@pytest.mark.slow
def test_the_draws_are_those_of_the_picked_kernel():
    fibre = linear_gaussian(problems=(6,)).problem
    default, given = run(fibre), run(fibre, dgm.LiftedHMC())
    assert isinstance(default.kernel, dgm.LiftedHMC)
    assert torch.equal(default.inputs, given.inputs)
    assert default.kernel == given.kernel
    # whatever the seed of the run
    assert isinstance(run(fibre, seed=2).kernel, dgm.LiftedHMC)


def test_no_pilot_runs_where_there_is_nothing_to_pick(monkeypatch):
    def refused(*arguments, **more):
        raise AssertionError("a pilot ran")

    monkeypatch.setattr(run_module, "pick_kernel", refused)
    fibre, start = linear_gaussian().problem, torch.Generator().manual_seed(1)
    run(circle().problem)
    run(fibre, dgm.LiftedHMC())
    assert isinstance(run(fibre, warmup=0).kernel, dgm.ConstrainedHMC)
    assert isinstance(run(fibre, initial=fibre.start(4, start)).kernel, dgm.ConstrainedHMC)
    with pytest.raises(AssertionError, match="a pilot ran"):
        run(fibre)


def test_what_was_picked_and_why_is_said_once(capsys):
    def said(draws):
        run(linear_gaussian().problem, progress=True, draws=draws)
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "picked" in line]
        return line

    assert "effective draw in a pilot, at least" in said(100)
    assert "LiftedHMC picked: a pilot of ConstrainedHMC would take more than a fifth of the run" in said(5)
    run(linear_gaussian().problem)
    assert capsys.readouterr().err == ""


def test_effective_draws_are_counted_from_successive_ones():
    rng = torch.Generator().manual_seed(1)
    x = torch.empty(64, 400, 2, 3, dtype=FLOAT)
    x[:, 0] = torch.randn(64, 2, 3, generator=rng, dtype=FLOAT)
    for i in range(1, 400):
        x[:, i] = 0.8 * x[:, i - 1] + 0.6 * torch.randn(64, 2, 3, generator=rng, dtype=FLOAT)
    assert pilot._effective(x) == pytest.approx(0.2 / 1.8, rel=0.1)
    # draws that do not move, and ones that are independent
    assert pilot._effective(x[:, :1].expand(-1, 30, -1, -1)) <= 1e-5
    assert pilot._effective(torch.randn(64, 99, 2, 3, generator=rng)) == pytest.approx(1, rel=0.1)
