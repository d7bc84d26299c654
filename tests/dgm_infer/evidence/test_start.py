"""A problem may come without a base, or as a model with images."""

import math

import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.evidence.start import EvidenceProblem
from generators import LatentPosterior
from tests.findings import honest
from tests.known_evidence import known_gaussian, known_linear_gaussian
from tests.oracles import FLOAT

QUICK = dgm.AIS(20, pilot_temperatures=10)


class Decodes(torch.nn.Module):
    """A decoder that is a method."""

    def decoder(self, z):
        return z


@pytest.fixture(scope="module")
def vae():
    return generators.load("digits_vae")


@pytest.fixture(scope="module")
def images(vae):
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        return vae.decoder(torch.randn(2, vae.prior.dim, generator=rng)).mean.reshape(2, 8, 8)


def estimated(problem, **options):
    return dgm.log_evidence(problem, method=QUICK, **{"chains": 4, "seed": 0, "progress": False} | options)


@honest
def test_a_model_with_images_is_their_posterior_from_the_encoder(vae, images):
    target = LatentPosterior(vae.decoder, images, vae.prior)
    base = dgm.Gaussian.from_encoder(vae.encoder, images.flatten(1))
    expected = dgm.log_evidence(target, base, QUICK, chains=4, seed=0, progress=False)
    for shape in ((2, 8, 8), (2, 64), (2, 1, 8, 8)):
        assert torch.equal(estimated((vae, images.reshape(shape))).log_z, expected.log_z)
    # of a fibre the same density, in float64
    found = EvidenceProblem.of("log_evidence", dgm.condition(vae, images)).started(None)
    assert found.said == "base: the encoder's posterior"
    torch.testing.assert_close(found.base.mean, base.mean.double(), rtol=1e-4, atol=1e-5)
    exact = dgm.log_evidence(found.target, found.base, dgm.AIS(100), chains=8, seed=1, progress=False)
    other = dgm.log_evidence((vae, images), method=dgm.AIS(100), chains=8, seed=2, progress=False)
    apart = dgm.compare(exact, other)
    assert (apart.difference.abs() < 5 * apart.std_error).all()


def test_without_an_encoder_that_applies_the_base_is_laplaces(vae, images):
    seen = dgm.pixels(torch.arange(64).reshape(8, 8) < 32)
    # the encoder knows whole images only
    found = EvidenceProblem.of("log_evidence", dgm.condition(vae, images, observe=seen)).started(None)
    assert found.said == "base: Laplace's approximation at a mode"
    known = known_linear_gaussian((3,))
    found = EvidenceProblem.of("log_evidence", known.target).started(None)
    assert isinstance(found.base, dgm.Gaussian)
    # exact for a normal target
    torch.testing.assert_close(found.base.log_evidence, known.log_z)
    assert EvidenceProblem.of("log_evidence", known.target).started(known.base).base is known.base
    assert EvidenceProblem.of("log_evidence", known.target).started(known.base).said is None


def test_without_a_mode_the_base_is_a_fit():
    # Laplace's density, with a kink for a mode
    kinked = dgm.Target(lambda x: x.abs().sum(-1), 2)
    found = EvidenceProblem.of("log_evidence", kinked).started(None)
    assert found.said is not None
    assert found.said.startswith("base: a full Gaussian fit, as ")
    # whether that is bad, and what to do
    assert "; nothing to do: " in found.said
    assert isinstance(found.base, dgm.Gaussian)
    assert found.base.elbo.isfinite()


def test_the_choice_is_said_in_one_line(capsys):
    known = known_gaussian(2)
    estimated(known.target, progress=True)
    (line,) = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if "base:" in line]
    assert line.strip().endswith("base: Laplace's approximation at a mode")
    told: list[str] = []
    EvidenceProblem.of("log_evidence", dgm.Target(lambda x: x.abs().sum(-1), 2)).started(None, told.append)
    assert told == [
        "start-up, looking for the mode of every problem",
        "start-up, fitting a Gaussian to every problem",
    ]
    dgm.log_evidence(known.target, known.base, QUICK, chains=4, seed=0)
    assert "base:" not in capsys.readouterr().err


def test_a_model_without_a_decoder_has_the_density_of_its_own_noise():
    """The log density of two vectors under a network with noise, which is normal, and the difference of two of them."""
    net = torch.nn.Linear(2, 3).requires_grad_(False)
    net.weight.copy_(torch.tensor([[1.0, 0.5], [0.0, 1.0], [-0.7, 0.2]]))
    data = torch.tensor([[0.3, -1.0, 0.8], [1.5, 0.1, 0.2]])
    found, exact = [], []
    for sd in (0.5, 0.8):
        model = dgm.WithNoise(generators.from_module(net.eval(), latent=2), sd)
        found.append(dgm.log_evidence((model, data), method=dgm.AIS(60), chains=16, seed=1, progress=False))
        covariance = net.weight @ net.weight.mT + sd**2 * torch.eye(3)
        exact.append(torch.distributions.MultivariateNormal(net.bias, covariance).log_prob(data).double())
        assert ((found[-1].log_z - exact[-1]).abs() < 5 * found[-1].std_error + 1e-3).all()
    apart = dgm.compare(*found)
    assert ((apart.difference - (exact[0] - exact[1])).abs() < 5 * apart.std_error + 2e-3).all()


