"""Fibres with Jacobians in float32: the same points to the constraint's own tolerance, the same density to rounding."""

import pytest
import torch
from torch import nn

import dgm_infer as dgm
import generators
from tests.oracles import FLOAT


def fibre(dtype=FLOAT):
    net = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 5), nn.Sigmoid())
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.7)
    model = generators.from_module(net.eval(), 8)
    x = model(torch.randn(2, 8, generator=rng)).detach()
    return dgm.condition(model, x, dtype=dtype)


@pytest.mark.parametrize("traced", [False, True])
def test_float32_jacobians_are_those_of_the_model_to_rounding_and_nothing_else_is(traced):
    exact = fibre()
    coarse = exact.computed(float32=True, traced=traced)
    u = exact.start(6, torch.Generator().manual_seed(1)).reshape(-1, 8)
    rows, coarse_rows = exact.rows(6), coarse.rows(6)
    assert torch.equal(coarse_rows.constraint(u), rows.constraint(u))
    mine, theirs = (f.evaluate(type(f).linearise, u) for f in (coarse_rows, rows))
    for name in ("energy", "gradient"):
        a, b = getattr(mine, name), getattr(theirs, name)
        assert a.dtype == FLOAT
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        # the control: it is not the model in float64
        assert not torch.equal(a, b)
    # part of the rows keeps its Jacobians
    taken = coarse_rows.take(torch.tensor([3, 1]))
    torch.testing.assert_close(taken.jacobian(u[[3, 1]]).log_det, mine.jacobian.log_det[[3, 1]])
    assert not torch.equal(taken.jacobian(u[[3, 1]]).log_det, rows.jacobian(u).log_det[[3, 1]])


def test_without_gram_force_the_gradient_is_that_of_the_density_and_nothing_else_changes():
    exact = fibre()
    u = exact.start(6, torch.Generator().manual_seed(1)).reshape(-1, 8)
    rows = exact.computed(gram_force=False).rows(6)
    mine, theirs = (f.evaluate(type(f).linearise, u) for f in (rows, exact.rows(6)))
    assert torch.equal(mine.energy, theirs.energy)
    # of a standard normal density
    torch.testing.assert_close(mine.gradient, u)
    assert (theirs.gradient - u).abs().max() > 0.1
    for other in (rows.take(torch.tensor([3, 1])), rows.computed(float32=True), rows.with_noise_scale(None)):
        assert other.computed(gram_force=False) is other


def test_the_fibre_of_float32_positions_is_its_own():
    single = fibre(torch.float32)
    assert single.computed(float32=True) is single


def test_large_networks_without_structure_take_derivatives_in_float32():
    def of(n: int):
        net = torch.nn.Sequential(torch.nn.Linear(256, 16), torch.nn.Tanh(), torch.nn.Linear(16, 256)).eval()
        seen = dgm.pixels(torch.arange(256) < n)
        return dgm.condition(generators.from_module(net, 256), torch.zeros(256), observe=seen)

    assert [of(n).prefers_float32 for n in (4, 128)] == [False, True]


def test_networks_with_convolutions_take_derivatives_in_float32_unless_told():
    def of(*layers, dtype=torch.float64):
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Unflatten(1, (2, 2, 2)), *layers).eval()
        return dgm.condition(
            generators.from_module(net, 4), torch.zeros(2, 2, 2), observe=dgm.pixels(MASK), dtype=dtype
        )

    convolves = of(torch.nn.Conv2d(2, 2, 1))
    assert [convolves.prefers_float32, of(torch.nn.Tanh()).prefers_float32] == [True, False]
    assert not of(torch.nn.Conv2d(2, 2, 1), dtype=torch.float32).prefers_float32
    position = convolves.start(3, torch.Generator().manual_seed(1))

    def gram(**settings):
        return dgm.ConstrainedHMC(0.1, n_steps=1, **settings).init(convolves, position).linearisation.jacobian.log_det

    assert torch.equal(gram(), gram(float32_jacobians=True))
    assert not torch.equal(gram(), gram(float32_jacobians=False))


MASK = torch.arange(8).reshape(2, 2, 2) < 2


