"""Energies are probed before a run, without affecting the run's random numbers."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.probe import energy_doubt, energy_fault, probe_points
from tests.oracles import FLOAT


def bowl(x):
    return 0.5 * x.square().sum(-1)


def test_an_energy_of_one_point_is_told_of_the_chains():
    found = energy_fault(dgm.Target(lambda x: (x[0] - 1) ** 2 + (x[1] - x[0] ** 2) ** 2, 2), torch.randn(32, 2))
    assert found is not None
    assert "write x[..., 0] in place of x[0]" in found
    # controls: what fails at one point too, and what is right
    assert "in place of" not in str(energy_fault(dgm.Target(lambda x: 1 / 0, 2), torch.randn(32, 2)))
    assert energy_fault(dgm.Target(bowl, 2), torch.randn(32, 2)) is None


def fault(energy, batch=(), n=32):
    x = torch.randn(n, *batch, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    return energy_fault(dgm.Target(energy, 2, batch), x)


@pytest.mark.parametrize(
    ("energy", "words"),
    [
        (lambda x: 1 / 0, "the energy fails at x of shape (32, 2), torch.float64 on cpu: division by zero"),
        (lambda x: 3.0, "a float"),
        (lambda x: bowl(x).long(), "torch.int64"),
        (lambda x: bowl(x) + 0j, "torch.complex128"),
        (lambda x: x, "of shape (32, 2): expected one real value per point, shape (32,)"),
        (lambda x: bowl(x) + torch.randn(x.shape[:-1]), "differs from call to call"),
        (lambda x: bowl(x).where(torch.rand(x.shape[:-1]) < 0.5, math.inf), "by inf"),
        (lambda x: -bowl(x), "falls without end"),
        (lambda x: x.sum(-1), "falls without end"),
        (lambda x: -x.abs().sum(-1).log1p(), "falls without end"),
        (lambda x: bowl(x) - x[..., 0].exp(), "falls without end"),
    ],
)
def test_every_fault_of_an_energy_is_described(energy, words):
    assert words in fault(energy)


@pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: x.clamp_(-1, 1), lambda x: x[..., 0].zero_()])
def test_an_energy_that_writes_into_its_argument_is_a_fault(write):
    def energy(x, copied=False):
        write(x.clone() if copied else x.data)
        return bowl(x)

    assert "the energy writes into its argument" in fault(energy)
    # what is written once changes nothing the second time: the draws would
    with pytest.raises(dgm.errors.ArgumentError, match=r"sample\(\): the energy writes into its argument"):
        dgm.sample(dgm.Target(energy, 2), dgm.kernels.RandomWalk(0.5), chains=2, draws=2, progress=False)
    # the control
    assert fault(lambda x: energy(x, copied=True)) is None


MIXING = {
    "batch statistics": (lambda x: bowl(x - x.mean(0)), ()),
    "scaled by the batch": (lambda x: bowl(x) / bowl(x).mean(), ()),
    "points before": (lambda x: bowl(x) + 0.1 * x[..., 0].cumsum(0), ()),
    "their number": (lambda x: bowl(x) * (1 + 0.1 * (len(x) > 3)), ()),
    "a branch on all": (lambda x: bowl(x) if x.sum() > 0 else 2 * bowl(x), ()),
    "the largest of all": (lambda x: bowl(x) / (1 + x.abs().max()), ()),
    "other problems": (lambda x: bowl(x) + 0.1 * x[..., 0].sum(-1, keepdim=True) ** 2, (3,)),
    "a dimension from the left": (lambda x: bowl(x - x.mean(1, keepdim=True)), (3,)),
}


@pytest.mark.parametrize(("energy", "batch"), MIXING.values(), ids=MIXING)
def test_an_energy_that_depends_on_the_other_points_is_a_fault(energy, batch):
    assert "changes when the other points of its batch change" in fault(energy, batch)
    target, short = dgm.Target(energy, 2, batch), {"chains": 4, "seed": 0, "progress": False}
    # also where no gradient is used, and where all chains start at one point
    for options in ({}, {"initial": torch.zeros(4, *batch, 2)}):
        with pytest.raises(dgm.errors.ArgumentError, match=r"sample\(\): the energy of a point changes"):
            dgm.sample(target, dgm.kernels.RandomWalk(), warmup=1, draws=1, **options, **short)
    base = dgm.Gaussian(torch.zeros(*batch, 2), 1.0)
    with pytest.raises(dgm.errors.ArgumentError, match=r"log_evidence\(\): the energy of a point changes"):
        dgm.log_evidence(target, base, dgm.AIS(10), **short)


def test_control_energies_of_points_by_themselves_are_taken_in_any_batch():
    for batch in ((), (3,), (2, 2)):
        assert fault(bowl, batch) is None
        assert fault(bowl, batch, n=2) is None


@pytest.mark.parametrize(
    "energy",
    [
        bowl,
        lambda x: bowl(x - 1000),
        lambda x: 1e-6 * bowl(x) - 1e9,
        lambda x: 1.5 * (1 + x.square().sum(-1)).log() * 2,
        # without a density on half the space, or not a number at one point of many
        lambda x: bowl(x).where(x[..., 0] > 0, math.inf),
        lambda x: bowl(x).where(x[..., 0] > -3, math.nan),
        # left to the search for a start, which says more
        lambda x: bowl(x) * math.nan,
        # overflow or an error far away is not a fault
        lambda x: (x.exp() - x).sum(-1) + bowl(x),
        lambda x: torch.distributions.Normal(0.0, 1.0).log_prob(x.clamp(-30, 30)).sum(-1).neg() + bowl(x),
    ],
)
def test_densities_have_no_fault(energy):
    assert fault(energy) is None


def test_an_energy_that_is_often_nan_is_described_though_runs_go_on():
    target = dgm.Target(lambda x: bowl(x).where(x[..., 0] > 0, math.nan), 2)
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    assert energy_fault(target, x) is None
    assert f"NaN at {int((x[:, 0] <= 0).sum())} of 32 points" in (energy_doubt(target, x) or "")
    assert energy_doubt(dgm.Target(lambda x: bowl(x).where(x[..., 0] > x[..., 0].min(), math.nan), 2), x) is None
    assert energy_doubt(dgm.Target(lambda x: bowl(x) * math.nan, 2), x) is None
    with pytest.warns(UserWarning, match="NaN at"):
        draws = dgm.sample(target, chains=8, warmup=5, draws=5, seed=0, progress=False)
    assert (draws.inputs[..., 0] > 0).all()


@pytest.mark.parametrize(
    ("energy", "doubtful"),
    [
        (lambda x: 0 * x.sum(-1), True),
        (lambda x: x.clamp_min(0).square().sum(-1), True),
        (lambda x: 0.5 * (1 + x.square().sum(-1)).log(), True),
        (lambda x: 1 - (-bowl(x)).exp(), True),
        # along one variable, or where a shift of both changes nothing
        (lambda x: 0.5 * x[..., 0].square(), True),
        (lambda x: 0.5 * (1e3 * x[..., 0] - 2 * x[..., 1]).square(), True),
        (lambda x: -x.log_softmax(-1)[..., 0] - 0.3 * x.log_softmax(-1)[..., 1], True),
        # densities with the heaviest of tails
        (lambda x: (1 + x.square()).log().sum(-1), False),
        (lambda x: 1.1 * (1 + x.square().sum(-1)).log(), False),
        (bowl, False),
        # far above where it is least, that it levels off matters little
        (lambda x: bowl(x).clamp_max(1e6), False),
        # a funnel, and a density with an edge
        (lambda x: x[..., 0].square() / 18 + 0.5 * x[..., 0] + 0.5 * x[..., 1].square() * (-x[..., 0]).exp(), False),
        (lambda x: (0 * x.sum(-1)).where(x.abs().amax(-1) < 3, math.inf), False),
        (lambda x: x[..., 0].square().where(x[..., 1].abs() < 3, math.inf), False),
        # narrow beside wide
        (lambda x: 1e12 * (x[..., 0] - x[..., 1]).square() + bowl(x), False),
    ],
)
def test_an_energy_that_levels_off_has_no_integral(energy, doubtful):
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    assert energy_fault(dgm.Target(energy, 2), x) is None
    doubt = energy_doubt(dgm.Target(energy, 2), x)
    assert (doubt is not None and "levels off" in doubt) == doubtful


def test_the_problem_whose_energy_levels_off_is_named():
    rises = torch.tensor([1.0, 0.0])
    target = dgm.Target(lambda x: rises * bowl(x), 2, (2,))
    with pytest.warns(UserWarning, match="the energy of problem 1 levels off"):
        dgm.sample(target, dgm.HMC(0.1, n_steps=1), chains=2, warmup=0, draws=2, seed=0, progress=False)
    base = dgm.Gaussian(torch.zeros(2, 2), 1.0)
    with pytest.warns(UserWarning, match="the energy of problem 1 levels off"):
        dgm.log_evidence(target, base, dgm.Elbo(4), chains=2, seed=0, progress=False)
    with pytest.raises(dgm.errors.EvidenceError, match="the energy of problem 1 levels off"):
        dgm.Gaussian.fit(target, steps=5)


def test_an_error_of_the_project_is_left_as_it_is():
    def energy(x):
        raise dgm.errors.ModelError("the model's own word")

    with pytest.raises(dgm.errors.ModelError, match="own word"):
        fault(energy)


@pytest.mark.parametrize(("batch", "n"), [((), 32), ((100,), 10), ((1000, 1000), 2)])
def test_a_large_batch_is_looked_at_in_fewer_points(batch, n):
    assert probe_points(dgm.Target(bowl, 2, batch)) == n


@pytest.mark.parametrize(
    "run",
    [
        lambda target: dgm.sample(target, chains=3, warmup=5, draws=5, seed=1, progress=False).inputs,
        lambda target: (
            dgm.log_evidence(
                target, dgm.Gaussian(torch.zeros(2), 1.0), dgm.Elbo(10), chains=3, seed=1, progress=False
            ).draws
        ),
        lambda target: dgm.Gaussian.fit(target, steps=5, seed=1).mean,
    ],
    ids=["sample", "log_evidence", "fit"],
)
def test_a_run_draws_the_same_numbers_without_the_look(monkeypatch, run):
    target = dgm.Target(lambda x: bowl(x - 1), 2)
    with_it = run(target)
    state = torch.get_rng_state()
    for module in ("sampling.preflight", "evidence.run", "references.gaussian"):
        for look in ("energy_fault", "energy_doubt"):
            monkeypatch.setattr(f"dgm_infer.{module}.{look}", lambda *arguments, **options: None)
    assert torch.equal(run(target), with_it)
    assert torch.equal(torch.get_rng_state(), state)


FAULTY = {
    "random": (lambda x: bowl(x) + torch.randn(x.shape[:-1]), "differs from call to call"),
    "improper": (lambda x: -bowl(x), "falls without end"),
}


@pytest.mark.parametrize("chains", [1, 4])
@pytest.mark.parametrize(("energy", "words"), FAULTY.values(), ids=FAULTY)
def test_energies_are_looked_at_where_chains_are_told_to_start(energy, words, chains):
    target, kernel = dgm.Target(energy, 2), dgm.HMC(step_size=0.1, n_steps=1)
    with pytest.raises(dgm.errors.ArgumentError, match=words):
        dgm.sample(target, kernel, chains=chains, warmup=0, draws=3, initial=torch.zeros(chains, 2), progress=False)


@pytest.mark.parametrize("chains", [1, 4])
def test_a_density_passes_where_chains_start_at_one_point(chains):
    # warnings are errors
    target, kernel = dgm.Target(lambda x: bowl(1e3 * x), 2), dgm.HMC(step_size=1e-4, n_steps=1)
    dgm.sample(target, kernel, chains=chains, warmup=0, draws=3, initial=torch.zeros(chains, 2), progress=False)


def waves(x):
    """Waves within the first step of differences in 32 bits, and large beside rounding."""
    return 1e4 * (200 * x).sin().sum(-1) + bowl(x)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_an_energy_in_32_bits_that_bends_within_a_step_is_looked_at_closer(share):
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    # a share of the waves without a derivative
    found = energy_fault(dgm.Target(lambda x: (1 - share) * waves(x) + share * waves(x.detach()), 2), x)
    assert (found is None) == (share == 0), found
