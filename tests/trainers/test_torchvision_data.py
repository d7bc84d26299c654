"""Data sets of torchvision and folders of pictures: the parts, the pixels, and what is said where files are missing."""

import gzip
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from torchvision import datasets

from dgm_infer.errors import ArgumentError, ConfigError
from evaluation.commands.inputs import HeldOutImages
from tests.files import write_fashion
from trainers import CelebAData, FashionMNISTData, FolderData, MNISTData, OmniglotData

SETS = [MNISTData, FashionMNISTData, OmniglotData, CelebAData]


@pytest.mark.parametrize("kind", SETS)
def test_absent_files_give_one_line_with_the_folder_and_the_remedies(kind, tmp_path):
    with pytest.raises(ConfigError) as caught:
        kind(root=tmp_path).prepare_data()
    message = str(caught.value)
    assert f"no {kind.__name__.removesuffix('Data')} files in {tmp_path}/{kind.folder}" in message
    assert f"download=true if there is a network ({kind.download_size})" in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", SETS)
def test_nothing_is_downloaded_unless_asked(kind, tmp_path, monkeypatch):
    asked = []

    def fails(*arguments, **options):
        asked.append(kind)
        raise RuntimeError("no\nnetwork")

    for name in ("MNIST", "Omniglot", "CelebA"):
        monkeypatch.setattr(f"torchvision.datasets.{name}.download", fails)
    with pytest.raises(ConfigError, match=r"no .* files"):
        kind(root=tmp_path).held_out(1)
    assert not asked
    with pytest.raises(ConfigError, match=r"could not be downloaded to .*: no network"):
        kind(root=tmp_path, download=True).held_out(1)
    assert asked


@pytest.mark.parametrize("kind", SETS)
def test_a_value_outside_its_range_names_the_class(kind):
    with pytest.raises(ArgumentError, match=rf"{kind.__name__}\(batch_size=0\)"):
        kind(batch_size=0)


