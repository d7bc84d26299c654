"""Everything a user can get wrong is refused with the right exception: one line that names the value."""

import math

import pytest
import torch
from torch import nn

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, DgmInferError, ModelError, ObservationError, StartError
from generators import LinearGaussian, WithNoise
from tests.models import MASK, Bent, Images, image
from tests.oracles import FLOAT, Circle, Ellipse, GaussianTarget
from tests.quick import cases


def circle():
    return dgm.condition(Circle(), [1.0])


def gaussian():
    return GaussianTarget(torch.ones((), dtype=FLOAT), torch.zeros(2, dtype=FLOAT), torch.eye(2, dtype=FLOAT))


def images(**changes):
    def make(y=None, **arguments):
        return dgm.condition(Images().eval(), image() if y is None else y, **arguments)

    return make(**changes)


def holes(value, *where):
    y = image()
    y[where] = value
    return y


class Network(dgm.GenerativeModel):
    """A generator around any layer that treats training and evaluation differently."""

    def __init__(self, layer):
        super().__init__()
        self.input_density = dgm.StandardNormal(4)
        self.network = nn.Sequential(nn.Linear(4, 3), layer)

    def train_parts(self):
        self.network.train()
        return self

    def observed(self, u):
        return self.network(u.reshape(-1, 4)).reshape(*u.shape[:-1], 3)


class Random(Circle):
    def observed(self, u):
        return super().observed(u) + 0.1 * torch.randn(*u.shape[:-1], 1, dtype=u.dtype)


class Coupled(Bent):
    """Declared independent, but every output sees all the noise."""

    def simulate(self, z, u2):
        return super().simulate(z, u2) + 0.1 * u2.sum(-1, keepdim=True)


class TooFewLocal(Bent):
    def __init__(self):
        super().__init__()
        self.local_density = dgm.StandardNormal(1)