@pytest.mark.parametrize(
    ("problem", "error", "message"),
    [
        ((1, 2), dgm.errors.ArgumentError, r"\(int, int\)\): expected a target, or a pair \(model, images\)"),
        ((torch.nn.Linear(2, 2), torch.zeros(2)), dgm.errors.ModelError, "has no decoder"),
        ((Decodes(), torch.zeros(2)), dgm.errors.ModelError, "Decodes.decoder is a method: make it a torch.nn.Module"),
        # more values than inputs, and no noise
        (
            (generators.from_module(torch.nn.Linear(1, 3).eval(), latent=1), torch.zeros(3)),
            dgm.errors.ObservationError,
            r"condition\(\.\.\., noise=sd\)",
        ),
        ((torch.nn.Linear(2, 2),), dgm.errors.ArgumentError, r"a pair \(model, images\)"),
    ],
)
def test_what_is_no_problem_is_named(problem, error, message):
    with pytest.raises(error, match=message):
        estimated(problem)


def test_images_of_another_size_are_named(vae):
    with pytest.raises(dgm.errors.ObservationError, match="do not end in the 64 values"):
        estimated((vae, torch.zeros(2, 7, 7)))


def test_a_difference_has_the_errors_of_both():
    known = known_gaussian(3, (200,))
    a, b = (dgm.log_evidence(known.target, known.base, QUICK, chains=8, seed=s, progress=False) for s in (1, 2))
    found = dgm.compare(a, b)
    torch.testing.assert_close(found.difference, a.log_z - b.log_z)
    torch.testing.assert_close(found.std_error, (a.std_error.square() + b.std_error.square()).sqrt())
    # the truth is 0 in every problem
    low, high = found.interval()
    assert 0.88 <= ((low < 0) & (high > 0)).double().mean() <= 0.99
    assert abs(found.mean) < 5 * found.mean_std_error
    assert (found.dof >= 7).all()
    assert (found.dof <= 14).all()
    assert dgm.compare(b, a).mean == pytest.approx(-found.mean)
    assert "mean and standard error over 200 problems" in repr(found)


def test_what_problems_share_drops_out_of_the_mean():
    """Two models of the same images: log p varies by nats between images, their difference by hundredths."""
    shift = torch.linspace(-50, 50, 40, dtype=FLOAT)

    def model(offset):
        target = dgm.Target(lambda x: 0.5 * x.square().sum(-1) - shift - offset, 2, (40,))
        base = dgm.Gaussian(torch.zeros(40, 2, dtype=FLOAT), 1.1)
        return dgm.log_evidence(target, base, QUICK, chains=8, seed=int(10 * offset), progress=False)

    found = dgm.compare(model(0.3), model(0.1))
    assert abs(found.mean - 0.2) < 5 * found.mean_std_error
    assert found.mean_std_error < 0.02


def test_bounds_make_the_difference_one_or_leave_it_open():
    known = known_gaussian(2, (3,))
    exact = known.draw(4, torch.Generator().manual_seed(0))
    bounds = dgm.bidirectional(known.target, known.base, exact, QUICK, chains=4, seed=0, progress=False)
    elbo = dgm.log_evidence(known.target, known.base, dgm.Elbo(20), chains=4, seed=0, progress=False)
    assert dgm.compare(elbo, bounds.upper).status == "lower"
    assert dgm.compare(bounds.upper, elbo).status == "upper"
    assert dgm.compare(elbo, elbo).status == "heuristic"
    assert dgm.compare(bounds.lower, bounds.combined).status in ("lower", "consistent")
    with pytest.raises(dgm.errors.ArgumentError, match=r"batch shapes \(3,\) and \(2,\)"):
        dgm.compare(elbo, estimated(known_gaussian(2, (2,)).target))
    with pytest.raises(dgm.errors.ArgumentError, match="compare"):
        dgm.compare(elbo, 1.0)


def test_the_evidence_of_a_uniform_kernel_names_what_can_estimate_it():
    class First(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(2)

        def observed(self, u):
            return u[..., :1]

    target = dgm.condition(First(), torch.tensor([0.5]), tolerance=0.5, kernel="uniform")
    with pytest.raises(dgm.errors.ArgumentError, match=r"a uniform kernel has no derivative.*zeros\(2\).*ImportanceS"):
        dgm.log_evidence(target, progress=False)
    base, method = dgm.Gaussian(torch.zeros(2), 1.0), dgm.evidence.ImportanceSampling(10_000)
    found = dgm.log_evidence(target, base, method, chains=16, seed=0, progress=False)
    # the probability of (0, 1)
    exact = math.log(0.5 * math.erf(0.5**0.5))
    assert found.std_error < 0.01
    assert abs(found.log_z - exact) < 5 * found.std_error
