"""Control variables of continuous tempering: temperatures, weights of their ends, the extended Hamiltonian."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad

import dgm_infer as dgm
from dgm_infer.evidence.estimators import log_weights_at_ends
from dgm_infer.evidence.plan import Pilot
from dgm_infer.evidence.tempering.temperatures import Plateaus, Sigmoid, Warped, draw_beta
from tests.known_evidence import known_bimodal, known_gaussian
from tests.oracles import FLOAT

PLATEAUS = dgm.ContinuousTempering(plateau=0.2)


@pytest.mark.parametrize("control", [Sigmoid(), Plateaus(0.1), Plateaus(0.4)], ids=["sigmoid", "short", "long"])
def test_a_temperature_has_the_derivative_that_it_says(control):
    t = torch.linspace(-7.3, 7.3, 301, dtype=FLOAT, requires_grad=True)
    at = control.temperature(t)
    (slope,) = torch.autograd.grad(at.beta.sum(), t)
    torch.testing.assert_close(at.slope, slope)
    torch.testing.assert_close(at.beta + at.rest, torch.ones_like(t))
    (force,) = torch.autograd.grad((control.energy(t) + 0 * t).sum(), t)
    torch.testing.assert_close(control.force(t, at), force)
    beta = torch.linspace(0.01, 0.99, 50, dtype=FLOAT)
    torch.testing.assert_close(control.temperature(control.inverse(beta)).beta, beta)


def test_each_plateau_has_its_share_of_the_circle():
    beta = Plateaus(0.15).temperature(torch.arange(-30, 30, 1e-4, dtype=FLOAT)).beta
    assert (beta == 1).double().mean().item() == pytest.approx(0.15, abs=1e-3)
    assert (beta == 0).double().mean().item() == pytest.approx(0.15, abs=1e-3)


@pytest.mark.parametrize("delta", [-1e5, -300.0, -2.0, 0.0, 1e-6, 5.0, 300.0, 1e5])
def test_weights_of_the_ends_are_the_shares_of_the_plateaus_given_x(delta):
    share, low = 0.2, min(delta, 0.0)
    width = min(1.0, 30 / abs(delta) ** 0.5) if delta else 1.0

    def along(r):
        return np.exp(low - delta * (3 * r**2 - 2 * r**3))

    near, far = quad(along, 0, width, epsabs=0)[0], quad(along, 1 - width, 1, epsabs=0)[0]
    ramp = near if delta > 1 else far if delta < -1 else quad(along, 0, 1)[0]
    total = share * (np.exp(low) + np.exp(low - delta)) + (1 - 2 * share) * ramp
    # the nodes are good for 1e-7 up to a Delta of 1e5
    w1, w0 = Plateaus(share).log_ends(torch.tensor(delta, dtype=FLOAT))
    assert w1.item() == pytest.approx(np.log(share) + low - delta - np.log(total), rel=1e-7, abs=1e-7)
    assert w0.item() == pytest.approx(np.log(share) + low - np.log(total), rel=1e-7, abs=1e-7)


@pytest.mark.slow
# trajectories to a U-turn on the harder of the two
@pytest.mark.parametrize(("name", "nuts"), [("normal", None), ("two modes", None), ("two modes", 15)])
def test_the_extended_hamiltonian_finds_the_evidence(name, nuts, monkeypatch):
    known = known_gaussian(10, (3,)) if name == "normal" else known_bimodal((3,))

    def off():
        method = PLATEAUS.replace(nuts=nuts)
        estimate = dgm.log_evidence(known.target, known.base, method, chains=64, seed=2, coverage=False, progress=False)
        return ((estimate.log_z - estimate.bias - known.log_z) / estimate.std_error).abs().max(), estimate

    error, estimate = off()
    assert error <= 4
    assert estimate.std_error.max() < 0.06
    assert (estimate.diagnostics["round_trips"] > 64).all()
    if name == "two modes":
        left = estimate.expectation(lambda x: (x[..., 0] < -0.3).double())
        assert ((left.value - 0.35).abs() <= 5 * left.std_error).all()
    if name == "two modes":
        return
    # control: the weights of temperatures without plateaus, which do not depend on how the states move
    monkeypatch.setattr(Plateaus, "log_ends", lambda self, difference: log_weights_at_ends(difference + self.log_zeta))
    error, _ = off()
    assert error > 5


@pytest.mark.slow
def test_states_on_the_plateau_are_draws_of_the_target_without_weights():
    known = known_gaussian(3)
    chains = []

    class Kept(dgm.ContinuousTempering):
        def _chain(self, *arguments):
            chain = super()._chain(*arguments)
            step = chain.step

            def keep():
                state = step()
                chains.append((state.beta, known.base.unwhiten(state.point.v)))
                return state

            chain.step = keep
            return chain

    method = Kept(draws=600, plateau=0.3)
    estimate = dgm.log_evidence(known.target, known.base, method, chains=128, seed=4, coverage=False, progress=False)
    beta, x = (torch.stack(parts[100:]) for parts in zip(*chains, strict=True))
    cold, hot = x[beta == 1], x[beta == 0]
    mean = estimate.expectation(lambda x: x.square())
    assert len(cold) > 5000
    # autocorrelated: five errors of a tenth of the draws
    error = cold.square().std(0) / (len(cold) / 10) ** 0.5
    assert ((cold.square().mean(0) - mean.value).abs() < 5 * error).all()
    # the control: those of the base are others
    assert ((hot.square().mean(0) - mean.value).abs() > 5 * error).any()


def warped():
    """By a pilot whose differences fall with beta, of three problems."""
    betas = torch.linspace(0, 1, 41, dtype=FLOAT)
    fall = torch.exp(-betas.unsqueeze(-1) * torch.tensor([1.0, 4.0, 9.0], dtype=FLOAT))
    curve = -3 * (1 - fall) + betas.unsqueeze(-1)
    none = torch.zeros(1, 3, dtype=FLOAT)
    pilot = Pilot(None, betas, fall, none, None, curve)
    return Warped(pilot, torch.tensor([0.3, -1.0, 2.0], dtype=FLOAT))


def test_warped_temperatures_have_their_derivatives_and_weights():
    control = warped()
    t = torch.linspace(-6, 6, 600, dtype=FLOAT).reshape(200, 3).requires_grad_()
    at = control.temperature(t)
    (slope,) = torch.autograd.grad(at.beta.sum(), t)
    torch.testing.assert_close(at.slope, slope)
    (force,) = torch.autograd.grad(control.energy(t).sum(), t)
    torch.testing.assert_close(control.force(t, at), force)
    torch.testing.assert_close(
        control.temperature(control.inverse(at.beta.detach())).beta, at.beta.detach(), atol=1e-4, rtol=0
    )
    # the integral over t by a fine grid
    fine = torch.linspace(-30, 30, 400_001, dtype=FLOAT).unsqueeze(-1).expand(-1, 3)
    for delta in (-8.0, 0.0, 5.0):
        given = torch.full((1, 3), delta, dtype=FLOAT)
        log_sum = (-control.temperature(fine).beta * delta - control.energy(fine)).exp().sum(0).mul(60 / 400_000).log()
        w1, w0 = control.log_ends(given - control.log_zeta)
        torch.testing.assert_close(w0[0], -log_sum, atol=1e-6, rtol=0)
        torch.testing.assert_close(w1, w0 - delta)


def test_draws_given_x_are_those_of_the_control_variable():
    control, n = warped(), 100_000
    delta = torch.tensor([-4.0, 0.5, 7.0], dtype=FLOAT)
    rung = control.draw((delta - control.log_zeta).expand(n, 3), torch.Generator().manual_seed(3))
    fine = torch.linspace(-20, 20, 200_001, dtype=FLOAT).unsqueeze(-1).expand(-1, 3)
    beta = control.temperature(fine).beta
    weight = (-beta * delta - control.energy(fine)).softmax(0)
    for power in (1, 2):
        exact = (weight * beta**power).sum(0)
        error = rung.beta.pow(power).std(0) / n**0.5
        assert ((rung.beta.pow(power).mean(0) - exact).abs() < 4.5 * error).all()
    # control: uniform temperatures have other moments
    other = draw_beta(delta.expand(n, 3), torch.Generator().manual_seed(3))
    assert ((other.mean(0) - (weight * beta).sum(0)).abs() > 10 * other.std(0) / n**0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", [dgm.GibbsTempering(), dgm.ContinuousTempering()], ids=lambda m: type(m).__name__)
def test_the_evidence_by_warped_temperatures(method, monkeypatch):
    known = known_gaussian(10, (3,))

    def off():
        estimate = dgm.log_evidence(
            known.target,
            known.base,
            method.replace(schedule="barrier"),
            chains=64,
            seed=2,
            coverage=False,
            progress=False,
        )
        return ((estimate.log_z - estimate.bias - known.log_z) / estimate.std_error).abs().max(), estimate

    error, estimate = off()
    assert error <= 4
    assert estimate.std_error.max() < 0.06
    assert (estimate.diagnostics["round_trips"] > 64).all()
    # control: terms of the sum as if all pieces began at the base
    right = Warped._log_parts

    def without(self, delta):
        parts, rate = right(self, delta)
        return parts + self.low.unsqueeze(1) * delta, rate

    monkeypatch.setattr(Warped, "_log_parts", without)
    assert off()[0] > 5


@pytest.mark.parametrize("share", [0.0, 0.5, 0.7])
def test_bad_shares_are_named(share):
    with pytest.raises(dgm.errors.ArgumentError, match=rf"plateau={share}"):
        dgm.ContinuousTempering(plateau=share)


def test_path_sampling_needs_uniform_temperatures():
    with pytest.raises(dgm.errors.ArgumentError, match="not uniform; leave plateau out"):
        dgm.evidence.PathSampling(PLATEAUS)
    with pytest.raises(dgm.errors.ArgumentError, match="not uniform; leave schedule out"):
        dgm.evidence.PathSampling(dgm.GibbsTempering(schedule="barrier"))


def test_one_thing_alone_bends_the_temperatures():
    with pytest.raises(dgm.errors.ArgumentError, match="use one of them"):
        dgm.ContinuousTempering(plateau=0.1, schedule="barrier")
    with pytest.raises(dgm.errors.ArgumentError, match="schedule='even'"):
        dgm.GibbsTempering(schedule="even")
