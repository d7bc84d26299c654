"""Generators on a hub: a double of it that keeps files in a folder."""

import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

import generators
from dgm_infer.errors import ArgumentError, CheckpointError, MissingExtraError
from generators.hub import Address


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """``huggingface_hub`` as far as it is used; returns the folder of its repositories."""
    root = tmp_path / "hub"

    def hf_hub_download(*, repo_id, filename, revision=None):
        path = root / repo_id / (revision or "main") / filename
        if not path.is_file():
            raise FileNotFoundError(f"404 Client Error: {repo_id} has no {filename}")
        # into a cache of its own, as the hub's client does
        cached = tmp_path / "cache" / repo_id / (revision or "main") / filename
        cached.parent.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(path, cached))

    class HfApi:
        def create_repo(self, *, repo_id, exist_ok):
            assert exist_ok
            if repo_id.startswith("stranger/"):
                raise PermissionError("403 Forbidden")
            (root / repo_id / "main").mkdir(parents=True, exist_ok=True)

        def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id, revision=None):
            target = root / repo_id / (revision or "main") / path_in_repo
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path_or_fileobj, target)

    double = types.ModuleType("huggingface_hub")
    double.hf_hub_download, double.HfApi = hf_hub_download, HfApi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", double)
    return root


@pytest.mark.parametrize("address", ["hf://me/digits", "hf://me/digits/small", "hf://me/digits/of/mine@v1"])
def test_what_is_uploaded_is_loaded_by_its_address(address, hub, tmp_path):
    torch.manual_seed(0)
    model = generators.GaussianVAE(2, (3, 3), hidden=[4])
    generators.save(model, tmp_path / "own", {"epochs": 3}, hub=address)
    assert sorted(path.suffix for path in hub.rglob("*.*") if path.is_file()) == [".json", ".safetensors"]
    (tmp_path / "own.safetensors").unlink()
    loaded = generators.load(address)
    assert not loaded.training
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_what_the_hub_does_not_have_or_take_is_named(hub, tmp_path):
    with pytest.raises(CheckpointError, match=r"hf://me/none cannot be downloaded: .*no generator\.json.*uploads them"):
        generators.load("hf://me/none")
    model = generators.GaussianVAE(2, (3, 3), hidden=[4])
    with pytest.raises(ArgumentError, match=r"hub='hf://stranger/x'\): 403 Forbidden.*own\.safetensors"):
        generators.save(model, tmp_path / "own", hub="hf://stranger/x")
    # a file that describes another class is not run
    folder = hub / "me" / "odd" / "main"
    folder.mkdir(parents=True)
    (folder / "generator.json").write_text('{"format": "x", "class": "os.system", "config": {}}')
    shutil.copy(tmp_path / "own.safetensors", folder / "generator.safetensors")
    with pytest.raises(CheckpointError, match=r"os\.system"):
        generators.load("hf://me/odd")


@pytest.mark.parametrize("text", ["hf://", "hf://me", "hf://me/a b", "hf://me/x/../../y", "hf://me/x@"])
def test_an_address_of_another_form_is_refused(text):
    with pytest.raises(ArgumentError, match="expected hf://owner/name"):
        generators.load(text)


def test_the_parts_of_an_address():
    assert Address.of("load", "hf://me/x") == ("me/x", "generator", None)
    assert Address.of("load", "hf://me/x/a/b.safetensors@main") == ("me/x", "a/b", "main")


def test_without_the_client_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r'pip install "dgm-infer\[hub\]"'):
        generators.load("hf://me/x")
    assert not Path("hf:").exists()
