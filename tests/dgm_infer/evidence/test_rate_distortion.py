"""Rates and distortions of decoders, against linear ones whose curve is known in closed form."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import dgm_infer as dgm
import generators
from dgm_infer.evidence.estimators import CurvePoints, curve_points
from tests.findings import honest
from tests.oracles import FLOAT

MODULE = "dgm_infer.evidence.rates"
PRIOR = dgm.StandardNormal(4)
SIZE = 12


class Linear(nn.Module):
    """``f(z) = W z + b``."""

    def __init__(self, dtype: torch.dtype = FLOAT):
        super().__init__()
        rng = torch.Generator().manual_seed(3)
        self.register_buffer("weight", torch.randn(SIZE, PRIOR.dim, generator=rng, dtype=FLOAT).to(dtype))
        self.register_buffer("bias", torch.randn(SIZE, generator=rng, dtype=FLOAT).to(dtype))
        self.weight: Tensor
        self.bias: Tensor

    def forward(self, z):
        return z @ self.weight.mT + self.bias


class Noisy(nn.Module):
    """A decoder with a density: normal noise of sd 0.5 around a linear output."""

    def __init__(self):
        super().__init__()
        self.mean = Linear()

    def forward(self, z):
        return Independent(Normal(self.mean(z), 0.5), 1)


class Curve(NamedTuple):
    """What is true at one beta, per image."""

    rate: Tensor
    distortion: Tensor


def images(n: int) -> Tensor:
    rng = torch.Generator().manual_seed(4)
    z = torch.randn(n, PRIOR.dim, generator=rng, dtype=FLOAT)
    return Linear()(z) + 0.3 * torch.randn(n, SIZE, generator=rng, dtype=FLOAT)


def truth(beta: Tensor, x: Tensor) -> Curve:
    """``q ~ N(z; 0, I) exp(-beta |x - f|^2/n)`` is Gaussian: its divergence from the prior, and its mean distortion."""
    decoder, c = Linear(), 2 * beta / SIZE
    w = decoder.weight
    covariance = torch.linalg.inv(torch.eye(PRIOR.dim, dtype=FLOAT) + c * w.mT @ w)
    mean = c * (x - decoder.bias) @ w @ covariance
    missed = (x - decoder(mean)).square().sum(-1) + torch.trace(w @ covariance @ w.mT)
    rate = 0.5 * (torch.trace(covariance) + mean.square().sum(-1) - PRIOR.dim - torch.logdet(covariance))
    return Curve(rate, missed / SIZE)


def run(x: Tensor, **options) -> dgm.evidence.RateDistortion:
    options = {
        "prior": PRIOR,
        "beta": 500.0,
        "chains": 1000,
        "seed": 0,
        "progress": False,
    } | options
    n, step_size = options.pop("temperatures", 200), options.pop("step_size", None)
    # the default, at another number of temperatures
    options["method"] = dgm.AIS(n, step_size=step_size, target_acceptance=0.85, pilot_temperatures=max(n // 4, 1))
    return dgm.evidence.rate_distortion(Linear(), x, **options)


def deviations(found: dgm.evidence.RateDistortion, x: Tensor) -> Tensor:
    """Errors of rates and distortions at some temperatures, in standard errors."""
    z = []
    for k in range(10, len(found.beta), 15):
        known = truth(found.beta[k], x)
        z.append((found.rate[k] - known.rate) / found.rate_error[k])
        z.append((found.distortion[k] - known.distortion) / found.distortion_error[k])
    return torch.stack(z)


def test_the_curve_of_a_linear_decoder_is_the_closed_form():
    x = images(4)
    found = run(x)
    assert found.ess.min() > 100
    assert deviations(found, x).abs().max() <= 5
    assert found.rate[0].abs().max() < 1e-12
    # the rate at the largest beta is known to better than a tenth
    assert (found.rate_error[-1] < 0.1 * found.rate[-1]).all()


def unweighted(beta, log_weights, distortions) -> CurvePoints:
    """Control: as if the states at a temperature were draws of it, and the weights the same for all."""
    return curve_points(beta, torch.zeros_like(log_weights), distortions)


def late(beta, log_weights, distortions) -> CurvePoints:
    """Control: the rate of the prior's mean weight alone, without the distortion."""
    points = curve_points(beta, log_weights, distortions)
    return points._replace(rate=points.rate + beta * points.distortion)


