"""What tests of runs share: a stop that nothing catches, and when draws are the same."""

import torch


class Killed(BaseException):
    """Nothing catches it, as nothing does a kill."""


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
