"""``check()`` says in words what a pretrained network trips on: kinks, weights, bad conditioning, what vmap refuses."""

import inspect
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional

import dgm_infer as dgm
import generators
from dgm_infer.conditioning import derivatives as kinks
from tests.models import Network
from tests.oracles import FLOAT


def mlp(activation, width=64):
    torch.manual_seed(0)
    layers = nn.Linear(10, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, 20), nn.Tanh()
    return nn.Sequential(*layers).eval()


class Absolute(nn.Module):
    def forward(self, x):
        return x.abs()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU, Absolute, lambda: nn.Hardtanh(-0.3, 0.3)])
def test_kinks_are_found_with_what_they_cost_and_cure(activation):
    report = dgm.check(generators.from_module(mlp(activation), 10))
    assert report.codes == ("kinks",)
    assert report.ok
    (finding,) = report.findings
    named = type(activation()).__name__
    assert (f"2 {named}" if named != "Absolute" else "abs") in finding.what
    assert "smooth=10" in finding.what
    assert "% of these can be accepted" in finding.what


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Softplus, nn.Tanh, nn.ELU])
def test_control_smooth_activations_have_none(activation):
    assert dgm.check(generators.from_module(mlp(activation), 10)).findings == ()


class Largest(nn.Module):
    """Outputs of which one of two branches is the larger."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 8), nn.Linear(3, 8)])
        self.last = nn.Linear(8, 2)

    def forward(self, z):
        a, b = (layer(z) for layer in self.layers)
        return self.last(torch.maximum(a.tanh(), b.tanh()))


def test_the_operation_its_layer_and_its_line_are_named():
    (finding,) = dgm.check(generators.from_module(Largest(), 3)).findings
    line = Largest.forward.__code__.co_firstlineno + 2
    assert f"(maximum in Largest, line {line} of test_kinks.py)" in finding.what


JUMPS = {
    "a largest value": lambda u: u.abs().amax(-1, keepdim=True),
    "a branch": lambda u: torch.where(u[..., :1] > 0.3, 1.0, 2.0) * u.square().sum(-1, keepdim=True),
    "a bend": lambda u: torch.where(u[..., :1] > 0, u.sum(-1, keepdim=True), u[..., 1:] - 3 * u[..., :1]),
}
SMOOTH = {
    "a sum": lambda u: u.square().sum(-1, keepdim=True),
    "a steep wall": lambda u: torch.tanh(1000 * u[..., :1]) + u[..., 1:],
}


class Written(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)
    output_shape = (1,)

    def __init__(self, code):
        super().__init__()
        self.observed = code


@pytest.mark.parametrize("code", JUMPS.values(), ids=JUMPS)
def test_jumps_of_the_jacobian_are_named(code):
    (finding,) = dgm.check(Written(code)).findings
    assert finding.code == "kinks"
    assert "the Jacobian jumps, by" in finding.what
    assert re.search(r"points \((abs|where), line \d+ of test_kinks.py", finding.what)


@pytest.mark.parametrize("code", SMOOTH.values(), ids=SMOOTH)
def test_control_smooth_code_has_no_jumps(code):
    assert dgm.check(Written(code)).findings == ()


def test_smoothing_removes_them():
    smooth = generators.from_module(mlp(nn.ReLU), 10, smooth=10)
    assert dgm.check(smooth).findings == ()


class Functional(nn.Module):
    """A network of ReLU modules with another function between its layers."""

    def __init__(self, remaining):
        super().__init__()
        net = mlp(nn.ReLU)
        self.first, self.remaining, self.last = net[:2], remaining, net[2:]

    def forward(self, z):
        return self.last(self.remaining(self.first(z)))


@pytest.mark.parametrize("noise", [None, 1e-3])
@pytest.mark.parametrize(
    ("remaining", "words"),
    [
        (lambda x: functional.leaky_relu(x - 0.3, 0.01), "by modules, such as nn.LeakyReLU, which smooth= finds"),
        (nn.Softshrink(0.3), "smooth= does not replace these: use smooth modules"),
    ],
    ids=["functional", "another module"],
)
def test_a_smoothed_model_that_still_has_kinks_is_not_told_to_smooth_again(remaining, words, noise):
    net = Functional(remaining).eval()
    smooth = generators.from_module(net, 10, smooth=10)
    assert isinstance(smooth, generators.NetworkGenerator)
    assert "2 activation modules replaced" in str(smooth.smoothing)
    report = dgm.check(smooth if noise is None else dgm.WithNoise(smooth, noise))
    (finding,) = (finding for finding in report.findings if finding.code == "kinks")
    assert words in finding.what
    assert "smooth=10" not in finding.what


@pytest.mark.slow
def test_kinks_under_noise_that_is_integrated_out_are_a_note():
    model = generators.from_module(mlp(nn.ReLU).eval(), 10)
    data = model.generate(n=1, seed=1).images[0]
    exact = dgm.check(model, data[:4], dgm.linear(torch.eye(len(data))[:4]))
    assert exact.codes == ("kinks",)
    report = dgm.check(model, data, noise=0.1)
    assert report.codes == ()
    (finding,) = report.findings
    assert finding.what.startswith("nothing to do: the default kernel here, LiftedHMC, integrates the noise out")
    # narrow noise that leaves most inputs free: the default meets them
    few = dgm.check(model, data[:4], dgm.linear(torch.eye(len(data))[:4]), noise=1e-4)
    assert few.codes == ("kinks",)
    (finding,) = (finding for finding in few.findings if finding.code == "kinks")
    assert finding.what.startswith("under the default kernel here, ConstrainedHMC, kinks (")


def test_the_acceptance_that_kinks_allow_is_that_of_trajectories_with_small_steps():
    # the error of the energy over a trajectory of fine steps is what the line misses, up to the curve of the fibre
    model = generators.from_module(mlp(nn.ReLU, 256), 10)
    with torch.no_grad():
        y = model(torch.randn(10, generator=torch.Generator().manual_seed(1)))[:4]
    mask = torch.arange(20) < 4
    fibre = dgm.condition(model, torch.cat([y, torch.zeros(16)]), observe=dgm.pixels(mask))
    found = kinks.find_kinks(
        fibre.observed, torch.randn(4, 10, generator=torch.Generator().manual_seed(2), dtype=FLOAT), 4
    )
    assert found is not None
    rates = []
    for step_size in (0.03, 0.0075):
        kernel = dgm.ConstrainedHMC(step_size=step_size, trajectory_length=kinks.SETTINGS.duration, n_geodesic=1)
        draws = dgm.sample(fibre, kernel, chains=32, warmup=0, draws=4, seed=0, progress=False)
        rates.append(draws.stats["acceptance_rate"].mean().item())
    assert abs(rates[1] - rates[0]) < 0.15
    assert abs(rates[1] - found.acceptance) < 0.3
    assert rates[1] < 0.9


def test_badly_conditioned_observations_are_noted():
    class Squeezed(Network):
        def finish(self, x):
            return x * torch.tensor([1, 1, 1e-4, 1, 1], dtype=x.dtype)

    seen = torch.tensor([True, False, True, False, False])
    report = dgm.check(Squeezed().eval(), torch.zeros(5), dgm.pixels(seen))
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("conditioning", "note")
    assert "hardly vary" in finding.what
    assert dgm.check(Network().eval(), torch.zeros(5), dgm.pixels(seen)).findings == ()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.ones(3, 5)

    def forward(self, z):
        return z @ self.weight


class Cast(nn.Linear):
    def forward(self, input):
        return super().forward(input.float())


def hidden():
    net = nn.Linear(3, 5)
    return lambda z: net(z)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Plain, "Plain.weight as parameters or buffers"),
        (lambda: Cast(3, 5), "float"),
        (hidden, "pass the module itself"),
    ],
    ids=["attribute", "cast", "function"],
)
def test_weights_of_another_type_are_named(make, words):
    (finding,) = dgm.check(generators.from_module(make(), 3)).findings
    assert finding.code == "observed"
    assert "weights of another type" in finding.what
    assert words in finding.what


def test_batch_statistics_of_a_network_in_training_mode_are_named():
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh()).train()
    (finding,) = dgm.check(generators.from_module(net, 3)).findings
    assert finding.code == "training_mode"
    assert "eval()" in finding.what


class Old(torch.autograd.Function):
    """Without ``setup_context``."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g


