"""Reading images and masks, the report, and the published demonstration."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

import dgm_infer as dgm
import generators
from dgm_infer.errors import ConfigError
from evaluation.conditioning import describe, parse_label, read_images, read_mask
from trainers import DigitsData

CONFIG = Path(__file__).parents[2] / "configs" / "condition" / "digits_top_half.yaml"


def test_named_halves_and_their_opposites_share_no_pixel():
    for shape in ((8, 8), (3, 7, 5)):
        for one, other in (("top_half", "bottom_half"), ("left_half", "right_half")):
            first, second = read_mask(one, shape), read_mask(other, shape)
            assert (first ^ second).all()
    assert read_mask("top_half", (8, 8))[:4].all()


def test_pictures_and_arrays_are_read(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    assert torch.equal(read_images(str(tmp_path / "grey.png"), 1, (8, 6)), torch.tensor(pixels).unsqueeze(0) / 255)
    Image.fromarray(np.stack([pixels] * 3, -1)).save(tmp_path / "colour.png")
    assert read_images(str(tmp_path / "colour.png"), 1, (3, 8, 6)).shape == (1, 3, 8, 6)
    np.save(tmp_path / "many.npy", np.ones((5, 8, 8)))
    assert read_images(str(tmp_path / "many.npy"), 3, (8, 8)).shape == (3, 8, 8)


def test_bytes_are_scaled_as_in_pictures_and_one_image_needs_no_batch(tmp_path):
    np.save(tmp_path / "bytes.npy", np.full((8, 8), 51, dtype=np.uint8))
    images = read_images(str(tmp_path / "bytes.npy"), 1, (8, 8))
    assert images.shape == (1, 8, 8)
    torch.testing.assert_close(images, torch.full_like(images, 0.2))


def test_a_file_that_is_no_picture_is_named(tmp_path):
    (tmp_path / "text.png").write_text("text")
    with pytest.raises(ConfigError, match=r"text\.png"):
        read_images(str(tmp_path / "text.png"), 1, (8, 8))


def test_a_pickled_array_is_refused(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"objects\.npy"):
        read_images(str(tmp_path / "objects.npy"), 1, (8, 8))


def test_labels_of_the_summary_are_parsed():
    assert parse_label("z[3, 0]") == ("z", (3, 0))
    assert parse_label("angle") == ("angle", ())


def test_the_report_names_what_has_not_mixed():
    model = generators.LinearGaussian(torch.randn(3, 2, generator=torch.Generator().manual_seed(0)))
    fibre = dgm.condition(model, torch.zeros(2, 3))
    draws = dgm.sample(fibre, chains=4, warmup=30, draws=30, seed=1, progress=False)
    summary = draws.summary()
    summary["r_hat"] = [1.0, 1.2, 1.0, np.nan]
    report = describe(draws, summary, 1.0)
    assert "2 of 4" in report
    assert "z[0, 1] (1.200)" in report
    assert "z[1, 1] (nan)" in report


@pytest.fixture(scope="module")
def demo():
    settings = yaml.safe_load(CONFIG.read_text())
    model = generators.load(settings["generator"])
    images = DigitsData().held_out(settings["n_images"])
    fibre = dgm.condition(model, images, observe=dgm.pixels(read_mask(settings["observe"], model.output_shape)))
    kernel = dgm.ConstrainedHMC(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings["kernel"].items()})
    sizes = {name: settings[name] for name in ("chains", "warmup", "draws", "seed")}
    return dgm.sample(fibre, kernel, progress=False, **sizes)


@pytest.mark.slow
def test_the_demonstration_conditions_exactly_and_mixes(demo):
    stats = demo.stats
    assert demo.shape[0] >= 16
    assert demo.shape[1] >= 150
    assert demo.shape[2] == 8
    assert stats["constraint_error"].max() <= 1e-8
    acceptance = stats["acceptance_rate"].mean((0, 1))
    assert acceptance.min() > 0.6
    assert acceptance.max() < 0.99
    failed = (stats["projection_failed"] | stats["reversal_failed"]).double().mean()
    assert failed < 0.03
    moved = (demo.inputs.diff(dim=1) != 0).any(-1).any(1)
    assert moved.all()
    assert (demo.summary()["r_hat"] <= 1.05).mean() >= 0.9


@pytest.mark.slow
def test_where_two_digits_fit_the_visible_half_both_appear(demo):
    data = DigitsData()
    classifier = KNeighborsClassifier(5).fit(data.training.images.flatten(1), data.training.labels)
    completions = demo.generate()
    several = 0
    for i in range(completions.shape[2]):
        digits = classifier.predict(completions[:, :, i].flatten(0, 1).flatten(1))
        share = np.bincount(digits, minlength=10) / len(digits)
        several += int((share > 0.05).sum() > 1)
    assert several >= 2
