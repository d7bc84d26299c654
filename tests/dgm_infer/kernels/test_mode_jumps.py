"""Jumps between modes: the proportions of the target, however bad the normal approximations and masses are."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError
from dgm_infer.kernels import Info
from dgm_infer.kernels.metropolis import point_at
from dgm_infer.kernels.mode_jumps import Jumps
from tests.findings import honest
from tests.oracles import FLOAT, compare
from tests.quick import cases, some

WEIGHTS = torch.tensor([[0.7, 0.2], [0.2, 0.8], [0.1, 0.0]], dtype=FLOAT)
CENTRES = torch.tensor([[[-4.0, 0.0], [-4.0, 0.0]], [[4.0, 1.0], [4.0, 1.0]], [[5.5, 1.0], [0.0, 0.0]]], dtype=FLOAT)
SCALES = torch.tensor([[1.0, 1.0], [0.4, 0.4], [0.6, 0.6]], dtype=FLOAT)


class Bananas(dgm.Target):
    """Two problems: three bent modes, of which two overlap, and two that do not; exact draws are at hand."""

    dim, batch_shape = 2, torch.Size([2])

    def energy(self, x):
        v = (x.unsqueeze(-3) - CENTRES) / SCALES.unsqueeze(-1)
        v = torch.stack([v[..., 0], v[..., 1] - 0.7 * (v[..., 0].square() - 1)], -1)
        log_normal = -0.5 * v.square().sum(-1) - 2 * SCALES.log() - math.log(2 * math.pi)
        return -(WEIGHTS.log() + log_normal).logsumexp(-2)

    def exact_draws(self, n, rng):
        k = torch.stack([torch.multinomial(w, n, replacement=True, generator=rng) for w in WEIGHTS.T], -1)
        v = torch.randn(n, 2, 2, generator=rng, dtype=FLOAT)
        v = torch.stack([v[..., 0], v[..., 1] + 0.7 * (v[..., 0].square() - 1)], -1)
        problem = torch.arange(2)
        return CENTRES[k, problem] + SCALES[k, problem].unsqueeze(-1) * v

    def initial_draws(self, n, rng):
        return self.exact_draws(n, rng)


class Still:
    """A kernel that stays where it is."""

    def check(self, problem): ...

    def init(self, problem, position):
        return point_at(problem, position)

    def step(self, problem, state, rng):
        ones = torch.ones_like(state.energy)
        return state, Info(ones, torch.zeros_like(ones, dtype=torch.int8), state.energy)


def poor(**changes: Tensor) -> Jumps:
    """Wrong centres, sheared covariances, and masses that are nearly the reverse of the true ones."""
    factor = torch.tensor([[1.2, 0.0], [0.5, 0.9]], dtype=FLOAT)
    log_weights = torch.tensor([[0.1, 0.5], [0.5, 0.5], [0.4, 0.0]], dtype=FLOAT).log()
    jumps = Jumps(CENTRES + 0.3, SCALES[..., None, None] * factor, log_weights)
    return jumps.replace(**changes)


def statistics(x: Tensor) -> Tensor:
    """``[n, 2, 2] -> [n, 10]``: means, squares and shares of modes, of both problems."""
    shares = torch.stack([x[..., 0] < 0, x[..., 0] > 5], -1).double()
    return torch.cat([x, x.square(), shares[..., :1], shares[..., 1:] * x[..., 1:]], -1).flatten(1)


def standard_errors(jumps, transitions=6, n=160_000) -> Tensor:
    """How far statistics of exact draws are from those of other ones after so many jumps."""
    target, rng = Bananas(), torch.Generator().manual_seed(1)
    kernel = dgm.ModeJumps(Still(), jumps)
    state = kernel.init(target, target.exact_draws(n, rng))
    before = state.position
    for _ in range(transitions):
        state, _ = kernel.step(target, state, rng)
    assert (state.position != before).any(-1).double().mean() > 0.3
    after, fresh = statistics(state.position), statistics(target.exact_draws(n, rng))
    return (after.mean(0) - fresh.mean(0)) / ((after.var(0) + fresh.var(0)) / n).sqrt()


def test_jumps_leave_draws_of_the_target_as_they_are():
    assert standard_errors(poor()).abs().max() < 5


@pytest.mark.parametrize(
    "part",
    some(
        ["responsibilities", "determinants", "choice of the other mode"],
        quick=["determinants", "choice of the other mode"],
    ),
)
def test_control_without_a_term_of_the_acceptance_they_do_not(part):
    jumps = poor()
    roots = (0.5 * jumps.log_weights).exp()

    class Wrong(Jumps):
        def proposed(self, x, rng):
            moved, log_hastings = super().proposed(x, rng)
            here, there = self._known(x), self._known(moved)
            # modes that are far apart: the nearest is the one that was drawn
            i, j = here.log_r.argmax(-1), there.log_r.argmax(-1)
            log_det = self.factors.diagonal(dim1=-2, dim2=-1).log().sum(-1).T
            rests = (roots.sum(0) - roots).log().T
            terms = {
                "determinants": lambda k, log_r: log_det.expand(*k.shape, -1),
                "responsibilities": lambda k, log_r: log_r,
                "choice of the other mode": lambda k, log_r: -(roots.log().T + rests).expand(*k.shape, -1),
            }[part]

            def at(k, log_r):
                return terms(k, log_r).gather(-1, k.unsqueeze(-1)).squeeze(-1).nan_to_num(neginf=0.0)

            return moved, log_hastings - at(j, there.log_r) + at(i, here.log_r)

    # the first is off by 7 errors of so many draws, the others by dozens
    n = 160_000 if part == "responsibilities" else 20_000
    assert standard_errors(Wrong(jumps.centres, jumps.factors, jumps.log_weights), n=n).abs().max() > 5


@pytest.mark.parametrize(("dtype", "nats"), [(torch.float32, 34), (torch.float32, 300), (FLOAT, 80), (FLOAT, 2000)])
def test_masses_that_are_wrong_by_any_factor_leave_the_proportions_as_they_are(dtype, nats):
    def energy(x):
        return -torch.logaddexp(-0.5 * (x - 5).square().sum(-1), -0.5 * (x + 5).square().sum(-1))

    target = dgm.Target(energy, 1)
    centres = torch.tensor([[5.0], [-5.0]], dtype=dtype)
    jumps = Jumps(centres, torch.ones(2, 1, 1, dtype=dtype), torch.tensor([0.0, -nats], dtype=dtype))
    x = torch.cat([centres[:1].expand(2000, 1), centres[1:].expand(2000, 1)])
    rng = torch.Generator().manual_seed(1)
    point = point_at(target, x + torch.randn(x.shape, generator=rng, dtype=dtype))
    for _ in range(10):
        position, log_hastings = jumps.proposed(point.position, rng)
        there = point_at(target, position)
        moved, probability = jumps.decided(point, there, log_hastings, rng)
        assert ((probability >= 0) & (probability <= 1)).all()
        point = there.where(moved, point)
    share = (point.position > 0).double().mean().item()
    assert abs(share - 0.5) < 5 * 0.5 / 4000**0.5


def test_jumps_are_to_other_modes_and_back_by_the_same_map():
    jumps, rng = poor(), torch.Generator().manual_seed(2)
    x = CENTRES[1].expand(200, 2, 2) + 0.1
    there, forward = jumps.proposed(x, rng)
    assert forward.isfinite().all()
    # of the second problem there is one other mode
    back, backward = jumps.proposed(there, rng)
    torch.testing.assert_close(back[:, 1], x[:, 1])
    torch.testing.assert_close(backward[:, 1], -forward[:, 1])
    assert (there[:, 0, 0] < 0).any()
    assert (there[:, 0, 0] > 4.5).any()


def sampled(kernel, **changes) -> Any:
    settings = {"chains": 32, "warmup": 100, "draws": 100, "seed": 1, "progress": False} | changes
    return dgm.sample(Bananas(), kernel, **settings)


KERNELS = {"HMC": dgm.HMC(), "NUTS": dgm.NUTS(n_steps=15), "RandomWalk": dgm.kernels.RandomWalk()}


@pytest.mark.parametrize("kernel", cases(KERNELS, quick=("HMC", "RandomWalk")))
def test_chains_hold_the_modes_in_the_proportions_of_the_target(kernel):
    draws = sampled(dgm.ModeJumps(kernel))
    left = (draws.inputs[..., 0] < 0).double()
    z, ess = compare(left, WEIGHTS[0])
    assert ess.min() > 200
    assert z.abs().max() < 5
    assert (draws.stats["jump_acceptance"].mean((0, 1)) > 0.2).all()
    if isinstance(kernel, dgm.HMC):
        # modes that a first search found are those of another run
        again = sampled(dgm.ModeJumps(kernel, draws.kernel.modes), draws=20)
        assert again.kernel.modes == draws.kernel.modes


@honest
def test_control_without_jumps_no_chain_crosses():
    left = sampled(dgm.HMC()).inputs[..., 0] < 0
    assert (left == left[:, :1]).all()


# of the problem of which one mode is given
@honest
def test_modes_may_be_given_and_a_problem_may_have_one():
    target = Bananas()
    found = dgm.modes(target)
    kernel = dgm.ModeJumps(dgm.HMC(), found)
    assert kernel.modes.counts.tolist() == [3, 2]
    one = kernel.modes.log_weights.clone()
    one[1:, 0] = -torch.inf
    draws = sampled(kernel.replace(modes=kernel.modes.replace(log_weights=one)), draws=100)
    assert (draws.stats["jump_acceptance"][:, :, 0] == 0).all()
    assert (draws.stats["jump_acceptance"][:, :, 1].mean()) > 0.2
    assert "Jumps(2 to 3 modes of 2 coordinates)" in repr(kernel)
    assert len(repr(kernel)) < 400


def test_chains_forget_which_of_two_like_modes_they_are_in():
    """As two jumps of every transition, all of them accepted, would not let them."""
    target = dgm.Target(lambda x: -torch.logaddexp(*(-2 * (x + side).square().sum(-1) for side in (4, -4))), 2)
    draws = dgm.sample(target, dgm.ModeJumps(), chains=8, warmup=50, draws=300, seed=1, progress=False)
    assert draws.stats["jump_acceptance"].mean() > 0.99
    z, ess = compare((draws.inputs[..., :1] > 0).double(), torch.tensor([0.5], dtype=FLOAT))
    assert ess.min() > 1200
    assert z.abs().max() < 5


def test_a_target_without_curvature_at_its_mode_says_so():
    with pytest.raises(dgm.errors.EvidenceError, match="no mode was found"):
        dgm.sample(dgm.Target(lambda x: x.abs().sum(-1), 2), dgm.ModeJumps(), chains=2, draws=2, progress=False)


class Bowls(dgm.Target):
    """Problems of one mode, that can be taken alone, of float32."""

    def __init__(self, batch):
        super().__init__(None, 2, batch)
        self.net = torch.nn.Linear(2, 2).requires_grad_(False)

    def energy(self, x):
        assert x.numel() > 0
        return 0.5 * x.square().sum(-1) + 0.01 * self.net(x).square().sum(-1)

    def take(self, problems):
        return Bowls((len(problems),))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_problems_of_one_mode_each_have_nowhere_to_jump_and_keep_their_type(batch):
    draws: Any = dgm.sample(Bowls(batch), dgm.ModeJumps(), chains=3, warmup=20, draws=10, seed=1, progress=False)
    assert (draws.stats["jump_acceptance"] == 0).all()
    assert draws.inputs.dtype == draws.kernel.modes.centres.dtype == torch.float32
    # modes of more bits than the chains have
    double = draws.kernel.modes.to(torch.zeros(1, dtype=FLOAT))
    again = dgm.sample(Bowls(batch), dgm.ModeJumps(modes=double), chains=3, warmup=5, draws=5, progress=False)
    assert again.inputs.dtype == torch.float32


def test_kernels_of_blocks_jump_too():
    walk = dgm.kernels.Alternating(dgm.kernels.RandomWalk(0.5), dgm.kernels.RandomWalk(), blocks=((0, 1), (1, 2)))
    draws = sampled(dgm.ModeJumps(walk), draws=100)
    assert (draws.stats["jump_acceptance"].mean((0, 1)) > 0.2).all()


class Patchy(dgm.DirectedModel):
    """Noise that is additive at prior draws, and not beyond u1 = -4."""

    structure = "independent"
    output_shape = (1,)

    def __init__(self):
        super().__init__()
        self.global_density, self.local_density = dgm.StandardNormal(1), dgm.StandardNormal(1)

    def global_latents(self, u1):
        return {"z": u1}

    def simulate(self, z, u2):
        return z["z"].square() + 0.1 * torch.where(z["z"] < -4, u2.square(), u2)


@pytest.mark.filterwarnings("ignore:observed values")
@pytest.mark.parametrize("kind", [dgm.LiftedHMC, dgm.ConstrainedHMC], ids=lambda kind: kind.__name__)
def test_a_jump_off_the_fibre_is_none(kind):
    problem = dgm.condition(Patchy(), torch.full((1,), 25.0, dtype=FLOAT))
    centres = torch.tensor([[5.0], [-5.0]], dtype=FLOAT)
    modes = Jumps(centres, torch.full((2, 1, 1), 0.01, dtype=FLOAT), torch.zeros(2, dtype=FLOAT))
    start = problem.marginal.lift(centres[:1].expand(4, 1), torch.Generator())
    kernel = dgm.ModeJumps(kind(step_size=0.01, n_steps=2), modes)
    draws = dgm.sample(problem, kernel, chains=4, initial=start, warmup=0, draws=20, seed=1, progress=False)
    assert (draws.inputs[..., 0] > 0).all()
    assert draws.stats["constraint_error"].max() < 1e-6


def test_what_does_not_fit_is_named():
    found = dgm.modes(Bananas())
    with pytest.raises(
        ArgumentError, match=r"ModeJumps\(Jumps\(2 to 3 modes.* of \(2,\) problems\): .*dgm.modes\(problem\)"
    ):
        dgm.ModeJumps(modes=found).check(dgm.Target(lambda x: x.square().sum(-1), 2))
    with pytest.raises(ArgumentError, match=r"ModeJumps\(kernel=.*HMC.*\): must be a kernel"):
        dgm.ModeJumps(dgm.HMC)
    with pytest.raises(ArgumentError, match=r"ModeJumps\(modes=3\): must be modes, dgm.modes\(problem\), or None"):
        dgm.ModeJumps(modes=3)
    soft = dgm.condition(Bent(), torch.zeros(1, dtype=FLOAT), tolerance=0.1)
    for kernel in (dgm.kernels.RiemannianHMC(), dgm.kernels.LinearSlice(width=1.0, max_steps=1, reflect=True)):
        with pytest.raises(ArgumentError, match=r"its chains can't jump: use HMC"):
            dgm.ModeJumps(kernel).check(soft)
    with pytest.raises(ArgumentError, match=r"ModeJumps\(modes=None\): only sample\(\) finds modes"):
        dgm.ModeJumps().init(Bananas(), torch.zeros(2, 2, 2, dtype=FLOAT))
    uniform = dgm.condition(Bent(), torch.zeros(1, dtype=FLOAT), tolerance=0.1, kernel="uniform")
    with pytest.raises(ArgumentError, match=r"modes are found by gradients, .* or use the kernel alone"):
        dgm.ModeJumps(dgm.kernels.EllipticalSlice()).check(uniform)
    noisy = dgm.condition(dgm.WithNoise(Bent(), 0.1), torch.zeros(1, dtype=FLOAT))
    for kernel, fibre in ((dgm.HMC(), noisy), (dgm.ConstrainedHMC(), dgm.condition(Bent(), noisy.values))):
        with pytest.raises(ArgumentError, match=r"on a Fibre only LiftedHMC and ConstrainedHMC jump, and only where"):
            dgm.ModeJumps(kernel).check(fibre)
    with pytest.raises(ArgumentError, match=r"ModeJumps\(Jumps\(.*1 problems|problem has \(\) problems"):
        dgm.ModeJumps(dgm.LiftedHMC(), found).check(noisy)


class Bent(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return u[..., :1] + u[..., 1:].square()