@pytest.mark.slow
def test_chains_with_float32_derivatives_keep_the_constraint_in_float64_and_go_as_those_without():
    problem = fibre()
    start = problem.start(16, torch.Generator().manual_seed(1))
    coarse, exact = (
        dgm.sample(
            problem,
            dgm.ConstrainedHMC(0.3, n_steps=3, float32_jacobians=single),
            chains=16,
            warmup=0,
            draws=20,
            seed=1,
            initial=start,
            progress=False,
        )
        for single in (True, False)
    )
    assert coarse.stats["constraint_error"].max() < 1e-8
    assert not coarse.stats["reversal_failed"].any()
    # the same trajectories until rounding decides an acceptance: nearly never in so few
    same = (coarse.inputs - exact.inputs).abs().amax(-1) < 1e-2
    assert same.double().mean() > 0.9
    assert not torch.equal(coarse.inputs, exact.inputs)


class Mixed(dgm.GenerativeModel):
    """``|u|^2`` in any unit beside a sum."""

    input_density = dgm.StandardNormal(3)
    output_shape = (2,)

    def __init__(self, unit):
        super().__init__()
        self.unit = unit

    def observed(self, u):
        return torch.stack([self.unit * u.square().sum(-1), u.sum(-1)], -1)


REPRESENTED = {
    "Fibre(Mixed: 3 inputs, 2 observed values; structure: dense)": (Mixed(1.0), [2.0, 0.5]),
    "Fibre(Mixed: 3 inputs, 2 observed values, 6 problems; structure: dense)": (
        Mixed(1.0), torch.tensor([2.0, 0.5]).expand(2, 3, 2)
    ),
    "Fibre(WithNoise: 23 inputs, 20 observed values, 1 problem; structure: diagonal)": (
        generators.from_module(nn.Linear(3, 20).eval(), 3, noise=0.1), torch.zeros(1, 20)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "problem"), REPRESENTED.items(), ids=["one", "a batch", "with noise"])
def test_a_fibre_is_shown_by_its_sizes(text, problem):
    assert repr(dgm.condition(*problem)) == text


def misses(fibre):
    """By how much draws miss ``|u|^2 = 2``."""
    kernel = dgm.ConstrainedHMC(step_size=0.3, n_steps=3)
    draws = dgm.sample(fibre, kernel, chains=2, warmup=0, draws=10, seed=1, progress=False)
    return (draws.inputs[..., 0, :].square().sum(-1) - 2).abs().max()


@pytest.mark.parametrize("unit", [1.0, 1e-8, 1e8])
def test_the_tolerance_is_that_of_every_output_in_any_unit(unit):
    fibre = dgm.condition(Mixed(unit), [[2 * unit, 0.5], [3 * unit, 0.1]])
    assert misses(fibre) < 1e-7
    # outputs of order one are measured as they are
    assert (fibre.observed.unit is None) == (unit == 1)
    if unit < 1:
        # the control: one tolerance for all
        control = type(fibre)(fibre.observed.measured_in(None), fibre.values)
        assert misses(control) > 1e-2


def test_units_leave_the_noise_marginal_and_chains_of_their_own_as_they_are():
    weight = torch.tensor([[1.0, -0.5], [2e4, 1e4]], dtype=FLOAT)
    values = torch.tensor([[0.5, 3e4], [0.2, -1e4]], dtype=FLOAT)
    fibre = dgm.condition(generators.LinearGaussian(weight, sd=0.1), values)
    plain = type(fibre)(fibre.observed.measured_in(None), fibre.values)
    assert fibre.observed.unit is not None
    assert fibre.marginal is not None
    x = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    offset = fibre.marginal.energy(x) - plain.marginal.energy(x)
    assert (offset - offset[:1]).abs().max() < 1e-3
    u = fibre.marginal.lift(x, torch.Generator().manual_seed(1))
    assert (fibre.constraint_error(u) < 1e-8 * fibre.scale).all()
    torch.testing.assert_close(fibre.take(torch.tensor([1])).constraint(u[:, 1:] + 1), fibre.constraint(u + 1)[:, 1:])
