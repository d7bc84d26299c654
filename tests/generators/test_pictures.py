"""Pictures that are damaged, or unpack too far, are refused in one line."""

import struct
import zlib

import pytest
import torch
from PIL import Image

import dgm_infer as dgm
import generators
from dgm_infer.errors import ConfigError
from generators.pictures import PixelScale, read_picture


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
