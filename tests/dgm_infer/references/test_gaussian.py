"""Gaussian bases: densities, maps to whitened coordinates, fits."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch.distributions import Bernoulli, Independent, MultivariateNormal, Normal

import dgm_infer as dgm
from tests.known_evidence import known_gaussian
from tests.oracles import FLOAT, compare

KINDS = ("diagonal", "full", "low_rank")


def base_of(kind, batch=(2, 3), dim=5, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*batch, *shape, generator=rng, dtype=FLOAT)

    mean, sd = normal(dim), normal(dim).exp()
    if kind == "full":
        return dgm.Gaussian(mean, cholesky=normal(dim, dim).tril(-1) + torch.diag_embed(sd))
    return dgm.Gaussian(mean, sd, factor=normal(dim, 2) if kind == "low_rank" else None)


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_map_is_a_root_of_the_covariance(kind, batch):
    base = base_of(kind, batch)
    identity = torch.eye(base.dim, dtype=FLOAT)
    # columns of L, by the map of unit vectors
    columns = base.scale.apply(identity.reshape(base.dim, *[1] * len(batch), base.dim).expand(-1, *batch, -1))
    root = columns.movedim(0, -1)
    torch.testing.assert_close(root @ root.mT, base.covariance)
    torch.testing.assert_close(base.covariance_diagonal, base.covariance.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(base.log_det, torch.linalg.slogdet(root).logabsdet)
    gradient = torch.randn(7, *base.mean.shape, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    torch.testing.assert_close(base.scale.transpose(gradient), (root.mT @ gradient.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(base.whiten(base.unwhiten(gradient)), gradient)
    assert base.kind == kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_density_is_that_of_a_multivariate_normal(kind):
    base = base_of(kind)
    x = base.mean + torch.randn(4, *base.mean.shape, generator=torch.Generator().manual_seed(2), dtype=FLOAT)
    torch.testing.assert_close(base.log_prob(x), MultivariateNormal(base.mean, base.covariance).log_prob(x))
    torch.testing.assert_close(base.energy(x), -base.log_prob(x))


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_moments(kind):
    base = base_of(kind, ())
    x = base.sample((10, 2000), torch.Generator().manual_seed(3))
    i, j = torch.triu_indices(5, 5)
    d = x - base.mean
    z, _ = compare(torch.cat([d, d[..., i] * d[..., j]], -1), torch.cat([0 * base.mean, base.covariance[i, j]]))
    assert z.abs().max() <= 5
    # a covariance a tenth off is noticed
    wrong, _ = compare(d[..., i] * d[..., j], 1.1 * base.covariance[i, j])
    assert wrong.abs().max() > 5


@pytest.mark.parametrize("kind", KINDS)
def test_problems_are_taken_by_flat_index(kind):
    base = base_of(kind)
    taken = base.take(torch.tensor([4, 0]))
    torch.testing.assert_close(taken.mean, base.mean.reshape(6, 5)[[4, 0]])
    torch.testing.assert_close(taken.covariance, base.covariance.reshape(6, 5, 5)[[4, 0]])
    assert taken.to(torch.float32).covariance.dtype == torch.float32


def precision_target(dim=4, batch=(2,)):
    """``exp(-2) N(mean, scale^2 C)``, one scale per problem."""
    known = known_gaussian(dim)
    mean, covariance = known.target.parts[1][0], known.target.parts[2][0]
    scales = torch.tensor([0.5, 3.0], dtype=FLOAT)[: math.prod(batch)].reshape(batch)
    precision = torch.linalg.inv(covariance) / scales.square()[..., None, None]
    offset = 2 + 0.5 * dim * math.log(2 * math.pi) - 0.5 * torch.logdet(precision)

    def energy(x):
        apart = x - mean
        return offset + 0.5 * ((apart.unsqueeze(-2) @ precision).squeeze(-2) * apart).sum(-1)

    return dgm.Target(energy, dim, batch), mean.expand(*batch, dim), precision


@pytest.mark.slow
def test_a_full_fit_recovers_a_gaussian_and_its_evidence():
    target, mean, precision = precision_target()
    base = dgm.Gaussian.fit(target, "full", start=dgm.Gaussian.standard(target, FLOAT), steps=2000)
    torch.testing.assert_close(base.mean, mean, atol=1e-3, rtol=0)
    torch.testing.assert_close(base.covariance, torch.linalg.inv(precision), rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(base.elbo, torch.full((2,), -2.0, dtype=FLOAT), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_diagonal_fit_is_the_mean_field_solution_and_its_bound_is_short_by_the_known_gap():
    target, mean, precision = precision_target()
    base = dgm.Gaussian.fit(target, start=dgm.Gaussian.standard(target, FLOAT), steps=2000)
    diagonal = precision.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(base.mean, mean, atol=0.03, rtol=0.02)
    torch.testing.assert_close(base.covariance_diagonal, 1 / diagonal, rtol=0.05, atol=0)
    gap = 0.5 * (diagonal.log().sum(-1) - torch.logdet(precision))
    assert gap.min() > 0.1
    torch.testing.assert_close(base.elbo, -2.0 - gap, atol=0.1, rtol=0)


@pytest.mark.slow
def test_a_low_rank_fit_recovers_a_covariance_of_its_rank():
    rng = torch.Generator().manual_seed(5)
    sd, factor = 0.5 + torch.rand(6, generator=rng, dtype=FLOAT), torch.randn(6, 2, generator=rng, dtype=FLOAT)
    truth = dgm.Gaussian(torch.arange(6, dtype=FLOAT), sd, factor=factor)
    target = dgm.Target(truth.energy, 6)
    base = dgm.Gaussian.fit(target, "low_rank", rank=2, start=dgm.Gaussian.standard(target, FLOAT), steps=2500)
    torch.testing.assert_close(base.covariance, truth.covariance, rtol=0.02, atol=0.02)
    assert base.elbo == pytest.approx(0, abs=1e-3)
    # one dimension fewer cannot
    assert dgm.Gaussian.fit(target, "low_rank", rank=1, start=dgm.Gaussian.standard(target, FLOAT)).elbo < -0.1


def test_laplace_is_exact_for_a_gaussian():
    target, mean, precision = precision_target()
    base = dgm.Gaussian.laplace(target)
    torch.testing.assert_close(base.mean, mean)
    torch.testing.assert_close(base.covariance, torch.linalg.inv(precision))
    torch.testing.assert_close(base.log_evidence, torch.full((2,), -2.0, dtype=FLOAT))


def test_laplace_finds_modes_of_targets_that_are_no_gaussians():
    counts = torch.tensor([[1.0, 30.0], [7.0, 2.0], [400.0, 0.5]], dtype=FLOAT)
    # log of a gamma variable: the mode is log k and the curvature there k
    target = dgm.Target(lambda x: (x.exp() - counts * x).sum(-1), 2, (3,))
    base = dgm.Gaussian.laplace(target)
    torch.testing.assert_close(base.mean, counts.log())
    torch.testing.assert_close(base.covariance, torch.diag_embed(1 / counts))


def test_laplace_refuses_a_saddle_and_a_slope_without_end():
    saddle = dgm.Target(lambda x: x[..., 0] ** 2 - x[..., 1] ** 2, 2)
    with pytest.raises(dgm.errors.EvidenceError, match=r"1 of 1 problems: pass start="):
        dgm.Gaussian.laplace(saddle)
    with pytest.raises(dgm.errors.EvidenceError, match="not positive definite"):
        dgm.Gaussian.laplace(dgm.Target(lambda x: x.sum(-1), 2))


def test_refined_matches_weighted_moments():
    rng = torch.Generator().manual_seed(6)
    truth = base_of("full", (2,), 3)
    proposal = dgm.Gaussian(truth.mean, 1.5 * truth.covariance_diagonal.sqrt())
    draws = proposal.sample((4, 20000), rng)
    log_weights = truth.log_prob(draws) - proposal.log_prob(draws)
    log_weights[0, :10] = math.nan
    log_zeta = torch.tensor([1.0, 2.0])
    for kind in ("full", "diagonal", "low_rank"):
        base = proposal.refined(draws, log_weights, log_zeta, kind=kind)
        torch.testing.assert_close(base.mean, truth.mean, atol=0.05, rtol=0.05)
        torch.testing.assert_close(base.covariance_diagonal, truth.covariance_diagonal, rtol=0.1, atol=0)
        assert base.kind == kind
        assert base.log_zeta.tolist() == [1, 2]
    refined = proposal.refined(draws, log_weights, kind="full")
    torch.testing.assert_close(refined.covariance, truth.covariance, rtol=0.1, atol=0.1)
    # unweighted, the draws are of the proposal: the weights matter
    plain = proposal.refined(draws, torch.zeros_like(log_weights), kind="full")
    assert (plain.covariance_diagonal / truth.covariance_diagonal).min() > 1.8


def test_refined_from_few_draws_keeps_a_covariance_of_full_rank():
    base = base_of("full", (), 5)
    few = base.refined(base.sample((1, 2), torch.Generator().manual_seed(0)), torch.zeros(1, 2))
    assert torch.linalg.eigvalsh(few.covariance).min() > 0


def two_modes(dim=2, apart=6.0):
    """``3 exp(-3) N(a, I) + exp(-3) N(-a, I)``, with ``a = (apart/2, 0, ...)``."""
    a = torch.zeros(dim, dtype=FLOAT)
    a[0] = apart / 2

    def energy(x):
        logs = torch.stack([math.log(3) - 0.5 * (x - a).square().sum(-1), -0.5 * (x + a).square().sum(-1)])
        return 3 + 0.5 * dim * math.log(2 * math.pi) - logs.logsumexp(0)

    return dgm.Target(energy, dim), 0.5 * a, apart


@pytest.mark.slow
def test_a_base_of_local_fits_covers_all_modes_and_counts_each_once():
    target, mean, apart = two_modes()
    wide = dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 4.0)
    base = dgm.Gaussian.from_local_fits(target, 12, start=wide, steps=400)
    torch.testing.assert_close(base.mean, mean, atol=0.05, rtol=0)
    expected = torch.diag(torch.tensor([1 + 0.75 * 0.25 * apart**2, 1.0], dtype=FLOAT))
    torch.testing.assert_close(base.covariance, expected, atol=0.1, rtol=0.02)
    assert base.log_zeta == pytest.approx(math.log(4) - 3, abs=0.02)
    # one fit finds one mode, and duplicates that stay count again
    one = dgm.Gaussian.from_local_fits(target, 1, start=wide, steps=400)
    assert one.covariance_diagonal.max() < 2
    again = dgm.Gaussian.from_local_fits(target, 12, start=wide, steps=400, tolerance=0)
    assert again.log_zeta > base.log_zeta + 1


def mixture_of(dim: int, *, n: int = 2, variance: float = 1.0, log_weight: float = 0.0, **options) -> dgm.Gaussian:
    """Moments of n equal components about 0, 1, ..."""
    means = torch.arange(float(n)).unsqueeze(-1).expand(n, dim)
    covariances = variance * torch.eye(dim).expand(n, dim, dim)
    return dgm.Gaussian.of_mixture(means, covariances, torch.full((n,), log_weight), **options)


def test_components_without_weight_do_not_count_and_some_must_have_one():
    means, covariances = torch.tensor([[0.0], [50.0]]), torch.ones(2, 1, 1)
    base = dgm.Gaussian.of_mixture(means, covariances, torch.tensor([1.0, -math.inf]))
    assert base.mean == 0
    assert base.log_zeta == 1
    with pytest.raises(dgm.errors.EvidenceError, match="all components have zero weight for 1 of 1 problems"):
        mixture_of(2, log_weight=-math.inf)


def test_the_rank_of_a_base_of_local_fits_is_the_one_asked_for():
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 6)
    base = dgm.Gaussian.from_local_fits(target, 2, kind="low_rank", rank=2, steps=20)
    scale: Any = base.scale
    assert scale.factor.shape == (6, 2)


def test_mixtures_of_every_problem_are_matched_on_their_own():
    rng = torch.Generator().manual_seed(4)
    means = 10 * torch.randn(5, 3, 2, generator=rng, dtype=FLOAT)
    covariances = torch.eye(2, dtype=FLOAT).expand(5, 3, 2, 2)
    log_weights = torch.randn(5, 3, generator=rng, dtype=FLOAT)
    base = dgm.Gaussian.of_mixture(means, covariances, log_weights, kind="diagonal")
    for i in range(3):
        alone = dgm.Gaussian.of_mixture(means[:, i], covariances[:, i], log_weights[:, i])
        torch.testing.assert_close(base.mean[i], alone.mean)
        torch.testing.assert_close(base.covariance_diagonal[i], alone.covariance_diagonal)
        torch.testing.assert_close(base.log_zeta[i], log_weights[:, i].logsumexp(0))


@pytest.mark.slow
def test_the_trace_of_a_fit_rises_to_its_bound():
    target, _, _ = precision_target()
    base = dgm.Gaussian.fit(target, "full", start=dgm.Gaussian.standard(target, FLOAT), steps=800)
    assert base.elbo_trace.shape == (800, 2)
    assert (base.elbo_trace[:5].mean(0) < base.elbo - 0.5).all()
    torch.testing.assert_close(base.elbo_trace[-50:].mean(0), base.elbo, atol=0.01, rtol=0)


def test_a_base_from_an_encoder():
    def encoder(x):
        return Independent(Normal(x[..., :2], x[..., 2:].exp()), 1)

    images = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    base = dgm.Gaussian.from_encoder(encoder, images)
    torch.testing.assert_close(base.log_prob(images[:, :2]), encoder(images).log_prob(images[:, :2]))
    with pytest.raises(dgm.errors.ArgumentError, match="the encoder returns a Bernoulli"):
        dgm.Gaussian.from_encoder(lambda x: Bernoulli(logits=x), images)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dgm.Gaussian(torch.zeros(2)), "give the scale as sd"),
        (lambda: dgm.Gaussian(torch.zeros(2), 1.0, cholesky=torch.eye(2)), "give the scale as sd"),
        (lambda: dgm.Gaussian(torch.zeros(2), torch.tensor([1.0, -1.0])), "sd=-1.: must be positive"),
        (lambda: dgm.Gaussian(torch.zeros(2), torch.ones(3)), r"sd of shape \(3,\)"),
        (lambda: dgm.Gaussian(torch.tensor([0.0, math.nan]), 1.0), "mean=nan"),
        (lambda: dgm.Gaussian(torch.zeros(2), cholesky=torch.zeros(2, 2)), "diagonal of cholesky=0"),
        (lambda: dgm.Gaussian(torch.zeros(2), 1.0, factor=torch.zeros(3, 1)), r"factor of shape \(3, 1\)"),
        (lambda: dgm.Gaussian(torch.tensor(1.0), 1.0), r"mean of shape \(\)"),
        (lambda: dgm.Gaussian(torch.zeros(3, 2), 1.0, log_zeta=torch.zeros(2)), "log_zeta of shape"),
        (lambda: dgm.Gaussian.fit(dgm.Target(lambda x: x.sum(-1), 2), "ful"), "kind='ful'"),
        (lambda: dgm.Gaussian.fit(dgm.Target(lambda x: x.sum(-1), 2), steps=0), "steps=0"),
        (lambda: dgm.Gaussian.fit(dgm.Target(lambda x: x.sum(-1), 2), rate=-1), "rate=-1"),
        (lambda: dgm.Gaussian.fit(object()), "expected a Target, not a object"),
        (lambda: dgm.Gaussian.laplace(dgm.Target(lambda x: x.sum(-1), 2), start=torch.zeros(3)), "start of shape"),
        (lambda: dgm.Gaussian.of_mixture(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3)), "of_mixture"),
        (lambda: dgm.Gaussian.from_local_fits(dgm.Target(lambda x: x.sum(-1), 2), 0), "starts=0"),
        (lambda: dgm.Gaussian(torch.zeros(2), 1.0).refined(torch.zeros(2, 3), torch.zeros(2)), "refined"),
        (lambda: dgm.Gaussian(torch.zeros(2), 1.0, log_zeta=torch.tensor(math.nan)), "log_zeta=nan"),
        (
            lambda: dgm.Gaussian(torch.zeros(2), cholesky=torch.tensor([[1, 0], [math.nan, 1]])),
            "cholesky=nan.*not finite",
        ),
        (lambda: dgm.Gaussian(torch.zeros(2), 1.0, factor=torch.full((2, 1), math.inf)), "factor=inf.*not finite"),
        (lambda: dgm.Gaussian.fit(dgm.Target(lambda x: x.sum(-1), 2), start=torch.zeros(2)), "start=a Tensor"),
        (lambda: dgm.Gaussian.fit(dgm.Target(lambda x: x.sum(-1), 2), start=mixture_of(3)), r"start=Gaussian.*\(2,\)"),
        (lambda: dgm.Gaussian.from_local_fits(dgm.Target(lambda x: x.sum(-1), 2), kind="ful"), "kind='ful'"),
        (lambda: dgm.Gaussian.from_local_fits(dgm.Target(lambda x: x.sum(-1), 2), rank=0), "rank=0"),
        (lambda: mixture_of(2, kind="ful"), "kind='ful'"),
        (lambda: mixture_of(2, kind="low_rank", rank=0), "rank=0"),
        (lambda: mixture_of(2, n=0), "no components"),
        (lambda: mixture_of(2, variance=-1.0), "variance is not positive"),
        (lambda: mixture_of(2, log_weight=math.nan), "weight is not finite"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        make()


def test_a_base_is_frozen():
    base = base_of("full")
    for name in ("mean", "scale", "log_zeta", "elbo", "anything"):
        with pytest.raises(FrozenInstanceError, match=f"setting {name}"):
            setattr(base, name, None)
    with pytest.raises(FrozenInstanceError, match="mean cannot be deleted"):
        del base.mean
    with pytest.raises(AttributeError):
        setattr(base.scale, "cholesky", torch.eye(5))  # noqa: B010


@pytest.mark.parametrize("kind", KINDS)
def test_what_becomes_of_the_tensors_that_a_base_was_made_of_does_not_change_it(kind):
    mean, sd, factor = torch.zeros(2, dtype=FLOAT), torch.ones(2, dtype=FLOAT), torch.eye(2, dtype=FLOAT)
    log_zeta = torch.tensor(1.0, dtype=FLOAT)
    scale = {"diagonal": {"sd": sd}, "full": {"cholesky": factor}, "low_rank": {"sd": sd, "factor": factor}}[kind]
    base = dgm.Gaussian(mean.requires_grad_(), **scale, log_zeta=log_zeta)
    x = torch.ones(2, dtype=FLOAT)
    before = base.energy(x)
    with torch.no_grad():
        for tensor in (mean, sd, factor, log_zeta):
            tensor += 1
        factor.tril_()
    assert torch.equal(base.energy(x), before)
    assert base.log_zeta == 1
    assert not base.mean.requires_grad
    # made of them now, it is another one
    assert not torch.equal(dgm.Gaussian(mean, **scale).energy(x), before)


def test_copies_of_a_base_are_the_same_density():
    base = base_of("low_rank")
    copied = pickle.loads(pickle.dumps(copy.deepcopy(base)))
    x = base.sample(2, torch.Generator().manual_seed(0))
    assert torch.equal(copied.energy(x), base.energy(x))


def test_weights_that_are_all_zero_make_no_base():
    base = dgm.Gaussian(torch.zeros(2), 1.0)
    with pytest.raises(dgm.errors.EvidenceError, match="all weights are zero for 1 of 1"):
        base.refined(torch.zeros(1, 3, 2), torch.full((1, 3), -math.inf))


def test_draws_without_a_density_do_not_pull_a_fit():
    cliff = dgm.Target(lambda x: x.square().sum(-1) * math.inf, 2)
    base = dgm.Gaussian.fit(cliff, steps=5)
    assert base.mean.isfinite().all()
    assert not base.elbo.isfinite().any()


@pytest.mark.parametrize(
    ("energy", "words"),
    [
        (lambda x: x.sum(-1) * math.nan, r"NaN at 100 % of the draws of the fitted base, for 1 of 1 problems"),
        (lambda x: x.square().sum(-1).where(x[..., 0] > 0, math.nan), r"NaN at \d+ of 32 points tried"),
        (lambda x: -x.square().sum(-1), "falls without end"),
        (lambda x: -x[..., 0].exp().log1p(), "falls without end"),
        (lambda x: x.square().sum(-1) + torch.randn(x.shape[:-1]), "differs from call to call"),
        (lambda x: x.square().sum(-1) + 1 / 0, "the energy fails.*division by zero"),
    ],
)
def test_what_is_no_density_is_not_fitted(energy, words):
    with pytest.raises(dgm.errors.EvidenceError, match=words):
        dgm.Gaussian.fit(dgm.Target(energy, 2), steps=5)


def test_a_fit_that_diverges_says_so():
    target = dgm.Target(lambda x: x.square().sum(-1), 2, (2,))
    # to numbers that are not finite, or to a density far from the target's
    for rate in (1e300, 100.0):
        with pytest.raises(dgm.errors.EvidenceError, match="diverged for 2 of 2 problems: use a rate below"):
            dgm.Gaussian.fit(target, start=dgm.Gaussian.standard(target, FLOAT), rate=rate, steps=5)
