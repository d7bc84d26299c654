"""Weights from files and repositories of others, of which those that do not fit, or would run code, are refused."""

import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, CheckpointError
from generators import from_hub, from_module
from tests.files import reference_folder


def net(seed=0, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 3))


def stored(folder, kind):
    state, path = net(1).state_dict(), folder / f"net.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        save_file(state, path)
        return path, None
    if kind == "prefixed":
        extra = {"critic.0.weight": torch.zeros(2)}
        torch.save({"state_dict": {f"generator.{k}": v for k, v in state.items()} | extra, "epoch": 3}, path)
        return path, "state_dict"
    torch.save(state, path)
    return path, None


@pytest.mark.parametrize("kind", ["safetensors", "torch", "prefixed"])
def test_weights_are_read_from_files_of_others(tmp_path, kind):
    path, key = stored(tmp_path, kind)
    model = from_module(net(0).eval(), 2, weights=path, key=key)
    u = torch.randn(5, 2)
    assert torch.equal(model.observed(u), net(1)(u))


def refused(words, path, network=None, **options):
    with pytest.raises(CheckpointError, match=words) as caught:
        from_module(net() if network is None else network, 2, weights=path, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("kept", [0, 10, 200])
def test_a_truncated_file(tmp_path, kind, kept):
    path, _ = stored(tmp_path, kind)
    path.write_bytes(path.read_bytes()[:kept])
    refused("damaged|not a plain file", path)


def test_a_foreign_file_or_another_architecture(tmp_path):
    path, _ = stored(tmp_path, "torch")
    refused(r"'0\.weight' is \(4, 2\) in the file, \(5, 2\) in the network", path, net(width=5))
    refused(
        "all of its tensors are missing, such as 'gain'", path, nn.ParameterDict({"gain": nn.Parameter(torch.zeros(2))})
    )
    refused(r"it has no '2\.weight' and no other 1", path, net()[:2])
    refused("has no 'g_ema': it holds '0.weight'", path, key="g_ema")
    prefixed, _ = stored(tmp_path, "prefixed")
    refused("it holds|holds 'state_dict', 'epoch'", prefixed)
    refused("does not exist", tmp_path / "absent.pt")
    (tmp_path / "text.pt").write_text("no weights")
    refused("damaged|not a plain file", tmp_path / "text.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    refused("holds a list", tmp_path / "list.pt")


def two_networks(path, ema, **more):
    """A checkpoint of a generator and its moving average, in a file of one dictionary."""
    state = {f"g.{name}": value for name, value in net(1).state_dict().items()}
    state |= {f"g_ema.{name}": value for name, value in net(ema).state_dict().items()}
    torch.save({"state_dict": state, **more} if more else state, path)
    return path


@pytest.mark.parametrize("more", [{}, {"epoch": 3}])
def test_one_of_two_networks_of_one_architecture_is_chosen_by_its_prefix(tmp_path, more):
    path = two_networks(tmp_path / "two.pt", 2, **more)
    before = "state_dict." if more else ""
    whole = {"key": "state_dict"} if more else {}
    refused(f"2 networks of this architecture: choose by key='{before}g' or key='{before}g_ema'$", path, **whole)
    u = torch.randn(5, 2)
    for prefix, seed in (("g", 1), ("g_ema", 2), ("g_ema.", 2)):
        model = from_module(net(0).eval(), 2, weights=path, key=before + prefix)
        assert torch.equal(model.observed(u), net(seed)(u))
    refused("has no 'state_dict.d'|has no 'd'", path, key=f"{before}d")


@pytest.mark.parametrize("more", [{}, {"epoch": 3}])
def test_a_network_without_a_prefix_and_its_average_with_one_are_told_apart(tmp_path, more):
    state = net(1).state_dict() | {f"ema.{name}": value for name, value in net(2).state_dict().items()}
    path, before = tmp_path / "two.pt", "state_dict." if more else ""
    torch.save({"state_dict": state, **more} if more else state, path)
    whole = {"key": "state_dict"} if more else {}
    refused(f"2 networks of this architecture: choose by key='{before}' or key='{before}ema'$", path, **whole)
    u = torch.randn(5, 2)
    for prefix, seed in (("", 1), ("ema", 2)):
        model = from_module(net(0).eval(), 2, weights=path, key=before + prefix)
        assert torch.equal(model.observed(u), net(seed)(u))


def test_two_networks_with_the_same_weights_need_no_choice(tmp_path):
    u = torch.randn(5, 2)
    model = from_module(net(0).eval(), 2, weights=two_networks(tmp_path / "two.pt", 1))
    assert torch.equal(model.observed(u), net(1)(u))


def test_networks_of_other_shapes_beside_it_are_none_to_choose_from(tmp_path):
    state = {f"g.{name}": value for name, value in net(1).state_dict().items()}
    state |= {f"d.{name}": value for name, value in net(1, width=5).state_dict().items()}
    torch.save(state, tmp_path / "other.pt")
    u = torch.randn(5, 2)
    assert torch.equal(from_module(net(0).eval(), 2, weights=tmp_path / "other.pt").observed(u), net(1)(u))


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_pickle_that_runs_code_is_refused_unless_the_caller_says_so(tmp_path):
    path = tmp_path / "code.pt"
    torch.save({"state_dict": net(1).state_dict(), "callback": Payload(tmp_path / "ran")}, path)
    refused(r"refused: loading it would import .*mkdir; save net.state_dict\(\) instead$", path, key="state_dict")
    assert not (tmp_path / "ran").exists()
    model = from_module(net(0).eval(), 2, weights=path, key="state_dict", trust=True)
    assert (tmp_path / "ran").exists()
    assert torch.equal(model.observed(torch.ones(2)), net(1)(torch.ones(2)))


def test_a_checkpoint_that_runs_code_is_refused_unless_the_caller_says_so(tmp_path):
    from generators.checkpoints import CHECKPOINT_KEY, describe

    vae = generators.GaussianVAE(3, (4, 5), (7,))
    state = {f"generator.{name}": tensor for name, tensor in vae.state_dict().items()}
    content = {"state_dict": state, CHECKPOINT_KEY: describe(vae), "callback": Payload(tmp_path / "ran")}
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="would import"):
        generators.load(tmp_path / "a.ckpt")
    assert not (tmp_path / "ran").exists()
    assert generators.load(tmp_path / "a.ckpt", trust=True).output_shape == (4, 5)


def test_a_whole_module_is_a_pickle_too(tmp_path):
    with open(tmp_path / "module.pt", "wb") as file:
        pickle.dump(net(1), file)
    refused("refused|damaged", tmp_path / "module.pt")
    torch.save(net(1), tmp_path / "module.pt")
    refused("refused", tmp_path / "module.pt")
    model = from_module(net(0).eval(), 2, weights=tmp_path / "module.pt", trust=True)
    assert torch.equal(model.observed(torch.ones(2)), net(1)(torch.ones(2)))


def test_published_arrays_are_found_by_the_file_or_its_folder():
    reference = reference_folder("iwae_mnist")
    for path in ("iwae_mnist", "iwae_mnist/decoder.npz"):
        assert isinstance(generators.load(f"{reference}/{path}"), generators.IWAE)
    for path in ("pose", "pose/joint_angle_decoder.npz"):
        assert isinstance(generators.load(f"{reference}/{path}"), generators.HumanPose)


# --------------------------------------------------------------------------------------------------------- torch.hub


HUBCONF = """
dependencies = ["torch"]

import torch


def small(width=4, pretrained=False):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 3))
    if pretrained:
        torch.nn.init.zeros_(net[2].weight)
    return net


def broken():
    raise RuntimeError("two\\nlines")


def number():
    return 3
"""


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "hubconf.py").write_text(HUBCONF)
    return tmp_path


