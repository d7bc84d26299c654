"""Simulators may branch on what does not depend on their random numbers, and on nothing else."""

import sys

import pytest
import torch
from torch import distributions as td

import dgm_infer as dgm
from dgm_infer.errors import ModelError

NORMAL = td.Normal(0.0, 1.0)


def time_loop(z):
    t, x = torch.tensor(0.0), torch.zeros(())
    while t < 1:
        x = x + 0.1 * z + 0.1 * torch.randn(())
        t = t + 0.25
    return x + torch.randn(2)


def in_place_clock(z):
    t, path, i = torch.zeros(2), torch.zeros(4), 0
    while t[0] < 1:
        path[i] = z + torch.randn(())
        t += 0.25
        i += 1
    return path + (0 if float(t.sum()) > 1 else 5)


def clock_of_the_latent(z):
    t, end, x = z.new_zeros(()), torch.ones_like(z), z
    while bool(t < end):
        x = x + torch.randn(())
        t = torch.add(t, 0.5).clone()
    return x.reshape(1)


def adaptive_grid(z):
    """As adaptive solvers do it: a step that is halved until it is short enough."""
    step = torch.full((), 1.0)
    while step.item() > 0.2:
        step = step / 2
    times = torch.arange(0, 1, step.item())
    return z * times + torch.randn(len(times))


@pytest.mark.parametrize("simulate", [time_loop, in_place_clock, clock_of_the_latent, adaptive_grid])
def test_constants_may_decide(simulate):
    model = dgm.from_simulator(simulate, NORMAL)
    u = torch.randn(5, model.input_density.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # the program itself under vmap, and its derivatives: code of evaluation mode would not branch
    model.train()
    together = model.observed(u)
    torch.testing.assert_close(together, torch.stack([model.observed(row) for row in u]))
    value, product = torch.func.jvp(model.observed, (u,), (torch.ones_like(u),))
    torch.testing.assert_close(value, together)
    difference = (model.observed(u + 1e-6) - model.observed(u - 1e-6)) / 2e-6
    torch.testing.assert_close(product, difference, rtol=1e-6, atol=1e-6)


def written_through_a_view(z):
    t = torch.zeros(2)
    first = t[0]
    t[0] = z
    return (z if first > 0 else -z) + torch.randn(2)


def written_in_place(z):
    t = torch.zeros(2)
    t.add_(z)
    return (z if t.sum() > 0 else -z) + torch.randn(2)


def mixed_in(z):
    t = torch.tensor(0.0) + 0 * z
    return (z if t > -1 else -z) + torch.randn(2)


def copied(z):
    t = z.clone()
    return (z if t > 0 else -z) + torch.randn(2)


@pytest.mark.parametrize("simulate", [written_through_a_view, written_in_place, mixed_in, copied])
def test_what_random_values_touched_may_not_decide(simulate):
    with pytest.raises(ModelError, match=r"branches on a random value: compute both branches.*torch\.where"):
        dgm.from_simulator(simulate, NORMAL)


SOLVER = """
import torch

def odeint(field, y, times, method="dopri5"):
    t, step = times[0], times[-1] - times[0]
    if method == "rk4":
        return y + step * field(t, y)
    while field(t, y).abs().sum() * step > 0.1:
        step = step / 2
    return y + step * field(t, y)
"""


@pytest.mark.parametrize(("name", "remedy"), [("torchdiffeq", r'method="rk4"'), ("torchsde", "adaptive=False")])
def test_solvers_that_choose_their_steps_name_one_with_fixed_steps(tmp_path, monkeypatch, name, remedy):
    (tmp_path / f"{name}.py").write_text(SOLVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    solver = __import__(name)
    monkeypatch.delitem(sys.modules, name)

    def simulate(z, method):
        return solver.odeint(lambda t, y: -z * y, torch.ones(2), torch.tensor([0.0, 1.0]), method) + torch.randn(2)

    with pytest.raises(ModelError, match=rf"at line \d+ of test_constants.py, `return solver\.odeint.*{remedy}"):
        dgm.from_simulator(simulate, NORMAL, "dopri5")
    assert dgm.from_simulator(simulate, NORMAL, "rk4").output_shape == (2,)
