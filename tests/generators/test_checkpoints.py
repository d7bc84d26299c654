"""Weights on disk: what is written is read back, and what is not ours is refused in one line."""

import json
import os
import pickle
import stat

import pytest
import torch
from safetensors.torch import save_file

import generators
from dgm_infer import GenerativeModel, StandardNormal
from dgm_infer.errors import ArgumentError, CheckpointError
from generators.checkpoints import CHECKPOINT_KEY, CHECKPOINT_PREFIX, PRETRAINED, describe
from generators.weights import load_weights


@pytest.fixture
def vae():
    torch.manual_seed(0)
    return generators.GaussianVAE(3, (4, 5), (7, 6))


def refuses(path, words):
    """Loading fails with one line that contains ``words``."""
    with pytest.raises(CheckpointError, match=words) as caught:
        generators.load(path)
    assert "\n" not in str(caught.value)


def same(a, b):
    return all(torch.equal(a.state_dict()[name], b.state_dict()[name]) for name in a.state_dict())


def test_a_generator_is_read_back_to_the_last_bit(vae, tmp_path):
    written = generators.save(vae, tmp_path / "mine", {"epochs": 3})
    assert written == tmp_path / "mine.safetensors"
    loaded = generators.load(written)
    assert same(vae, loaded)
    assert loaded.config == vae.config
    assert not loaded.training
    assert json.loads((tmp_path / "mine.json").read_text())["notes"] == {"epochs": 3}
    assert {path.name for path in tmp_path.iterdir()} == {"mine.safetensors", "mine.json"}


MODELS = {
    "fully connected VAE": lambda: generators.GaussianVAE(3, (4, 5), (7, 6)),
    "convolutional VAE": lambda: generators.GaussianVAE(3, (2, 4, 5), (7,), sd=0.1, channels=(6, 4)),
    "binary VAE": lambda: generators.BernoulliVAE(3, (4, 5), (7, 6)),
    "convolutional IWAE": lambda: generators.IWAE(3, (4, 5), (7,), channels=(6,)),
    "fully connected GAN": lambda: generators.GAN(3, (4, 5), (7,), None, output_range=None),
    "convolutional GAN": lambda: generators.GAN(3, (3, 4, 5), (7,), (6, 4), "group", (-1, 1)),
    "GAN with batch statistics": lambda: generators.GAN(3, (4, 5), channels=(6, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_rebuilt_from_its_configuration(name, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]()
    if isinstance(model, generators.GAN):
        # which changes the buffers
        model(torch.randn(10, 3))
    loaded = generators.load(generators.save(model, tmp_path / "mine"))
    assert type(loaded) is type(model)
    assert same(model, loaded)
    assert loaded.config == model.config == json.loads((tmp_path / "mine.json").read_text())["config"]
    assert (loaded.output_range, loaded.structure) == (model.output_range, model.structure)
    z = torch.randn(2, 3)
    part = (lambda m: m) if isinstance(model, generators.GAN) else (lambda m: lambda z: m.decoder(z).base_dist.mean)
    assert torch.equal(part(loaded)(z), part(model.eval())(z))


@pytest.mark.parametrize("given", ["mine", "mine.safetensors", "mine.json"])
def test_the_ending_may_be_left_out(vae, tmp_path, given):
    assert generators.save(vae, tmp_path / given) == tmp_path / "mine.safetensors"


def test_a_dot_in_a_name_is_no_ending(vae, tmp_path):
    assert generators.save(vae, tmp_path / "mine.v2") == tmp_path / "mine.v2.safetensors"
    assert same(vae, generators.load(tmp_path / "mine.v2.safetensors"))


def test_files_have_the_permissions_of_any_other(vae, tmp_path):
    (tmp_path / "plain").write_text("")
    generators.save(vae, tmp_path / "mine")
    modes = {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("plain", "mine.json", "mine.safetensors")}
    assert len(modes) == 1


def test_a_save_that_fails_keeps_the_old_pair(vae, tmp_path):
    generators.save(vae, tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ArgumentError, match="must be JSON values"):
        generators.save(vae, tmp_path / "mine", {"not JSON": object()})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_shipped_generator_is_loaded_by_name_and_by_path():
    shipped = generators.load("digits_vae")
    assert shipped.output_shape == (8, 8)
    assert same(shipped, generators.load(PRETRAINED / "digits_vae.safetensors"))
    size = sum((PRETRAINED / f"digits_vae.{ending}").stat().st_size for ending in ("safetensors", "json"))
    assert size < 500_000


def test_a_class_that_cannot_be_rebuilt_is_not_saved(tmp_path):
    class Own(GenerativeModel):
        input_density = StandardNormal(2)

    with pytest.raises(CheckpointError, match="Own cannot be stored"):
        generators.save(Own(), tmp_path / "own")
    assert not list(tmp_path.iterdir())


def test_weights_that_are_nan_are_neither_saved_nor_loaded(vae, tmp_path):
    whole = generators.save(vae, tmp_path / "mine").read_bytes()
    name = next(name for name, _ in vae.named_parameters())
    state = vae.state_dict() | {name: torch.full_like(vae.state_dict()[name], torch.nan)}
    save_file(state, tmp_path / "mine.safetensors")
    refuses(tmp_path / "mine.safetensors", f"'{name}' are NaN")
    stored = {CHECKPOINT_PREFIX + key: value for key, value in state.items()}
    torch.save({CHECKPOINT_KEY: describe(vae), "state_dict": stored}, tmp_path / "a.ckpt")
    refuses(tmp_path / "a.ckpt", f"'{name}' are NaN")
    with pytest.raises(CheckpointError, match="are NaN"):
        load_weights(vae, tmp_path / "mine.safetensors")
    (tmp_path / "mine.safetensors").write_bytes(whole)
    with torch.no_grad():
        vae.get_parameter(name)[0] = torch.nan
    with pytest.raises(CheckpointError, match="are NaN"):
        generators.save(vae, tmp_path / "mine")
    assert (tmp_path / "mine.safetensors").read_bytes() == whole


def test_missing(vae, tmp_path):
    refuses("digit_vae", "'digit_vae'.*digits_vae")
    refuses(tmp_path / "absent.safetensors", "absent.safetensors does not exist")
    refuses(tmp_path / "absent.ckpt", "absent.ckpt does not exist")
    generators.save(vae, tmp_path / "mine")
    (tmp_path / "mine.json").unlink()
    refuses(tmp_path / "mine.safetensors", "mine.json does not exist")


@pytest.mark.parametrize("kept", [0, 5, 100, 1000])
def test_truncated_weights(vae, tmp_path, kept):
    weights = generators.save(vae, tmp_path / "mine")
    weights.write_bytes(weights.read_bytes()[:kept])
    refuses(weights, "damaged")


def test_a_description_that_is_not_json(vae, tmp_path):
    weights = generators.save(vae, tmp_path / "mine")
    (tmp_path / "mine.json").write_text("{")
    refuses(weights, "mine.json is not JSON")


@pytest.mark.parametrize("change", [{"class": "os.system"}, {"class": None}, {"class": []}, {"format": "another 1"}])
def test_a_description_of_something_else(vae, tmp_path, change):
    weights = generators.save(vae, tmp_path / "mine")
    (tmp_path / "mine.json").write_text(json.dumps(describe(vae) | change))
    refuses(weights, "not one of GaussianVAE")


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_a_description_that_is_no_object(vae, tmp_path, text):
    weights = generators.save(vae, tmp_path / "mine")
    (tmp_path / "mine.json").write_text(text)
    refuses(weights, "not one of GaussianVAE")


@pytest.mark.parametrize(
    "config",
    [
        {"latent_dim": 4},
        {"hidden": [7]},
        {"sd": -1.0},
        {"latent_dim": 0},
        {"latent_dim": "three"},
        {"unknown": 1},
        {"hidden": None},
    ],
)
def test_weights_that_do_not_fit_the_description(vae, tmp_path, config):
    weights = generators.save(vae, tmp_path / "mine")
    what = describe(vae)
    (tmp_path / "mine.json").write_text(json.dumps(what | {"config": what["config"] | config}))
    refuses(weights, "does not fit its own description of a GaussianVAE")


def test_a_description_without_a_config(vae, tmp_path):
    weights = generators.save(vae, tmp_path / "mine")
    what = describe(vae)
    del what["config"]
    (tmp_path / "mine.json").write_text(json.dumps(what))
    refuses(weights, "does not fit")


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))])
def test_a_pickle_that_would_run_code_is_refused_and_does_not(tmp_path, write):
    path = tmp_path / "evil.ckpt"
    write({"state_dict": {}, CHECKPOINT_KEY: RunsCode(tmp_path / "ran")}, path)
    refuses(path, "holds more than weights and is refused")
    assert not (tmp_path / "ran").exists()


