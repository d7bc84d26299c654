"""What tests of runs share: a stop that nothing catches, a quick target, and when draws are the same."""

import torch

import dgm_infer as dgm


class Killed(BaseException):
    """Nothing catches it, as nothing does a kill."""


class Well(dgm.Target):
    """A normal density of this width in the plane."""

    def __init__(self, width):
        super().__init__(None, 2)
        self.width = width

    def energy(self, x):
        return 0.5 * (x / self.width).square().sum(-1)


def assert_same(draws, other):
    assert torch.equal(draws.inputs, other.inputs)
    assert draws.stats.keys() == other.stats.keys()
    for name, value in draws.stats.items():
        assert torch.equal(value, other.stats[name]), name
    assert draws.kernel == other.kernel
    assert draws.seed == other.seed
    assert draws.interrupted == other.interrupted
    assert (draws.ancestors is None) == (other.ancestors is None)
    assert draws.ancestors is None or torch.equal(draws.ancestors, other.ancestors)
