"""The scorecard of completions: scores with known values, planted mistakes that they show, and the whole benchmark."""

import functools
import json
import math
from typing import Any

import pytest
import torch

import generators
from dgm_infer.errors import ConfigError
from dgm_infer.sampling.run import SamplingRun
from evaluation.benchmarks import completions
from evaluation.benchmarks.classifier import train_classifier
from evaluation.benchmarks.completions import scorecard
from evaluation.benchmarks.publishing import measured_before
from evaluation.benchmarks.scores import class_scores, covered, crps, probability_integral_transform
from trainers.data import Labelled

FLOAT = torch.float64
# Draws and independent truths of the tests of scores.
DRAWS, TRUTHS = 19, 20_000


def normals(sd=1.0, seed=0):
    """Draws of spread ``sd`` and truths of spread 1, and a generator."""
    rng = torch.Generator().manual_seed(seed)
    truth = torch.randn(TRUTHS, generator=rng, dtype=FLOAT)
    return sd * torch.randn(DRAWS, TRUTHS, generator=rng, dtype=FLOAT), truth, rng


def z_score(values, expected):
    return (values.mean() - expected) / (values.std() / len(values) ** 0.5)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_of_calibrated_draws_have_their_coverage(level):
    draws, truth, rng = normals()
    assert abs(z_score(covered(draws, truth, rng, level).double(), level)) < 5


def test_coverage_is_exact_with_ties():
    rng = torch.Generator().manual_seed(1)
    dice = torch.randint(3, (DRAWS + 1, TRUTHS), generator=rng)
    assert abs(z_score(covered(dice[1:], dice[0], rng).double(), 0.9)) < 5


@pytest.mark.parametrize("sd", [0.5, 2.0])
def test_control_draws_too_narrow_or_too_wide_have_another_coverage(sd):
    draws, truth, rng = normals(sd)
    z = z_score(covered(draws, truth, rng).double(), 0.9)
    assert z < -20 if sd < 1 else z > 20


def test_the_transform_of_calibrated_draws_is_uniform():
    draws, truth, rng = normals()
    u = probability_integral_transform(draws, truth, rng).sort().values
    even = (torch.arange(TRUTHS) + 0.5) / TRUTHS
    # Kolmogorov and Smirnov: 1.95 is exceeded with probability 0.001
    assert (u - even).abs().max() * TRUTHS**0.5 < 1.95
    narrow, truth, rng = normals(0.5)
    u = probability_integral_transform(narrow, truth, rng).sort().values
    assert (u - even).abs().max() * TRUTHS**0.5 > 10


def gaussian_crps(x, sd):
    """``sd (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))`` with ``z = x / sd`` (Gneiting and Raftery 2007)."""
    normal, z = torch.distributions.Normal(0.0, 1.0), x / sd
    return sd * (z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp() - 1 / math.pi**0.5)


@pytest.mark.parametrize("sd", [0.5, 1.0, 2.0])
def test_crps_is_that_of_a_gaussian_for_any_number_of_draws(sd):
    draws, truth, _ = normals(sd)
    assert abs(z_score(crps(draws, truth) - gaussian_crps(truth, sd), 0.0)) < 5
    assert abs(z_score(crps(draws[:2], truth) - gaussian_crps(truth, sd), 0.0)) < 5


def test_control_crps_of_the_truth_is_lowest_and_a_biased_estimate_is_noticed():
    score = {sd: crps(*normals(sd)[:2]).mean() for sd in (0.5, 1.0, 2.0)}
    assert score[1.0] < min(score[0.5], score[2.0])
    draws, truth, _ = normals()
    # the pairs of a draw with itself counted in
    biased = crps(draws, truth) + (draws.unsqueeze(0) - draws.unsqueeze(1)).abs().mean((0, 1)) / 2 / (DRAWS - 1)
    assert abs(z_score(biased - gaussian_crps(truth, 1.0), 0.0)) > 5


@pytest.mark.parametrize("stuck", [False, True])
def test_crps_of_chains_that_have_not_mixed_is_that_of_independent_draws(stuck):
    rng = torch.Generator().manual_seed(2)
    chains, each = 4, 5
    truth = torch.randn(TRUTHS, generator=rng, dtype=FLOAT)
    draws = (
        torch.randn(chains, 1 if stuck else each, TRUTHS, generator=rng, dtype=FLOAT).expand(-1, each, -1).flatten(0, 1)
    )
    assert abs(z_score(crps(draws, truth, chains) - gaussian_crps(truth, 1.0), 0.0)) < 5
    # taken for independent, draws of chains that do not move look narrow
    z = z_score(crps(draws, truth) - gaussian_crps(truth, 1.0), 0.0)
    assert z > 20 if stuck else abs(z) < 5


def test_class_scores_have_their_definitions():
    p = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.4, 0.6]], dtype=FLOAT)
    scores = class_scores(p, torch.tensor([0, 0, 1, 0]))
    torch.testing.assert_close(scores.log_score.exp(), torch.tensor([0.8, 0.8, 0.2, 0.4], dtype=FLOAT))
    assert scores.accuracy == 0.5
    # three predictions at 0.8 of which two are right, one at 0.6 that is wrong
    assert scores.calibration_error == pytest.approx((abs(3 * 0.8 - 2) + 0.6) / 4)


