"""Reading images and masks, the report, and the published demonstration."""

import inspect
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

import dgm_infer as dgm
import generators
from dgm_infer.conditioning.observations import Pixels
from dgm_infer.conditioning.pictures import PixelScale
from dgm_infer.errors import ConfigError, ObservationError
from evaluation.commands import condition
from evaluation.commands.condition import condition_images
from evaluation.commands.inputs import read_images, read_mask, read_observation
from evaluation.commands.outline import in_words_of
from evaluation.reports.mixing import describe, modes, parse_label
from generators.checkpoints import PRETRAINED
from tests.dgm_infer.sampling.two_sides import fibre as two_sides
from tests.kernels import Wanderer
from trainers import DigitsData

CONFIG = Path(__file__).parents[3] / "configs" / "condition" / "digits_top_half.yaml"


def test_named_halves_and_their_opposites_share_no_pixel():
    for shape in ((8, 8), (3, 7, 5)):
        for one, other in (("top_half", "bottom_half"), ("left_half", "right_half")):
            first, second = read_mask(one, shape), read_mask(other, shape)
            assert (first ^ second).all()
    assert read_mask("top_half", (8, 8))[:4].all()


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("top", slice(2), slice(7)),
        ("bottom", slice(6, 8), slice(7)),
        ("left", slice(8), slice(1)),
        ("right", slice(8), slice(5, 7)),
    ],
)
def test_quarters_are_of_height_or_width(name, rows, columns):
    expected = torch.zeros(3, 8, 7, dtype=torch.bool)
    expected[:, rows, columns] = True
    assert torch.equal(read_mask(f"{name}_quarter", (3, 8, 7)), expected)