def test_custom_functions_that_torch_func_refuses_are_named():
    class Custom(Network):
        def finish(self, x):
            return Old.apply(x)

    (finding,) = dgm.check(Custom().eval()).findings
    assert finding.code == "derivatives"
    assert "setup_context" in finding.what.split("): ")[-1]


def test_operations_in_place_that_vmap_refuses_are_named():
    words = "vmap: inplace arithmetic(self, *extra_args) is not possible because there exists a Tensor `other`"

    class InPlace(Network):
        def finish(self, x):
            if torch._C._functorch.is_functorch_wrapped_tensor(x):  # type: ignore[attr-defined]
                raise RuntimeError(words)
            return x

    (finding,) = dgm.check(InPlace().eval()).findings
    assert finding.code == "derivatives"
    assert "in place" in finding.what


def test_operations_that_write_into_a_given_tensor_are_named():
    class Written(Network):
        def finish(self, x):
            return torch.mul(x, 0.5, out=torch.empty_like(x))

    (finding,) = dgm.check(Written().eval()).findings
    assert finding.code == "derivatives"
    assert "out=" in finding.what.split("): ")[-1]


WEIGHTS = [
    torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=FLOAT) / 2 for shape in ((6, 16), (16, 3))
]
PICTURE = torch.linspace(0, 3, 16, dtype=FLOAT).sin() * torch.linspace(0, 2, 16, dtype=FLOAT).cos().unsqueeze(-1)