@pytest.mark.parametrize(("sharpness", "calibrated"), [(1.0, True), (3.0, False)])
def test_the_calibration_error_of_true_probabilities_is_small(sharpness, calibrated):
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(TRUTHS, 4, generator=rng, dtype=FLOAT)
    labels = torch.multinomial(logits.softmax(1), 1, generator=rng).squeeze(1)
    error = class_scores((sharpness * logits).softmax(1), labels).calibration_error
    assert (error < 0.02) is calibrated


def test_the_nearest_training_image_completes_itself():
    images = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))
    mask = completions.top_half((4, 4))
    nearest = completions.nearest_completions(images[:2], mask, images, n=1)
    assert torch.equal(nearest, images[None, :2])
    other = images[:2] + 0.01
    nearest = completions.nearest_completions(other, mask, images, n=2)
    assert torch.equal(nearest[..., mask], other[..., mask].expand(2, 2, 8))
    assert torch.equal(nearest[0][..., ~mask], images[:2][..., ~mask])


def test_a_classifier_of_real_images_knows_them_and_is_repeatable():
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 2
    images = torch.rand(200, 8, 8, generator=rng) * torch.where(labels == 1, 1.0, 0.3)[:, None, None]
    classifier = train_classifier(Labelled(images, labels), 0, steps=80)
    p = classifier.probabilities(images.expand(2, 200, 8, 8))
    assert p.shape == (2, 200, 2)
    assert class_scores(p[0], labels).accuracy > 0.95
    again = train_classifier(Labelled(images, labels), 0, steps=80)
    assert torch.equal(again.probabilities(images), p[0])


OPTIONS: dict[str, Any] = {"images": 6, "chains": 2, "warmup": 20, "draws": 20, "cores": 1}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completions, "train_classifier", functools.partial(train_classifier, steps=30))
        # the second run keeps what the first has measured
        completions.bench("digits_gan", **OPTIONS, output=str(folder))
        first = json.loads((folder / "completions.json").read_text())
        path = completions.bench("digits_vae", **OPTIONS, output=str(folder))
        again = json.loads(path.read_text())
        assert again["generators"]["digits_gan"] == first["generators"]["digits_gan"]
        # of other settings it keeps nothing
        assert measured_before(path, again["settings"] | {"seed": 1}, "generators") == {"generators": {}}
    assert path == folder / "completions.json"
    return json.loads(path.read_text())


@pytest.mark.slow
def test_the_benchmark_scores_every_generator_beside_the_nearest_images(record, tmp_path):
    assert set(record["generators"]) == {"digits_vae", "digits_gan"}
    for row in record["generators"].values():
        assert 0 <= row["held_out"]["coverage"]["mean"] <= 1
        assert row["held_out"]["crps"]["mean"] > 0
        assert row["held_out"]["class_log_score"]["mean"] < 0
        assert "accuracy" not in row["own"]
    assert record["data"]["digits"]["complete"]["accuracy"] <= 1
    assert record["command"].startswith("dgm-infer bench completions --generators digits_gan,digits_vae --images 6")
    lines = scorecard(record).splitlines()
    assert len(lines) == 8
    assert all(line.count("|") == lines[0].count("|") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"generators": "nothing"}, "nothing"),
        ({"generators": "mnist=digits_vae"}, r"digits_vae makes images \(8, 8\)"),
        ({"generators": "digits_iwae"}, "discrete"),
        ({"images": 0}, "images"),
        ({"noise": 0.0}, "noise=0"),
        ({"chains": 1}, "chains"),
    ],
)
def test_options_that_make_no_scorecard(arguments, words, tmp_path):
    options: dict[str, Any] = {"generators": "digits_vae", "images": 2, "cores": 1, "output": str(tmp_path)} | arguments
    with pytest.raises(ConfigError, match=words):
        completions.bench(**options)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_records_no_part_of_the_draws(monkeypatch, tmp_path):
    made, keep = [], SamplingRun._keep

    def interrupted(*arguments):
        made.append(1)
        if len(made) == 5:
            raise KeyboardInterrupt
        return keep(*arguments)

    monkeypatch.setattr(SamplingRun, "_keep", interrupted)
    monkeypatch.setattr(completions, "train_classifier", functools.partial(train_classifier, steps=1))
    options: dict[str, Any] = {"images": 2, "chains": 2, "warmup": 2, "draws": 20, "own": False, "cores": 1}
    with pytest.warns(UserWarning, match="interrupted"), pytest.raises(KeyboardInterrupt):
        completions.bench("digits_vae", **options, output=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_exact_draws_cover_the_images_of_their_own_generator_and_those_of_another_do_not():
    model = generators.load("digits_vae")
    settings = {"noise": 0.1, "chains": 4, "warmup": 150, "draws": 100, "seed": 0}
    own = completions.Pictures(completions._made(model, 100, 0.1, 0), None)
    coverage = completions._completed(model, own, None, settings)["coverage"]
    assert abs(coverage["mean"] - 0.9) < 3 * coverage["std_error"] + 0.01
    # planted: a decoder whose noise is half as wide as it was
    narrow = generators.load("digits_vae")
    assert isinstance(narrow, generators.GaussianVAE)
    narrow.decoder.log_sd -= math.log(2)
    few = completions.Pictures(own.images[:30], None)
    coverage = completions._completed(narrow, few, None, settings)["coverage"]
    assert coverage["mean"] < 0.9 - 5 * coverage["std_error"]
