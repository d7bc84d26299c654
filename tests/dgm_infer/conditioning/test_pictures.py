"""Pictures become data: permuted and scaled, never reshaped; damaged ones are refused in one line."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import dgm_infer as dgm
import generators
from dgm_infer.conditioning.pictures import PixelScale, read_picture
from dgm_infer.errors import ConfigError, DgmInferError, ObservationError


def png(width, height, *chunks):
    """A black picture, or the beginning of a large one, with more chunks before its pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((width + 1) * min(height, 8)))
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in [(b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def damaged_exif(tmp_path):
    """A picture whose EXIF data do not begin as they must."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (8, 8)).save(tmp_path / "whole.webp", exif=exif)
    return (tmp_path / "whole.webp").read_bytes().replace(b"MM\0*", b"MX\0*").replace(b"II*\0", b"IX*\0")


BAD = {
    "too many pixels": lambda _: png(50_000, 50_000),
    "text that unpacks too far": lambda _: png(8, 8, (b"zTXt", b"k\0\0" + zlib.compress(bytes(2 * 2**20)))),
    "damaged EXIF data": damaged_exif,
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_in_one_line(name, tmp_path):
    file = tmp_path / "bad.png"
    file.write_bytes(BAD[name](tmp_path))
    with pytest.raises(ConfigError, match=r"bad\.png is not a readable picture: .") as caught:
        read_picture(file, colour=False)
    assert "\n" not in str(caught.value)


def test_control_a_whole_picture_is_read(tmp_path):
    (tmp_path / "good.png").write_bytes(png(8, 8, (b"zTXt", b"k\0\0" + zlib.compress(b"text"))))
    assert read_picture(tmp_path / "good.png", colour=False).shape == (8, 8)


@pytest.mark.parametrize(
    ("output_range", "scale"),
    [
        (None, (0, 1)),
        ((0, 1), (0, 1)),
        ((-0.05, 1.05), (0, 1)),
        ((-1, 1), (-1, 1)),
        ((-1.02, 1.02), (-1, 1)),
        ((0, 255), (0, 255)),
        ((0, float("inf")), (0, 1)),
    ],
)
def test_black_and_white_are_those_of_the_declared_range(output_range, scale):
    model = generators.from_module(torch.nn.Linear(2, 3), 2, output_range=output_range)
    for declared in (model, dgm.WithNoise(model, 0.1)):
        found = PixelScale.of(declared)
        assert found == scale
        pixels = torch.tensor([0.0, 0.25, 1.0])
        images = found.from_unit(pixels)
        assert images.tolist() == [scale[0], scale[0] + 0.25 * (scale[1] - scale[0]), scale[1]]
        assert torch.equal(found.to_unit(images), pixels)


class Painter(dgm.GenerativeModel):
    """Pictures of a shape, in (-1, 1)."""

    output_range = (-1, 1)

    def __init__(self, *shape):
        super().__init__()
        self.output_shape = shape
        self.input_density = dgm.StandardNormal(int(torch.Size(shape).numel()))

    def observed(self, u):
        return torch.tanh(u)


COLOUR = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
GREY = np.random.default_rng(1).integers(0, 256, (4, 6), dtype=np.uint8)
LUMA = COLOUR @ [0.299, 0.587, 0.114]


def scaled(pixels):
    return torch.as_tensor(np.asarray(pixels) / 127.5 - 1, dtype=torch.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for name, array in (("colour", COLOUR), ("grey", GREY)):
        Image.fromarray(array).save(folder / f"{name}.png")
    alpha = np.concatenate([COLOUR, np.full((4, 6, 1), 7, np.uint8)], -1)
    Image.fromarray(alpha).save(folder / "alpha.png")
    Image.fromarray(np.repeat(GREY[..., None], 3, -1)).save(folder / "grey_in_colour.png")
    return folder


@pytest.mark.filterwarnings("ignore:.* is in colour and read as grey")
@pytest.mark.parametrize(
    ("source", "shape", "expected"),
    [
        ("colour.png", (3, 4, 6), scaled(COLOUR.transpose(2, 0, 1))),
        ("alpha.png", (3, 4, 6), scaled(COLOUR.transpose(2, 0, 1))),
        ("grey.png", (4, 6), scaled(GREY)),
        ("grey.png", (1, 4, 6), scaled(GREY[None])),
        ("grey.png", (3, 4, 6), scaled(np.repeat(GREY[None], 3, 0))),
        ("grey_in_colour.png", (4, 6), scaled(GREY)),
        ("colour.png", (4, 6), scaled(LUMA)),
        (COLOUR, (3, 4, 6), scaled(COLOUR.transpose(2, 0, 1))),
        (COLOUR.transpose(2, 0, 1), (3, 4, 6), scaled(COLOUR.transpose(2, 0, 1))),
        (torch.as_tensor(GREY)[..., None], (4, 6), scaled(GREY)),
        (Image.fromarray(COLOUR), (3, 4, 6), scaled(COLOUR.transpose(2, 0, 1))),
        (np.linspace(-1, 1, 24).reshape(4, 6), (4, 6), torch.linspace(-1, 1, 24).reshape(4, 6)),
    ],
)
def test_a_picture_becomes_data_of_the_model(source, shape, expected, files):
    source = files / source if isinstance(source, str) else source
    found = dgm.image(source, like=Painter(*shape))
    assert found.shape == shape
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-6 if shape[0] != 4 else 6e-3)


def test_without_a_model_a_picture_is_as_it_is(files):
    assert torch.equal(dgm.image(files / "colour.png"), torch.as_tensor(COLOUR).movedim(-1, 0) / 255)
    assert torch.equal(dgm.image(files / "grey.png"), torch.as_tensor(GREY) / 255)


def test_another_size_is_refused_or_cut_about_the_middle_and_scaled(files):
    with pytest.raises(ObservationError, match=r"4 x 6 pixels, the generator's images the shape \(3, 2, 2\): resize"):
        dgm.image(files / "colour.png", like=Painter(3, 2, 2))
    found = dgm.image(files / "colour.png", like=Painter(3, 2, 2), resize=True)
    whole = dgm.image(COLOUR[:, 1:5], like=Painter(3, 2, 2), resize=True)
    assert torch.equal(found, whole)
    constant = dgm.image(np.full((7, 9), 51, np.uint8), like=Painter(3, 3), resize=True)
    torch.testing.assert_close(constant, torch.full((3, 3), 51 / 127.5 - 1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: dgm.condition(m, torch.zeros(4, 6, 3)), r"channels come last, permute.*dgm\.image"),
        (lambda m: dgm.condition(m, torch.zeros(3, 6, 4)), r"another order, permute"),
        (lambda m: dgm.condition(m, torch.zeros(3, 2, 6)), r"no reshape helps"),
        (lambda m: dgm.condition(m, "x.png"), r"dgm\.image\(picture, like=model\)"),
        (lambda m: dgm.condition(m, Image.new("L", (6, 4))), r"dgm\.image\(picture, like=model\)"),
        (lambda m: dgm.condition(Painter(4, 6), torch.zeros(6, 4)), r"height and width are exchanged.*image\.mT"),
        (
            lambda m: dgm.condition(m, torch.zeros(3, 4, 6), observe=dgm.pixels(np.ones((4, 6, 3), bool))),
            "permute them",
        ),
        (
            lambda m: dgm.condition(m, torch.zeros(3, 4, 6), observe=dgm.pixels(np.ones((4, 5), bool))),
            r"or \(4, 6\) for",
        ),
        (lambda m: dgm.pixels("absent.png"), r"absent\.png: there is no such picture"),
        (lambda m: dgm.image(np.zeros((2, 4, 6, 3), np.uint8), like=m), "one picture"),
        (lambda m: dgm.image(np.zeros((4, 6), np.int64), like=m), "values of int64: convert to 8 bits"),
        (lambda m: dgm.image(np.zeros((5, 4, 6), np.uint8), like=m), "one picture"),
        (lambda m: dgm.image(GREY, like=Painter(24)), r"\(24,\) are not images"),
        (lambda m: dgm.image(GREY, like=m, resize=1), "resize=1"),
        (lambda m: dgm.image(None, like=m), "source=None"),
    ],
)
def test_what_is_no_picture_of_the_model_is_told_what_to_do(make, words):
    with pytest.raises(DgmInferError, match=words) as caught:
        make(Painter(3, 4, 6))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lead", [(), (1,)])
def test_a_mask_of_height_and_width_holds_for_all_channels(lead):
    mask = torch.zeros(*lead, 4, 6, dtype=torch.bool)
    mask[..., 1:3, 2:] = True
    fibre = dgm.condition(Painter(3, 4, 6), torch.zeros(3, 4, 6), observe=dgm.pixels(mask))
    assert fibre.values.shape == (24,)
    each = torch.stack([mask.reshape(4, 6), mask.reshape(4, 6).flip(1)]).reshape(2, *lead, 4, 6)
    both = dgm.condition(Painter(3, 4, 6), torch.zeros(2, 3, 4, 6), observe=dgm.pixels(each))
    index = both.observed.operator.index  # type: ignore[attr-defined]
    full = each.reshape(2, 1, 4, 6).expand(2, 3, 4, 6).flatten(1)
    assert torch.equal(index, torch.stack([row.nonzero().squeeze(-1) for row in full]))


@pytest.mark.parametrize(
    ("shape", "observe", "words"),
    [
        ((2, 8), None, r"flatten the data, data\.flatten\(-2\)"),
        ((5, 2, 8), None, r"flatten the data, data\.flatten\(-2\)"),
        ((4,), dgm.pixels(torch.arange(16) < 4), r"give all of an output, of which what observe= leaves out"),
        ((3, 9), None, r"no reshape helps"),
    ],
)
def test_a_picture_for_flat_outputs_is_told_how_to_become_flat(shape, observe, words):
    model = generators.from_module(torch.nn.Linear(3, 16).eval(), latent=3)
    with pytest.raises(ObservationError, match=words):
        dgm.condition(model, torch.zeros(shape), observe=observe, noise=0.1)
