"""The posterior with sbi's interface: its own diagnostics run on it, and find it calibrated."""

import warnings

import pytest
import torch
from scipy import stats
from torch import distributions as td

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, ModelError, ObservationError

# sbi switches the checks of torch's distributions off
CHECKED = td.Distribution._validate_args  # type: ignore[attr-defined]
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    from sbi.diagnostics import run_sbc, run_tarp
td.Distribution.set_default_validate_args(CHECKED)

FEW = pytest.mark.filterwarnings("ignore:Number of .* samples .*should be on the order:UserWarning")
KERNEL = dgm.ConstrainedHMC(step_size=0.6, n_steps=(2, 4), n_geodesic=1)
WEIGHT = torch.tensor([[1.0, 0.5], [0.0, 1.0], [-1.0, 0.3]], dtype=torch.float64)
SD = 0.7


def linear():
    return generators.LinearGaussian(WEIGHT, sd=SD)


def moments(x):
    """The mean ``[B, 2]`` and covariance of ``z | x``."""
    covariance = torch.linalg.inv(WEIGHT.mT @ WEIGHT / SD**2 + torch.eye(2))
    return x.double() @ WEIGHT @ covariance / SD**2, covariance


def posterior(chains, warmup=15, **options):
    return dgm.interop.SBIPosterior(linear(), kernel=KERNEL, chains=chains, warmup=warmup, thin=1, **options)


class Both(dgm.GenerativeModel):
    """Two outputs of three inputs, with latents of several shapes."""

    input_density = dgm.StandardNormal(3)

    def observed(self, u):
        return u[..., :2] + u[..., 2:]

    def latents(self, u):
        return {"shared": u[..., 2], "own": u[..., :2].unsqueeze(-1)}


@FEW
def test_the_diagnostics_of_sbi_run_on_it():
    ours = posterior(chains=4, warmup=2)
    thetas, xs = ours.simulate(6, seed=1)
    assert thetas.shape == (6, 2)
    assert xs.shape == (6, 3)
    assert thetas.dtype == xs.dtype == torch.get_default_dtype()
    options = {"num_posterior_samples": 8, "show_progress_bar": False}
    torch.manual_seed(1)
    ranks, averaged = run_sbc(thetas, xs, ours, **options)  # type: ignore[arg-type]
    torch.manual_seed(1)
    samples = ours.sample_batched((8,), xs, show_progress_bars=False)
    assert torch.equal(ranks, (samples < thetas).sum(0).float())
    assert torch.equal(averaged, samples[0])
    expected, alpha = run_tarp(thetas, xs, ours, num_bins=4, **options)  # type: ignore[arg-type]
    assert expected.shape == alpha.shape == (5,)
    # one observation after the other, as for posteriors that take no batches
    ranks, _ = run_sbc(thetas[:2], xs[:2], ours, use_batched_sampling=False, **options)  # type: ignore[arg-type]
    assert ranks.shape == (2, 2)


def test_samples_of_each_observation_are_those_of_its_posterior():
    xs = torch.tensor([[1.0, -1.0, 0.5], [-2.0, 0.0, 2.0]])
    torch.manual_seed(3)
    z = posterior(chains=400).sample_batched((20, 40), xs, show_progress_bars=False)
    assert z.shape == (20, 40, 2, 2)
    mean, covariance = moments(xs)
    # 400 chains of 2 draws
    first = z.reshape(2, 400, 2, 2)[0].double()
    assert (first.mean(0) - mean).abs().max() < 5 * (covariance.diagonal().max() / 400) ** 0.5
    square = (first - mean).square()
    assert ((square.mean(0) - covariance.diagonal()).abs() < 5 * square.std(0) / 20).all()
    # the control: the posterior of the other
    assert (first.mean(0) - mean.flip(0)).abs().max() > 5 * (covariance.diagonal().max() / 400) ** 0.5


def test_theta_is_the_latents_in_the_stated_order():
    ours = dgm.interop.SBIPosterior(Both(), kernel=KERNEL, chains=3, warmup=0, thin=1)
    assert ours.entries == ["shared", "own[0, 0]", "own[1, 0]"]
    chosen = dgm.interop.SBIPosterior(Both(), ["own", "shared"], kernel=KERNEL, chains=3, warmup=0, thin=1)
    assert chosen.entries == ["own[0, 0]", "own[1, 0]", "shared"]
    assert dgm.interop.SBIPosterior(Both(), "shared").entries == ["shared"]
    x = torch.tensor([0.3, -0.2])
    theta = ours.sample((5,), x, show_progress_bars=False)
    torch.testing.assert_close(theta[:, 1:] + theta[:, :1], x.expand(5, 2))
    # draw by draw, and chain by chain within one
    kept = ours.draws.latents["shared"]  # type: ignore[union-attr]
    torch.testing.assert_close(theta[:, 0], kept.mT.flatten()[:5].float())
    thetas, xs = chosen.simulate(4)
    torch.testing.assert_close(thetas[:, :2] + thetas[:, 2:], xs)


def test_what_is_simulated_is_what_is_observed():
    image = dgm.WithNoise(generators.GAN(2, (4, 4), hidden=(8,), channels=None), 0.1)
    for observe, shape in (
        (None, (4, 4)),
        (dgm.pixels(torch.arange(16).reshape(4, 4) < 1), (4, 4)),
        (dgm.downsample(4), (1, 1)),
        (lambda x: x[..., 0, :1], (1,)),
    ):
        ours = dgm.interop.SBIPosterior(image, observe=observe, kernel=KERNEL, chains=2, warmup=0)
        thetas, xs = ours.simulate(3)
        assert xs.shape == (3, *shape)
        assert ours.sample_batched((2,), xs, show_progress_bars=False).shape == (2, 3, thetas.shape[-1])


