"""What no simulator may do: each fault is named, and its line quoted."""

import random

import numpy as np
import pytest
import torch
from torch import distributions as td
from torch.nn import functional as F

import dgm_infer as dgm
from dgm_infer.errors import ModelError
from tests.mistakes import WrongForward

NORMAL = td.Normal(0.0, 1.0)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def other_counts(z):
    total = torch.randn(())
    if torch.rand(()).item() > 0.5:
        total = total + torch.randn(())
    return z + total


def branch(z):
    noise = torch.randn(2)
    if noise[0] > 0:
        noise = noise * 2
    return z + noise


def rejection_loop(z):
    x = torch.randn(())
    while x.abs() > 1:
        x = torch.randn(())
    return z + x


def discrete(z):
    return z + torch.randn(2) + td.Bernoulli(0.5).sample()


def counted(z):
    return torch.poisson(z.exp()) + torch.randn(2)


def dropped(z):
    return F.dropout(z + torch.randn(4), 0.5)


def by_rejection(z):
    return td.Beta(z.exp(), 1.0).rsample((2,))


def under_no_grad(z):
    with torch.no_grad():
        mean = z.sin()
    return mean + torch.randn(2)


def detached(z):
    return z.detach().sin() + torch.randn(2)


def rounded(z):
    return torch.round(5 * z + torch.randn(6))


def compared(z):
    return (z + torch.randn(2) > 0).to(z.dtype)


def item(z):
    return torch.randn(2) + torch.tensor(z.item())


def round_trip(z):
    return torch.randn(2) + torch.from_numpy(np.sin(z.numpy()))


OUTSIDE = torch.zeros(2)


def outside_in_place(z):
    OUTSIDE[0] = z
    return OUTSIDE + torch.randn(2)


def custom_function(z):
    return Doubled.apply(z) + torch.randn(2)


def wrong_forward(z):
    return WrongForward.apply(z) + torch.randn(2)


def numpy_noise(z):
    return z + torch.randn(2) + float(np.random.normal())  # noqa: NPY002


def python_noise(z):
    return z + torch.randn(2) + random.gauss(0, 1)


def several_results(z):
    return z + torch.randn(2), z


def no_noise(x):
    return torch.ones(2)


def fails(z):
    return torch.randn(2) @ torch.randn(3)


FAULTS = {
    other_counts: (r"other random numbers from run to run.*|branches on|Python number", "torch.randn|torch.rand"),
    branch: ("branches on a random value", r"if noise\[0\] > 0:"),
    rejection_loop: (r"other random numbers from run to run", r"x = torch.randn|return z"),
    discrete: ("discrete numbers", r"td.Bernoulli\(0.5\)"),
    counted: ("discrete numbers", "torch.poisson"),
    dropped: ("discrete numbers", "F.dropout"),
    by_rejection: ("by rejection", "td.Beta"),
    under_no_grad: ("do not match its outputs", r"with torch.no_grad\(\):"),
    detached: ("do not match its outputs", r"z.detach\(\)"),
    rounded: ("change only in steps.*leave out rounding", "def rounded"),
    compared: ("change only in steps.*leave out rounding", "def compared"),
    item: ("Python number", r"z.item\(\)"),
    round_trip: ("NumPy array", r"z.numpy\(\)"),
    outside_in_place: ("in place", r"OUTSIDE\[0\] = z"),
    custom_function: ("setup_context", "Doubled.apply"),
    wrong_forward: ("forward-mode derivatives of wrong_forward differ", "def wrong_forward"),
    numpy_noise: ("different outputs for the same", "def numpy_noise"),
    python_noise: ("different outputs for the same", "def python_noise"),
    several_results: ("returns a tuple", "def several_results"),
    no_noise: ("no random numbers", "def no_noise"),
    fails: ("fails", r"torch.randn\(2\) @ torch.randn\(3\)"),
}


# forward mode loads torch's compiler
SLOW = {wrong_forward}


@pytest.mark.parametrize(
    "simulate",
    [pytest.param(f, marks=[pytest.mark.slow] if f in SLOW else [], id=f.__name__) for f in FAULTS],
)
def test_each_fault_is_named_and_its_line_quoted(simulate):
    message, line = FAULTS[simulate]
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    prior = None if simulate is no_noise else NORMAL
    args = (torch.ones(1),) if simulate is no_noise else ()
    with pytest.raises(ModelError, match=message) as caught:
        dgm.from_simulator(simulate, prior, *args)
    assert caught.match(rf"line \d+ of test_faulty_simulators.py, `.*({line})")
    assert simulate.__name__ in str(caught.value)
    # the global generators stay as they were, and torch is as it was
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert before[2] == random.getstate()
    assert torch.is_grad_enabled()
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize(
    "simulate",
    [
        lambda z: torch.stack([z, z.round()]) + 0 * torch.randn(2),
        lambda z: (30 * torch.sin(9 * z + torch.randn(2))).clamp(-1, 1),
        lambda z: 0 * z + 0 * torch.randn(2),
    ],
    ids=["some outputs", "mostly flat", "constant"],
)
def test_control_outputs_that_do_not_only_change_in_steps_are_converted(simulate):
    assert dgm.from_simulator(simulate, NORMAL).output_shape == (2,)
