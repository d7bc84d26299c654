"""Checks of arguments: what each accepts and returns, and what it refuses in one line."""

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

import dgm_infer as dgm
from dgm_infer import arguments
from dgm_infer.arguments.values import of_problems
from dgm_infer.errors import ArgumentError, ModelError, reported_as
from dgm_infer.evidence.start import EvidenceProblem
from tests.models import Function
from tests.oracles import Circle

ACCEPTED = {
    "an integer": (lambda: arguments.whole_number("f", "n", np.int64(3)), 3),
    "the largest integer": (lambda: arguments.whole_number("f", "n", 3, 0, 3), 3),
    "a number": (lambda: arguments.positive("f", "x", np.float32(0.5)), 0.5),
    "a number of one entry": (lambda: arguments.positive("f", "x", torch.tensor(2.0)), 2.0),
    "a fraction": (lambda: arguments.fraction("f", "x", 0.5), 0.5),
    "an edge": (lambda: arguments.within("f", "x", 0, 0, 1, open_end=True), 0.0),
    "the other edge": (lambda: arguments.within("f", "x", 1, 0, 1), 1.0),
    "an interval": (lambda: arguments.interval("f", "x", [0, math.inf]), (0.0, math.inf)),
    "a range": (lambda: arguments.counts("f", "n", (2, 3)), (2, 3)),
    "a flag": (lambda: arguments.flag("f", "x", False), False),
    "a choice": (lambda: arguments.choice("f", "x", None, ("a", None)), None),
    "a shape": (lambda: arguments.sizes("f", "x", torch.Size([2, 3])), (2, 3)),
    "no widths": (lambda: arguments.sizes("f", "x", [], empty=True), ()),
    "indices": (lambda: arguments.indices("f", "i", [0, 2], 3).tolist(), [0, 2]),
    "a mask": (lambda: arguments.boolean_mask("f", "m", [True, False]).tolist(), [True, False]),
    "numbers in a list": (lambda: arguments.numbers("f", "x", [1, 2]).dtype, torch.float32),
    "digits that are kept": (lambda: arguments.numbers("f", "x", 0.1, torch.float64).item(), 0.1),
    "a dtype": (lambda: arguments.floating_type("f", "dtype", torch.float32), torch.float32),
    "a device": (lambda: arguments.available_device("f", "device", "cpu"), torch.device("cpu")),
    "a path": (lambda: arguments.file_path("f", "path", "a/b"), Path("a/b")),
    "a function": (lambda: arguments.function("f", "g", len, "len"), len),
    "an object": (lambda: arguments.instance("f", "x", 1.5, float, "1.0"), 1.5),
    "what memory holds": (lambda: arguments.allocatable("f", "n", 10, 10, "take fewer"), None),
    "a seed": (lambda: arguments.random_seed("f", 0), 0),
}

