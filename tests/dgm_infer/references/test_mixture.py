"""Mixtures of Gaussians as bases: density, draws, moments, fits."""

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import dgm_infer as dgm
from tests.known_evidence import known_bimodal
from tests.oracles import FLOAT, compare


def mixture_of(kind="full", batch=(2,), components=3, dim=2, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(components, *batch, *shape, generator=rng, dtype=FLOAT)

    means, sd, logs = 2 * normal(dim), (0.3 * normal(dim)).exp(), normal()
    if kind == "diagonal":
        return dgm.Mixture(means, sd, log_weights=logs)
    return dgm.Mixture(means, cholesky=0.4 * normal(dim, dim).tril(-1) + torch.diag_embed(sd), log_weights=logs)


def reference(base):
    """The same by ``torch.distributions``, whose components are the last batch dimension."""
    logs, parts = base.log_weights.movedim(0, -1), base.components
    normals = MultivariateNormal(parts.mean.movedim(0, -2), parts.covariance.movedim(0, -3))
    return MixtureSameFamily(Categorical(logits=logs), normals)


KINDS = pytest.mark.parametrize("kind", ["diagonal", "full"])


@KINDS
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_density_gradient_and_moments_are_those_of_the_mixture(kind, batch):
    base = mixture_of(kind, batch)
    x = 2 * torch.randn(4, 5, *batch, 2, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    other = reference(base)
    torch.testing.assert_close(base.log_prob(x), other.log_prob(x))
    x.requires_grad_()
    (expected,) = torch.autograd.grad(other.log_prob(x).sum(), x)
    energy, gradient = base.energy_and_gradient(x.detach())
    torch.testing.assert_close(energy, base.energy(x).detach())
    torch.testing.assert_close(gradient, -expected)
    torch.testing.assert_close(base.mean, other.mean)
    torch.testing.assert_close(base.covariance_diagonal, other.variance)
    assert base.batch_shape == batch


def drawn_as(base, log_prob, seed=2):
    """Standard errors by which ``E[p(y)/r(y)]`` is off 1, for draws y of a wide normal density r and a density p."""
    wide = dgm.Gaussian(base.mean, 2 * base.covariance_diagonal.sqrt())
    y = wide.sample((20000,), torch.Generator().manual_seed(seed))
    ratio = (log_prob(y) - wide.log_prob(y)).exp()
    return (ratio.mean(0) - 1) / (ratio.std(0) / len(y) ** 0.5)


@KINDS
def test_the_density_is_normalised(kind):
    base = mixture_of(kind)
    assert drawn_as(base, base.log_prob).abs().max() <= 5
    # weights that are not normalised are noticed
    assert drawn_as(base, lambda x: base.log_prob(x) + 0.1).abs().min() > 5


@KINDS
def test_draws_are_of_the_density(kind):
    base = mixture_of(kind, ())
    x = base.sample((10, 2000), torch.Generator().manual_seed(3))
    assert x.shape == (10, 2000, 2)
    d = x - base.mean
    i, j = torch.triu_indices(2, 2)
    expected = torch.cat([0 * base.mean, base.covariance[i, j], torch.tensor([1.0], dtype=FLOAT)])
    # E_q[r/q] = 1 for a normal density r says that all of q is drawn, in its proportions
    inner = dgm.Gaussian(base.components.mean[0], 0.7 * base.components.covariance_diagonal[0].sqrt())
    share = (inner.log_prob(x) - base.log_prob(x)).exp().unsqueeze(-1)
    values = torch.cat([d, d[..., i] * d[..., j], share], -1)
    assert compare(values, expected).z.abs().max() <= 5
    # draws of the Gaussian of the same moments are noticed
    y = base.moments.sample((10, 2000), torch.Generator().manual_seed(3))
    share = (inner.log_prob(y) - base.log_prob(y)).exp().unsqueeze(-1)
    assert compare(share, expected[-1:]).z.abs().max() > 5


def test_a_component_without_weight_is_never_drawn_and_does_not_count():
    means = torch.tensor([[100.0], [0.0], [100.0], [1.0], [100.0]], dtype=FLOAT)
    logs = torch.tensor([-math.inf, 0.0, -math.inf, 1.0, -math.inf], dtype=FLOAT)
    base = dgm.Mixture(means, 0.5, log_weights=logs)
    assert base.sample(5000, torch.Generator().manual_seed(0)).max() < 20
    two = dgm.Mixture(means[[1, 3]], 0.5, log_weights=logs[[1, 3]])
    x = torch.linspace(-3, 3, 20, dtype=FLOAT).unsqueeze(-1)
    torch.testing.assert_close(base.log_prob(x), two.log_prob(x))
    torch.testing.assert_close(base.energy_and_gradient(x)[1], two.energy_and_gradient(x)[1])


@KINDS
def test_problems_are_taken_by_flat_index(kind):
    base = mixture_of(kind, (2, 3))
    taken = base.take(torch.tensor([4, 0]))
    torch.testing.assert_close(taken.mean, base.mean.reshape(6, 2)[[4, 0]])
    x = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    torch.testing.assert_close(taken.energy(x.reshape(6, 2)[[4, 0]]), base.energy(x).reshape(6)[[4, 0]])
    assert base.to(torch.float32).sample(2).dtype == torch.float32


def test_a_mixture_is_frozen_and_its_arguments_are_checked():
    base = mixture_of()
    with pytest.raises(FrozenInstanceError):
        base.mean = base.mean
    means = torch.zeros(2, 3, 4)
    with pytest.raises(dgm.errors.ArgumentError, match=r"expected \[components, \*batch, D\]"):
        dgm.Mixture(torch.zeros(4), 1.0)
    with pytest.raises(dgm.errors.ArgumentError, match="log_weights of shape"):
        dgm.Mixture(means, 1.0, log_weights=torch.zeros(2))
    with pytest.raises(dgm.errors.ArgumentError, match="sd"):
        dgm.Mixture(means, -1.0)
    with pytest.raises(dgm.errors.ArgumentError, match="log_zeta of shape"):
        dgm.Mixture(means, 1.0, log_zeta=0.0)
    with pytest.raises(dgm.errors.EvidenceError, match="zero weight for 3 of 3"):
        dgm.Mixture(means, 1.0, log_weights=torch.full((2, 3), -math.inf))
    with pytest.raises(dgm.errors.ArgumentError, match=r"expected \[\.\.\., \*batch, 4\]"):
        dgm.Mixture(means, 1.0).energy(torch.zeros(3))


# -------------------------------------------------------------------------------------------------------- fits


def test_modes_become_components_of_their_laplace_masses():
    known = known_bimodal((2,))
    base = dgm.Mixture.from_modes(known.target, widen=1.0)
    means, covariances = known.target.parts[1], known.target.parts[2]
    order = base.components.mean[:, 0, 0].argsort()
    torch.testing.assert_close(base.components.mean[order, 0], means, atol=1e-3, rtol=0)
    torch.testing.assert_close(base.components.covariance[order, 1], covariances, atol=1e-3, rtol=0)
    torch.testing.assert_close(base.log_weights[order, 0].exp(), known.target.parts[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(base.log_zeta, known.log_z, atol=1e-3, rtol=0)
    assert dgm.Mixture.from_modes(dgm.modes(known.target), widen=2.0).components.covariance[0, 0, 0, 0] > 0.7


def test_local_fits_become_components_of_their_bounds():
    known = known_bimodal()
    wide = dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 2.0)
    base = dgm.Mixture.from_local_fits(known.target, 8, start=wide, steps=600)
    kept = base.log_weights > -math.inf
    assert kept.sum() == 2
    weights, means, _ = known.target.parts
    order = base.components.mean[kept][:, 0].argsort()
    torch.testing.assert_close(base.components.mean[kept][order], means, atol=0.05, rtol=0)
    torch.testing.assert_close(base.log_weights[kept][order].exp(), weights, atol=0.05, rtol=0)
    assert base.log_zeta == pytest.approx(1.5, abs=0.05)


def test_a_refined_mixture_is_nearer_to_what_the_draws_are_of():
    known = known_bimodal()
    x = known.draw(4000, torch.Generator().manual_seed(5)).unflatten(0, (4, 1000))
    start = dgm.Mixture(torch.tensor([[-1.0, -1.0], [1.0, 0.0]], dtype=FLOAT), 1.5)
    bounds = [start]
    for _ in range(8):
        bounds.append(bounds[-1].refined(x, torch.zeros(4, 1000, dtype=FLOAT), known.log_z))
    fresh = known.draw(4000, torch.Generator().manual_seed(6))
    divergences = [(-known.target.energy(fresh) - 1.5 - base.log_prob(fresh)).mean().item() for base in bounds]
    assert divergences[0] > 1
    assert divergences[-1] == pytest.approx(0, abs=0.01)
    assert bounds[-1].log_zeta == 1.5
