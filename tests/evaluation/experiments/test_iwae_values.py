"""log p(x) of the published IWAE's images, against the values of long annealing runs (reference data)."""

import pytest
import torch

import dgm_infer as dgm
from generators import IWAE, LatentPosterior
from tests.files import reference_folder

pytestmark = pytest.mark.slow

N_IMAGES = 100
# from long runs that are not part of this project, with their uncertainty
LOG_EVIDENCE, TOLERANCE = -99.52, 0.03


@pytest.fixture(scope="module")
def published():
    folder = reference_folder("iwae_mnist")
    model = IWAE.from_npz(folder)
    images, latents = (x[:N_IMAGES] for x in IWAE.published_images(folder))
    target = LatentPosterior(model.decoder, images, model.input_density)
    encoder = dgm.Gaussian.from_encoder(model.encoder, target.images)
    base = dgm.Gaussian.fit(target, "full", start=encoder, steps=400, seed=1)
    return target, encoder, base, latents


@pytest.fixture(scope="module")
def both(published):
    target, _, base, latents = published
    # errors of the means are 0.004, of a tolerance of 0.03
    return dgm.bidirectional(target, base, latents, chains=4, seed=1, keep_draws=False, progress=False)


def mean(evidence):
    """Over the images, and its standard error given them."""
    n = evidence.log_z.numel()
    return evidence.log_z.mean(), evidence.std_error.square().sum().sqrt() / n


def test_bounds_from_both_sides_close_at_the_known_value(both):
    for bound in (both.lower, both.upper, both.combined):
        value, _ = mean(bound)
        assert abs(value - LOG_EVIDENCE) <= TOLERANCE, f"{bound.method}: {value:.4f}"
    assert both.gap.mean() <= 0.05


def test_simulated_tempering_agrees(published, both):
    target, _, base, _ = published
    tempered = dgm.log_evidence(
        target, base, dgm.SimulatedTempering(), chains=4, seed=1, keep_draws=False, progress=False
    )
    (value, error), (expected, its_error) = mean(tempered), mean(both.combined)
    spread = (error**2 + its_error**2).sqrt()
    assert spread < 0.01
    assert abs(value - expected) <= 3 * spread, f"{value:.4f} +- {error:.4f}, {expected:.4f} +- {its_error:.4f}"
    # the weighted draws at the base have the base's moments
    assert tempered.diagnostics["base_moments_agree"].double().mean() >= 0.95


def test_bounds_by_the_encoder_are_in_order_and_as_published(published, both):
    target, encoder, _, _ = published
    known = [(dgm.Elbo(500), -109.53), (dgm.evidence.ImportanceSampling(50), -101.98)]
    values = []
    for method, expected in known:
        bound = dgm.log_evidence(target, encoder, method, chains=8, seed=1, keep_draws=False, progress=False)
        value, error = mean(bound)
        assert error < 0.1
        assert abs(value - expected) <= 5 * (error**2 + torch.tensor(0.02) ** 2).sqrt(), f"{value:.3f} +- {error:.3f}"
        values.append(value)
    assert values[0] < values[1] < mean(both.lower)[0]
