"""Every method of evidence from every kind of base: where a base is normalised and drawn from, the law is the same."""

import dataclasses

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence.path import AnnealedPath
from tests.dgm_infer.evidence.methods import KINDS, SMALL, small, within
from tests.known_evidence import known_bimodal, known_gaussian
from tests.oracles import FLOAT
from tests.quick import cases


def mixture_for(known, spread=1.0):
    """Two Gaussians to the left and right of a known target's base."""
    base = known.base
    shift = spread * base.covariance_diagonal.sqrt() * torch.tensor([1.0, -0.5], dtype=FLOAT)
    means = torch.stack([base.mean + shift, base.mean - shift])
    logs = torch.tensor([0.3, -0.4], dtype=FLOAT).reshape(2, *[1] * len(base.batch_shape)).expand(2, *base.batch_shape)
    return dgm.Mixture(means, base.covariance_diagonal.sqrt().expand_as(means), log_weights=logs)


class Unnormalised(dgm.Mixture):
    """A planted mistake: weights that sum to 1.6."""

    def energy(self, x):
        return super().energy(x) - 0.5

    def energy_and_gradient(self, x):
        energy, gradient = super().energy_and_gradient(x)
        return energy - 0.5, gradient

    def take(self, problems):
        taken = super().take(problems)
        return Unnormalised._made(taken.components, taken.log_weights, None)


def unnormalised(known):
    good = mixture_for(known)
    return Unnormalised._made(good.components, good.log_weights, None)


def estimated(method, make, chains=32, **options):
    known = known_gaussian(2, (2,))
    return known, dgm.log_evidence(known.target, make(known), method, chains=chains, seed=3, progress=False, **options)


def chosen_with(method, sizes=SMALL, broad=None):
    """A small method; the broad reference of parallel tempering is one that does not happen to be the target."""
    chosen = small(method, sizes)
    if method is not dgm.ParallelTempering:
        return chosen
    broad = dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 2.0) if broad is None else broad
    return dataclasses.replace(chosen, broad=broad)


NAMED = {kind.__name__: kind for kind in KINDS}
# the rest share the code of these
QUICK = ("AIS", "SMC", "GibbsTempering", "ParallelTempering", "Elbo")


@pytest.mark.parametrize("method", cases(NAMED, quick=QUICK))
def test_an_estimate_from_a_mixture_is_where_its_status_says(method):
    known, estimate = estimated(chosen_with(method), mixture_for)
    assert estimate.std_error.max() < 0.3
    assert within(known, estimate)


def flow_for(known):
    pytest.importorskip("zuko")
    x = known.base.sample((4, 100), torch.Generator().manual_seed(7))
    return dgm.Flow.from_draws(x, steps=30, layers=2, width=8, bins=4)


# all methods have their law with a mixture; a flow is another base for the same code
@pytest.mark.parametrize("method", cases({name: NAMED[name] for name in QUICK}, quick=("Elbo",)))
def test_an_estimate_from_a_flow_is_where_its_status_says(method):
    known, estimate = estimated(chosen_with(method, {**SMALL, "temperatures": 20, "draws": 40}), flow_for)
    assert estimate.std_error.max() < 0.3
    assert within(known, estimate)


# a lower bound is one still, if it is high by less than its gap
WEIGHED = {name: kind for name, kind in NAMED.items() if small(kind).status != "lower"}


@pytest.mark.parametrize("method", cases(WEIGHED, quick=("AIS", "GibbsTempering", "ParallelTempering")))
def test_control_an_unnormalised_base_is_noticed_by_the_same_test(method):
    # the other leg of parallel tempering is normalised
    chosen = chosen_with(method, broad=False)
    # nor does what is looked for around the draws need it
    known, estimate = estimated(chosen, unnormalised, coverage=False)
    assert not within(known, estimate)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_path_from_a_mixture_has_its_energies_and_their_gradients(beta):
    known = known_gaussian(2, (2,))
    base = mixture_for(known)
    path = AnnealedPath(known.target, base)
    v = path.draws(4, torch.Generator().manual_seed(0)).requires_grad_()
    x = base.unwhiten(v)
    energy = (1 - beta) * base.energy(x) + beta * known.target.energy(x)
    (gradient,) = torch.autograd.grad(energy.sum(), v)
    point = path.at(v.detach())
    torch.testing.assert_close(torch.lerp(point.slope, point.gradient, torch.tensor(beta, dtype=FLOAT)), gradient)
    own = (1 - beta) * (point.square + path.base_constant) + beta * point.energy
    torch.testing.assert_close(own, energy.detach())
    torch.testing.assert_close(path.differences(v.detach()), path.difference(point))


