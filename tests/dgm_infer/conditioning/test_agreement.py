"""What has derivatives of another function is refused where it is given: models, operators, decoders, targets."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import distributions as td
from torch import nn

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, ModelError, ObservationError
from dgm_infer.probe import energy_fault
from tests.models import Function

FLOAT = torch.float64
FIRST = dgm.pixels(torch.tensor([True, False]))


class Coupled(dgm.GenerativeModel):
    """``[z0 + tanh(2 z1) z0 / 2, z1]``, with or without the derivative of the second z0; counts its evaluations."""

    input_density = dgm.StandardNormal(2)

    def __init__(self, stops):
        super().__init__()
        self.stops, self.rows = stops, 0
        self.weight = nn.Parameter(torch.tensor(0.5))

    def observed(self, u):
        self.rows += 1
        z0, z1 = u[..., 0], u[..., 1]
        inner = z0.detach() if self.stops else z0
        return torch.stack([z0 + self.weight * torch.tanh(2 * z1) * inner, z1], -1)


class Rounded(nn.Module):
    def forward(self, x):
        return x.round()


@pytest.mark.parametrize("options", [{}, {"tolerance": 0.1}, {"dtype": torch.float32}, {"noise": 0.1}], ids=str)
def test_a_stop_gradient_is_refused_by_condition(options):
    data = torch.tensor([1.5, 0.0])
    with pytest.raises(ModelError, match=r"derivatives of Coupled do not match its outputs.*detach\(\)"):
        dgm.condition(Coupled(True), data, observe=FIRST, **options)
    # the control
    dgm.condition(Coupled(False), data, observe=FIRST, **options)


def test_an_operator_with_another_derivative_is_refused():
    model = Coupled(False)
    with pytest.raises(ModelError, match="derivatives of Coupled do not match its outputs"):
        dgm.condition(model, torch.zeros(1), observe=lambda x: x[..., :1] * x[..., 1:].detach().exp())
    dgm.condition(model, torch.zeros(1), observe=lambda x: x[..., :1] * x[..., 1:].exp())
    # an operator is looked at although the model has been
    with pytest.raises(ModelError, match="derivatives of Coupled do not match its outputs"):
        dgm.condition(model, torch.zeros(1), observe=lambda x: x[..., :1] * x[..., 1:].detach().exp())


class Weighted(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return u[..., :1]

    def log_factor(self, u):
        return -u[..., 1].square() - u[..., 1].detach() * u[..., 1]


def test_a_log_factor_with_another_derivative_is_refused():
    with pytest.raises(ModelError, match=r"Weighted\.log_factor do not match"):
        dgm.condition(Weighted(), torch.zeros(1))


def test_the_check_costs_few_evaluations_and_is_made_once_a_model():
    model, counted = Coupled(False), []

    def observe(x):
        counted.append(x.shape[0] if x.ndim > 1 else 1)
        return x[..., :1]

    dgm.condition(model, torch.zeros(1), observe=observe)
    first = len(counted)
    counted.clear()
    dgm.condition(model, torch.zeros(1), observe=observe)
    assert 0 < first - len(counted) < 10
    # other weights may be another function
    with torch.no_grad():
        model.weight.mul_(2)
    counted.clear()
    dgm.condition(model, torch.zeros(1), observe=observe)
    assert len(counted) == first


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_a_derivative_that_is_off_by_a_hundredth_is_refused(dtype, offset):
    """Rounding of 32 bits allows it, and that of values of 100."""

    def outputs(u, stops=True):
        x = torch.tanh(u + 0.5 * u.roll(1, -1))
        return x * (1 - 0.01 * stops) + 0.01 * stops * x.detach() + offset

    data = torch.full((3,), offset)
    with pytest.raises(ModelError, match="derivatives of Function do not match its outputs"):
        dgm.condition(Function(outputs, 3), data, dtype=dtype)
    dgm.condition(Function(lambda u: outputs(u, False), 3), data, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Hardtanh(-0.3, 0.3), nn.SiLU()], ids=str)
def test_control_networks_with_kinks_and_offsets_are_taken_in_any_type(dtype, activation):
    for seed in range(4):
        torch.manual_seed(seed)
        last = nn.Linear(256, 100)
        last.bias.data.add_(10.0 * seed)
        net = nn.Sequential(nn.Linear(10, 256), activation, nn.Linear(256, 256), activation, last)
        dgm.condition(generators.from_module(net, latent=10), last.bias.detach(), noise=0.1, dtype=dtype)


@pytest.mark.parametrize("n", [10, 1000])
def test_one_output_of_many_is_refused(n):
    """It is hardly seen in a combination of all."""
    wide = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=FLOAT) / n**0.5

    def outputs(u, stops=True):
        x = torch.tanh(u @ wide.to(u))
        second = x[..., 1].detach() if stops else x[..., 1]
        return torch.cat([x[..., :-1], (x[..., 0] * (1 + 0.5 * second)).unsqueeze(-1)], -1)

    with pytest.raises(ModelError, match="derivatives of Function do not match its outputs"):
        dgm.condition(Function(outputs, n), torch.zeros(n))
    dgm.condition(Function(lambda u: outputs(u, False), n), torch.zeros(n))


def beyond(edge, stops=True):
    """The identity, which bends beyond an edge, with the derivative of the bend or without."""
    return lambda u: torch.where(u > edge, u + 0.3 * ((u.detach() if stops else u) - edge) ** 2, u)


def test_a_fault_that_one_prior_draw_of_eight_meets_is_refused():
    data = torch.tensor([0.0, 2.0, 2.5])
    with pytest.raises(ModelError, match="derivatives of Function do not match its outputs"):
        dgm.condition(Function(beyond(1.0), 3), data)
    dgm.condition(Function(beyond(1.0, stops=False), 3), data)


@pytest.mark.parametrize("noise", [None, 0.1])
def test_derivatives_are_compared_where_the_data_are_too(noise):
    """No prior draw is beyond 2.5; all starting points are."""
    options = {"observe": lambda x: x[..., :2], "noise": noise}
    short = {"chains": 4, "warmup": 2, "draws": 2, "seed": 0, "progress": False}
    data = torch.tensor([0.0, 3.5])
    fibre = dgm.condition(Function(beyond(2.5), 3), data, **options)
    with pytest.raises(ModelError, match="derivatives of Function at the data do not match its outputs"):
        dgm.sample(fibre, **short)
    dgm.sample(dgm.condition(Function(beyond(2.5, stops=False), 3), data, **options), **short)


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is reversed, as adversarial training of domains does."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def clipped(u):
    h = u.tanh()
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return 2 * h


@pytest.mark.parametrize(
    "function",
    [
        lambda u: Reversed.apply(u) + 2 * u.sin(),
        clipped,
        lambda u: u + (u.round() - u).detach(),
        lambda u: u + torch.special.bessel_j0(u),
    ],
    ids=["gradient reversal", "clipped gradients", "straight through", "an operation of torch without derivative"],
)
def test_other_ways_to_another_derivative_are_refused(function):
    with pytest.raises(ModelError, match="derivatives of Function do not match its outputs"):
        dgm.condition(Function(function, 3), torch.zeros(3))


class Doubling(nn.Module):
    """``x + x / 2``, of which the second has no derivative."""

    def forward(self, x):
        return x + 0.5 * x.detach()


class Product:
    """An operator with an attribute that changes its derivative."""

    stops = False

    def __call__(self, x):
        second = x[..., 1:].detach() if self.stops else x[..., 1:]
        return x[..., :1] * second


def test_what_has_changed_since_is_looked_at_again():
    model, data = Coupled(False), torch.zeros(2)
    dgm.condition(model, data)
    model.stops = True
    with pytest.raises(ModelError, match="derivatives of Coupled do not match"):
        dgm.condition(model, data)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = generators.from_module(net, latent=2)
    dgm.condition(generator, data)
    hook = net[0].register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))
    with pytest.raises(ModelError, match="derivatives of NetworkGenerator do not match"):
        dgm.condition(generator, data)
    hook.remove()
    dgm.condition(generator, data)
    net[1] = Doubling()
    with pytest.raises(ModelError, match="derivatives of NetworkGenerator do not match"):
        dgm.condition(generator, data)
    operator = Product()
    dgm.condition(Coupled(False), torch.ones(1), observe=operator)
    operator.stops = True
    with pytest.raises(ModelError, match="derivatives of Coupled do not match"):
        dgm.condition(Coupled(False), torch.ones(1), observe=operator)


class Switched(Coupled):
    """Whose derivative stops where any of what it holds, in whichever way, is set."""

    enclosed: Any
    partial: Any
    buffer: torch.Tensor

    def __init__(self):
        super().__init__(False)
        flag, self.array, self.listed = torch.zeros(1), torch.zeros(1).numpy(), [nn.Linear(1, 1, bias=False)]
        self.enclosed = lambda: flag.sum()
        self.partial = partial(torch.sum, torch.zeros(1))
        self.register_buffer("buffer", torch.zeros(1))
        nn.init.zeros_(self.listed[0].weight)

    def observed(self, u):
        held = (self.array, self.listed[0].weight, self.enclosed(), self.partial(), self.buffer, self.weight - 0.5)
        self.stops = any(float(each.item()) for each in held)
        return super().observed(u)


@pytest.mark.parametrize(
    "set_one",
    [
        lambda model: model.weight.data.add_(1),
        lambda model: model.buffer.data.copy_(torch.ones(1)),
        lambda model: model.array.fill(1),
        lambda model: model.listed[0].weight.data.fill_(1),
        lambda model: model.enclosed.__closure__[0].cell_contents.data.fill_(1),
        lambda model: model.partial.args[0].data.fill_(1),
    ],
    ids=[
        "a parameter's data",
        "a buffer's data",
        "an array",
        "a module in a list",
        "an enclosed variable",
        "a partial",
    ],
)
def test_what_has_changed_without_a_count_of_versions_is_looked_at_again(set_one):
    model = Switched()
    dgm.condition(model, torch.zeros(2))
    set_one(model)
    with pytest.raises(ModelError, match="derivatives of Switched do not match"):
        dgm.condition(model, torch.zeros(2))


class Decoder(nn.Module):
    """Of 16 pixels, with batch statistics of its rows or without, with a stop-gradient or without."""

    def __init__(self, mixes=False, stops=False):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 16), nn.BatchNorm2d(1, track_running_stats=not mixes)
        self.stops = stops

    def forward(self, z):
        h = self.norm(self.linear(z).reshape(-1, 1, 4, 4)).reshape(*z.shape[:-1], 16)
        return td.Independent(td.Bernoulli(logits=h * z[..., :1].detach() if self.stops else h), 1)


IMAGES = (torch.rand(5, 16, generator=torch.Generator().manual_seed(0)) > 0.5).float()


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (Decoder(mixes=True), "Decoder changes the output of a row when the other rows of its batch change"),
        (Decoder(stops=True), "derivatives of Decoder do not match its outputs"),
    ],
    ids=["mixes rows", "stops gradients"],
)
def test_a_decoder_is_refused_as_a_fibre_is(decoder, words):
    with pytest.raises(ModelError, match=words):
        generators.LatentPosterior(decoder, IMAGES, prior=dgm.StandardNormal(3))


@pytest.mark.filterwarnings("error")
def test_control_a_plain_decoder_is_taken_and_the_callers_random_numbers_are_left():
    decoder = Decoder()
    before = torch.get_rng_state()
    posterior = generators.LatentPosterior(decoder, IMAGES, prior=dgm.StandardNormal(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert posterior.batch_shape == (5,)


class Mixing(nn.Module):
    """A decoder of 16 pixels whose rows another function mixes."""

    def __init__(self, mix):
        super().__init__()
        self.linear, self.mix = nn.Linear(3, 16), mix

    def forward(self, z):
        return td.Independent(td.Normal(self.mix(self.linear(z)), 0.1), 1)


@pytest.mark.parametrize(
    "mix",
    [lambda h: h + h.std(0), lambda h: h.cumsum(0), lambda h: h / h.abs().max(), lambda h: h.softmax(0)],
    ids=["deviation of a batch", "rows before", "largest of all", "softmax over rows"],
)
def test_other_ways_to_mix_rows_are_refused(mix):
    with pytest.raises(ModelError, match="changes the output of a row when the other rows of its batch change"):
        generators.LatentPosterior(Mixing(mix), IMAGES, prior=dgm.StandardNormal(3))


class WrongGradient(dgm.Target):
    def energy_and_gradient(self, x):
        return self.energy(x).detach(), 2 * x


def bowl(x):
    return 0.5 * x.square().sum(-1)


@pytest.mark.parametrize(
    "make",
    [lambda: WrongGradient(bowl, 2), lambda: dgm.Target(lambda x: bowl(x) + 0.3 * (x * x.detach()).sum(-1), 2)],
    ids=["own gradient", "detached"],
)
def test_a_target_with_another_gradient_is_refused(make):
    with pytest.raises(ArgumentError, match=r"sample\(\): the gradient of this \w+ is not that of its energy"):
        dgm.sample(make(), chains=2, warmup=1, draws=1, seed=0, progress=False)
    base = dgm.Gaussian(torch.zeros(2), torch.ones(2))
    with pytest.raises(ArgumentError, match=r"the gradient of this .* is not that of its energy"):
        dgm.log_evidence(make(), base, chains=2, seed=0, progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_control_right_gradients_of_any_scale_are_taken(dtype, scale):
    def energy(x):
        return 1e3 + (x / scale).square().sum(-1) + (x / scale).sin().sum(-1)

    x = scale * torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    assert energy_fault(dgm.Target(energy, 2), x) is None
    wrong = dgm.Target(lambda x: energy(x) + (x * x.detach()).sum(-1) / scale**2, 2)
    assert "is not that of its energy" in (energy_fault(wrong, x) or "")


class WrongTwice(torch.autograd.Function):
    """The sine, whose derivative has none of its own."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        return gradients[0] * x.detach().cos()

    @staticmethod
    def jvp(ctx, *tangents):
        (x,) = ctx.saved_tensors
        return tangents[0] * x.detach().cos()