def test_a_module_in_a_checkpoint_is_refused_without_advice_to_trust_it(vae, tmp_path):
    torch.save(vae, tmp_path / "module.ckpt")
    refuses(
        tmp_path / "module.ckpt",
        r"loading it would import generators.vae.GaussianVAE; save net.state_dict\(\) instead$",
    )


@pytest.mark.parametrize("content", [b"", b"hello world\n", b"\x00" * 200, b"PK\x03\x04"])
def test_a_file_that_is_no_checkpoint(tmp_path, content):
    path = tmp_path / "junk.ckpt"
    path.write_bytes(content)
    refuses(path, "junk.ckpt (is damaged|holds more than weights)")


def test_a_truncated_checkpoint(vae, tmp_path):
    path = tmp_path / "cut.ckpt"
    torch.save({"state_dict": vae.state_dict()}, path)
    path.write_bytes(path.read_bytes()[:-400])
    refuses(path, "damaged")


def test_a_checkpoint_of_another_training(tmp_path):
    path = tmp_path / "other.ckpt"
    torch.save({"state_dict": {"layer.weight": torch.zeros(2)}, "epoch": 3}, path)
    refuses(path, "not a checkpoint of dgm-infer train")
    torch.save([1, 2], path)
    refuses(path, "not a checkpoint of dgm-infer train")


def test_a_checkpoint_whose_weights_are_elsewhere(vae, tmp_path):
    path = tmp_path / "other.ckpt"
    torch.save({CHECKPOINT_KEY: describe(vae), "state_dict": {"net.weight": torch.zeros(2)}}, path)
    refuses(path, "does not fit its own description")
    torch.save({CHECKPOINT_KEY: describe(vae)}, path)
    refuses(path, "does not fit its own description")