@pytest.mark.parametrize("mistake", [unweighted, late])
def test_a_mistake_in_the_rate_is_noticed(monkeypatch, mistake):
    x = images(4)
    monkeypatch.setattr(f"{MODULE}.curve_points", mistake)
    assert deviations(run(x, chains=300, temperatures=100), x).abs().max() > 5


def test_prior_draws_that_are_not_moved_have_few_effective_chains_and_say_so():
    with pytest.warns(UserWarning, match="rest on one chain at some beta.* use more temperatures or chains"):
        stuck = run(images(4), step_size=1e-9, chains=100, temperatures=50)
    assert stuck.ess.min() < 2


def tangents(points: CurvePoints, beta: Tensor, x: Tensor) -> Tensor:
    """``R + b D`` less its least value, ``-log Z_b``, over all b; means over images, each ``[K + 1, B]``."""
    others = [truth(b, x) for b in beta]
    least = torch.stack([(known.rate + b * known.distortion).mean() for b, known in zip(beta, others, strict=True)])
    return points.rate[:, None] + beta * points.distortion[:, None] - least


def bounded(found: dgm.evidence.RateDistortion, x: Tensor) -> tuple[Tensor, Tensor]:
    """How far means of points are above the curve's tangents, in standard errors over the images, at all betas."""
    points = found.mean()
    gaps = tangents(points, found.beta, x)
    # over images, whose annealing is independent, of each tangent's own combination
    each = found.rate[:, None] + found.beta[:, None] * found.distortion[:, None]
    known = torch.stack([truth(b, x).rate + b * truth(b, x).distortion for b in found.beta])
    spread = (each - known).std(-1) / math.sqrt(x.shape[0])
    return gaps[1:, 1:] / spread[1:, 1:], gaps.diagonal()


@honest
def test_points_of_short_runs_lie_above_the_curve():
    x = images(300)
    short = run(x, chains=2, temperatures=8)
    z, own = bounded(short, x)
    assert z.min() >= -5
    # the test has power: this bound is loose by nats, far above the noise
    assert z.diagonal().max() > 5
    assert own[-1] > 1


@honest
def test_points_without_their_weights_do_not(monkeypatch):
    monkeypatch.setattr(f"{MODULE}.curve_points", unweighted)
    x = images(300)
    z, _ = bounded(run(x, chains=2, temperatures=8), x)
    assert z.min() < -5


def test_at_beta_one_rate_and_nll_add_up_to_the_evidence():
    x, decoder = images(3), Linear()
    covariance = decoder.weight @ decoder.weight.mT + 0.25 * torch.eye(SIZE, dtype=FLOAT)
    log_p = torch.distributions.MultivariateNormal(decoder.bias, covariance).log_prob(x)
    found = dgm.evidence.rate_distortion(
        Noisy(),
        x,
        "nll",
        prior=PRIOR,
        method=dgm.AIS(100, target_acceptance=0.85, pilot_temperatures=25),
        chains=200,
        seed=1,
        progress=False,
    )
    assert found.beta[-1] == 1
    assert found.ess.min() > 20
    # the sum is -log of the mean weight, of whose error the ess tells
    error = (1 / found.ess[-1]).sqrt()
    assert ((found.rate[-1] + found.distortion[-1] + log_p).abs() < 5 * error).all()
    assert ((found.rate[-1] + found.distortion[-1] - 5 + log_p).abs() > 5 * error).all()


