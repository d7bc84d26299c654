"""ABC posteriors: kernels, distances, summaries, and models without derivatives."""

import math

import numpy as np
import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, ModelError, StartError
from tests.oracles import FLOAT, Ellipse

Y = torch.tensor([[2.0], [3.0]], dtype=FLOAT)


def points(n=7):
    return torch.randn(n, 2, 2, generator=torch.Generator().manual_seed(1), dtype=FLOAT)


def excess(target, u):
    """The energy less that of the prior."""
    return target.energy(u) + dgm.StandardNormal(2).log_prob(u)


def test_a_gaussian_kernel_is_output_noise_of_its_width_integrated_out():
    soft = dgm.condition(Ellipse(), Y, tolerance=0.5)
    noisy = dgm.condition(dgm.WithNoise(Ellipse(), 0.5), Y).marginal
    assert noisy is not None
    difference = soft.energy(points()) - noisy.energy(points())
    torch.testing.assert_close(difference, difference[:1].expand_as(difference))
    # the control: that of another width is not
    wider = dgm.condition(Ellipse(), Y, tolerance=0.6).energy(points()) - noisy.energy(points())
    assert (wider - wider[:1]).abs().max() > 1


@pytest.mark.parametrize("kernel", ["gaussian", "uniform", "epanechnikov"])
def test_kernels_are_functions_of_the_distance_over_the_tolerance(kernel):
    soft = dgm.condition(Ellipse(), Y, tolerance=1.5, kernel=kernel)
    r = (Ellipse().observed(points()) - Y).abs()[..., 0] / 1.5
    density = {"gaussian": (-0.5 * r**2).exp(), "uniform": (r <= 1) * 1.0, "epanechnikov": (1 - r**2).clamp_min(0)}
    torch.testing.assert_close((-excess(soft, points())).exp(), density[kernel].to(FLOAT))
    assert 0 < (r < 1).sum() < r.numel()


class Three(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return torch.cat([u, u.sum(-1, keepdim=True)], -1)


def test_summaries_and_a_distance_take_the_place_of_the_values():
    y = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]], dtype=FLOAT)

    def mean(x):
        return x.mean(-1, keepdim=True)

    soft = dgm.condition(Three(), y, tolerance=0.5, summaries=mean)
    x = Three().observed(points())
    torch.testing.assert_close(excess(soft, points()), 2 * (mean(x) - mean(y)).square()[..., 0])
    soft = dgm.condition(Three(), y, tolerance=0.5, distance=lambda a, b: (a - b).abs().amax(-1))
    torch.testing.assert_close(excess(soft, points()), 2 * (x - y).abs().amax(-1).square())


class Counts(dgm.GenerativeModel):
    """A simulator in NumPy, of whole numbers."""

    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return torch.from_numpy(np.round(u.numpy()[..., :1] + u.numpy()[..., 1:]))


def test_a_simulator_in_numpy_needs_a_tolerance_and_is_sampled_without_gradients():
    with pytest.raises(ModelError, match=r"has no derivative.*tolerance="):
        dgm.condition(Counts(), [2.0])
    target = dgm.condition(Counts(), [2.0], tolerance=0.5, kernel="uniform")
    draws = dgm.sample(target, chains=200, warmup=10, draws=40, seed=1, progress=False)
    assert isinstance(draws.kernel, dgm.kernels.EllipticalSlice)
    assert draws.inputs is not None
    total = draws.inputs.sum(-1)
    assert ((total > 1.5) & (total < 2.5)).all()
    # the sum is N(0, 2), truncated to what rounds to 2
    grid = torch.linspace(1.5, 2.5, 10_001, dtype=FLOAT)
    mean = grid @ (-0.25 * grid.square()).softmax(0)
    assert abs(total.mean(1).mean() - mean) < 5 * total.mean(1).std() / math.sqrt(200)
    with pytest.raises(ArgumentError, match=r"no derivative.*EllipticalSlice"):
        dgm.sample(target, dgm.HMC(), chains=2, warmup=2, draws=2, progress=False)


def test_a_tolerance_that_nothing_meets_names_the_smallest_distance():
    target = dgm.condition(Counts(), [12.0], tolerance=0.5, kernel="epanechnikov")
    with pytest.raises(StartError, match=r"none of \d+ prior draws.*nearest.* is [5-9](\.\d+)? away.*fewer than 1 in"):
        dgm.sample(target, dgm.kernels.RandomWalk(), chains=4, warmup=2, draws=2, seed=1, progress=False)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tolerance": 0.1, "kernel": "cosine"}, "kernel='cosine'"),
        ({"kernel": "uniform"}, "give tolerance="),
        ({"summaries": lambda y: y}, "give tolerance="),
        ({"tolerance": 0.1, "distance": 2.0}, "distance=2.0"),
        ({"tolerance": 0.1, "distance": lambda a, b: (a - b).abs()}, "one finite number per point"),
        ({"tolerance": 0.1, "summaries": lambda y: y.nothing}, "fails at prior draws"),
    ],
)
def test_what_does_not_fit_is_named(settings, named):
    with pytest.raises(ArgumentError, match=named):
        dgm.condition(Ellipse(), Y, **settings)
