"""Rows of a Jacobian from the parts of a network that they look at."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import dgm_infer as dgm
from dgm_infer.autodiff import jacobian_products as jacobian
from dgm_infer.autodiff import receptive
from dgm_infer.autodiff.jacobian_products import pull_back
from dgm_infer.autodiff.receptive import InFields, ReceptiveFields
from generators import from_module
from tests.oracles import FLOAT

SIDE = 24


class Squeezed(nn.Module):
    """Channels weighted by means over the whole image."""

    def forward(self, x):
        return x * x.mean((-2, -1), keepdim=True).sigmoid()


class Shifted(nn.Module):
    """Something else at every position."""

    def forward(self, x):
        return x + torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def first():
    return nn.Linear(9, 4 * 36), nn.Unflatten(1, (4, 6, 6)), nn.Softplus()


def last():
    return nn.ConvTranspose2d(6, 5, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(5, 2, 4, 2, 1), nn.Tanh()


NETWORKS = {
    "chain": nn.Sequential(*first(), nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), *last()),
    "odd": nn.Sequential(
        *(*first(), nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2), nn.LeakyReLU()),
        *(nn.Conv2d(6, 4, 3, padding=2, dilation=2), nn.GELU(), nn.ConvTranspose2d(4, 2, 2, 2, bias=False)),
    ),
    "residual": nn.Sequential(
        *(*first(), nn.Conv2d(4, 6, 3, padding=1), Residual(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()))),
        *last(),
    ),
    "enlarged": nn.Sequential(
        *(*first(), nn.Upsample(scale_factor=2), nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.ELU()),
        *(nn.Upsample(scale_factor=2), nn.Conv2d(6, 2, 3, padding=1)),
    ),
    "shifted": nn.Sequential(*first(), nn.Conv2d(4, 6, 3, padding=1), Shifted(), *last()),
}
WHOLE = {
    "squeezed": nn.Sequential(*first(), nn.Conv2d(4, 6, 3, padding=1), Squeezed(), *last(), Squeezed()),
    "no convolution": nn.Sequential(nn.Linear(9, 2 * SIDE**2), nn.Softplus(), nn.Unflatten(1, (2, SIDE, SIDE))),
}


def network(name):
    torch.manual_seed(4)
    net = (NETWORKS | WHOLE)[name].to(FLOAT).eval().requires_grad_(False)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.normal_(layer.weight, std=0.5)
    return net


def means(net):
    """Means over blocks of 6 x 6, ``[R, 9] -> [R, 32]``."""
    return lambda u: functional.avg_pool2d(net(u), 6).flatten(1)


def inputs(n=5, seed=1):
    return torch.randn(n, 9, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def row_gradient(function, u):
    """The value, the rows, and the gradient of a fixed function of the rows."""
    u = u.clone().requires_grad_()
    value, rows = pull_back(function, u)
    weights = torch.linspace(-1, 1, rows.numel(), dtype=u.dtype).reshape(rows.shape)
    return value.detach(), rows.detach(), torch.autograd.grad((weights * rows).sum(), u)[0]


@pytest.fixture(autouse=True)
def calls_cost_nothing(monkeypatch):
    """The networks here are so small that the calls for their parts take longer than the whole."""
    monkeypatch.setattr(receptive, "_CALLS", 0)


def test_parts_of_a_small_network_are_used_for_many_rows_only(monkeypatch):
    function, fields = means(network("chain")), ReceptiveFields()
    assert fields.parts(function, inputs(), 32) is not None
    monkeypatch.setattr(receptive, "_CALLS", 2e8)
    assert fields.parts(function, inputs(), 32) is None
    assert fields.parts(function, inputs()[:1].expand(1_000_000, -1), 32) is not None


@pytest.fixture(params=["kept", "computed again"])
def small(request, monkeypatch):
    """Fields for small networks too, with derivatives kept for their own or computed again."""
    monkeypatch.setattr(jacobian, "_FIELDS", 0)
    if request.param == "computed again":
        monkeypatch.setattr(jacobian, "_KEPT", 0)


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_in_fields_are_those_of_the_whole_network_and_so_is_their_gradient(name, small):
    function, fields = means(network(name)), ReceptiveFields()
    parts = fields.parts(function, inputs(), 32)
    # both channels of a block look at the same places
    assert parts is not None
    assert len(parts) == 16
    assert all(len(part.rows) == 2 for part in parts)
    # at other points than those where they were found
    u = inputs()
    for seed in range(2, 5):
        u = 2 * inputs(seed=seed)
        for mine, expected in zip(row_gradient(InFields(function, fields), u), row_gradient(function, u), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(pull_back(InFields(function, fields), u), pull_back(function, u))


def test_a_chain_of_convolutions_stays_small_from_one_to_the_next():
    parts = ReceptiveFields().parts(means(network("chain")), inputs(), 32)
    assert parts is not None
    for part in parts:
        assert part.joined == (True, True, False)
    # the corner at the top left: 3 convolutions back from 6 x 6 pixels
    assert parts[0].boxes == (((0, 3), (0, 3)), ((0, 4), (0, 4)), ((0, 6), (0, 6)))
    # work counted by the sizes of the images that are computed
    net, sizes = network("chain"), []
    net[-1].register_forward_hook(lambda _m, _x, y: sizes.append(y))
    with parts[5].mode():
        value = net(inputs())
    assert value.shape[-2:] == (SIDE, SIDE)
    assert parts[5].share < 0.4


@pytest.mark.parametrize("name", WHOLE)
def test_networks_without_fields_are_computed_as_a_whole(name, small):
    function, fields = means(network(name)), ReceptiveFields()
    assert fields.parts(function, inputs(), 32) is None
    for mine, expected in zip(
        row_gradient(InFields(function, fields), inputs()), row_gradient(function, inputs()), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=0)


def test_slopes_that_happen_to_be_zero_hide_no_field(small):
    # at the first point all is below zero, and nothing passes a ReLU
    net = nn.Sequential(*first(), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), *last()).to(FLOAT).requires_grad_(False)
    bias = net.get_parameter("3.bias")
    bias.fill_(-100.0)
    function, fields = means(net), ReceptiveFields()
    assert fields.parts(function, inputs(), 32) is not None
    bias.fill_(0.1)
    torch.testing.assert_close(
        pull_back(InFields(function, fields), inputs())[1], pull_back(function, inputs())[1], rtol=1e-9, atol=1e-11
    )


def test_fields_that_are_too_small_are_refused(monkeypatch):
    """The control: what is found is compared with the whole network."""
    right = receptive._box

    def smaller(slope):
        (a, b), *others = right(slope)
        return ((a, max(a + 1, b - 1)), *others)

    monkeypatch.setattr(receptive, "_box", smaller)
    assert ReceptiveFields().parts(means(network("chain")), inputs(), 32) is None


def test_a_fibre_looks_only_where_its_observation_does(monkeypatch):
    monkeypatch.setattr(jacobian, "_FIELDS", 0)
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(40, 4 * 36), nn.Unflatten(1, (4, 6, 6)), nn.Softplus()),
        *(nn.Conv2d(4, 6, 3, padding=1), nn.SiLU(), *last()),
    )
    model = from_module(net.eval().requires_grad_(False), 40)
    y = dgm.downsample(6)(model(torch.randn(2, 40)).unflatten(-1, model.output_shape)).double().detach()
    fibre = dgm.condition(model, y, observe=dgm.downsample(6))
    u = torch.randn(6, 40, dtype=FLOAT)
    parts = fibre.rows(3).linearise(u)
    assert fibre.observed.fields is not None
    assert fibre.observed.fields.parts(len, u, 32) is not None
    fibre.observed.fields = None
    whole = dgm.condition(model, y, observe=dgm.downsample(6))
    whole.observed.fields = None
    whole = whole.rows(3).linearise(u)
    torch.testing.assert_close(parts.energy, whole.energy, rtol=1e-10, atol=0)
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-8, atol=1e-10)
    # each problem observes other pixels: there is no one field
    masks = torch.zeros(2, 2, SIDE, SIDE, dtype=torch.bool)
    masks[0, 0, 3], masks[1, 1, 3] = True, True
    images = model(torch.randn(2, 40)).unflatten(-1, model.output_shape).double().detach()
    assert dgm.condition(model, images, observe=dgm.pixels(masks)).observed.fields is None
