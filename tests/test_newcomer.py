"""What a newcomer trips over first: each mistake is answered by one line that names it and what to do instead."""

import re
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dgm_infer as dgm
import generators
from dgm_infer.errors import DgmInferError
from dgm_infer.sampling.show import heading_of
from evaluation.commands.cli import main
from evaluation.commands.inputs import read_generator, read_images
from evaluation.commands.outline import in_words_of

LONGEST = 320


class Photograph(dgm.GenerativeModel):
    """Grey pictures of 4 x 4 pixels near (0, 1), without a declared range."""

    input_density = dgm.StandardNormal(16)
    output_shape = (4, 4)  # type: ignore[assignment]

    def observed(self, u):
        return torch.sigmoid(u)


class Dependent(dgm.GenerativeModel):
    """Three outputs of four inputs, of which the last is the sum of the others."""

    input_density = dgm.StandardNormal(4)

    def observed(self, u):
        return torch.stack([u[..., 0], u[..., 1], u[..., 0] + u[..., 1]], -1)


@pytest.fixture(scope="module")
def photograph():
    return Photograph().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomer")
    torch.save(network().state_dict(), folder / "net.pt")
    np.save(folder / "grey.npy", 255 * np.random.default_rng(0).random((8, 8)))
    colours = np.zeros((8, 8, 3), dtype=np.uint8)
    colours[..., 0] = 200
    Image.fromarray(colours).save(folder / "red.png")
    return folder


def assert_names(message, words):
    assert "\n" not in message
    assert len(message) <= LONGEST
    for word in words:
        assert word in message


def network():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Unflatten(-1, (4, 4)))


def grey(top):
    """A picture of values from 0 to ``top``."""
    return torch.linspace(0, top, 16).reshape(4, 4)


def colours(image):
    """The three nearly equal colours of one picture."""
    return torch.stack([image, 0.9 * image, 0.8 * image + 0.01])


def start(problem):
    """Points from one round of prior draws, as the chains of ``sample`` find them."""
    return problem.start(2, torch.Generator().manual_seed(0), attempts=1)


def ranged(low, high):
    """Pictures of 4 x 4 pixels in a declared range."""
    squash = torch.tanh if low < 0 else torch.sigmoid
    return generators.from_module(network(), 4, output_range=(low, high), transform=lambda x: squash(3 * x))


def logits():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Unflatten(-1, (4, 4))).eval()
    return generators.from_module(net, 4, output_range=(0, 1), transform=lambda x: 4 * x)


def line():
    """Three independent values with noise, each near zero."""
    return generators.LinearGaussian(torch.eye(3), torch.zeros(3), 1.0).eval()


def twice(rows, values):
    """Single outputs observed, perhaps one of them twice."""
    return dgm.condition(Dependent().eval(), torch.tensor(values), observe=dgm.linear(torch.eye(3)[rows]))