REFUSED = {
    "a bool": (lambda: arguments.whole_number("f", "n", True), "f(n=True): must be an integer >= 1"),
    "half a thing": (lambda: arguments.whole_number("f", "n", 2.5), "f(n=2.5): must be an integer >= 1"),
    "too many": (lambda: arguments.whole_number("f", "n", 4, 0, 3), "f(n=4): must be an integer from 0 to 3"),
    "nothing": (lambda: arguments.positive("f", "x", 0), "f(x=0): must be a positive number"),
    "no end": (lambda: arguments.positive("f", "x", math.inf), "f(x=inf): must be a positive number"),
    "words for a number": (lambda: arguments.positive("f", "x", "1"), "f(x='1'): must be a positive number"),
    "numbers for one": (lambda: arguments.positive("f", "x", torch.ones(2)), "f(x=tensor([1., 1.])): must be a pos"),
    "all of it": (lambda: arguments.fraction("f", "x", 1.0), "f(x=1.0): must lie between 0 and 1"),
    "beyond": (lambda: arguments.within("f", "x", 2, 0, 1), "f(x=2): must be in [0, 1]"),
    "the open edge": (lambda: arguments.within("f", "x", 1, 0, 1, open_end=True), "f(x=1): must be in [0, 1)"),
    "below": (lambda: arguments.within("f", "x", -1, 0), "f(x=-1): must be a number >= 0"),
    "NaN": (lambda: arguments.within("f", "x", math.nan, 0), "f(x=nan): must be a number >= 0"),
    "an interval upside down": (lambda: arguments.interval("f", "x", (1, 0)), "f(x=(1, 0)): must be two numbers"),
    "three edges": (lambda: arguments.interval("f", "x", (0, 1, 2)), "f(x=(0, 1, 2)): must be two numbers"),
    "an interval in words": (lambda: arguments.interval("f", "x", "ab"), "f(x='ab'): must be two numbers"),
    "an empty range": (lambda: arguments.counts("f", "n", (3, 2)), "f(n=(3, 2)): low"),
    "1 for True": (lambda: arguments.flag("f", "x", 1), "f(x=1): must be True or False"),
    "another choice": (lambda: arguments.choice("f", "x", "b", ("a", "c")), "f(x='b'): must be 'a' or 'c'"),
    "True for 1": (lambda: arguments.choice("f", "x", True, (1, 2)), "f(x=True): must be 1 or 2"),
    "a width of 0": (lambda: arguments.sizes("f", "x", (3, 0)), "f(x=(3, 0)): must be a sequence of integers >= 1"),
    "no shape": (lambda: arguments.sizes("f", "x", ()), "f(x=()): must be a sequence"),
    "a number for a shape": (lambda: arguments.sizes("f", "x", 8), "f(x=8): must be a sequence"),
    "words for a shape": (lambda: arguments.sizes("f", "x", "88"), "f(x='88'): must be a sequence"),
    "an index beyond": (lambda: arguments.indices("f", "i", [3], 3), "f(i=[3]): must be a tensor [N] of integers from"),
    "an index by itself": (lambda: arguments.indices("f", "i", 1, 3), "f(i=1): must be a tensor [N]"),
    "a mask of numbers": (lambda: arguments.boolean_mask("f", "m", [0, 1]), "f(m of torch.int64): must be a boolean"),
    "words for a mask": (lambda: arguments.boolean_mask("f", "m", "x"), "f(m='x'): must be a boolean"),
    "no numbers": (lambda: arguments.numbers("f", "x", object()), "f(x=a object): must be a tensor"),
    "an image": (lambda: arguments.numbers("f", "x", Image.new("L", (2, 2))), "f(x=a Image): must be a tensor, or "),
    "a list of images": (
        lambda: arguments.numbers("f", "x", [Image.new("RGB", (2, 2))]),
        "numbers to make one of: dgm.image(picture, like=model) reads one",
    ),
    "complex numbers": (lambda: arguments.numbers("f", "x", 1j), "f(x of torch.complex64): must be real"),
    "one that is infinite": (lambda: arguments.finite("f", "x", [1, math.inf]), "f(x=inf): not finite"),
    "one that is negative": (lambda: arguments.positive_numbers("f", "x", [1, -2]), "f(x=-2): must be positive"),
    "a dtype of integers": (lambda: arguments.floating_type("f", "dtype", torch.int32), "f(dtype=torch.int32): must"),
    "a device by number": (lambda: arguments.available_device("f", "device", 1.5), "f(device=1.5): must be a device"),
    "no device": (lambda: arguments.available_device("f", "device", "meta"), "f(device='meta'): must be a device"),
    "a device of none": (
        lambda: arguments.available_device("f", "device", "cuda:99"),
        "f(device='cuda:99'): must be an av",
    ),
    "no path": (lambda: arguments.file_path("f", "path", ""), "f(path=''): must be a path"),
    "a number for a path": (lambda: arguments.file_path("f", "path", 5), "f(path=5): must be a path"),
    "no function": (lambda: arguments.function("f", "g", 5, "len"), "f(g=5): must be a function, such as len"),
    "another object": (lambda: arguments.instance("f", "x", 1, str, "'a'"), "f(x=1): must be a str, such as 'a'"),
    "more than memory": (lambda: arguments.allocatable("f", "n", 3, 2**70, "take fewer"), "f(n=3): needs 8.8e+12 GiB"),
    "far more": (lambda: arguments.allocatable("f", "n", 3, 10**500, "take fewer"), "f(n=3): needs 1e+300 GiB"),
    "a long value": (lambda: arguments.flag("f", "x", "word " * 50), "...): must be True or False"),
    "a value of many lines": (lambda: arguments.flag("f", "x", torch.zeros(3, 3)), "f(x=tensor of shape (3, 3)): must"),
    "a seed below 0": (lambda: arguments.random_seed("f", -1), "f(seed=-1): must be an integer from 0 to"),
}


