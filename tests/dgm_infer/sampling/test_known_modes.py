"""A target whose chains may all begin in one of its modes: the default jumps, and other kernels say what they miss."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.sampling import starts
from dgm_infer.sampling.starts import StartSettings
from tests.oracles import compare

OPTIONS = {"warmup": 150, "draws": 400, "seed": 1, "progress": False}
# where nothing is asked of the draws
FEW = OPTIONS | {"warmup": 50, "draws": 60}


def two(x):
    """Half of the mass about 0, half about 8."""
    return -torch.logaddexp(-0.5 * x.square().sum(-1), -0.5 * (x - 8).square().sum(-1))


def one(x):
    return 0.5 * x.square().sum(-1)


def missed(draws):
    return [each.what for each in draws.diagnose() if "no draw is in modes" in each.what]


def test_the_default_jumps_between_modes_and_others_name_those_that_they_miss():
    draws = dgm.sample(dgm.Target(two, 2), **OPTIONS)
    far = (draws.inputs.sum(-1) > 8).double().unsqueeze(-1)
    z, ess = compare(far, torch.tensor([0.5], dtype=torch.float64))
    assert ess > 200
    assert z.abs() < 4
    assert not draws.diagnose()
    with pytest.warns(UserWarning, match=r"no draw is in modes that hold 50 % .*ModeJumps"):
        draws = dgm.sample(dgm.Target(two, 2), dgm.NUTS(), **FEW)
    assert (draws.inputs.sum(-1) < 8).all()
    assert missed(draws)


def test_control_without_the_search_nothing_is_said(monkeypatch):
    monkeypatch.setattr(starts, "_SETTINGS", StartSettings(operations=0))
    draws = dgm.sample(dgm.Target(two, 2), **OPTIONS)
    assert (draws.inputs.sum(-1) < 8).all()
    assert not draws.diagnose()


def test_a_search_leaves_chains_of_one_mode_as_they_are(monkeypatch):
    draws = dgm.sample(dgm.Target(one, 2), **FEW)
    assert draws.modes.counts == 1
    monkeypatch.setattr(starts, "_SETTINGS", StartSettings(operations=0))
    assert torch.equal(draws.inputs, dgm.sample(dgm.Target(one, 2), **FEW).inputs)


@pytest.mark.parametrize(
    "energy",
    [
        # a kink everywhere that it has no second derivative, and nothing below
        lambda x: x.abs().sum(-1),
        # hardly a mode: most of the mass is in a tail
        lambda x: -1e-3 * x.sum(-1) + torch.nn.functional.softplus(x).sum(-1),
    ],
    ids=["kinks", "open"],
)
# steps for a wall of width 1 beside a tail of 1000 are another matter, whose warnings differ by processor
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_has_no_modes_with_curvature_is_sampled_as_before(energy):
    draws = dgm.sample(dgm.Target(energy, 2), **FEW)
    assert draws.modes is None or draws.modes.counts == 1


def spike(share, sd=0.02, dim=5):
    """A narrow normal law of this share inside a standard normal one."""

    def energy(x):
        square, constant = x.square().sum(-1), 0.5 * dim * math.log(2 * math.pi)
        slab = math.log1p(-share) - 0.5 * square - constant
        inside = math.log(share) - 0.5 * square / sd**2 - constant - dim * math.log(sd)
        return -torch.logaddexp(slab, inside)

    return dgm.Target(energy, dim)


def test_a_narrow_mode_within_the_draws_is_named_by_its_mass():
    with pytest.warns(UserWarning, match=r"no draw is in modes that hold (4[5-9]|50) % .* or more.*log_evidence"):
        draws = dgm.sample(spike(0.5), **OPTIONS).inputs.flatten(0, 1)
    # what it says helps does
    base = dgm.Gaussian(draws.mean(0), draws.std(0))
    evidence = dgm.log_evidence(spike(0.5), base, seed=1, progress=False)
    assert abs(evidence.log_z) < 4 * evidence.std_error
    # control: a mode of little mass, though the density there is higher than where the draws are
    target = spike(0.001)
    assert target.energy(torch.zeros(5)) < target.energy(torch.ones(5)) - 5
    assert not dgm.sample(target, **OPTIONS).diagnose()
