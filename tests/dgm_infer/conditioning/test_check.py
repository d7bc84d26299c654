"""``check()`` names each fault of a network built to have just that one, and passes sound models."""

from importlib import import_module

import pytest
import torch
from scipy.optimize import least_squares
from torch import nn

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, ModelError, ObservationError
from tests.files import reference_folder
from tests.models import Bent, BentPairs, FreeWalk, Network, Stretched, Walk
from tests.oracles import FLOAT, Circle, Ellipse, linear_gaussian_model


class Normalised(Network):
    def prepare(self, u):
        return u / torch.linalg.vector_norm(u, dim=-1, keepdim=True)


class Random(Network):
    def finish(self, x):
        return x * (1 - 0.01 * torch.rand_like(x))


class Widened(Network):
    def finish(self, x):
        return 1.3 * x


class Detached(Network):
    def finish(self, x):
        return 0.5 * x[..., :1].detach() + 0.5 * x


class Halved(torch.autograd.Function):
    """The identity, with half its derivative in reverse mode."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return 0.5 * g

    @staticmethod
    def jvp(ctx, t):  # type: ignore[override]
        return t.clone()

    @staticmethod
    def vmap(info, in_dims, x):
        return Halved.apply(x), in_dims[0]


class OneSided(Network):
    def finish(self, x):
        return Halved.apply(x)


class Doubled(torch.autograd.Function):
    """The identity, with twice its derivative in forward mode."""

    forward, setup_context, vmap = (
        Halved.forward,
        Halved.setup_context,
        staticmethod(lambda info, in_dims, x: (Doubled.apply(x), in_dims[0])),
    )

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g.clone()

    @staticmethod
    def jvp(ctx, t):  # type: ignore[override]
        return 2 * t


class OtherTangent(Network):
    def finish(self, x):
        return Doubled.apply(x)


class Numpy(Network):
    def finish(self, x):
        return torch.from_numpy(x.detach().numpy())


class Coupled(Bent):
    def simulate(self, z, u2):
        return super().simulate(z, u2) + 0.1 * u2.sum(-1, keepdim=True)


class BatchNorm(nn.BatchNorm1d):
    """Statistics of the batch in evaluation mode too."""

    def __init__(self):
        super().__init__(6, track_running_stats=False)


def test_a_derivative_that_forward_mode_alone_has_wrong_is_named():
    # which mode a run takes depends on its size
    report = dgm.check(OtherTangent().eval())
    assert any("reverse- and forward-mode derivatives" in finding.what for finding in report.findings)


MODELS = {
    "hidden_randomness": lambda: Random().eval(),
    "training_mode": lambda: Network(nn.Dropout(0.3)),
    "batch_statistics": lambda: Network(BatchNorm()).eval(),
    "output_range": lambda: Widened().eval(),
    "rank": lambda: Normalised().eval(),
    "derivatives": lambda: OneSided().eval(),
    "structure": lambda: Coupled().eval(),
    "observed": lambda: Network(nn.Linear(7, 6)).eval(),
    "model": lambda: nn.Linear(3, 5),
}


@pytest.mark.parametrize(("code", "make"), MODELS.items(), ids=MODELS.keys())
def test_a_model_with_one_fault_is_found_to_have_that_one(code, make):
    report = dgm.check(make())
    assert report.codes == (code,)
    assert report.ok == bool(report) == (code == "rank")
    (finding,) = report.findings
    assert "\n" not in finding.what
    assert str(report).splitlines()[1].startswith(f"  {finding.severity}, {code}: ")


class Noisy(nn.Module):
    def forward(self, z, noise=None):
        return z + (torch.randn_like(z) if noise is None else noise)


def test_hidden_randomness_of_a_network_becomes_an_input_as_the_message_says():
    (finding,) = dgm.check(generators.from_module(Noisy().eval(), (1, 4, 4))).findings
    assert finding.code == "hidden_randomness"
    assert "inputs={'noise': (1, 4, 4)}" in finding.what
    cured = generators.from_module(Noisy().eval(), (1, 4, 4), inputs={"noise": (1, 4, 4)})
    assert dgm.check(cured).codes == ()


def seeded(x):
    torch.manual_seed(3)
    return x * torch.rand(x.shape[-1], dtype=x.dtype)


def test_random_numbers_that_hardly_ever_show_are_found_by_the_generator():
    class Own(Network):
        def __init__(self, finish):
            super().__init__()
            self.finish = finish

    rare = Own(lambda x: nn.functional.dropout(x, 1e-6, training=True)).eval()
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match=r"draws random numbers: call model\.eval\(\) if they are dropout"):
        dgm.condition(rare, torch.zeros(5))
    assert torch.equal(torch.get_rng_state(), state)
    # the controls
    assert "hidden_randomness" not in dgm.check(Own(seeded).eval()).codes
    assert dgm.check(Own(lambda x: 1 * x).eval()).codes == ()


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(6), nn.Dropout(0.3)], ids=["batch norm", "dropout"])
def test_batch_statistics_of_training_are_a_matter_of_the_mode(layer):
    assert dgm.check(Network(layer)).codes == ("training_mode",)
    assert dgm.check(Network(layer).eval()).codes == ()


@pytest.mark.parametrize("make", [Detached, Numpy])
def test_what_hides_a_dependence_from_derivatives_is_found_by_differences(make):
    report = dgm.check(make().eval())
    assert report.codes == ("derivatives",)


def test_a_function_without_forward_mode_is_named():
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    class Old(Network):
        def finish(self, x):
            return Reverse.apply(x)

    (finding,) = dgm.check(Old().eval()).findings
    assert finding.code == "derivatives"
    assert "setup_context" in finding.what


SOUND = {
    "network": lambda: Network().eval(),
    "ReLU network": lambda: Network(nn.ReLU(), nn.Linear(6, 6)).eval(),
    "batch norm": lambda: Network(nn.BatchNorm1d(6)).eval(),
    "noise": lambda: dgm.WithNoise(Normalised(), 0.1),
    "circle": Circle,
    "ellipse": Ellipse,
    "independent": Bent,
    "dense": lambda: Bent("dense"),
    "logistic": Stretched,
    "units": BentPairs,
    "Markov": Walk,
    "Markov, independent components": FreeWalk,
    "linear": linear_gaussian_model,
    "digits_vae": lambda: generators.load("digits_vae"),
    "mnist_vae": lambda: generators.load("mnist_vae"),
    "mnist_conv_vae": lambda: generators.load("mnist_conv_vae"),
    "digits_gan": lambda: generators.load("digits_gan"),
    "mnist_gan": lambda: generators.load("mnist_gan"),
    "mnist_conv_gan": lambda: generators.load("mnist_conv_gan"),
    "fashion_gan": lambda: generators.load("fashion_gan"),
    "generalised lambda": lambda: generators.GeneralisedLambda(50),
    "g and k": lambda: generators.GAndK(20),
    "hyperbola": generators.Hyperbola,
}


@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND.keys())
def test_sound_models_pass(make):
    report = dgm.check(make())
    assert report.findings == ()
    assert report.ok
    assert report.rank == min(report.n_inputs, report.n_outputs)
    assert "no fault found" in repr(report)


def test_a_simulator_that_explodes_is_checked_on_data():
    model = generators.LotkaVolterra()
    assert dgm.check(model).codes == ()
    report = dgm.check(model, torch.full((100,), 100.0))
    assert report.findings == ()
    assert report.rank == 100


def test_masks_of_their_own_for_every_problem():
    masks = torch.eye(5, dtype=torch.bool)[:2]
    assert dgm.check(Network().eval(), torch.zeros(2, 5), dgm.pixels(masks)).findings == ()
    y = torch.tensor([[0.0] * 5, [0.0, 1.5, 0, 0, 0]])
    assert dgm.check(Network().eval(), y, dgm.pixels(masks)).codes == ("observations_range",)


@pytest.mark.slow
def test_the_published_models_pass():
    pose = generators.HumanPose.from_folder(reference_folder("pose"))
    report = dgm.check(pose)
    # the rank that makes its output noise essential
    assert report.codes == ("rank",)
    assert report.rank == 50
    assert dgm.check(dgm.WithNoise(pose, 0.01)).findings == ()


def test_the_rank_is_that_of_the_observed_part():
    report = dgm.check(Normalised().eval())
    assert (report.n_inputs, report.n_outputs, report.rank) == (3, 5, 2)
    assert "rank 2" in report.findings[0].what
    tall = Normalised(n_outputs=40).eval()
    assert dgm.check(tall).rank == 2
    seen = torch.zeros(5, dtype=torch.bool)
    for n, codes in ((2, ()), (3, ("too_many_observations",))):
        seen[:n] = True
        assert dgm.check(Normalised().eval(), torch.zeros(5), dgm.pixels(seen)).codes == codes


def test_more_observations_than_rank_suggest_noise_that_helps():
    model = Network().eval()
    report = dgm.check(model, torch.zeros(5))
    assert report.codes == ("too_many_observations",)
    assert not report
    words = report.findings[0].what
    sd = float(words.split("sd=")[1].rstrip(")"))
    assert f"noise={sd:.2g})" in words
    # the residual of least squares, with five values and three inputs
    starts = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = Network().eval().double()
    fits = [least_squares(lambda u: net.observed(torch.from_numpy(u)).detach().numpy(), start) for start in starts]
    assert sd == pytest.approx(min(2 * fit.cost / (5 - 3) for fit in fits) ** 0.5, rel=0.1)
    assert dgm.check(dgm.WithNoise(model, sd), torch.zeros(5)).findings == ()


def test_the_noise_that_is_suggested_has_the_size_of_the_data_s():
    rng = torch.Generator().manual_seed(2)
    weight = torch.randn(200, 5, generator=rng, dtype=torch.float64)

    class Mean(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(5)
        output_shape = (200,)

        def observed(self, u):
            return torch.tanh(u @ weight.mT.to(u))

    mean = Mean().observed(torch.randn(5, generator=rng, dtype=torch.float64))
    for noise in (0.113, 0.007):
        data = mean + noise * torch.randn(200, generator=rng, dtype=torch.float64)
        words = dgm.check(Mean(), data).findings[-1].what
        assert float(words.split("sd=")[1].rstrip(")")) == pytest.approx(noise, rel=0.2)


EDGES = {"beyond": 1.5, "on the edge": 1.0, "below": -2.0}


@pytest.mark.parametrize("value", EDGES.values(), ids=EDGES.keys())
def test_observations_at_the_edge_of_the_range(value):
    model, y = Network().eval(), torch.tensor([0.5, value, 0.0, 0.0, 0.0])
    mask = torch.tensor([True, True, False, False, False])
    report = dgm.check(model, y, dgm.pixels(mask))
    assert report.codes == ("observations_range",)
    assert "1 of 2" in report.findings[0].what
    with pytest.raises(ObservationError, match=r"1 of 2 .*output_range \(-1, 1\)") as caught:
        dgm.condition(model, y, observe=dgm.pixels(mask))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    # a hidden value may be anything, noise reaches everything, and a tolerance needs no exact solution
    hidden = mask & (y == 0.5)
    assert dgm.check(model, y, dgm.pixels(hidden)).findings == ()
    assert dgm.check(dgm.WithNoise(model, 0.1), y, dgm.pixels(mask)).findings == ()
    dgm.condition(model, y, observe=dgm.pixels(mask), tolerance=0.1)


def test_means_of_pixels_keep_the_range_and_other_functions_do_not():
    mean, total = torch.tensor([[0.5, 0.5, 0, 0, 0]]), torch.tensor([[1.0, 1.0, 0, 0, 0]])
    model = Network().eval()
    assert dgm.check(model, [1.2], dgm.linear(mean)).codes == ("observations_range",)
    assert dgm.check(model, [1.2], dgm.linear(total)).codes == ()


def test_data_that_do_not_fit_are_named():
    report = dgm.check(Network().eval(), torch.zeros(4))
    assert report.codes == ("observations",)
    assert "(4,)" in report.findings[0].what


def test_discrete_outputs_are_checked_through_their_decoder():
    model = generators.IWAE(3, (4, 4), hidden=[6])
    report = dgm.check(model.eval())
    assert report.ok
    assert report.codes == ()
    assert [finding.code for finding in report.findings] == ["discrete"]
    assert dgm.check(model, torch.ones(2, 4, 4)).codes == ()
    report = dgm.check(model, torch.full((2, 4, 4), 0.5))
    assert report.codes == ("observations_range",)
    assert "binarise" in str(report)
    with pytest.raises(
        dgm.errors.ArgumentError, match=r"noise=0.1\): outputs are discrete, and have no such noise: omit it"
    ):
        dgm.condition(model, torch.ones(2, 4, 4), noise=0.1)
    model.decoder.network.append(nn.Dropout(0.5))
    assert dgm.check(model.train()).codes == ("training_mode",)


def test_several_faults_are_all_said():
    report = dgm.check(Widened(nn.Dropout(0.5)), torch.zeros(5))
    assert set(report.codes) == {"output_range", "training_mode", "too_many_observations"}
    assert len(str(report).splitlines()) == 4


def test_conditioning_refuses_what_is_cheap_to_find():
    with pytest.raises(ModelError, match="batch statistics"):
        dgm.condition(Network(BatchNorm()).eval(), torch.zeros(5))
    with pytest.raises(ModelError, match=r"output_range \(-1, 1\)"):
        dgm.condition(Widened().eval(), torch.zeros(5))


class Spectral(Network):
    """A network that multiplies the spectrum of its outputs by a complex buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("filter", torch.full((3,), 1j), persistent=False)

    def finish(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, x.shape[-1])