def mlp_of(activation):
    return lambda u: activation(u @ WEIGHTS[0]) @ WEIGHTS[1]


def normalised(h):
    """PixelNorm."""
    return (h / (h.square().mean(-1, keepdim=True) + 1e-8).sqrt()).tanh()


def looked_up(u):
    """Two pixels of a picture that is rotated, scaled and moved."""
    v = u.reshape(-1, 6)
    turn = torch.eye(2, 3, dtype=u.dtype) + 0.2 * v.reshape(-1, 2, 3)
    places = functional.affine_grid(turn.mT.reshape(-1, 2, 3), [len(v), 1, 1, 2], align_corners=False)
    pixels = functional.grid_sample(PICTURE.expand(len(v), 1, 16, 16), places, align_corners=False)
    return pixels.reshape(*u.shape[:-1], 2) + 0.05 * u[..., :2]


SMOOTH = mlp_of(torch.tanh)
# kinked, the observed values, and the same with smooth functions
PAIRS = {
    "the maximum of uniforms": (
        lambda u: torch.special.ndtr(u).amax(-1, keepdim=True),
        lambda u: (20 * torch.special.ndtr(u)).logsumexp(-1, keepdim=True) / 20,
        (0.75,),
    ),
    "clamps": (mlp_of(lambda h: h.clamp(-1, 1)), SMOOTH, (0.1, 0.2, -0.1)),
    "PixelNorm": (mlp_of(normalised), SMOOTH, (0.1, 0.2, -0.1)),
    "grid_sample": (looked_up, lambda u: (u[..., :2] + u[..., 2:4]).sin(), (0.2, 0.1)),
}


@cache
def updates(code, data):
    """Newton's and its kin, and their Jacobians, a chain, over 20 transitions after warm-up."""

    class Model(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(6)
        output_shape = (len(data),)

        def observed(self, u):
            return code(u)

    fibre = dgm.condition(Model(), torch.tensor(data, dtype=FLOAT))
    draws = dgm.sample(fibre, chains=8, warmup=100, draws=20, seed=0, progress=False)
    kernel: Any = draws.kernel
    steps = draws.stats["n_steps"].double().mean() * kernel.sub_steps(fibre)
    return (draws.stats["solver_iterations"].double().mean() + steps).item()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kinked", "smooth", "data"), PAIRS.values(), ids=PAIRS)
def test_models_with_kinks_take_no_more_evaluations_than_smooth_ones(kinked, smooth, data):
    assert updates(kinked, data) < 1.5 * updates(smooth, data) + 50


def test_lines_of_operations_are_those_of_the_model_or_none():
    """A simulator that was traced has no lines of its own: that of the call was given in their place."""
    traced = dgm.from_simulator(lambda z: (z + torch.randn(3)).sort().values[::2], Normal(0.0, 1.0))
    fibre = dgm.condition(traced, torch.tensor([0.2, 1.9]))
    u = fibre.start(1, torch.Generator().manual_seed(0))
    assert "line" not in kinks.kinked_operations(fibre.constraint, u)

    class Sorts(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(3)

        def observed(self, u):
            return u.sort(-1).values[..., ::2]

    fibre = dgm.condition(Sorts(), torch.tensor([0.2, 1.9]))
    found = kinks.kinked_operations(fibre.constraint, fibre.start(1, torch.Generator().manual_seed(0)))
    line = inspect.getsourcelines(Sorts.observed)[1] + 1
    assert f"sort, line {line} of test_kinks.py" in found
