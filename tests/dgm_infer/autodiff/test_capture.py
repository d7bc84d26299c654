"""Functions captured as graphs compute what the functions do, from fewer operations."""

import itertools

import pytest
import torch
from torch import nn

import dgm_infer as dgm
from dgm_infer.autodiff.capture import affine_graph, bound, capture, value_and_gradient
from dgm_infer.autodiff.captured import CapturedTarget, agree, captured, captured_targets
from dgm_infer.autodiff.loops import capturing
from dgm_infer.errors import ModelError
from tests.oracles import FLOAT


def points(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def network(*sizes):
    torch.manual_seed(0)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(FLOAT).requires_grad_(False)


def test_a_graph_computes_what_its_function_does_at_other_points():
    net, index = network(3, 8, 20), torch.tensor([1, 7, 4])
    graph = capture(lambda x: [net(x)[..., index].square().sum(-1)], points(5, 3))
    x = points(5, 3, seed=1)
    torch.testing.assert_close(graph(x)[0], net(x)[..., index].square().sum(-1))


@pytest.mark.parametrize("shape", [(20,), (4, 5)])
def test_of_a_product_only_the_columns_that_are_used_are_computed(shape):
    net, index = network(3, 8, 20), torch.tensor([1, 7, 4])

    def columns(x):
        # as an image in between
        return (0.5 * net(x) + 1).tanh().view(-1, *shape).view(len(x), 20).index_select(-1, index)

    graph = capture(lambda x: [columns(x)], points(5, 3))
    x = points(5, 3, seed=1)
    torch.testing.assert_close(graph(x)[0], (0.5 * net(x) + 1).tanh()[..., index])
    # the control: without the selection all twenty are there
    sizes = [max(constant.shape) for constant in graph.constants if constant.ndim]
    assert max(sizes) == 8
    everything = capture(lambda x: [net(x)], points(5, 3))
    assert max(max(constant.shape) for constant in everything.constants) == 20


def test_what_depends_on_constants_alone_is_computed_once():
    weight = points(3, 3)
    graph = capture(lambda x: [x @ (weight @ weight.mT + torch.eye(3, dtype=FLOAT)).inverse()], points(5, 3))
    assert graph.calls <= 3
    x = points(5, 3, seed=1)
    torch.testing.assert_close(graph(x)[0], x @ (weight @ weight.mT + torch.eye(3, dtype=FLOAT)).inverse())


def test_constants_of_a_graph_can_be_replaced():
    weight = points(3, 3)
    graph = capture(lambda x: [x @ weight], points(5, 3))
    x = points(5, 3, seed=1)
    with bound([graph], [2 * constant for constant in graph.constants]):
        torch.testing.assert_close(graph(x)[0], 2 * x @ weight)
    torch.testing.assert_close(graph(x)[0], x @ weight)


def test_gradients_are_those_of_autograd():
    net = network(2, 6, 1)

    def function(x):
        return net(x).squeeze(-1) + (x[..., 0] * x[..., 1]).square(), (x.sum(-1),)

    value, both = value_and_gradient(function, points(4, 2))
    x = points(4, 2, seed=1).requires_grad_()
    expected = function(x)[0]
    (slope,) = torch.autograd.grad(expected.sum(), x)
    found, gradient, other = both(x.detach())
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(value(x.detach())[0], expected.detach())
    torch.testing.assert_close(gradient, slope)
    torch.testing.assert_close(other, x.detach().sum(-1))


def test_a_gradient_that_stops_on_the_way_is_that_of_the_target():
    def energy(x):
        return (x[..., 0].detach() * x[..., 1]).square() + x.square().sum(-1)

    # by some versions of torch its graph has another gradient, which is refused
    target, x = dgm.Target(energy, 2), points(4, 2, seed=1)
    found = CapturedTarget(target).energy_and_gradient(x)
    torch.testing.assert_close(found[1], target.energy_and_gradient(x)[1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: [x + torch.rand_like(x)], "draws random numbers"),
        (lambda x: [x if float(x.sum()) > 0 else -x], "cannot be captured"),
    ],
)
def test_what_cannot_be_captured_says_why(function, message):
    with pytest.raises(ModelError, match=message):
        capture(function, points(3, 2))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b: a.exp() + 2 * b, True),
        (lambda a, b: torch.cat([a, b], -1)[..., 2:] * a.sin(), True),
        (lambda a, b: (a.square() + b @ torch.ones(2, 2, dtype=FLOAT)) / a, True),
        (lambda a, b: torch.where(a > 0, b, -b).cumsum(-1), True),
        (lambda a, b: a.new_zeros(5, 3).scatter(-1, torch.tensor([[0, 1]] * 5), b) + 1, True),
        (lambda a, b: a + b.square(), False),
        (lambda a, b: a * b.exp(), False),
        (lambda a, b: b * b.flip(-1), False),
        (lambda a, b: torch.where(b > 0, b, -b), False),
        (lambda a, b: a / b, False),
    ],
)
def test_operations_show_what_a_function_is_affine_in(function, expected):
    graph = affine_graph(function, points(5, 2), points(5, 2, seed=1))
    assert (graph is not None) is expected
    if graph is not None:
        a, b = points(5, 2, seed=2), points(5, 2, seed=3)
        torch.testing.assert_close(graph(a, b)[0], function(a, b))