@pytest.mark.parametrize(("check", "value"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_is_right_is_returned(check, value):
    assert check() == value


@pytest.mark.parametrize(("check", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_is_refused_in_one_line(check, words):
    with pytest.raises(ArgumentError) as caught:
        check()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_seed_one_is_drawn():
    assert len({arguments.random_seed("f", None) for _ in range(10)}) > 1


def test_tensors_are_returned_without_their_history():
    assert not arguments.numbers("f", "x", torch.ones(2, requires_grad=True)).requires_grad


def test_what_is_written_into_an_argument_later_changes_nothing():
    y, matrix, mask = torch.ones(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64), torch.tensor([True, False])
    circle = Function(lambda u: u[..., :2] * u[..., 2:], 3)
    conditioned = [
        dgm.condition(circle, y),
        dgm.condition(circle, y, tolerance=0.1),
        dgm.condition(circle, y, observe=dgm.linear(matrix)),
        dgm.condition(circle, y, observe=dgm.pixels(mask)),
    ]
    later, u = dgm.pixels(mask), torch.linspace(-1, 1, 3, dtype=torch.float64)[None]
    before = [fibre.constraint(u) if isinstance(fibre, dgm.Fibre) else fibre.energy(u) for fibre in conditioned]
    # the control: what torch makes of a tensor shares its memory
    shared = torch.as_tensor(y)
    for tensor in (y, matrix):
        tensor.fill_(5.0)
    mask.fill_(True)
    assert (shared == 5).all()
    after = [fibre.constraint(u) if isinstance(fibre, dgm.Fibre) else fibre.energy(u) for fibre in conditioned]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert dgm.condition(circle, y, observe=later).values.shape == (1,)


def test_numbers_of_python_lose_no_digits_on_the_way_to_the_model():
    y, single = [2.2, 0.1], torch.tensor([2.2, 0.1])
    exact, rounded = torch.tensor(y, dtype=torch.float64), single.double()
    model = Function(lambda u: u[..., :2] + u[..., 2:], 4)

    def values(given):
        noisy = dgm.WithNoise(model, sd=0.1)
        yield dgm.condition(model, given).values
        yield dgm.condition(model, given, noise=0.1).values
        yield dgm.condition(model, given, tolerance=0.1).values
        yield dgm.condition(model, given, observe=dgm.pixels([True, True])).values
        yield dgm.condition(model, [2.2], observe=lambda x: x[..., :1]).values if given is y else given[:1]
        base = dgm.Gaussian(torch.zeros(4, dtype=torch.float64), 1.0)
        target: Any = EvidenceProblem.of("log_evidence", (noisy, given)).started(base).target
        yield target.values

    for found in values(y):
        torch.testing.assert_close(found, exact[: len(found)], rtol=0, atol=0)
    # the control: a tensor of 32 bits has the digits that it has
    assert not torch.equal(exact, rounded)
    for found in list(values(single))[:4]:
        torch.testing.assert_close(found, rounded, rtol=0, atol=0)
    matrix = [[0.1, 0.2, 0.3, 0.7]]
    assert torch.equal(dgm.linear(matrix).matrix, torch.tensor(matrix, dtype=torch.float64))
    assert torch.equal(dgm.Gaussian(exact, y).scale.parts[0], exact)


def read_only(values):
    values.setflags(write=False)
    return values


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "convert",
    [
        lambda values: values.astype(">f8"),
        lambda values: values[::-1].copy()[::-1],
        lambda values: read_only(values.copy()),
        lambda values: np.asfortranarray(values),
        lambda values: pandas.DataFrame(values, index=list("ba")),
    ],
    ids=["another byte order", "negative strides", "read-only", "by columns", "a table"],
)
def test_arrays_of_any_layout_are_data(convert):
    """As of FITS files, of pictures that were flipped, of memory maps and of tables."""
    values = np.arange(6.0).reshape(2, 3)
    assert arguments.numbers("f", "x", convert(values)).tolist() == values.tolist()


def test_an_error_can_be_reported_as_one_of_the_model():
    with pytest.raises(ModelError, match=r"f\(n=0\)"), reported_as(ModelError):
        arguments.whole_number("f", "n", 0)


@contextlib.contextmanager
def default_type(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def without_a_console():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", None)
        yield


@contextlib.contextmanager
def anomalies():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            yield


def drawn():
    """Draws on a fibre, of a target, an estimate, and what a fit gives, in numbers."""
    fibre = dgm.condition(Circle().eval(), [2.0])
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    few = {"chains": 4, "warmup": 10, "draws": 5, "seed": 0, "progress": True}
    on_fibre, free = dgm.sample(fibre, **few).inputs, dgm.sample(target, dgm.HMC(0.5, 3), **few).inputs
    base = dgm.Gaussian([0.0, 0.0], 1.0)
    estimate = dgm.log_evidence(target, base, dgm.AIS(temperatures=5), chains=4, seed=0, progress=True)
    fitted = dgm.Gaussian.fit(target, steps=5).covariance
    return [part.double().sum().item() for part in (on_fibre, free, estimate.log_z, fitted)]


@pytest.fixture(scope="module")
def expected():
    return drawn()


@pytest.mark.parametrize(
    "around",
    [
        lambda: default_type(torch.float16),
        lambda: default_type(torch.bfloat16),
        torch.no_grad,
        anomalies,
        without_a_console,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["float16", "bfloat16", "no_grad", "anomalies", "no console", "autocast"],
)
def test_draws_do_not_depend_on_what_is_around_the_call(around, expected):
    with around():
        assert drawn() == expected


def test_draws_on_a_fibre_do_not_depend_on_the_default_type(expected):
    with default_type(torch.float64):
        assert drawn()[0] == expected[0]


@pytest.mark.parametrize("call", ["condition", "sample", "check", "log_evidence", "modes", "fit", "start"])
@pytest.mark.parametrize("around", ["inference_mode", "meta"])
def test_where_nothing_can_be_computed_is_said_in_one_line(call, around):
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    fibre = dgm.condition(Circle().eval(), [2.0])
    calls = {
        "condition": lambda: dgm.condition(Circle().eval(), [2.0]),
        "check": lambda: dgm.check(Circle().eval()),
        "sample": lambda: dgm.sample(target),
        "log_evidence": lambda: dgm.log_evidence(target),
        "modes": lambda: dgm.modes(target),
        "fit": lambda: dgm.Gaussian.fit(target),
        "start": lambda: fibre.start(2, torch.Generator()),
    }
    place = torch.inference_mode() if around == "inference_mode" else torch.device("meta")
    with place, pytest.raises(ArgumentError, match=f"{call}.*{around}"):
        calls[call]()


def test_a_diagnosis_is_the_same_where_nothing_can_be_computed():
    draws = dgm.sample(dgm.condition(Circle().eval(), [2.0]), chains=4, warmup=20, draws=20, seed=1, progress=False)
    with torch.inference_mode():
        inside = str(draws.diagnose())
    assert inside == str(draws.diagnose())


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ([1], " of problem 1"),
        ([1, 4], " of problems 1 and 4"),
        ([0, 2, 5], " of problems 0, 2 and 5"),
        ([0, 2, 5, 6], " of problems 0, 2, 5 and 6"),
        ([0, 2, 3, 5, 6], " of problems 0, 2, 3 and 2 others"),
    ],
)
def test_problems_are_named_and_only_many_of_them_counted(which, words):
    mask = torch.zeros(7, dtype=torch.bool)
    mask[which] = True
    assert of_problems(mask) == words


def test_a_picture_is_proposed_where_a_file_is_given_alone():
    with pytest.raises(ArgumentError, match=r"dgm\.image\(picture"):
        arguments.array("condition", "observed", "face.png")
    with pytest.raises(ArgumentError, match=r"numbers to make one of$"):
        arguments.array("WithNoise", "sd", "x")
