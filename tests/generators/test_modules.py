"""Networks made elsewhere become generators that can be conditioned, and files that do not fit are refused."""

import math
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, CheckpointError, ModelError
from generators import from_hub, from_module
from tests.files import reference_folder
from tests.models import layer


class PixelNorm(nn.Module):
    def forward(self, z):
        return z / z.square().mean(1, keepdim=True).add(1e-8).sqrt()


class Style(nn.Module):
    """A 3 x 3 convolution whose weights a style scales and normalises, per image, with weighted noise on its output."""

    def __init__(self, n_in, n_out, style):
        super().__init__()
        self.affine = nn.Linear(style, n_in)
        self.weight = nn.Parameter(torch.randn(n_out, n_in, 3, 3) / math.sqrt(9 * n_in))
        self.strength = nn.Parameter(torch.tensor(0.2))

    def forward(self, x, w, noise):
        weight = self.weight * (1 + self.affine(w))[:, None, :, None, None]
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        n, _, height, width = x.shape
        out = nn.functional.conv2d(x.reshape(1, -1, height, width), weight.flatten(0, 1), padding=1, groups=n)
        return nn.functional.leaky_relu(out.reshape(n, -1, height, width) + self.strength * noise, 0.2)


class StyleGenerator(nn.Module):
    """A mapping network behind a pixel norm, a learned constant, modulated convolutions with noise, and an RGB layer.

    Returns (images [n, 3, 8, 8], styles), and draws the noise itself where none is given.
    """

    def __init__(self, latent=6, style=8):
        super().__init__()
        self.mapping = nn.Sequential(PixelNorm(), nn.Linear(latent, style), nn.LeakyReLU(0.2), nn.Linear(style, style))
        self.constant = nn.Parameter(torch.randn(4, 4, 4))
        self.coarse, self.fine = Style(4, 4, style), Style(4, 4, style)
        self.rgb = nn.Conv2d(4, 3, 1)

    def forward(self, z, coarse=None, fine=None, truncation=1.0):
        w = truncation * self.mapping(z)
        n = len(z)
        coarse = torch.randn(n, 1, 4, 4, dtype=z.dtype) if coarse is None else coarse
        fine = torch.randn(n, 1, 8, 8, dtype=z.dtype) if fine is None else fine
        x = self.coarse(self.constant.expand(n, -1, -1, -1), w, coarse)
        x = self.fine(nn.functional.interpolate(x, scale_factor=2), w, fine)
        return torch.tanh(self.rgb(x)), w


@pytest.fixture
def style():
    torch.manual_seed(0)
    return StyleGenerator().eval()


NOISE = {"coarse": (1, 4, 4), "fine": (1, 8, 8)}


def test_a_style_network_hides_its_noise_until_it_is_an_input_or_fixed(style):
    range_ = {"output_range": (-1.0, 1.0)}
    assert dgm.check(from_module(style, 6, **range_)).codes == ("hidden_randomness",)
    free = from_module(style, 6, inputs=NOISE, arguments={"truncation": 0.7}, **range_)
    report = dgm.check(free)
    # 192 pixels of 64 values of the fine noise, 16 of the coarse, and five directions of a normalised latent
    assert (report.n_inputs, report.n_outputs, report.rank) == (6 + 16 + 64, 192, 5 + 16 + 64)
    assert report.ok
    # its activations are leaky ReLUs
    assert report.codes == ("rank", "kinks")
    fixed = from_module(style, 6, arguments={"coarse": torch.zeros(1, 4, 4), "fine": torch.zeros(1, 8, 8)}, **range_)
    report = dgm.check(fixed)
    assert report.codes == ("rank", "kinks")
    assert (report.n_inputs, report.rank) == (6, 5)


@pytest.mark.slow
def test_a_style_network_is_conditioned_exactly_on_fewer_pixels_than_its_rank(style):
    model = from_module(style, 6, inputs=NOISE, output_range=(-1, 1))
    truth = model.observed(model.input_density.sample((2,), generator=torch.Generator().manual_seed(1)))
    images = truth.detach().unflatten(-1, (3, 8, 8))
    mask = torch.zeros(3, 8, 8, dtype=torch.bool)
    mask[0, 0, :6] = True
    assert dgm.check(model, images, dgm.pixels(mask)).codes == ("kinks",)
    fibre = dgm.condition(model, images, observe=dgm.pixels(mask))
    kernel = dgm.ConstrainedHMC(step_size=0.1, n_steps=(2, 3), n_geodesic=1)
    draws = dgm.sample(fibre, kernel, chains=2, warmup=0, draws=3, seed=0, progress=False)
    assert draws.stats["acceptance_rate"].mean() > 0.5
    assert draws.stats["constraint_error"].max() < 1e-7
    completed = draws.generate()
    assert completed.shape == (2, 3, 2, 3, 8, 8)
    torch.testing.assert_close(completed[..., mask], images.double()[..., mask].expand_as(completed[..., mask]))
    latents = draws.latents
    assert {name: tuple(value.shape[3:]) for name, value in latents.items()} == {"z": (6,), **NOISE}