def test_the_default_observation_and_the_seed_are_those_of_sbi():
    ours = posterior(chains=2, warmup=0)
    assert ours.default_x is None
    with pytest.raises(ArgumentError, match="set_default_x"):
        ours.sample((2,))
    x = torch.tensor([[0.1, 0.2, 0.3]])
    assert ours.set_default_x(x) is ours
    assert torch.equal(ours.default_x, x)  # type: ignore[arg-type]
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(ours.sample((3,), show_progress_bars=False))
    assert results[0].shape == (3, 2)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    ours.default_x = x[0]
    assert ours.sample(show_progress_bars=False).shape == (2,)


def test_models_of_discrete_outputs_have_a_posterior_too():
    model = generators.BernoulliVAE(2, (2, 3), hidden=(4,))
    ours = dgm.interop.SBIPosterior(model, kernel=dgm.HMC(step_size=0.3, n_steps=2), chains=2, warmup=0)
    thetas, xs = ours.simulate(4, seed=1)
    assert set(xs.unique().tolist()) <= {0.0, 1.0}
    assert ours.sample_batched((3,), xs, show_progress_bars=False).shape == (3, *thetas.shape)


def gamma(z):
    return z + torch.randn(2)


def test_faults_are_named():
    ours = posterior(chains=2, warmup=0)
    xs = torch.zeros(2, 3)
    with pytest.raises(ArgumentError, match=r"sample\(x\): 2 observations, of batch shape \(2,\): use sample_batched"):
        ours.sample((2,), xs, show_progress_bars=False)
    with pytest.raises(ArgumentError, match=r"has batch shape \(\): must be \[B, \*x_shape\]"):
        ours.sample_batched((2,), xs[0], show_progress_bars=False)
    with pytest.raises(ObservationError, match=r"\(2, 4\)"):
        ours.sample_batched((2,), torch.zeros(2, 4))
    with pytest.raises(ArgumentError, match="max_sampling_batch_size"):
        ours.sample_batched((2,), xs, max_sampling_batch_size=3)
    with pytest.raises(ArgumentError, match="sample_shape=0"):
        ours.sample_batched((0,), xs)
    with pytest.raises(ArgumentError, match="must be among the latents z"):
        dgm.interop.SBIPosterior(linear(), "slope").simulate(2)
    with pytest.raises(ArgumentError, match="must be among the latents z"):
        dgm.interop.SBIPosterior(linear(), "slope", warmup=10**6).sample((2,), xs[0])
    with pytest.raises(ArgumentError, match="reduce_fns='marginals'"):
        ours.log_prob(torch.zeros(2))
    with pytest.raises(ArgumentError, match="chains=0"):
        dgm.interop.SBIPosterior(linear(), chains=0)
    with pytest.raises(ModelError, match="has a log factor"):
        dgm.interop.SBIPosterior(dgm.from_simulator(gamma, td.Gamma(2.0, 1.0))).simulate(2)


class Planted:
    """A posterior with an error: its draws are scaled about their mean, and shifted."""

    def __init__(self, samples, scale=1.0, shift=0.0):
        mean = samples.mean(0)
        self.samples = mean + scale * (samples - mean) + shift * samples.std(0)

    def sample_batched(self, sample_shape, x, show_progress_bars):
        return self.samples


def tarp_p_value(expected, alpha, n):
    """Kolmogorov-Smirnov p-value of ``n`` coverages being uniform."""
    return float(stats.kstwo.sf(float((expected - alpha).abs().max()), n))


@pytest.mark.slow
@FEW
def test_its_posteriors_are_calibrated_by_the_diagnostics_of_sbi():
    n, size = 300, 99
    ours = posterior(chains=size, warmup=25)
    thetas, xs = ours.simulate(n, seed=4)
    torch.manual_seed(5)
    samples = ours.sample_batched((size,), xs, show_progress_bars=False)
    found = {}
    # the controls: posteriors too narrow, too wide, shifted
    cases = {"exact": {}, "narrow": {"scale": 0.5}, "wide": {"scale": 2.0}, "shifted": {"shift": 0.5}}
    for name, error in cases.items():
        planted = Planted(samples, **error)
        options = {"num_posterior_samples": size, "show_progress_bar": False}
        ranks, _ = run_sbc(thetas, xs, planted, **options)  # type: ignore[arg-type]
        counts = torch.stack([torch.bincount(column.long() // 10, minlength=10) for column in ranks.T])
        references = 3 * torch.randn(thetas.shape, generator=torch.Generator().manual_seed(6))
        tarp = run_tarp(thetas, xs, planted, references, **options)  # type: ignore[arg-type]
        found[name] = (float(stats.chisquare(counts.numpy(), axis=1).pvalue.min()), tarp_p_value(*tarp, n))
    # |z| <= 5
    least = 2 * float(stats.norm.sf(5))
    assert min(found["exact"]) > least
    for name in ("narrow", "wide", "shifted"):
        assert found[name][0] < least
    for name in ("narrow", "wide"):
        assert found[name][1] < least