def test_noise_is_recognised_where_the_model_overflows_at_prior_draws():
    class Explodes(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(1)
        output_shape = (2,)

        def observed(self, u):
            return torch.cat([(1e6 + u).exp(), u], -1)

    fibre = dgm.condition(dgm.WithNoise(Explodes(), 0.5), torch.ones(2, dtype=FLOAT))
    assert fibre.marginal is not None
    assert fibre.marginal.holds_everywhere


def test_a_target_that_is_captured_has_the_same_energies_and_gradients():
    target = dgm.Target(lambda x: (x.square() * torch.tensor([1.0, 4.0]).to(x)).sum(-1) + x.prod(-1).cos(), 2)
    graphs, x = CapturedTarget(target), points(6, 2)
    energy, gradient = target.energy_and_gradient(x)
    torch.testing.assert_close(graphs.energy(x), energy)
    torch.testing.assert_close(graphs.gradient(x), gradient)
    found = graphs.energy_gradient_and_extra(x)
    assert agree([found[0], found[1]], [energy, gradient])
    assert captured(target) is target
    with capturing("rehearsal"), captured_targets():
        assert isinstance(captured(target), CapturedTarget)
        assert captured(target) is captured(target)


def test_coarse_numbers_may_differ_as_far_as_rounding_of_what_is_given_leads():
    expected = [torch.tensor([1.0, 2.0, 3.0], dtype=FLOAT), torch.tensor([True, False, True])]
    nearby = [[torch.tensor([1.0, 2.0, 3.01], dtype=FLOAT), torch.tensor([True, False, False])]]
    # the third row is one that any rounding leads elsewhere
    found = [torch.tensor([1.0, 2.0, 3.5], dtype=FLOAT), torch.tensor([True, False, False])]
    assert agree(found, expected, torch.float32, nearby)
    assert not agree(found, expected, torch.float32)
    # the control: the others are as they were
    wrong = [torch.tensor([1.0, 2.01, 3.0], dtype=FLOAT), expected[1]]
    assert not agree(wrong, expected, torch.float32, nearby)
    assert not agree([expected[0], ~expected[1]], expected, torch.float32, nearby)
    infinite = [expected[0] / torch.tensor([0.0, 1.0, 1.0], dtype=FLOAT), expected[1]]
    assert agree(infinite, infinite, torch.float32, nearby)
    assert not agree(expected, infinite)
    assert not agree([expected[0].masked_fill(expected[1], torch.nan), expected[1]], expected, torch.float32, nearby)


def test_a_gradient_of_its_own_is_kept():
    class Own(dgm.Target):
        dim = 2

        def energy(self, x):
            return x.square().sum(-1)

        def energy_and_gradient(self, x):
            return self.energy(x).detach(), 3 * x.detach()

    graphs, x = CapturedTarget(Own()), points(4, 2)
    torch.testing.assert_close(graphs.gradient(x), 3 * x)
    torch.testing.assert_close(graphs.energy_and_gradient(x)[1], 3 * x)


def test_an_energy_that_remembers_is_refused():
    class Remembers(dgm.Target):
        dim = 2
        calls = 0

        def energy(self, x):
            self.calls += 1
            return x.square().sum(-1) * self.calls

    with pytest.raises(ModelError, match="computes something else"):
        CapturedTarget(Remembers()).energy(points(4, 2))


@pytest.mark.parametrize("grown", [False, True])
def test_a_network_of_fewer_digits_than_its_energy_agrees_within_its_own(grown):
    net = network(3, 32, 2).float()

    class Coarse(dgm.Target):
        dim = 3
        factor = 1.0

        def energy(self, x):
            # the control grows by more than a rounding of its network at every call
            self.factor *= 1.01 if grown else 1.0
            return self.factor * 100 * (net(x.float())[..., 0].to(FLOAT) - 0.3).square() + x.square().sum(-1)

    target, x = Coarse(), points(4, 3)
    if grown:
        with pytest.raises(ModelError, match="computes something else"):
            CapturedTarget(target).energy(x)
    else:
        expected = target.energy_and_gradient(x)[1]
        torch.testing.assert_close(CapturedTarget(target).gradient(x), expected, rtol=1e-4, atol=1e-4)