def test_complex_buffers_are_refused():
    # a copy in a real type would lose their imaginary part
    words = r"^Spectral: its buffer filter is of torch\.complex64: must be real"
    with pytest.raises(ModelError, match=words):
        dgm.condition(Spectral().eval(), torch.zeros(5))
    with pytest.raises(ModelError, match=words):
        dgm.condition(Network().eval(), torch.zeros(5), observe=Spectral().eval())


def test_nothing_about_the_model_or_the_random_numbers_changes():
    model = Network(nn.BatchNorm1d(6), nn.Dropout(0.3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    dgm.check(model, torch.zeros(5))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_simulator_that_mostly_overflows_is_looked_at_where_it_does_not():
    class Wild(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(2)

        def observed(self, u):
            return torch.where(u.abs().amax(-1, keepdim=True) < 0.3, u, torch.inf)

    assert dgm.check(Wild()).findings == ()


def test_draws_below_one_are_named():
    with pytest.raises(ArgumentError, match="draws=0"):
        dgm.check(Circle(), draws=0)
    assert dgm.check(Circle(), torch.ones(1, dtype=FLOAT), draws=1).ok


def test_noise_of_the_measurement_allows_for_more_values_than_the_rank():
    model = Network().eval()
    blurring = torch.tril(torch.ones(5, 5)).triu(-1)
    assert dgm.check(model, torch.zeros(5), dgm.linear(blurring)).codes == ("too_many_observations",)
    # on or beyond the edge of the model's range, too
    for data in (torch.zeros(5), torch.full((5,), 1.0)):
        report = dgm.check(model, data, dgm.linear(blurring), noise=0.1)
        assert report
        assert report.rank == 5
    with pytest.raises(dgm.errors.ArgumentError, match="noise=0"):
        dgm.check(model, torch.zeros(5), noise=0)


def test_a_jacobian_that_takes_long_is_said_with_what_to_do(monkeypatch):
    flow = generators.load("digits_flow")
    image, mask = flow.generate(1, seed=0).images[0], torch.arange(64).reshape(8, 8) < 8
    module = import_module("dgm_infer.conditioning.check")
    monkeypatch.setattr(module, "SETTINGS", module.ReportSettings(seconds=1e-9))
    (found,) = [found for found in dgm.check(flow, image, dgm.pixels(mask)).findings if found.code == "cost"]
    assert found.severity == "note"
    assert "8 observed values by 64 inputs" in str(found)
    # where a step needs no Jacobian nothing is said
    noisy = dgm.check(flow, image, dgm.pixels(mask), noise=0.05)
    assert not any(found.code == "cost" for found in noisy.findings)