@pytest.mark.slow
def test_errors_are_those_of_repeated_runs():
    x = images(1)
    runs = [run(x, beta=20.0, chains=64, temperatures=60, seed=seed) for seed in range(30)]
    for name in ("rate", "distortion"):
        values = torch.stack([getattr(each, name)[-1] for each in runs])
        claimed = torch.stack([getattr(each, f"{name}_error")[-1] for each in runs])
        # 30 runs know a standard deviation to 13 percent
        assert 0.6 < float(values.std() / claimed.square().mean().sqrt()) < 1.6


def test_a_function_and_a_chunk_give_the_same_law():
    x = images(4)
    half = run(x, distortion=lambda f, x: 0.5 * (f - x).square().mean(-1), beta=1000.0, chunk=3)
    again = truth(half.beta[-1] / 2, x)
    assert half.rate.shape == (201, 4)
    assert ((half.rate[-1] - again.rate) / half.rate_error[-1]).abs().max() <= 5
    assert ((2 * half.distortion[-1] - again.distortion) / (2 * half.distortion_error[-1])).abs().max() <= 5


@pytest.mark.parametrize("name", ["digits_vae", "digits_iwae", "digits_gan"])
@honest
def test_shipped_generators_have_a_curve(name):
    from trainers import DigitsData

    found = dgm.evidence.rate_distortion(
        generators.load(name),
        DigitsData().held_out(2),
        method=dgm.AIS(12, pilot_temperatures=6),
        chains=4,
        seed=0,
        progress=False,
    )
    assert found.beta[-1] == 64 / (2 * 0.1**2)
    assert found.rate.shape == (13, 2)
    assert found.rate.isfinite().all()
    assert (found.rate[-1] > found.rate[0]).all()
    assert (found.distortion[-1] < found.distortion[0]).all()


@honest
def test_a_result_is_saved_and_tabulated(tmp_path):
    found = run(images(3), chains=8, temperatures=10)
    found.save(tmp_path / "curve.npz")
    again = dgm.evidence.RateDistortion.load(tmp_path / "curve.npz")
    assert repr(again) == repr(found)
    assert torch.equal(again.rate, found.rate)
    assert again.diagnostics["gradient_evaluations"] == found.diagnostics["gradient_evaluations"]
    table = found.to_dataframe()
    assert list(table) == ["beta", "rate", "rate_error", "distortion", "distortion_error", "ess"]
    assert table["rate"].iloc[-1] == pytest.approx(float(found.rate[-1].mean()))
    assert len(found.to_dataframe(per_image=True)) == 11 * 3
    (tmp_path / "other.npz").write_bytes(b"nothing")
    for name in ("other.npz", "missing.npz"):
        with pytest.raises(dgm.errors.CheckpointError, match=name):
            dgm.evidence.RateDistortion.load(tmp_path / name)


@honest
def test_the_same_seed_gives_the_same_curve():
    x = images(2)
    first, second, other = (run(x, chains=4, temperatures=8, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.rate, second.rate)
    assert not torch.equal(first.rate, other.rate)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"distortion": "l2"}, dgm.errors.ArgumentError, r'must be "mse", "nll" or a function'),
        ({"distortion": "nll"}, dgm.errors.ModelError, "no distribution"),
        ({"distortion": lambda f, x: f[..., 0], "beta": None}, dgm.errors.ArgumentError, "name the largest"),
        ({"beta": -1.0}, dgm.errors.ArgumentError, "beta"),
        ({"beta": [0.0, 2.0, 1.0]}, dgm.errors.ArgumentError, "rises from 0"),
        ({"temperatures": 0}, dgm.errors.ArgumentError, "temperatures"),
        ({"prior": None}, dgm.errors.ModelError, "has no prior"),
        ({"prior": dgm.Logistic(4)}, dgm.errors.ModelError, "standard normal"),
        ({"distortion": lambda f, x: f}, dgm.errors.ArgumentError, "shape"),
    ],
)
def test_mistakes_are_named(options, error, words):
    with pytest.raises(error, match=words):
        run(images(2), **{"chains": 2, "temperatures": 8} | options)


def test_images_of_another_size_are_named():
    with pytest.raises(dgm.errors.ArgumentError, match="12 values per image"):
        run(images(2)[:, :5])