class Tall(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return torch.cat([u, u.square()], -1)


class Shapeless(Circle):
    def observed(self, u):
        return u.square().sum(-1)


class Unflat(Circle):
    output_shape = (2, 2)

    def observed(self, u):
        return u.unsqueeze(-1) * u.unsqueeze(-2)


class Infinite(Circle):
    def observed(self, u):
        return super().observed(u) / 0


class NoObserved(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)
    output_shape = (1,)


class NoShape(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)


class Plain(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)
    output_shape = (1,)
    weight = torch.ones(1, 2)

    def observed(self, u):
        return u @ self.weight.mT


class Twice(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(3)

    def observed(self, u):
        x = u.square().sum(-1, keepdim=True)
        return torch.cat([x, 2 * x], -1)


class NoDensity(dgm.GenerativeModel):
    def observed(self, u):
        return u


class NoGlobal(dgm.DirectedModel):
    local_density = dgm.StandardNormal(1)


def sample(problem=None, kernel=None, **arguments):
    arguments = {"chains": 2, "warmup": 0, "draws": 1, "seed": 0, "progress": False} | arguments
    return dgm.sample(gaussian() if problem is None else problem, kernel, **arguments)


def loaded(**changes):
    draws = sample(circle(), dgm.ConstrainedHMC(step_size=0.1), **changes)
    draws.problem = changes.get("problem", draws.problem)
    return draws


NAN_POSITION = (0, 1)

CASES = {
    # ------------------------------------------------------------------------------------------------- observations
    "mask of another shape": (
        lambda: images(observe=dgm.pixels(MASK.mT)), ObservationError, ["(3, 2)", "(2, 3)"]
    ),
    "mask of another batch": (
        lambda: images(y=image(4), observe=dgm.pixels(MASK.expand(3, 2, 3))),
        ObservationError,
        ["(3, 2, 3)", "(4, 2, 3)"],
    ),
    "mask that is not boolean": (lambda: dgm.pixels(MASK.int()), ObservationError, ["int32", "boolean"]),
    "mask of floats": (lambda: dgm.pixels([[0.0, 1.0]]), ObservationError, ["float32", "boolean"]),
    "mask without an entry": (
        lambda: images(observe=dgm.pixels(torch.zeros(2, 3, dtype=torch.bool))), ObservationError, ["no entry"]
    ),
    "one of the masks without an entry": (
        lambda: images(y=image(2), observe=dgm.pixels(torch.stack([MASK, torch.zeros_like(MASK)]))),
        ObservationError,
        ["no entry"],
    ),
    "masks of unequal counts": (
        lambda: images(y=image(2), observe=dgm.pixels(torch.stack([MASK, torch.ones_like(MASK)]))),
        ObservationError,
        ["3", "6", "equal"],
    ),
    "observed pixel that is NaN": (
        lambda: images(y=holes(math.nan, *NAN_POSITION), observe=dgm.pixels(MASK)), ObservationError, ["nan", "(0, 1)"]
    ),
    "observed pixel that is infinite": (
        lambda: images(y=holes(-math.inf, *NAN_POSITION), observe=dgm.pixels(MASK)),
        ObservationError,
        ["-inf", "(0, 1)"],
    ),
    "NaN without a mask": (lambda: images(y=holes(math.nan, 1, 2)), ObservationError, ["nan", "(1, 2)"]),
    "NaN in one problem of a batch": (
        lambda: images(y=torch.stack([image(), holes(math.nan, *NAN_POSITION)]), observe=dgm.pixels(MASK)),
        ObservationError,
        ["nan", "(0, 1)", "problem (1,)"],
    ),
    "NaN given to a function of the output": (
        lambda: images(y=torch.tensor([math.nan, 1.0, 2.0]), observe=lambda x: x.mean(-2)), ObservationError, ["1"]
    ),
    "data of another shape": (lambda: images(y=torch.zeros(4, 5)), ObservationError, ["(4, 5)", "(2, 3)"]),
    "data of another shape for a function": (
        lambda: images(y=torch.zeros(4), observe=lambda x: x.mean(-2)), ObservationError, ["(4,)", "(3,)"]
    ),
    "an operator that is none": (lambda: images(observe="top half"), ObservationError, ["'top half'", "pixels(mask)"]),
    "a mask that is not wrapped": (lambda: images(observe=MASK), ObservationError, ["pixels(mask)"]),
    "more observed values than inputs": (
        lambda: dgm.condition(Tall(), torch.zeros(4)), ObservationError, ["4 observed", "2 inputs", "WithNoise"]
    ),
    "integer dtype": (lambda: images(dtype=torch.int64), DgmInferError, ["int64"]),
    "tolerance of zero": (lambda: images(tolerance=0.0), ArgumentError, ["tolerance=0"]),
    "negative tolerance": (lambda: images(tolerance=-0.5), ArgumentError, ["-0.5"]),
    "tolerance that is NaN": (lambda: images(tolerance=math.nan), ArgumentError, ["nan"]),
    "an empty batch": (lambda: dgm.condition(Circle(), torch.zeros(0, 1)), ObservationError, ["(0, 1)"]),
    "words as data": (lambda: dgm.condition(Circle(), "abc"), ObservationError, ["observed='abc'"]),
    "device that there is none of": (lambda: images(device="gpu0"), ArgumentError, ["gpu0"]),
    "half precision": (lambda: images(dtype=torch.float16), ArgumentError, ["float16", "float64"]),
    # ------------------------------------------------------------------------------------------------------- models
    "model that defines nothing": (lambda: dgm.condition(NoObserved(), [1.0]), ModelError, ["NoObserved", "observed"]),
    "model that defines nothing, not even a shape": (
        lambda: dgm.condition(dgm.WithNoise(NoShape(), 0.1), [1.0]), ModelError, ["NoShape", "observed"]
    ),
    "noise on something that is not a model": (lambda: WithNoise("x", 0.1), ModelError, ["str"]),
    "model with a plain 32-bit tensor": (lambda: dgm.condition(Plain(), [1.0]), ModelError, ["Plain", "buffers"]),
    "something that is not a model": (lambda: dgm.condition(nn.Linear(2, 1), [1.0]), ModelError, ["Linear"]),
    "model without a density": (lambda: dgm.condition(NoDensity(), [1.0]), ModelError, ["NoDensity", "input_density"]),
    "directed model without a density": (
        lambda: dgm.condition(NoGlobal(), [1.0]), ModelError, ["NoGlobal", "global_density"]
    ),
    "dropout in training mode": (
        lambda: dgm.condition(Network(nn.Dropout(0.5)), torch.zeros(3)), ModelError, ["training mode", "eval()"]
    ),
    "batch norm in training mode": (
        lambda: dgm.condition(Network(nn.BatchNorm1d(3)), torch.zeros(3)), ModelError, ["training mode", "eval()"]
    ),
    "dropout in training mode, in a part": (
        lambda: dgm.condition(Network(nn.Dropout(0.5)).eval().train_parts(), torch.zeros(3)), ModelError,
        ["training mode", "eval()"]
    ),
    "a complex operator": (
        lambda: dgm.condition(Network(nn.Identity()).eval(), torch.zeros(3), observe=torch.fft.fft), ObservationError,
        ["observe gives torch.complex128", "view_as_real"]
    ),
    "hidden randomness": (lambda: dgm.condition(Random().eval(), [1.0]), ModelError, ["Random", "randomness"]),
    "hidden randomness in training mode": (lambda: dgm.condition(Random(), [1.0]), ModelError, ["randomness"]),
    "outputs that share noise declared independent": (
        lambda: dgm.condition(Coupled(), torch.zeros(5)), ModelError, ["Coupled", "'independent'", "'dense'"]
    ),
    "too few noise inputs declared independent": (
        lambda: dgm.condition(TooFewLocal(), torch.zeros(5)), ModelError, ["TooFewLocal", "1 local", "5 outputs"]
    ),
    "unknown structure": (
        lambda: dgm.condition(Bent("sparse"), torch.zeros(5)), ModelError, ["'sparse'", "independent"]
    ),
    "output without its last axis": (lambda: dgm.condition(Shapeless(), [1.0]), ModelError, ["Shapeless", "(2,)"]),
    "output that is not flat": (
        lambda: dgm.condition(Unflat(), torch.zeros(2, 2)), ModelError, ["Unflat", "(2, 2, 2)"]
    ),
    "noise of no size": (lambda: WithNoise(Circle(), sd=0.0), ArgumentError, ["sd=0"]),
    "noise of another shape": (lambda: WithNoise(Circle(), sd=torch.ones(3)), ArgumentError, ["(3,)", "(1,)"]),
    "linear model with a bias of another shape": (
        lambda: LinearGaussian(torch.eye(2), torch.zeros(3)), ArgumentError, ["bias"]
    ),
    "density of negative dimension": (lambda: dgm.Logistic(-2), ArgumentError, ["dim=-2"]),
    "target without dimensions": (lambda: dgm.Target(lambda x: x, 0), ArgumentError, ["dim=0"]),
    "energy of another shape": (
        lambda: sample(dgm.Target(lambda x: x.square(), 2), dgm.HMC(step_size=0.1)), ArgumentError, ["(32, 2)", "(32,)"]
    ),
    "density without a finite value": (
        lambda: sample(dgm.Target(lambda x: x.sum(-1) * math.nan, 2)), StartError, ["2 of 2", "initial"]
    ),
    "as many observed values as inputs": (
        lambda: sample(dgm.condition(Tall(), torch.ones(2), observe=lambda x: x[..., 2:])),
        ArgumentError,
        ["2 observed", "2 inputs", "isolated"],
    ),
    "outputs that are functions of each other": (
        lambda: sample(dgm.condition(Twice(), [2.0, 4.0])), StartError, ["rank-deficient", "WithNoise"]
    ),
    # ------------------------------------------------------------------------------------------------------ kernels
    "HMC on a fibre": (lambda: sample(circle(), dgm.HMC()), ArgumentError, ["Fibre", "ConstrainedHMC"]),
    "constrained HMC on a target": (
        lambda: sample(kernel=dgm.ConstrainedHMC()), ArgumentError, ["GaussianTarget", "HMC"]
    ),
    "something that is not a problem": (lambda: sample([1.0, 2.0]), ArgumentError, ["list", "condition()"]),
    "unknown solver": (
        lambda: dgm.ConstrainedHMC(solver="bisection"), ArgumentError, ["'bisection'", "quasi_newton", "newton"]
    ),
    "negative step size": (lambda: dgm.HMC(step_size=-0.1), ArgumentError, ["-0.1", "positive"]),
    "step size of zero": (lambda: dgm.ConstrainedHMC(step_size=0.0), ArgumentError, ["step_size=0)"]),
    "step size that is NaN": (lambda: dgm.HMC(step_size=math.nan), ArgumentError, ["nan"]),
    "infinite step size": (lambda: dgm.HMC(step_size=math.inf), ArgumentError, ["inf"]),
    "one negative step size of several": (
        lambda: dgm.HMC(step_size=torch.tensor([0.1, -0.2])), ArgumentError, ["-0.2"]
    ),
    "no steps": (lambda: dgm.HMC(n_steps=0), ArgumentError, ["n_steps=0"]),
    "reversed range of steps": (lambda: dgm.HMC(n_steps=(5, 2)), ArgumentError, ["(5, 2)"]),
    "half a step": (lambda: dgm.HMC(n_steps=2.5), ArgumentError, ["n_steps=2.5"]),
    "step sizes for another number of problems": (
        lambda: sample(dgm.condition(Ellipse(), [[1.0], [2.0]]), dgm.ConstrainedHMC(step_size=torch.ones(3))),
        ArgumentError,
        ["step_size", "(3,)", "(2,)"],
    ),
    "trajectory lengths for another number of problems": (
        lambda: sample(dgm.condition(Ellipse(), [[1.0], [2.0]]), dgm.ConstrainedHMC(trajectory_length=torch.ones(3))),
        ArgumentError,
        ["trajectory_length", "(3,)", "(2,)"],
    ),
    "a number of steps and a trajectory length": (
        lambda: dgm.ConstrainedHMC(n_steps=3, trajectory_length=1.0), ArgumentError, ["n_steps=3", "trajectory_length"]
    ),
    "trajectories of no length": (lambda: dgm.HMC(trajectory_length=0.0), ArgumentError, ["trajectory_length=0"]),
    "trajectories without end": (lambda: dgm.HMC(trajectory_length=math.inf), ArgumentError, ["inf"]),
    "one negative trajectory length of several": (
        lambda: dgm.ConstrainedHMC(trajectory_length=torch.tensor([1.0, -2.0])), ArgumentError, ["-2"]
    ),
    "a trajectory length in words": (lambda: dgm.HMC(trajectory_length="long"), ArgumentError, ["'long'"]),
    "half a sub-step": (lambda: dgm.ConstrainedHMC(n_geodesic=0.5), ArgumentError, ["n_geodesic=0.5"]),
    "a kernel that is a class": (lambda: sample(kernel=dgm.HMC), ArgumentError, ["HMC()"]),
    "no geodesic steps": (lambda: dgm.ConstrainedHMC(n_geodesic=0), ArgumentError, ["n_geodesic=0"]),
    "solver tolerance of zero": (lambda: dgm.ConstrainedHMC(tolerance=0.0), ArgumentError, ["tolerance=0.0"]),
    "no solver iterations": (lambda: dgm.ConstrainedHMC(max_iterations=0), ArgumentError, ["max_iterations=0"]),
    "step to be adapted, given to step()": (
        lambda: dgm.HMC().step(gaussian(), dgm.HMC().init(gaussian(), torch.zeros(1, 2)), torch.Generator()),
        ArgumentError,
        ["step_size=None", "sample()"],
    ),
    # ------------------------------------------------------------------------------------------------------- sample
    "no chains": (lambda: sample(chains=0), ArgumentError, ["chains=0"]),
    "half a chain": (lambda: sample(kernel=dgm.HMC(step_size=0.1), chains=2.5), ArgumentError, ["chains=2.5"]),
    "no draws": (lambda: sample(draws=0), ArgumentError, ["draws=0"]),
    "negative warm-up": (lambda: sample(warmup=-1), ArgumentError, ["warmup=-1"]),
    "thinning to nothing": (lambda: sample(thin=0), ArgumentError, ["thin=0"]),
    "something else to keep": (lambda: sample(keep="everything"), ArgumentError, ["'everything'", "'latents'"]),
    "acceptance of one": (lambda: sample(target_acceptance=1.0), ArgumentError, ["target_acceptance=1.0"]),
    "starts of another shape": (
        lambda: sample(initial=torch.zeros(3, 2)), ArgumentError, ["(3, 2)", "(2, 2)"]
    ),
    "starts off the fibre": (
        lambda: sample(circle(), initial=torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=FLOAT)),
        ArgumentError,
        ["initial", "1 of 2 points"],
    ),
    "starts that are NaN": (
        lambda: sample(circle(), initial=torch.full((2, 2), math.nan, dtype=FLOAT)), ArgumentError, ["initial"]
    ),
    "an observation that the model cannot produce": (
        # the best residual is that of u = 0
        lambda: sample(dgm.condition(Circle(), [-3.0])), StartError, ["residual", "3", "WithNoise"]
    ),
    "one problem that the model cannot produce": (
        lambda: sample(dgm.condition(Ellipse(), [[2.0], [-3.0]])), StartError, ["problem 1", "residual", "3"]
    ),
    "a model that gives no finite output": (lambda: sample(dgm.condition(Infinite(), [1.0])), StartError, ["inf"]),
    # -------------------------------------------------------------------------------------------------------- draws
    "generating nothing": (lambda: loaded().generate(0), ArgumentError, ["n=0"]),
    "generating without inputs": (lambda: loaded(keep="latents").generate(), ArgumentError, ["keep='inputs'"]),
    "generating from a bare target": (
        lambda: sample(kernel=dgm.HMC(step_size=0.1)).generate(), ArgumentError, ["GaussianTarget"]
    ),
    "saving where there is no folder": (
        lambda: loaded().save("no/such/folder/draws.nc"), ArgumentError, ["no/such/folder"]
    ),
}  # fmt: skip


# a search that finds nothing takes its time, and one is quick enough
LONG = {"one problem that the model cannot produce"}


@pytest.mark.parametrize(("wrong", "kind", "words"), cases(CASES, quick=CASES.keys() - LONG))
def test_what_is_wrong_is_said_in_one_line(wrong, kind, words):
    with pytest.raises(kind) as caught:
        wrong()
    message = str(caught.value)
    assert isinstance(caught.value, DgmInferError)
    assert "\n" not in message
    assert len(message) < 400
    for word in words:
        assert word in message


def test_the_same_calls_without_the_mistake_are_accepted():
    """The controls: nothing above is refused for another reason than the one it names."""
    images(observe=dgm.pixels(MASK))
    images(y=image(2), observe=dgm.pixels(torch.stack([MASK, ~MASK])))
    images(y=holes(math.nan, 0, 2), observe=dgm.pixels(MASK))
    images(y=torch.zeros(3), observe=lambda x: x.mean(-2))
    images(tolerance=0.5)
    dgm.condition(Tall(), torch.zeros(2), observe=lambda x: x[..., 2:])
    for layer in (nn.Dropout(0.5), nn.BatchNorm1d(3)):
        dgm.condition(Network(layer).eval(), torch.zeros(3))
    dgm.condition(Circle(), [1.0])
    dgm.condition(Bent(), torch.zeros(5))

    class Declared(Coupled):
        structure = "dense"

    coupled = Declared("dense")
    dgm.condition(coupled, torch.zeros(5))
    for kernel in (dgm.HMC(trajectory_length=1.0), dgm.ConstrainedHMC(trajectory_length=torch.ones(2))):
        kernel.replace(trajectory_length=None, n_steps=3)
    several = dgm.ConstrainedHMC(step_size=torch.full((2,), 0.1), trajectory_length=torch.ones(2))
    sample(dgm.condition(Ellipse(), [[1.0], [2.0]]), several)
    sample()
    sample(circle(), initial=torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=FLOAT))
    assert loaded().generate(1).shape == (2, 1, 1)


def test_exceptions_are_of_the_package_and_of_the_kind_python_expects():
    for kind in (ArgumentError, ObservationError):
        assert issubclass(kind, DgmInferError)
        assert issubclass(kind, ValueError)
    for kind in (ModelError, StartError, dgm.errors.CheckpointError, dgm.errors.ConfigError):
        assert issubclass(kind, DgmInferError)


def test_a_warning_points_at_the_line_that_called_the_package():
    here = __file__
    with pytest.warns(UserWarning, match="units") as caught:
        dgm.condition(generators.LinearGaussian(torch.eye(3), torch.zeros(3), 1.0), torch.full((3,), 1e4))
    assert [warning.filename for warning in caught] == [here]
    with pytest.warns(dgm.diagnosis.DiagnosisWarning) as caught:
        dgm.log_evidence(gaussian(), dgm.Gaussian(torch.full((2,), 40.0), 0.1), dgm.AIS(temperatures=2), chains=4)
    assert {warning.filename for warning in caught} == {here}