def test_fashion_is_read_as_digits_are(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    write_fashion(raw)
    data = FashionMNISTData(tmp_path)
    assert [len(part.images) for part in data.split] == [200, 500, 2]
    torch.testing.assert_close(data.held_out(), torch.full((2, 28, 28), 0.2))


def test_fashion_is_read_as_it_is_published(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    write_fashion(raw)
    _pack(raw)
    data = FashionMNISTData(tmp_path)
    assert [len(part.images) for part in data.split] == [200, 500, 2]
    torch.testing.assert_close(data.held_out(), torch.full((2, 28, 28), 0.2))


def _pack(folder):
    for file in [*folder.iterdir()]:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()


def test_fashion_is_read_from_debians_package(tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.mnist.DEBIAN", tmp_path / "package")
    assert FashionMNISTData().root == Path("data")
    package = tmp_path / "package"
    package.mkdir()
    write_fashion(package)
    _pack(package)
    data = FashionMNISTData()
    assert data.root == package
    data.prepare_data()
    assert [len(part.images) for part in data.split] == [200, 500, 2]
    torch.testing.assert_close(data.held_out(), torch.full((2, 28, 28), 0.2))
    assert all(file.suffix == ".gz" for file in package.iterdir())
    (package / "t10k-labels-idx1-ubyte.gz").write_bytes(b"no labels")
    with pytest.raises(ConfigError, match="damaged"):
        FashionMNISTData().held_out(1)


@pytest.fixture
def omniglot(tmp_path, monkeypatch):
    """Three characters in 170 background images each, one in three others; the brightness numbers the image."""
    monkeypatch.setattr(datasets.Omniglot, "_check_integrity", lambda self: True)
    for part, characters, n in (("background", 3, 170), ("evaluation", 1, 3)):
        for character in range(characters):
            folder = tmp_path / "omniglot-py" / f"images_{part}" / "Alphabet" / f"character{character:02d}"
            folder.mkdir(parents=True)
            for i in range(n):
                Image.new("L", (105, 105), 255 - i).save(folder / f"{character:04d}_{i:03d}.png")
    return OmniglotData(tmp_path)


def test_omniglot_is_white_on_black_and_its_validation_is_of_all_alphabets(omniglot):
    assert [len(part.images) for part in omniglot.split] == [10, 500, 3]
    torch.testing.assert_close(omniglot.held_out()[:, 5, 5].sort().values, torch.arange(3) / 255)
    assert omniglot.held_out().shape == (3, 28, 28)
    assert set(omniglot.validation.labels.tolist()) == {0, 1, 2}
    again = OmniglotData(omniglot.root)
    assert torch.equal(again.training.images, omniglot.training.images)


def test_colour_pictures_are_kept_in_8_bits_and_given_as_fractions(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.CelebA, "_check_integrity", lambda self: True)
    folder = tmp_path / "celeba"
    (folder / "img_align_celeba").mkdir(parents=True)
    parts = [0, 0, 0, 0, 1, 1, 2, 2]
    for i in range(8):
        Image.new("RGB", (178, 218), (51, 102, i)).save(folder / "img_align_celeba" / f"{i:06d}.jpg", quality=100)
    (folder / "list_eval_partition.txt").write_text("".join(f"{i:06d}.jpg {part}\n" for i, part in enumerate(parts)))
    (folder / "identity_CelebA.txt").write_text("".join(f"{i:06d}.jpg {i}\n" for i in range(8)))
    for name in ("list_bbox_celeba.txt", "list_landmarks_align_celeba.txt", "list_attr_celeba.txt"):
        header = "8\nx\n" if "attr" in name or "land" in name else "8\nimage_id x\n"
        (folder / name).write_text(header + "".join(f"{i:06d}.jpg 1\n" for i in range(8)))
    data = CelebAData(16, tmp_path, batch_size=3)
    assert [len(part.images) for part in data.split] == [4, 2, 2]
    assert data.split.training.images.dtype == torch.uint8
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (3, 3, 16, 16)
    assert images.dtype == torch.float32
    assert images[:, 0].sub(0.2).abs().max() < 0.02
    assert images[:, 1].sub(0.4).abs().max() < 0.02
    assert data.held_out_labels().tolist() == [6, 7]
    assert data.held_out(1).max() < 0.5
    with pytest.raises(ArgumentError, match="size=0"):
        CelebAData(0)


# ------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def pictures(tmp_path):
    for label, grey in (("cats", 51), ("dogs", 204)):
        (tmp_path / label).mkdir()
        for i in range(10):
            Image.new("RGB", (8 + i, 12), (grey, grey, grey)).save(tmp_path / label / f"{i}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


@pytest.mark.parametrize("grey", [True, False])
def test_a_folder_of_pictures(pictures, grey):
    data = FolderData(pictures, (6, 4), grey=grey, held_out=0.2)
    assert isinstance(data, LightningDataModule)
    assert isinstance(data, HeldOutImages)
    assert [len(part.images) for part in data.split] == [14, 2, 4]
    shape = (6, 4) if grey else (3, 6, 4)
    assert data.held_out().shape == (4, *shape)
    training = data.training
    first = training.images.flatten(1)[:, 0]
    torch.testing.assert_close(first, torch.where(training.labels == 0, 0.2, 0.8))
    assert torch.equal(FolderData(pictures, (6, 4), grey=grey, held_out=0.2).held_out(), data.held_out())


def test_pictures_keep_their_proportions(tmp_path):
    picture = Image.new("L", (40, 10))
    picture.paste(255, (0, 0, 10, 10))
    for i in range(4):
        picture.save(tmp_path / f"{i}.png")
    data = FolderData(tmp_path, (5, 5), grey=True)
    # the white quarter on the left is cut off by the crop about the centre
    assert data.held_out().max() < 0.1


def test_pictures_may_be_made_binary(pictures):
    data = FolderData(pictures, (6, 4), grey=True, binarise="static")
    assert set(data.training.images.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("field", "value"), [("validation", 0.0), ("held_out", 1.0), ("size", (0, 4)), ("batch_size", 0)]
)
def test_illegal_fields_are_named(field, value, tmp_path):
    with pytest.raises(ArgumentError, match=field):
        FolderData(**{"root": tmp_path, "size": (4, 4)} | {field: value})


def test_folders_that_do_not_serve(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        FolderData(tmp_path / "absent", (4, 4)).prepare_data()
    with pytest.raises(ConfigError, match="holds no pictures"):
        FolderData(tmp_path, (4, 4)).prepare_data()
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="holds 1 pictures: too few"):
        FolderData(tmp_path, (4, 4)).held_out()
    for name in "bcd":
        (tmp_path / f"{name}.png").write_text("no picture")
    with pytest.raises(ConfigError, match=r"b\.png is not a readable picture"):
        FolderData(tmp_path, (4, 4)).held_out()
