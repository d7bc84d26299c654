"""Networks made elsewhere become generators that can be conditioned."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, ModelError
from generators import from_module
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