@pytest.mark.parametrize("noise", [None, 0.1])
def test_a_second_derivative_of_another_function_is_refused(noise):
    with pytest.raises(ModelError, match="second derivatives of Function do not match its first ones"):
        dgm.condition(Function(lambda u: WrongTwice.apply(u) + u, 3), torch.zeros(3), noise=noise)
    dgm.condition(Function(lambda u: u.sin() + u, 3), torch.zeros(3), noise=noise)


def simulated(function):
    return dgm.from_simulator(lambda z: function(z + torch.randn(3)), td.Normal(0.0, 1.0))


def test_flat_outputs_are_named_in_one_line():
    clamped = simulated(lambda x: x.clamp_max(0.5))
    with pytest.raises(
        ObservationError, match=r"2 of 3 observed values, such as 0\.5, .* positive probability"
    ) as caught:
        dgm.condition(clamped, torch.tensor([0.1, 0.5, 0.5]))
    assert "\n" not in str(caught.value)
    # below the edge they are values like others
    dgm.condition(clamped, torch.tensor([0.1, 0.2, 0.3]))
    constant = simulated(lambda x: torch.cat([x, torch.ones(1)]))
    with pytest.raises(
        ObservationError, match=r"1 of 4 observed values .* number 3\) are the same at every prior draw"
    ):
        dgm.condition(constant, torch.tensor([0.1, 0.5, 0.5, 1.0]))
    dgm.condition(constant, torch.tensor([0.1, 0.5, 0.5, 1.0]), observe=dgm.pixels(torch.tensor([True] * 3 + [False])))
    with pytest.raises(ObservationError, match=r"2 of 2 observed values of Coupled .* change only in steps"):
        dgm.condition(Coupled(False), torch.zeros(2), observe=Rounded(), noise=0.1)


