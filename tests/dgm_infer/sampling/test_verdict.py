"""A run whose draws are of no use says so; one whose draws are fine says nothing."""

import math
import warnings
from functools import partial

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, ModelError, ObservationError
from dgm_infer.kernels.hmc import TRAJECTORY
from dgm_infer.sampling import run
from dgm_infer.sampling.verdict import verdict
from tests.oracles import FLOAT

CHAINS, DRAWS = 3, 50
KERNEL = dgm.ConstrainedHMC(step_size=0.3, n_steps=1, n_geodesic=1)


class Sphere(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(3)
    output_shape = (1,)

    def observed(self, u):
        return u.square().sum(-1, keepdim=True)

    def latents(self, u):
        return {"u": u}


class Spoiled(Sphere):
    """A sphere until its chains have started."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil, self.started = spoil, False

    def observed(self, u):
        x = super().observed(u)
        return self.spoil(x) if self.started else x


class Spoils(dgm.ConstrainedHMC):
    def init(self, problem, position):
        state = super().init(problem, position)
        problem.model.started = True
        return state


def said(problem, kernel, **changes):
    """What a run warns of."""
    on_sphere = torch.tensor([math.sqrt(2), 0, 0], dtype=FLOAT).expand(CHAINS, 3)
    settings = {"chains": CHAINS, "warmup": 0, "draws": DRAWS, "seed": 1, "progress": False, "initial": on_sphere}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dgm.sample(problem, kernel, **settings | changes)
    return [str(warning.message) for warning in caught]


def said_of_spoiled(spoil):
    return said(dgm.condition(Spoiled(spoil), [2.0]), Spoils(step_size=0.3, n_steps=1, n_geodesic=1, max_iterations=5))


def test_a_run_that_is_fine_says_nothing():
    assert said(dgm.condition(Sphere(), [2.0]), KERNEL) == []


def test_a_model_that_turns_nan_is_named():
    stuck, lost = said_of_spoiled(lambda x: x * math.nan)
    assert "3 of 3 chains never moved: in 100 % of their transitions projections fail" in stuck
    assert "outputs are NaN at draws" in lost


@pytest.mark.filterwarnings("default:stopped by")
def test_draws_are_kept_of_a_model_that_fails_for_good():
    def fail(x):
        raise RuntimeError("a fault for good")

    class SpoilsLater(Spoils):
        def step(self, problem, state, rng):
            problem.model.started = (made := len(calls)) >= 3
            calls.append(made)
            return super().step(problem, state, rng)

        def init(self, problem, position):
            return dgm.ConstrainedHMC.init(self, problem, position)

    calls: list[int] = []
    problem = dgm.condition(Spoiled(fail), [2.0])
    lines = said(problem, SpoilsLater(step_size=0.3, n_steps=1, n_geodesic=1))
    assert lines[0] == f"stopped by RuntimeError (a fault for good): 3 of {DRAWS} draws were made and are kept"
    assert lines[1] == "sample(): the draws could not be checked: stopped by RuntimeError (a fault for good)"


def test_an_interrupt_while_draws_are_checked_keeps_them(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "verdict", interrupted)
    start = torch.tensor([math.sqrt(2), 0, 0], dtype=FLOAT).expand(CHAINS, 3)
    with pytest.warns(UserWarning, match="all of them are kept"):
        draws = dgm.sample(
            dgm.condition(Sphere(), [2.0]), KERNEL, chains=CHAINS, warmup=0, draws=5, initial=start, progress=False
        )
    assert draws.interrupted
    assert draws.shape[1] == 5


def test_a_model_that_computes_a_row_from_its_batch_is_named():
    lines = said_of_spoiled(lambda x: x + 1e-3 * len(x))
    assert any("miss the observation" in line and "a row from the other rows of its batch" in line for line in lines)


def test_a_model_that_changes_after_the_start_is_named():
    lines = said_of_spoiled(lambda x: x + torch.rand_like(x))
    assert any("3 of 3 chains never moved" in line for line in lines)
    assert any("or draws random numbers" in line for line in lines)


class Bent(dgm.GenerativeModel):
    """Outputs that are linear on either side of a line, or bend along it sharply or smoothly."""

    input_density = dgm.StandardNormal(2)
    output_shape = (1,)

    def __init__(self, bend):
        super().__init__()
        self.bend = bend

    def observed(self, u):
        return u[..., 1:] - 3 * self.bend(u[..., :1])

    def latents(self, u):
        return {"u": u}


def test_transitions_that_fail_at_jumps_of_the_jacobian_are_named():
    kernel = dgm.ConstrainedHMC(step_size=0.8, n_steps=2, n_geodesic=1, max_iterations=8)
    start = torch.tensor([[0.3, 1.9], [-0.3, 1.9], [0.5, 2.5]], dtype=FLOAT)
    bent = dgm.condition(Bent(torch.abs), [1.0])
    lines = said(bent, kernel, initial=start)
    assert any("the model's Jacobian jumps, by" in line and "softplus" in line for line in lines), lines
    # the control: transitions of a smooth model that fail as often
    smooth = dgm.condition(Bent(lambda x: (x**2 + 1e-4).sqrt()), [1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws = dgm.sample(smooth, kernel, chains=8, warmup=0, draws=60, seed=1, progress=False)
    assert draws.stats["projection_failed"].double().mean() > 0.1
    assert not list(verdict(draws, smooth, torch.zeros(8, dtype=torch.bool), 60, adapted=False))


def test_draws_that_miss_the_observation_are_named():
    fibre = dgm.condition(Sphere(), [2.0])
    draws = dgm.sample(fibre, KERNEL, chains=2, warmup=0, draws=2, seed=1, progress=False)
    draws.stats["constraint_error"][0, 1] = 0.55
    (line,) = map(str, verdict(draws, fibre, torch.zeros(2, dtype=torch.bool), 2, adapted=False))
    assert line.startswith("draws miss the observation by 0.55, more than the tolerance 2e-08")


def test_a_target_whose_proposals_all_fail_is_named():
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    initial = torch.zeros(CHAINS, 2)
    assert said(target, dgm.HMC(step_size=0.5, n_steps=3), initial=initial) == []
    (line,) = said(target, dgm.HMC(step_size=1e4, n_steps=3), initial=initial)
    assert line == (
        "sample(): useless: 3 of 3 chains never moved: in 100 % of their transitions the energy is not finite, or its "
        "error exceeds 1000: use smaller steps (target_acceptance=0.95), or start elsewhere (initial=)"
    )
    # a few transitions may be bad luck
    assert said(target, dgm.HMC(step_size=1e4, n_steps=3), initial=initial, draws=20) == []


SHORT_STEPS = {"HMC": dgm.HMC(step_size=1e-3, trajectory_length=1.5), "NUTS": dgm.NUTS(step_size=1e-3, n_steps=7)}


@pytest.mark.parametrize("kernel", SHORT_STEPS.values(), ids=SHORT_STEPS)
def test_trajectories_at_their_longest_are_named(kernel):
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 1)
    draws = dgm.sample(target, kernel, chains=CHAINS, warmup=0, draws=5, seed=1, initial=torch.ones(CHAINS, 1))
    stayed = torch.zeros(CHAINS, dtype=torch.bool)
    (line,) = map(str, verdict(draws, target, stayed, 50, adapted=False))
    assert line.startswith("trajectories are at their longest")
    assert f" {TRAJECTORY.most_steps if isinstance(kernel, dgm.HMC) else 7} steps, in 100 % of the transitions" in line
    # a few transitions are too few to say
    assert list(verdict(draws, target, stayed, 5, adapted=False)) == []


def test_a_step_that_collapsed_is_named_with_its_problems():
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2, (3,))
    kernel = dgm.HMC(step_size=torch.tensor([0.3, 1e-9, 1e-9]), n_steps=2)
    initial = torch.randn(CHAINS, 3, 2, generator=torch.Generator().manual_seed(0))
    draws = dgm.sample(target, kernel, chains=CHAINS, warmup=0, draws=10, seed=1, initial=initial, progress=False)
    stayed = torch.zeros(CHAINS, 3, dtype=torch.bool)
    (line,) = map(str, verdict(draws, target, stayed, 10, adapted=True))
    assert line.startswith("the step size collapsed to 1e-09 of problems 1 and 2")
    # a step that was asked for is taken
    assert list(verdict(draws, target, stayed, 10, adapted=False)) == []


# ----------------------------------------------------------------------------------------------------- before the run


@pytest.mark.parametrize(
    ("observe", "message"),
    [
        (lambda x: x - 0.3 * x.mean(0, keepdim=True), "changes the values of an output when the others"),
        (lambda x: x * (1 + (x.abs().max() > 40)), "changes the values of an output when the others"),
        (lambda x: x + 1e-3 * torch.randn_like(x), "returns different values for the same output"),
    ],
    ids=["a mean of the batch", "a branch on the batch", "random numbers"],
)
def test_operators_pass_the_same_checks_as_models(observe, message):
    with pytest.raises(ObservationError, match=message):
        dgm.condition(Sphere(), [2.0], observe=observe)


def test_a_model_that_branches_on_its_whole_batch_is_refused():
    class Branches(Sphere):
        def observed(self, u):
            return super().observed(u) * (1.5 if u.abs().max() > 5 else 1.0)

    with pytest.raises(ModelError, match="do not branch on the whole batch"):
        dgm.condition(Branches(), [2.0])


def test_a_model_that_refuses_inputs_far_out_is_not():
    class Refuses(Sphere):
        def observed(self, u):
            assert u.abs().max() < 8
            return super().observed(u)

    assert dgm.condition(Refuses(), [2.0]).dim == 3


# ------------------------------------------------------------------------------------- where no prior draw has been


class Coupled(dgm.DirectedModel):
    """Three values with noise that they share beyond a = 2.5, where a hundredth of the prior is."""

    structure = "independent"
    global_density, local_density, output_shape = dgm.StandardNormal(1), dgm.StandardNormal(3), (3,)

    def __init__(self, bend=0.1, share=0.4):
        super().__init__()
        self.bend, self.share = bend, share

    def global_latents(self, u1):
        return {"a": u1}

    def simulate(self, z, u2):
        noise = u2 + self.bend * u2**3
        return z["a"] + noise + self.share * (z["a"] > 2.5) * noise.roll(1, -1)


FAR, NEAR = torch.tensor([3.0, 3.5, 4.0]), torch.tensor([-0.5, 0.0, 0.5])


@pytest.mark.parametrize("bend", [0.0, 0.1], ids=["normal noise", "other noise"])
def test_a_structure_is_compared_where_the_data_are(bend):
    short = {"chains": 4, "warmup": 5, "draws": 5, "seed": 1, "progress": False}
    with pytest.raises(
        ModelError, match="at the data Coupled declares structure 'independent', but its outputs depend"
    ):
        dgm.sample(dgm.condition(Coupled(bend), FAR + 3), **short)
    # the controls: data where it holds, and a model for which it holds everywhere
    for model, data in ((Coupled(bend), NEAR), (Coupled(bend, share=0.0), FAR + 3)):
        dgm.sample(dgm.condition(model, data), **short)


def test_a_structure_is_compared_where_the_chains_have_gone():
    def points(a):
        """On the fibre if noise is not shared."""
        x = FAR.double() - a
        for _ in range(50):
            x = x - (x + 0.1 * x**3 + a - FAR) / (1 + 0.3 * x**2)
        return torch.cat([torch.tensor([a], dtype=FLOAT), x]).expand(CHAINS, 4)

    fibre = dgm.condition(Coupled(), FAR)
    lines = said(fibre, dgm.ConstrainedHMC(step_size=0.3, n_steps=1), initial=points(2.4))
    assert any("useless: at the data Coupled declares structure 'independent'" in line for line in lines)
    lines = said(
        dgm.condition(Coupled(share=0.0), FAR), dgm.ConstrainedHMC(step_size=0.3, n_steps=1), initial=points(2.4)
    )
    assert not any("declares" in line for line in lines)


def test_evidence_looks_at_the_noise_where_the_data_are():
    short = {"chains": 4, "seed": 1, "progress": False, "coverage": False}
    with pytest.raises(ArgumentError, match="at the data the noise of Coupled is not added, independent and normal"):
        dgm.log_evidence(dgm.condition(Coupled(0.0), FAR + 3), **short)
    dgm.log_evidence(dgm.condition(Coupled(0.0), NEAR), method=dgm.AIS(temperatures=5), **short)


def test_an_energy_that_branches_on_the_batch_far_out_is_named():
    def branching(x, share=2.0):
        energy = 0.5 * (x - 3).square().sum(-1)
        return energy + share if (x > 4.5).any() else energy

    at = torch.full((CHAINS, 1), 3.0, dtype=FLOAT)
    kernel = dgm.HMC(step_size=1.0, n_steps=2)
    # a look at points around the start would find it
    target = dgm.Target(branching, 1)
    target.initial_draws = lambda n, rng: at[:1] + 0.01 * torch.randn(n, 1, generator=rng, dtype=FLOAT)
    lines = said(target, kernel, initial=None, draws=100)
    assert any(
        "useless: the energy of a draw changes when the other draws of its batch change, by 2" in line for line in lines
    )
    control = dgm.Target(lambda x: branching(x, 0.0), 1)
    assert not any("batch" in line for line in said(control, kernel, initial=at, draws=100))


def test_an_energy_without_digits_for_differences_is_named():
    """As with the constant of many data: float32 has a number every 64 at 1e9."""

    def energy(x, constant=1e9):
        return 0.5 * x.square().sum(-1) + constant

    at = torch.randn(CHAINS, 2, generator=torch.Generator().manual_seed(0))
    kernel, short = dgm.HMC(step_size=0.5, n_steps=3), {"seed": 1, "progress": False, "coverage": False}
    words = "energies are so large that their digits are 64 nats apart"
    lines = said(dgm.Target(energy, 2), kernel, initial=at)
    assert any(f"useless: {words}" in line for line in lines)
    base = dgm.Gaussian(torch.zeros(2), torch.ones(2))
    with warnings.catch_warnings():
        # the weights are wrong too
        warnings.simplefilter("ignore")
        estimate = dgm.log_evidence(dgm.Target(energy, 2), base, dgm.AIS(temperatures=5), **short)
    assert any(words in found.what and found.severity == "misleading" for found in estimate.diagnose())
    # the controls: no constant, and enough digits
    for constant, dtype in ((0.0, torch.float32), (1e9, FLOAT)):
        target = dgm.Target(partial(energy, constant=constant), 2)
        assert not any("digits" in line for line in said(target, kernel, initial=at.to(dtype)))
        assert not dgm.log_evidence(target, base.to(dtype), dgm.AIS(temperatures=5), **short).diagnose()