def test_latents_of_any_shape_and_leading_dimensions():
    torch.manual_seed(0)
    net = nn.Sequential(nn.ConvTranspose2d(2, 3, 2, stride=2), nn.BatchNorm2d(3), nn.Sigmoid()).eval()
    model = from_module(net, (2, 3, 4), output_range=(0, 1))
    assert model.output_shape == (3, 6, 8)
    assert model.input_density.dim == 24
    u = torch.randn(5, 2, 24)
    x = model.observed(u)
    assert x.shape == (5, 2, 144)
    torch.testing.assert_close(x[3, 1].reshape(3, 6, 8), net(u[3, 1].reshape(1, 2, 3, 4))[0])
    torch.testing.assert_close(model.observed(u[0, 0]), x[0, 0])
    assert model.latents(u)["z"].shape == (5, 2, 2, 3, 4)
    assert dgm.check(model).codes == ()


class Conditional(nn.Module):
    """Images of a latent and a class, in a mapping with other things."""

    def __init__(self):
        super().__init__()
        self.classes, self.layer = nn.Embedding(3, 4), nn.Linear(4, 9)

    def forward(self, z, label, onehot=None):
        h = z + self.classes(label)
        return {"images": torch.tanh(self.layer(h)).reshape(-1, 3, 3), "features": h, "onehot": onehot}


def test_class_labels_are_fixed_arguments_of_every_row():
    torch.manual_seed(0)
    net = Conditional().eval()
    models = [
        from_module(net, 4, select="images", arguments={"label": torch.tensor(c), "onehot": torch.eye(3)[c]})
        for c in range(3)
    ]
    u = torch.randn(7, 2, 4)
    for c, model in enumerate(models):
        expected = net(u.reshape(-1, 4), torch.full((14,), c))["images"].reshape(7, 2, 9)
        torch.testing.assert_close(model.observed(u), expected)
        assert dgm.check(model).codes == ()
    # labels stay whole numbers in a computation of 64 bits
    fibre = dgm.condition(models[1], torch.zeros(3, 3), observe=dgm.pixels(torch.eye(3, dtype=torch.bool)))
    assert fibre.constraint(torch.zeros(5, 4, dtype=torch.float64)).shape == (5, 3)


class Summed(Conditional):
    def forward(self, z, label, onehot=None):
        return self.layer(z + self.classes(label))


@pytest.mark.parametrize("kind", [Conditional, Summed])
@pytest.mark.parametrize("label", [2, torch.tensor([2]), torch.tensor([2, 1])], ids=["int", "one element", "two"])
def test_a_label_that_is_not_a_scalar_tensor_is_refused_with_the_right_one(kind, label):
    with pytest.raises(ModelError, match=r"scalar tensor: arguments=\{'label': torch.tensor\(2\)\}") as caught:
        from_module(kind().eval(), 4, select="images", arguments={"label": label})
    assert "\n" not in str(caught.value)


def test_integers_that_the_network_takes_are_left_alone():
    model = from_module(lambda z, n, order: n * z[:, order[0]], 3, arguments={"n": 2, "order": torch.tensor([2, 0])})
    u = torch.randn(5, 3)
    torch.testing.assert_close(model.observed(u), 2 * u[:, [2, 0]])


def test_a_transform_noise_and_a_density_of_the_latents():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh()).eval()
    model = from_module(net, dgm.Logistic(2), transform=lambda x: (x + 1) / 2, output_range=(0, 1), noise=0.1)
    assert isinstance(model, dgm.WithNoise)
    u = torch.randn(3, 7)
    torch.testing.assert_close(model.observed(u), (net(u[:, :2]) + 1) / 2 + 0.1 * u[:, 2:])
    assert isinstance(model.global_density, dgm.Logistic)
    assert model.latents(u)["z"].shape == (3, 2)
    assert dgm.check(model, torch.ones(5)).findings == ()


def test_noise_of_the_shape_of_the_images_is_that_of_their_flat_values():
    net = nn.Unflatten(1, (1, 2, 3)).eval()
    sd = torch.arange(1.0, 7.0).reshape(1, 2, 3)
    u = torch.randn(3, 12)
    flat = from_module(net, 6, noise=sd.flatten()).observed(u)
    torch.testing.assert_close(flat, u[:, :6] + sd.flatten() * u[:, 6:])
    torch.testing.assert_close(from_module(net, 6, noise=sd).observed(u), flat)
    with pytest.raises(
        ArgumentError, match=r"sd of shape \(2, 3\)\): expected a number or shape \(6,\) or \(1, 2, 3\)"
    ):
        from_module(net, 6, noise=sd[0])


@pytest.mark.parametrize("part", ["all", "child"])
def test_training_mode_is_seen_beside_a_transform_in_evaluation_mode(part):
    network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
    if part == "child":
        network.eval()[1].train()
    model = from_module(network, latent=3, transform=nn.Sigmoid().eval())
    assert model.training
    assert "training_mode" in dgm.check(model).codes