class Floored(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return (3 * u[..., :1]).floor()


def test_a_tolerance_needs_no_derivative():
    model = Floored()
    with pytest.raises(ObservationError, match="change only in steps"):
        dgm.condition(model, torch.ones(1))
    # once before the model has been looked at, once after
    assert not dgm.condition(model, torch.ones(1), tolerance=0.1).has_gradient
    target = dgm.condition(model, torch.ones(1), tolerance=0.1)
    assert not target.has_gradient
    draws = dgm.sample(target, chains=64, warmup=20, draws=50, seed=1, progress=False)
    assert isinstance(draws.kernel, dgm.kernels.EllipticalSlice)
    assert draws.inputs is not None
    # of a standard normal between 1/3 and 2/3
    assert abs(draws.inputs[..., 0].mean().item() - 0.49539) < 0.01
    # the control: where outputs have derivatives, they are used
    assert dgm.condition(Coupled(False), torch.zeros(2), tolerance=0.1).has_gradient


def test_what_passes_with_noise_is_looked_at_again_without():
    model = Function(lambda u: torch.cat([u[..., :1], torch.ones_like(u[..., :1])], -1), 3)
    dgm.condition(model, torch.ones(2), noise=0.1)
    with pytest.raises(ObservationError, match="are the same at every prior draw"):
        dgm.condition(model, torch.ones(2))


@pytest.mark.parametrize("options", [{}, {"tolerance": 0.1}, {"noise": 0.1}], ids=str)
@pytest.mark.parametrize(
    "write", [lambda u: u.mul_(2), lambda u: u.clamp_(-1, 1), nn.ReLU(inplace=True)], ids=["twice", "clamp", "ReLU"]
)
def test_a_model_that_writes_into_its_inputs_is_refused(write, options):
    with pytest.raises(ModelError, match=r"observed writes into its argument.* work on a copy, x = x\.clone\(\)"):
        dgm.condition(Function(lambda u: write(u)[..., :2] + u[..., 2:], 3), torch.ones(2), **options)
    # the control
    dgm.condition(Function(lambda u: write(u.clone())[..., :2] + u[..., 2:], 3), torch.ones(2), **options)


def test_an_operator_that_writes_into_its_argument_is_refused():
    def observe(x):
        x[..., 1] = 2 * x[..., 1]
        return x

    with pytest.raises(ObservationError, match="observe writes into its argument"):
        dgm.condition(Coupled(False), torch.zeros(2), observe=observe)
    dgm.condition(Coupled(False), torch.zeros(2), observe=lambda x: observe(x.clone()))


class Bordered(dgm.GenerativeModel):
    """Four pixels, of which the first is black, or all but black, whatever the input."""

    input_density = dgm.StandardNormal(3)
    output_shape = (4,)  # type: ignore[assignment]

    def __init__(self, black):
        super().__init__()
        self.black = black

    def observed(self, u):
        return torch.cat([self.black * torch.sigmoid(1e-7 * u[..., :1] - 20), torch.sigmoid(u)], -1)


@pytest.mark.parametrize(("black", "words"), [(0.0, "are the same at every prior draw"), (1.0, "that is saturated")])
def test_black_borders_with_noise_say_nothing_and_do_no_harm(black, words):
    data = torch.tensor([0.05, 0.3, 0.6, 0.4])
    with pytest.raises(
        ObservationError, match=rf"1 of 4 observed values of Bordered \(the first is number 0\) .*{words}"
    ):
        dgm.condition(Bordered(black), data)
    border = torch.tensor([True, False, False, False])
    fibre = dgm.condition(Bordered(black), data, noise=0.1)
    without = dgm.condition(Bordered(black), data, observe=dgm.pixels(~border), noise=0.1)
    u = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    # energies differ by a constant: the border's
    assert fibre.marginal is not None
    assert without.marginal is not None
    apart = fibre.marginal.energy(u) - without.marginal.energy(u)
    torch.testing.assert_close(apart, apart[:1].expand(5))


def test_an_energy_that_leaves_torch_is_named_wherever_gradients_are_needed():
    target = dgm.Target(lambda x: torch.as_tensor((x.numpy() ** 2).sum(-1)), 2)
    base = dgm.Gaussian(torch.zeros(2), torch.ones(2))
    short = {"chains": 2, "seed": 0, "progress": False}
    for call in (
        lambda: dgm.sample(target, warmup=2, draws=2, **short),
        lambda: dgm.log_evidence(target, base, **short),
        lambda: dgm.modes(target),
        lambda: dgm.Gaussian.laplace(target),
        lambda: dgm.Gaussian.fit(target),
    ):
        with pytest.raises(ArgumentError, match=r"the energy of a Target has no gradient, as it leaves torch"):
            call()
    # the remedy
    dgm.sample(target, dgm.kernels.RandomWalk(0.5), warmup=2, draws=2, **short)


def test_an_activation_without_a_second_derivative_is_named_with_what_takes_its_place():
    def net(activation):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), activation, nn.Linear(16, 2)).eval()

    y = torch.zeros(2)
    with pytest.raises(ModelError, match=r"torch itself has none of its hardsigmoid: use relu6\(x \+ 3\) / 6") as told:
        dgm.condition(generators.from_module(net(nn.Hardsigmoid()), latent=4), y)
    assert "autograd.Function" not in str(told.value)
    # what is advised is taken, as are activations with kinks
    dgm.condition(generators.from_module(net(nn.Hardsigmoid()), latent=4, smooth=10), y)
    for control in (nn.Hardswish(), nn.Hardtanh(), nn.ReLU6(), nn.Sigmoid()):
        dgm.condition(generators.from_module(net(control), latent=4), y)
