"""The bound of a learned Hamiltonian flow: valid, tighter than that of its base, and exactly weighted."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence import lower_bounds
from dgm_infer.evidence.path import AnnealedPath
from tests.known_evidence import known_bimodal
from tests.oracles import FLOAT


def bent(problems=()):
    """A banana of known log evidence in four dimensions, not normal in two of them."""

    def energy(x):
        a, b, rest = x[..., 0], x[..., 1], x[..., 2:]
        return 0.5 * a.square() + 2 * (b - 0.7 * a.square()).square() + 0.5 * rest.square().sum(-1)

    log_z = 2 * math.log(2 * math.pi) - math.log(2)
    return dgm.Target(energy, 4, problems), log_z


@pytest.fixture(scope="module")
def fitted():
    target, log_z = bent((2,))
    return target, log_z, dgm.Gaussian.fit(target, start=dgm.Gaussian.standard(target, FLOAT), steps=500)


def run(fitted, method, chains=32, seed=1):
    target, _, base = fitted
    return dgm.log_evidence(target, base, method, chains=chains, seed=seed, progress=False)


def test_it_is_tighter_than_the_bound_of_its_base_and_never_above_log_z(fitted):
    _, log_z, _ = fitted
    plain, flown = run(fitted, dgm.Elbo(samples=1000)), run(fitted, dgm.evidence.HamiltonianElbo(samples=1000))
    assert flown.status == "lower"
    assert (flown.log_z < log_z + 5 * flown.std_error).all()
    assert (flown.log_z - plain.log_z > 5 * (flown.std_error.square() + plain.std_error.square()).sqrt()).all()


def test_control_a_flow_that_forgets_its_momentum_is_above_log_z(fitted, monkeypatch):
    fly = lower_bounds._fly

    def without(path, flow, v, noise, evaluate):
        # as if what the momentum gained were the target's
        end = fly(path, flow, v, noise, evaluate)
        return end._replace(log_weights=end.log_weights + 0.5 * noise.square().sum(-1))

    monkeypatch.setattr(lower_bounds, "_fly", without)
    flown = run(fitted, dgm.evidence.HamiltonianElbo(fit_steps=40))
    assert (flown.log_z > fitted[1] + 5 * flown.std_error).any()


def moving(path, n_steps=3):
    """A flow that nobody learned, which moves its draws."""
    mean = path.base.mean
    log_step = torch.linspace(-2.2, -1.6, n_steps, dtype=FLOAT).reshape(-1, *[1] * mean.ndim).expand(-1, *mean.shape)
    beta = torch.full_like(mean[..., 0], 0.3)
    return lower_bounds._Flow(log_step, 0.1 + 0 * mean, 0.2 + 0 * mean, beta, n_steps)


def test_weights_of_the_ends_are_those_of_the_target():
    target, log_z = bent((2,))
    base = dgm.Gaussian(torch.zeros(2, 4, dtype=FLOAT), torch.tensor([1.3, 1.5, 1.2, 1.2], dtype=FLOAT).expand(2, 4))
    path = AnnealedPath(target, base)
    rng = torch.Generator().manual_seed(0)
    flow = moving(path)
    v, noise = path.draws(50000, rng), path.normal(50000, rng)
    end = lower_bounds._fly(path, flow, v, noise, lower_bounds._evaluated)
    assert (end.v - v).abs().mean() > 0.3
    weights = (end.log_weights - log_z).exp()

    def standard_errors_off(values, truth):
        return ((values.mean(0) - truth) / (values.std(0) / 50000**0.5)).abs()

    assert standard_errors_off(weights, 1.0).max() <= 5
    x = base.unwhiten(end.v)
    assert standard_errors_off(weights * x[..., 0].square(), 1.0).max() <= 5
    assert standard_errors_off(weights * x[..., 1], 0.7).max() <= 5
    # without the volume of the widened start
    wrong = weights * (-flow.log_widen.sum(-1)).exp()
    assert standard_errors_off(wrong, 1.0).min() > 5


def test_a_flow_that_stays_is_the_plain_bound():
    known = known_bimodal()
    path = AnnealedPath(known.target, known.base)
    rng = torch.Generator().manual_seed(0)
    v, noise = path.draws(50, rng), path.normal(50, rng)
    still = lower_bounds._Flow.still(known.base.mean, 3)._replace(log_step=torch.full((3, 2), -math.inf, dtype=FLOAT))
    end = lower_bounds._fly(path, still, v, noise, lower_bounds._evaluated)
    torch.testing.assert_close(end.log_weights, -path.differences(v))


def test_learning_costs_what_it_says_and_the_flow_is_learned_per_problem():
    sds = torch.tensor([0.3, 1.0], dtype=FLOAT)
    target = dgm.Target(lambda x: 0.5 * (x / sds.unsqueeze(-1)).square().sum(-1), 2, (2,))
    method = dgm.evidence.HamiltonianElbo(n_steps=3, fit_steps=60, fit_samples=8, samples=10)
    estimate = dgm.log_evidence(
        target, dgm.Gaussian(torch.zeros(2, 2, dtype=FLOAT), 1.0), method, chains=4, seed=0, progress=False
    )
    assert estimate.diagnostics["pilot_evaluations"] == 60 * 8 * 2 * 4 // 4
    assert estimate.diagnostics["gradient_evaluations"] == 60 * 8 * 2 + 10 * 4
    plain = dgm.log_evidence(
        target, dgm.Gaussian(torch.zeros(2, 2, dtype=FLOAT), 1.0), dgm.Elbo(), seed=0, progress=False
    )
    log_z = 2 * sds.log() + math.log(2 * math.pi)
    gap, before = log_z - estimate.log_z, log_z - plain.log_z
    assert gap[0] < 0.2 * before[0]
    # there is nothing to gain where the base is the target
    assert abs(gap[1]) < 0.1


def test_an_energy_without_second_derivatives_is_refused():
    class Slope(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError("the derivative of slope is not implemented")

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 0.5 * x.square().sum(-1)

        @staticmethod
        def backward(ctx, grad):
            return grad.unsqueeze(-1) * Slope.apply(ctx.saved_tensors[0])

    target, base = dgm.Target(Square.apply, 2), dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 1.5)
    with pytest.raises(dgm.errors.EvidenceError, match="no second derivatives"):
        dgm.log_evidence(target, base, dgm.evidence.HamiltonianElbo(), progress=False)
    # which the other methods do not need
    assert dgm.log_evidence(target, base, dgm.Elbo(), seed=0, progress=False).log_z < math.log(2 * math.pi) + 0.1