MISTAKES = {
    "8-bit pixels": (lambda p, f: dgm.condition(p, grey(255)), ["0 to 255", "Photograph", "divide by 255"]),
    "8-bit integers": (lambda p, f: dgm.condition(p, grey(240).to(torch.uint8)), ["0 to 240", "divide by 255"]),
    "digits of scikit-learn": (lambda p, f: dgm.condition(p, grey(16)), ["0 to 16", "divide by 16"]),
    "8-bit pixels for (-1, 1)": (
        lambda p, f: dgm.condition(generators.GAN(16, (4, 4), channels=None, output_range=(-1, 1)).eval(), grey(255)),
        ["output_range is (-1, 1)", "values / 127.5 - 1"],
    ),
    "8-bit means": (
        lambda p, f: dgm.condition(p, torch.full((2, 2), 128.0), observe=dgm.downsample(2)),
        ["128", "divide by 255"],
    ),
    "a plain network": (
        lambda p, f: dgm.condition(network(), grey(1)),
        ["Sequential", "generators.from_module(net.eval(), latent=D)"],
    ),
    "noise for a plain network": (lambda p, f: dgm.WithNoise(network(), 0.1), ["Sequential", "from_module"]),  # type: ignore[arg-type]
    "a plain network on the command line": (lambda p, f: read_generator(network()), ["Sequential", "from_module"]),
    "weights without their network": (
        lambda p, f: generators.load(f / "net.pt"),
        ["net.pt", "generators.from_module(net.eval(), latent=D, weights="],
    ),
    "a complete image as its thumbnail": (
        lambda p, f: dgm.condition(p, grey(1), observe=dgm.downsample(2)),
        ["downsample(2)", "(4, 4)", "(2, 2)", "op(image)"],
    ),
    "values that contradict each other": (
        lambda p, f: start(dgm.condition(Dependent().eval(), torch.tensor([1.0, 2.0, 4.0]))),
        ["rank-deficient", "contradict", "WithNoise"],
    ),
    "one value observed twice, differently": (
        lambda p, f: start(twice([0, 0], [1.0, 2.0])),
        ["rank-deficient", "contradict", "0.5", "omit"],
    ),
    "colours last": (
        lambda p, f: dgm.condition(p, torch.rand(4, 4, 3)),
        ["(4, 4, 3)", "colour", "image[..., :3].mean(-1)"],
    ),
    "a mask of ones": (
        lambda p, f: dgm.pixels(Image.fromarray(np.eye(4, dtype=np.uint8))),
        ["brightest pixel is 1", "white"],
    ),
    "a picture that is not there": (lambda p, f: dgm.image(f / "nope.png"), ["nope.png", "no such picture"]),
    "a model without its images": (lambda p, f: dgm.log_evidence(p), ["Photograph", "log_evidence((model, images))"]),
    "logits called pixels": (
        lambda p, f: dgm.condition(logits(), grey(1), noise=0.1),
        ["output_range (0, 1)", "transform=torch.sigmoid"],
    ),
    "code in the place of a generator": (lambda p, f: read_generator("mymodel.py"), ["mymodel.model"]),
    "a module that is misspelt": (lambda p, f: read_generator("mymodell.model"), ["no module 'mymodell'"]),
    "HMC on a fibre": (
        lambda p, f: dgm.sample(dgm.condition(p, grey(1), noise=0.1), dgm.HMC()),
        ["LiftedHMC", "ConstrainedHMC"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_newcomers_mistake_is_answered_in_one_line(mistake, photograph, folder):
    make, words = MISTAKES[mistake]
    with pytest.raises(DgmInferError) as caught:
        make(photograph, folder)
    assert_names(str(caught.value), words)


WARNINGS = {
    "other units": (
        lambda p: dgm.condition(line(), torch.full((3,), 1e4)),
        ["1e+04", "LinearGaussian", "units"],
    ),
    "colours first": (
        lambda p: dgm.condition(p, colours(0.1 + 0.8 * grey(1))),
        ["(3, 4, 4)", "3 grey images", "image[:3].mean(0)"],
    ),
    "(-1, 1) for (0, 1)": (
        lambda p: dgm.condition(ranged(0, 1), 2 * grey(1) - 1, noise=0.05),
        ["observed values from -1 to 1", "20 standard deviations", "dgm.image"],
    ),
    "(0, 1) for (-1, 1)": (
        lambda p: dgm.condition(ranged(-1, 1), grey(1), noise=0.05),
        ["output_range of (-1, 1)", "dgm.image"],
    ),
    "noise in 8 bits": (
        lambda p: dgm.condition(ranged(0, 1), 0.1 + 0.8 * grey(1), noise=12.75),
        ["noise=12.75", "hides the data"],
    ),
}


@pytest.mark.parametrize("mistake", WARNINGS)
def test_what_may_be_meant_is_warned_of(mistake, photograph):
    make, words = WARNINGS[mistake]
    with pytest.warns(UserWarning, match=re.escape(words[0])) as caught:
        make(photograph)
    assert_names(str(caught[0].message), words)


@pytest.mark.parametrize(
    "meant",
    [
        lambda p: dgm.condition(p, 0.01 + 0.98 * grey(1)),
        lambda p: dgm.condition(p, 0.1 + 0.8 * torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))),
        lambda p: dgm.condition(line(), torch.full((3,), 9.0)),
        lambda p: dgm.condition(ranged(0, 1), grey(1) + 0.1, noise=0.1),
        lambda p: dgm.condition(ranged(-1, 1), 1.8 * grey(1) - 0.9, noise=0.5),
        lambda p: dgm.condition(line(), torch.tensor([[1.0, 2.0, 3.0]] * 4 + [[1.0, 2.0, 1e4]])),
        lambda p: start(
            dgm.condition(Dependent().eval(), torch.tensor([1.0, 2.0]), observe=dgm.linear(torch.eye(3)[:2]))
        ),
    ],
    ids=[
        "pixels",
        "three images",
        "the tail of the prior",
        "noise at the edge",
        "dark and bright",
        "one value of many",
        "values observed once",
    ],
)
def test_control_what_is_meant_is_not_remarked_on(meant, photograph):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meant(photograph)


def test_what_is_in_another_room_is_said():
    with pytest.raises(AttributeError, match=r"'from_module': use generators\.from_module"):
        dgm.from_module  # noqa: B018
    # the control
    with pytest.raises(AttributeError, match=r"'zebra'$"):
        dgm.zebra  # noqa: B018
    assert not hasattr(dgm, "load")


def test_operators_compute_what_they_observe():
    image = torch.rand(2, 3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means = dgm.downsample(2)(image)
    torch.testing.assert_close(means, nn.functional.avg_pool2d(image, 2))
    matrix = torch.rand(5, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(dgm.linear(matrix)(image), image.flatten(-2) @ matrix.mT)
    flat = torch.full((4, 6), 0.5, dtype=torch.float64)
    torch.testing.assert_close(dgm.blur(1.0)(torch.nn.functional.pad(flat, (4, 4, 4, 4), value=0.5)).mean(), flat[0, 0])
    with pytest.raises(DgmInferError, match=r"downsample\(4\): \(2, 3, 4, 6\)"):
        dgm.downsample(4)(image)
    with pytest.raises(DgmInferError, match="24 entries"):
        dgm.linear(matrix)(image[..., :5])


def test_the_command_line_says_it_in_one_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--name", "n", "--generator", "digits_vae", "--images", str(folder / "grey.npy"), "--n_images", "1"]
    assert main(["condition", *options]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert_names(message.strip(), ["dgm-infer condition: error:", "GaussianVAE", "divide by 255"])


def test_a_colour_picture_for_a_grey_generator_is_remarked_on(folder):
    with pytest.warns(UserWarning, match=re.escape("red.png is in colour and read as grey")):
        images = read_images(str(folder / "red.png"), 1, (8, 8))
    assert images.shape == (1, 8, 8)


@pytest.mark.parametrize("layout", ["colours last", "colours first", "one image"])
def test_an_array_of_colour_images_for_a_grey_generator_is_named(layout, tmp_path):
    images = np.zeros({"colours last": (2, 8, 8, 3), "colours first": (2, 3, 8, 8), "one image": (8, 8, 3)}[layout])
    np.save(tmp_path / "images.npy", images)
    with pytest.raises(DgmInferError) as caught:
        read_images(str(tmp_path / "images.npy"), 1, (8, 8))
    assert_names(
        str(caught.value), ["images.npy", "expected (n, 8, 8)", "colour images for a grey generator", ".mean("]
    )


def test_columns_say_from_how_many_chains_they_come():
    assert heading_of(1, 1) == "completion"
    assert heading_of(12, 16) == "completions, each from another chain"
    assert heading_of(12, 8) == "completions from 8 chains"
    assert heading_of(12, 1, "restoration") == "restorations from one chain"


def test_noise_of_every_output_belongs_to_the_model(photograph):
    sds = torch.full((4, 4), 0.1)
    for function in (dgm.check, dgm.condition):
        with pytest.raises(DgmInferError, match=r"must be one positive number; where noise differs .* WithNoise"):
            function(photograph, torch.zeros(4, 4), noise=sds)
    # the remedy
    assert "16 inputs + 16 of noise" in repr(dgm.check(dgm.WithNoise(photograph, sds), torch.full((4, 4), 0.5)))


def test_one_chain_has_no_error():
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    base = dgm.Gaussian(torch.zeros(2), 1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [dgm.log_evidence(target, base, dgm.AIS(5), chains=n, seed=0, progress=False) for n in (1, 4)]
    assert ["no error from one chain" in repr(each) for each in found] == [True, False]


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("shape", [(6, 6), (1, 6, 6), (3, 6, 6)])
def test_draws_of_pictures_are_a_sheet_with_titles(shape, lead, tmp_path):
    torch.manual_seed(0)
    # black is -1
    net = nn.Sequential(nn.Linear(3, torch.Size(shape).numel()), nn.Tanh(), nn.Unflatten(-1, shape))
    model = generators.from_module(net.eval(), latent=3, output_range=(-1, 1))
    truth = model.generate(2, seed=1).images
    truth = truth if lead else truth[0]
    mask = torch.arange(36).reshape(6, 6) < 18
    kernel = dgm.LiftedHMC(step_size=0.1, n_steps=1)
    titles = {}
    for name, operator in (("half", dgm.pixels(mask)), ("blur", dgm.blur(0.5)), ("small", dgm.downsample(2))):
        fibre = dgm.condition(model, truth if name == "half" else operator(truth), observe=operator, noise=0.1)
        draws = dgm.sample(fibre, kernel, chains=2, warmup=0, draws=3, seed=1, progress=False)
        figure = draws.plot("pictures", originals=truth)
        figure.savefig(tmp_path / f"{name}.png")
        (axis,) = figure.axes
        titles[name] = [label.get_text() for label in axis.texts if label.get_text()]
        if name == "half":
            # the top as it is, the rest marked, though its values are known
            seen = np.asarray(axis.images[1].get_array())
            first = (truth.reshape(-1, *shape)[0] + 1) / 2
            top = first.movedim(0, -1).expand(6, 6, 3) if len(shape) == 3 else first.unsqueeze(-1).expand(6, 6, 3)
            np.testing.assert_allclose(seen[:3], top[:3].clamp(0, 1), atol=1e-5)
            assert (seen[3:, :, 2] > seen[3:, :, 0]).all()
    assert titles == {
        "half": ["original", "observed", "completions from 2 chains", "mean", "sd"],
        "blur": ["original", "observed", "restorations from 2 chains", "mean", "sd"],
        # what was observed has another size
        "small": ["original", "restorations from 2 chains", "mean", "sd"],
    }
    with pytest.raises(DgmInferError, match=r"plot\(originals of shape \(6, 5\)\): expected "):
        draws.plot("pictures", originals=torch.zeros(6, 5))


def test_what_is_not_a_picture_has_no_sheet():
    model = generators.from_module(nn.Linear(3, 4).eval(), latent=3)
    fibre = dgm.condition(model, torch.zeros(4), noise=0.5)
    draws = dgm.sample(fibre, dgm.LiftedHMC(step_size=0.1, n_steps=1), chains=2, warmup=0, draws=2, progress=False)
    with pytest.raises(DgmInferError, match=re.escape("outputs of shape (4,) are not [H, W], [1, H, W] or [3, H, W]")):
        draws.plot("pictures")


SPOKEN = {
    "12 transitions diverged of problem 6: use smaller steps (target_acceptance=0.95), or rescale": (
        "12 transitions diverged of image 6: use smaller steps (--target_acceptance 0.95), or rescale"
    ),
    "the chains of problems 1, 2 and 4: use more sub-steps (n_geodesic=)": (
        "the chains of images 1, 2 and 4: use more sub-steps (--kernel.n_geodesic)"
    ),
    "allow for noise of the measurement, condition(..., noise=0.01), or of the output, WithNoise(model, sd=0.01)": (
        "allow for noise of the measurement, --noise 0.01, or of the output, --output_noise 0.01"
    ),
    "R-hat of 3 (latent, problem) pairs: output noise with WithNoise(model, sd=...)": (
        "R-hat of 3 (latent, image) pairs: output noise with --output_noise SD"
    ),
    "2 of 7 problems: dgm.image('x.png', like=model, resize=True) scales": (
        "2 of 7 images: dgm.image('x.png', like=model, resize=True) scales"
    ),
    "give it noise, or mean=True; or start them apart (initial=)": (
        "give it noise, or --mean true; or start them apart (initial=)"
    ),
}


@pytest.mark.parametrize("said", SPOKEN)
def test_messages_on_the_command_line_name_its_options_and_images(said):
    assert in_words_of("condition", said) == SPOKEN[said]
    # the control: other commands have neither
    assert in_words_of("train", said) == said


def test_a_method_is_named_as_the_command_takes_it():
    said = "of problem 1: for less, method=dgm.ParallelTempering(), which takes twelve times the gradients"
    expected = "of image 1: for less, --methods ParallelTempering, which takes twelve times the gradients"
    assert in_words_of("evidence", said) == expected