def test_the_network_is_used_as_it_is():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    model = from_module(net, 3, noise=0.1)
    assert net.training
    assert net[1].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert dgm.check(model).codes == ("training_mode",)
    net.eval()
    assert dgm.check(from_module(net, 3, noise=0.1)).codes == ()
    # training goes on in the network that the generator holds
    with torch.no_grad():
        layer(net, 0).bias.add_(1)
    assert model.model.net is net  # type: ignore[union-attr]


def test_a_function_is_a_network_too():
    model = from_module(lambda z: (z.square().sum(1, keepdim=True), "more"), 2)
    assert model.output_shape == (1,)
    assert dgm.condition(model, [1.0]).dim == 2


WRONG = {
    "no function": (lambda: from_module(3, 2), ArgumentError, "net=3"),
    "latent of no size": (lambda: from_module(nn.Identity(), 0), ArgumentError, "latent=0"),
    "latent of a negative shape": (lambda: from_module(nn.Identity(), (2, -1)), ArgumentError, r"latent=\(2, -1\)"),
    "latent of another class": (
        lambda: from_module(nn.Identity(), dgm.kernels.Uniform(16)),  # type: ignore[arg-type]
        ArgumentError,
        r"latent=Uniform.*an integer >= 1, a shape such as \(1, 4, 4\), or a density: dgm.StandardNormal\(16\)",
    ),
    "another length": (lambda: from_module(nn.Linear(3, 2), 4), ModelError, r"Linear fails .* z \(2, 4\).*latent="),
    "range upside down": (lambda: from_module(nn.Identity(), 2, output_range=(1, 0)), ArgumentError, r"\(1, 0\)"),
    "no noise": (lambda: from_module(nn.Identity(), 2, noise=-1.0), ArgumentError, "sd=-1"),
    "an input twice": (
        lambda: from_module(nn.Identity(), 2, inputs={"n": 3}, arguments={"n": 1}), ArgumentError, "'n'"
    ),
    "one output for all": (lambda: from_module(lambda z: z.sum(), 2), ModelError, r"shape \(\) for 2 latents"),
    "nothing selected": (
        lambda: from_module(lambda z: {"a": z}, 2, select="b"), ModelError, "'a'; select='b' is not in it"
    ),
    "no tensor selected": (lambda: from_module(lambda z: ("a", z), 2), ModelError, "output 0 is a str"),
    "weights for a function": (lambda: from_module(abs, 2, weights="x"), ArgumentError, "not a torch.nn.Module"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "kind", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said_in_one_line(wrong, kind, words):
    with pytest.raises(kind, match=words) as caught:
        wrong()
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- weights


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


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 4), nn.Linear(6, 5)

    def forward(self, z, label):
        return self.linear(torch.cat([z, self.embedding(label)], -1))


class ManyNoises(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 5)

    def forward(self, z, noise):
        return self.linear(z) + noise[0] + 2 * noise[1]


def test_a_label_of_numpy_is_one_of_torch_and_one_that_is_no_integer_is_told_what_to_write():
    network = Labelled().eval()
    expected = from_module(network, 2, arguments={"label": torch.tensor(3)}).observed(torch.ones(4, 2))
    found = from_module(network, 2, arguments={"label": np.array(3)}).observed(torch.ones(4, 2))
    assert torch.equal(found, expected)
    for label in (3.0, torch.tensor(3.0), np.array(3.0), np.int64(3), np.array([3]), [3]):
        with pytest.raises(ModelError, match=r"arguments=\{'label': torch\.tensor\(3\)\}") as caught:
            from_module(network, 2, arguments={"label": label})
        assert "\n" not in str(caught.value)


def test_an_argument_that_is_a_list_of_noises_is_fixed_or_has_an_input_for_each():
    network = ManyNoises().eval()
    fixed = [np.full(5, 0.5), torch.full((5,), 0.25)]
    model = from_module(network, 2, arguments={"noise": fixed})
    with torch.no_grad():
        torch.testing.assert_close(model.observed(torch.ones(3, 2)), network.linear(torch.ones(3, 2)) + 1)
    # its tensors are cast with the network
    assert dgm.condition(model, torch.zeros(1), observe=lambda x: x[..., :1]).model.observed(
        torch.ones(3, 2, dtype=torch.float64)
    ).dtype == torch.float64  # fmt: skip
    free = from_module(network, 2, inputs={"noise": [(5,), (5,)]})
    u = torch.randn(3, 12)
    latents = free.latents(u)
    assert {name: tuple(value.shape) for name, value in latents.items()} == {
        "z": (3, 2), "noise_0": (3, 5), "noise_1": (3, 5)
    }  # fmt: skip
    with torch.no_grad():
        expected = network(latents["z"], [latents["noise_0"], latents["noise_1"]])
        assert torch.equal(free.observed(u), expected)


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