def test_a_local_repository(repository):
    model = from_hub(repository, "small", 2, entry_arguments={"width": 6, "pretrained": True}, output_range=(-9, 9))
    assert model.output_shape == (3,)
    assert model.output_range == (-9, 9)
    assert not model.training
    assert model.net[0].out_features == 6  # type: ignore[index]
    assert torch.equal(model.observed(torch.zeros(2)), model.observed(torch.ones(2)))
    assert dgm.check(from_hub(repository, "small", 2)).rank == 2


@pytest.mark.parametrize(
    ("entry", "words"),
    [("absent", "'absent'.*fails"), ("broken", "two lines"), ("number", "returns a int, not a torch.nn.Module")],
)
def test_an_entry_that_gives_no_network(repository, entry, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        from_hub(repository, entry, 2)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_repository_and_a_source_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"no hubconf\.py"):
        from_hub(tmp_path, "small", 2)
    with pytest.raises(ArgumentError, match="source='web'"):
        from_hub(tmp_path, "small", 2, source="web")  # type: ignore[arg-type]


def test_nothing_is_downloaded_unless_asked(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a download was tried")

    monkeypatch.setattr("torch.hub._get_cache_or_reload", refuse)
    with pytest.raises(CheckpointError, match="source='github'"):
        from_hub("owner/name", "small", 2)
    with pytest.raises(CheckpointError, match="a download was tried"):
        from_hub("owner/name", "small", 2, source="github")