def test_draws_of_the_path_are_those_of_the_base_in_whitened_coordinates():
    base = mixture_for(known_gaussian(2, (2,)), spread=3.0)
    path = AnnealedPath(known_gaussian(2, (2,)).target, base)
    v = path.draws(20000, torch.Generator().manual_seed(1))
    assert v.mean(0).abs().max() < 0.05
    torch.testing.assert_close(v.var(0), torch.ones_like(v[0]), atol=0.05, rtol=0)
    # not normal: two modes leave the middle empty
    kurtosis = v.pow(4).mean(0) / v.var(0).square()
    assert kurtosis.min() < 2.5


def test_bounds_from_both_sides_and_chunks_take_a_mixture():
    known = known_gaussian(2, (3,))
    exact = known.draw(16, torch.Generator().manual_seed(2))
    method = dgm.AIS(temperatures=60, pilot_temperatures=20)
    bounds = dgm.bidirectional(known.target, mixture_for(known), exact, method, seed=1, progress=False)
    assert within(known, bounds.combined)
    chunked = dgm.log_evidence(known.target, mixture_for(known), method, chunk=2, seed=1, progress=False)
    assert within(known, chunked)


class StudentModes(dgm.Target):
    """Four modes with heavier tails than normal ones, far apart in ten dimensions; ``log Z = 1.5``."""

    def __init__(self, problems: int, freedom: float = 10.0):
        super().__init__(None, 10, (problems,))
        rng = torch.Generator().manual_seed(12)
        self.means = 4.0 * torch.randn(4, 10, generator=rng, dtype=FLOAT)
        self.sds = 0.5 + torch.rand(4, generator=rng, dtype=FLOAT)
        self.freedom = torch.tensor(freedom, dtype=FLOAT)

    def energy(self, x):
        nu, d = self.freedom, self.dim
        constant = torch.lgamma((nu + d) / 2) - torch.lgamma(nu / 2) - 0.5 * d * (nu * torch.pi).log()
        squares = torch.stack([((x - m) / s).square().sum(-1) for m, s in zip(self.means, self.sds, strict=True)])
        logs = constant - d * self.sds.log().reshape(4, *[1] * (x.ndim - 1)) - 0.5 * (nu + d) * (squares / nu).log1p()
        return -(logs.logsumexp(0) - torch.tensor(4.0).log() + 1.5)

    def take(self, problems):
        return StudentModes(len(problems), float(self.freedom))


def test_a_mixture_that_knows_the_modes_is_much_better_than_one_gaussian_that_covers_them():
    target = StudentModes(4)
    found = dgm.modes(target)
    errors = {}
    for name, base in (
        ("mixture", dgm.Mixture.from_modes(found, widen=1.4)),
        ("gaussian", dgm.Gaussian.covering(found)),
    ):
        # the same gradients for both
        method = dgm.AIS(temperatures=40, pilot_temperatures=20)
        estimate = dgm.log_evidence(target, base, method, chains=32, seed=4, coverage=False, progress=False)
        errors[name] = (estimate.log_z - 1.5).square().mean().sqrt().item()
    assert errors["mixture"] < 0.1
    assert errors["mixture"] < 0.25 * errors["gaussian"], errors


def test_a_refined_mixture_stays_one():
    known = known_bimodal()
    start = dgm.Mixture(torch.tensor([[-1.0, -1.0], [1.0, 0.0]], dtype=FLOAT), 1.5)
    refined = dgm.evidence.refine_base(
        known.target, start, dgm.GibbsTempering(draws=100, warmup=20), seed=0, progress=False
    )
    assert isinstance(refined.base, dgm.Mixture)
    bound = dgm.Elbo(samples=200)
    before, after = (
        dgm.log_evidence(known.target, base, bound, seed=1, progress=False).log_z for base in (start, refined.base)
    )
    assert known.log_z - after < 0.1 * (known.log_z - before)