@pytest.mark.parametrize("path", sorted(CONFIG.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_say_what_they_reach_and_where_their_weights_come_from(path):
    text = path.read_text()
    header = " ".join(line for line in text.splitlines() if line.startswith("#"))
    assert "akes" in header
    assert "R-hat" in header
    settings = yaml.safe_load(text)
    assert settings["name"] == path.stem
    assert (CONFIG.parents[2] / "docs" / f"{path.stem}.png").is_file()
    assert "not yet measured" not in header
    assert set(settings) <= set(inspect.signature(condition_images).parameters)
    observation = read_observation(settings["observe"], None, (28, 28))
    if isinstance(observation, Pixels):
        assert observation.mask is not None
        assert 0 < observation.mask.sum() < 28 * 28
    generator = settings.get("generator")
    if isinstance(generator, dict):
        assert generator["class_path"] == "generators.FaceGAN"
        assert "make faces" in text
    elif not (PRETRAINED / f"{generator}.safetensors").is_file():
        # trained by the reader, or of the reference data
        assert f"--export.path {Path(str(generator)).with_suffix('')}" in text or "--generator" in text


def test_a_grid_observes_the_middle_of_every_block():
    mask = read_mask("grid_3", (3, 8, 8))
    assert mask.sum() == 3 * 9
    assert mask[1].nonzero().tolist() == [[i, j] for i in (1, 4, 7) for j in (1, 4, 7)]
    with pytest.raises(ConfigError, match="grid_9 observes nothing"):
        read_mask("grid_9", (8, 8))
    with pytest.raises(ConfigError, match="grid_0"):
        read_mask("grid_0", (8, 8))


def test_what_is_observed_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = np.random.default_rng(0).random((5, 192))
    np.save("a.npy", matrix)
    np.save("k.npy", np.full((3, 3), 1 / 9))
    made = {
        "downsample:4": dgm.downsample(4),
        "downsample_4": dgm.downsample(4),
        "blur:1.5": dgm.blur(1.5),
        "blur:k.npy": dgm.blur(np.full((3, 3), 1 / 9)),
        "linear:a.npy": dgm.linear(matrix),
    }
    for name, expected in made.items():
        operator = read_observation(name, None, (3, 8, 8))
        assert not isinstance(operator, Pixels)
        assert torch.equal(operator(image), expected(image))
    for wrong in ("downsample:0", "blur:wide", "blurr:1", "linear:absent.npy", "sharpen"):
        with pytest.raises(ConfigError, match=wrong.partition(":")[2] or wrong):
            read_observation(wrong, None, (3, 8, 8))


def test_a_mask_is_a_picture_or_an_array_for_all_channels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[2:5, 1:] = True
    black_and_white = 255 * mask.numpy().astype(np.uint8)
    np.save("mask.npy", black_and_white)
    for name, mode in (("l.png", "L"), ("one.png", "1"), ("rgb.png", "RGB"), ("mask.npy", "")):
        if mode:
            Image.fromarray(black_and_white).convert(mode).save(name)
        observation = read_observation(None, name, (3, 8, 8))
        assert isinstance(observation, Pixels)
        assert torch.equal(observation.index((3, 8, 8)), mask.expand(3, 8, 8).flatten().nonzero().squeeze(-1))
    with pytest.raises(ConfigError, match="give one of them"):
        read_observation("top_half", "l.png", (8, 8))
    with pytest.raises(ConfigError, match=r"mask: absent\.png does not exist"):
        read_observation(None, "absent.png", (8, 8))
    np.save("grey.npy", np.arange(64, dtype=np.uint8).reshape(8, 8))
    with pytest.raises(ObservationError, match="boolean mask"):
        read_observation(None, "grey.npy", (8, 8))


def test_a_blurred_picture_is_sharpened(tmp_path):
    """Measured with noise after the blur: the restored mean is nearer the truth than what was measured."""
    model = generators.load("digits_vae")
    truth = model.generate(1, seed=5).images[0].clamp(0, 1)  # type: ignore[operator]
    blurred = dgm.blur(1.0)(truth)
    Image.fromarray((255 * blurred).round().to(torch.uint8).numpy()).save(tmp_path / "blurred.png")
    folder = condition_images(
        "sharp",
        model,
        str(tmp_path / "blurred.png"),
        "blur:1.0",
        1,
        0.02,
        chains=4,
        warmup=60,
        draws=60,
        seed=1,
        measured=True,
        mean=True,
        output=str(tmp_path),
    )
    names = {path.name for path in (folder / "images").iterdir()}
    assert names == {"000_observed.png", "000_mean.png", *(f"000_completion_{k}.png" for k in range(1, 5))}
    page = (folder / "report.html").read_text().lower()
    assert "restorations" in page
    assert "completions, each" not in page
    restored = dgm.image(folder / "images" / "000_mean.png")
    assert restored.shape == (8, 8)
    assert (restored - truth).square().mean() < 0.3 * (blurred - truth).square().mean()


@pytest.mark.slow
def test_completions_have_the_block_means_that_were_observed(tmp_path):
    torch.manual_seed(0)
    model = generators.GAN(6, (8, 8), hidden=(16,), channels=None).eval()
    images = model(torch.randn(2, 6)).detach().reshape(2, 8, 8)
    np.save(tmp_path / "images.npy", images.numpy())
    folder = condition_images(
        "blocks", model, str(tmp_path / "images.npy"), "downsample_4", 2, chains=3, warmup=2, draws=4, seed=0,
        output=str(tmp_path),
    )  # fmt: skip
    draws = dgm.Draws.load(folder / "posterior.nc")
    with torch.no_grad():
        means = dgm.downsample(4)(model(draws.inputs.float()).unflatten(-1, (8, 8)))
    torch.testing.assert_close(means, dgm.downsample(4)(images).expand_as(means), atol=1e-5, rtol=0)
    with Image.open(folder / "completions.png") as picture:
        assert picture.size[0] > 200


def test_pictures_and_arrays_are_read(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    assert torch.equal(read_images(str(tmp_path / "grey.png"), 1, (8, 6)), torch.tensor(pixels).unsqueeze(0) / 255)
    Image.fromarray(np.stack([pixels] * 3, -1)).save(tmp_path / "colour.png")
    assert read_images(str(tmp_path / "colour.png"), 1, (3, 8, 6)).shape == (1, 3, 8, 6)
    np.save(tmp_path / "many.npy", np.ones((5, 8, 8)))
    assert read_images(str(tmp_path / "many.npy"), 3, (8, 8)).shape == (3, 8, 8)


def test_a_picture_in_colour_becomes_grey_for_a_grey_generator_and_another_size_is_named(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "colour.png")
    grey = np.asarray(Image.fromarray(pixels).convert("L"))
    for shape in ((8, 6), (1, 8, 6)):
        with pytest.warns(UserWarning, match=r"colour\.png is in colour and read as grey"):
            images = read_images(str(tmp_path / "colour.png"), 1, shape)
        assert torch.equal(images, torch.tensor(grey).reshape(1, *shape) / 255)
    with pytest.raises(ConfigError, match=r"has 8 x 6 pixels, the generator's images the shape \(8, 8\): resize"):
        read_images(str(tmp_path / "colour.png"), 1, (8, 8))


def test_a_picture_of_more_bits_is_refused_and_a_turned_one_is_turned_back(tmp_path):
    Image.fromarray(np.arange(48, dtype=np.uint16).reshape(8, 6) * 1000).save(tmp_path / "deep.png")
    with pytest.raises(ConfigError, match=r"deep\.png has pixels of more than 8 bits.*convert it to 8 bits"):
        read_images(str(tmp_path / "deep.png"), 1, (8, 6))
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    assert torch.equal(read_images(str(tmp_path / "turned.png"), 1, (6, 8))[0] * 255, torch.tensor(pixels).rot90(-1))


def test_bytes_are_scaled_as_in_pictures_and_one_image_needs_no_batch(tmp_path):
    np.save(tmp_path / "bytes.npy", np.full((8, 8), 51, dtype=np.uint8))
    images = read_images(str(tmp_path / "bytes.npy"), 1, (8, 8))
    assert images.shape == (1, 8, 8)
    torch.testing.assert_close(images, torch.full_like(images, 0.2))


def test_pictures_bytes_and_data_sets_are_mapped_to_the_scale_of_the_generator(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6), dtype=np.uint8)
    expected = 2 * (torch.tensor(pixels).unsqueeze(0) / 255) - 1
    scale = PixelScale(-1, 1)
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    np.save(tmp_path / "bytes.npy", pixels)
    np.save(tmp_path / "own.npy", expected.numpy())
    for name in ("grey.png", "bytes.npy", "own.npy"):
        torch.testing.assert_close(read_images(str(tmp_path / name), 1, (8, 6), scale), expected)
    np.save(tmp_path / "binary.npy", pixels > 100)
    binary = torch.where(torch.tensor(pixels > 100), 1.0, -1.0).unsqueeze(0)
    torch.testing.assert_close(read_images(str(tmp_path / "binary.npy"), 1, (8, 6), scale), binary)
    np.save(tmp_path / "wide.npy", 100 * pixels.astype(np.uint16))
    with pytest.raises(ConfigError, match=r"wide\.npy has values of torch\.uint16: convert to 8 bits"):
        read_images(str(tmp_path / "wide.npy"), 1, (8, 6), scale)
    held_out = DigitsData().held_out(3)
    torch.testing.assert_close(read_images(DigitsData(), 3, (8, 8), scale), 2 * held_out - 1)
    np.save(tmp_path / "unit.npy", expected.numpy() / 2 + 0.5)
    with pytest.warns(UserWarning, match=r"values in \[0, 1\], taken as they are.* -1 and 1: save -1 \+ 2 \* images"):
        read_images(str(tmp_path / "unit.npy"), 1, (8, 6), scale)


def test_a_folder_is_read_by_the_names_of_its_pictures(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 6), dtype=np.uint8)
    for i in (2, 0, 1):
        Image.fromarray(pixels[i]).save(tmp_path / f"{i}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    assert torch.equal(read_images(str(tmp_path), 2, (8, 6)), torch.tensor(pixels[:2]) / 255)
    with pytest.raises(ConfigError, match=r"the folder .* holds 3 pictures .*n_images = 4"):
        read_images(str(tmp_path), 4, (8, 6))


@pytest.mark.parametrize("observe", ["grid_4", "downsample_4"])
def test_a_picture_is_completed_on_the_scale_of_the_generator_and_shown_as_a_picture(observe, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = generators.GAN(8, (8, 8), hidden=[16], channels=None, output_range=(-1, 1)).eval()
    with torch.no_grad():
        own = model.observed(torch.randn(8)).reshape(8, 8)
    pixels = (255 * (own + 1) / 2).round().to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "own.png")
    shown = {}
    for name in ("completions", "thumbnails"):
        monkeypatch.setattr(
            condition, name, lambda path, originals, what, outputs, **_: shown.update(x=originals, y=outputs)
        )
    options = {"chains": 2, "warmup": 0, "draws": 3, "seed": 1, "output": str(tmp_path)} | QUICK
    folder = condition_images("own", model, str(tmp_path / "own.png"), observe, 1, **options)
    inputs = dgm.Draws.load(folder / "posterior.nc").inputs.float()
    operator = dgm.downsample(4) if observe == "downsample_4" else lambda x: x[..., 2::4, 2::4]
    with torch.no_grad():
        made = operator(model(inputs).unflatten(-1, (8, 8)))
    torch.testing.assert_close(made, operator(2 * (pixels / 255) - 1).expand_as(made), rtol=0, atol=1e-4)
    torch.testing.assert_close(shown["x"], pixels.unsqueeze(0) / 255)
    torch.testing.assert_close(operator(shown["y"]).float(), operator(pixels / 255).expand_as(made), rtol=0, atol=1e-4)


def test_black_that_a_generator_never_reaches_is_told_the_option_that_helps(tmp_path):
    model = generators.GAN(8, (8, 8), hidden=[16], channels=None, output_range=(-1, 1)).eval()
    Image.new("L", (8, 8)).save(tmp_path / "black.png")
    options = {"chains": 2, "warmup": 0, "draws": 3, "seed": 1, "output": str(tmp_path)} | QUICK
    with pytest.raises(ObservationError, match=r"of -1 to -1, are on or beyond the edge") as caught:
        condition_images("black", model, str(tmp_path / "black.png"), "grid_4", 1, **options)
    assert "--output_noise SD" in in_words_of("condition", caught.value)
    condition_images("black", model, str(tmp_path / "black.png"), "grid_4", 1, noise=0.5, **options)


def test_a_file_that_is_no_picture_is_named(tmp_path):
    (tmp_path / "text.png").write_text("text")
    with pytest.raises(ConfigError, match=r"text\.png"):
        read_images(str(tmp_path / "text.png"), 1, (8, 8))


def test_a_pickled_array_is_refused(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"objects\.npy"):
        read_images(str(tmp_path / "objects.npy"), 1, (8, 8))


def test_an_array_of_more_than_any_memory_is_named(tmp_path):
    with open(tmp_path / "large.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (2**50, 8, 8)})
    with pytest.raises(ConfigError, match=r"large\.npy is not a readable"):
        read_images(str(tmp_path / "large.npy"), 1, (8, 8))


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


def test_the_report_names_groups_of_chains_and_how_the_largest_mixed():
    model = generators.LinearGaussian(torch.randn(3, 2, generator=torch.Generator().manual_seed(0)))
    fibre = dgm.condition(model, torch.zeros(2, 3))
    draws = dgm.sample(fibre, chains=4, warmup=30, draws=100, seed=1, progress=False)
    assert "never overlap" not in describe(draws, draws.summary(), 1.0)
    draws.latents["z"][3, :, 1] += 20
    # and one that drifts away
    draws.latents["z"][0, :, 0] += 20 + torch.arange(100).unsqueeze(-1)
    vars(draws).pop("chain_groups")
    first, second = describe(draws, draws.summary(), 1.0).splitlines()[-2:]
    mixed = r"within the largest group [12] of 2 latents have R-hat at most 1\.05, all at most 1\.0\d"
    assert re.fullmatch(f"image 0: 3 chains overlap, 1 mix too slowly to tell; {mixed}", first)
    assert re.fullmatch(f"image 1: groups of 3, 1 chains never overlap; {mixed}", second)


def test_the_report_names_the_modes_of_chains_that_have_not_mixed():
    kernel = dgm.ConstrainedHMC(step_size=0.2, n_steps=3)
    draws = dgm.sample(two_sides(far=1.5), kernel, chains=12, warmup=0, draws=8, seed=1, progress=False)
    summary = draws.summary()
    draws.interrupted = True
    assert modes(draws, summary) == ""
    draws.interrupted = False
    lines = modes(draws, summary).splitlines()
    assert len(lines) == 3
    for i, line in enumerate(lines):
        said = r"chains by the mode below their middle and last draws: (\d+) \(lowest energy .*\), (\d+) \(lowest"
        found = re.match(f"image {i}: {said}", line)
        assert found
        assert int(found[1]) + int(found[2]) == 12
    # nothing of what has mixed, nor of a fibre that is not searched
    summary["r_hat"] = 1.0
    assert modes(draws, summary) == ""
    noisy = dgm.condition(generators.LinearGaussian(torch.eye(2)), torch.zeros(2))
    others = dgm.sample(noisy, kernel, chains=2, warmup=0, draws=8, seed=1, progress=False)
    assert modes(others, draws.summary()) == ""


# ------------------------------------------------------------------------------------------------------ generators


QUICK = {
    "kernel": dgm.ConstrainedHMC(step_size=0.05, n_steps=2, n_geodesic=1),
    "latent_kernel": dgm.HMC(step_size=0.1, n_steps=3),
}


def completed(tmp_path, model, **options):
    """The draws of a short run on two digits, and what its report says."""
    settings = {"chains": 2, "warmup": 0, "draws": 6, "n_images": 2, "seed": 1, "output": str(tmp_path)} | QUICK
    data = DigitsData(binarise="static" if isinstance(model, generators.BernoulliVAE) else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = condition_images("small", model, data, **settings | options)
    names = {path.name for path in folder.iterdir()} - {"report.html"}
    assert names == {"completions.png", "config.yaml", "log.txt", "posterior.nc", "summary.csv", "traces.png", "images"}
    return dgm.Draws.load(folder / "posterior.nc"), (folder / "log.txt").read_text()


def gan():
    torch.manual_seed(0)
    return generators.GAN(8, (8, 8), hidden=[16], channels=None, output_range=(-0.05, 1.05)).eval()


@pytest.mark.slow
def test_a_generator_without_noise_is_conditioned_exactly_on_no_more_pixels_than_latents(tmp_path):
    # an untrained generator has only grey outputs, but its own images can be reached
    images = gan().observed(torch.randn(2, 8, generator=torch.Generator().manual_seed(1))).detach()
    np.save(tmp_path / "own.npy", images.reshape(2, 8, 8).numpy())
    sizes = {"chains": 2, "warmup": 0, "draws": 6, "seed": 1, "output": str(tmp_path)}
    folder = condition_images("own", gan(), str(tmp_path / "own.npy"), "grid_4", 2, **sizes, **QUICK)
    draws = dgm.Draws.load(folder / "posterior.nc")
    assert draws.inputs.shape == (2, 6, 2, 8)
    assert draws.stats["constraint_error"].max() < 1e-7
    with pytest.raises(ObservationError, match=r"32 observed values but only 8 inputs.*WithNoise"):
        completed(tmp_path, gan(), observe="top_half")


@pytest.mark.slow
def test_binary_images_may_have_a_channel(tmp_path):
    model = generators.BernoulliVAE(3, (1, 8, 8), hidden=[8])
    np.save(tmp_path / "binary.npy", (np.random.default_rng(0).random((2, 1, 8, 8)) < 0.5).astype(np.float32))
    settings = {"chains": 2, "warmup": 0, "draws": 6, "seed": 1, "output": str(tmp_path), **QUICK}
    folder = condition_images("one", model, str(tmp_path / "binary.npy"), "top_half", 2, **settings)
    assert dgm.Draws.load(folder / "posterior.nc").inputs.shape == (2, 6, 2, 3)


@pytest.mark.slow
def test_noise_makes_any_number_of_pixels_observable(tmp_path):
    draws, report = completed(tmp_path, gan(), observe="top_half", noise=0.3)
    assert draws.inputs.shape == (2, 6, 2, 8 + 32)
    assert draws.stats["constraint_error"].max() < 1e-7
    assert "R-hat" in report


@pytest.mark.slow
def test_of_binary_pixels_the_latents_are_sampled(tmp_path):
    torch.manual_seed(0)
    model = generators.IWAE(5, (8, 8), [16]).eval()
    draws, report = completed(tmp_path, model, observe="top_half")
    assert draws.inputs.shape == (2, 6, 2, 5)
    assert "constraint_error" not in draws.stats
    assert "  -  " in report
    # any kernel, one without steps too
    draws, report = completed(tmp_path, model, observe="top_half", latent_kernel=Wanderer())
    assert "step_size" not in draws.stats
    assert "R-hat" in report
    with pytest.raises(ConfigError, match="kernel: Wanderer would not be used: a IWAE has binary pixels"):
        completed(tmp_path, model, observe="top_half", kernel=Wanderer())
    with pytest.raises(ConfigError, match="noise: a IWAE has binary pixels"):
        completed(tmp_path, model, noise=0.1)
    with pytest.raises(ObservationError, match="binarise"):
        condition_images("grey", model, DigitsData(), n_images=2, output=str(tmp_path))
    # grey images may be made binary by the command itself
    sizes = {"n_images": 2, "chains": 2, "warmup": 0, "draws": 4, "output": str(tmp_path)}
    folder = condition_images("threshold", model, DigitsData(), binarise=0.5, **sizes, **QUICK)
    assert (folder / "completions.png").is_file()


@pytest.fixture(scope="module")
def demo():
    settings = yaml.safe_load(CONFIG.read_text())
    model = generators.load(settings["generator"])
    images = DigitsData().held_out(settings["n_images"])
    fibre = dgm.condition(model, images, observe=dgm.pixels(read_mask(settings["observe"], model.output_shape)))
    sizes = {name: settings[name] for name in ("chains", "warmup", "draws", "seed")}
    return dgm.sample(fibre, progress=False, **sizes)


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
