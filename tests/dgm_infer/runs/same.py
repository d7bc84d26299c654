"""What tests of runs share: a stop that nothing catches, a quick target, and when draws are the same."""

import torch

import dgm_infer as dgm
from tests.models import Bent
from tests.oracles import FLOAT

CHAINS, WARMUP, DRAWS = 4, 30, 20


def fibre(values=0.3):
    return dgm.condition(Bent(), torch.full((2, 5), values, dtype=FLOAT))


def run(problem=None, kernel=None, **changes):
    options = {"chains": CHAINS, "warmup": WARMUP, "draws": DRAWS, "seed": 7, "progress": False} | changes
    return dgm.sample(fibre() if problem is None else problem, kernel or dgm.ConstrainedHMC(), **options)


def quick_run(**changes):
    """Of a target that takes no time: two problems, a step size, a length and a metric to adapt."""
    return run(Bumps(torch.tensor([0.5, 2.0])), **{"kernel": dgm.HMC(), **changes})


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
    assert (draws.modes is None) == (other.modes is None)
    assert draws.modes is None or torch.equal(draws.modes.centres, other.modes.centres)


class Bumps(dgm.Target):
    """Normal densities of several widths, one a problem: log Z is known."""

    def __init__(self, widths):
        super().__init__(None, 2, widths.shape)
        self.widths = widths

    def energy(self, x):
        return 0.5 * (x / self.widths.unsqueeze(-1)).square().sum(-1)

    def take(self, problems):
        return Bumps(self.widths[problems])


def assert_same_evidence(one, other):
    if isinstance(one, dgm.evidence.Bounds):
        for name in ("lower", "upper", "combined"):
            assert_same_evidence(getattr(one, name), getattr(other, name))
        return
    for name in ("log_z", "std_error", "bias", "log_weights", "draws"):
        assert torch.equal(*(getattr(each, name).nan_to_num(7.0) for each in (one, other))), name
    assert one.diagnostics.keys() == other.diagnostics.keys()
    for name, value in one.diagnostics.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.double().nan_to_num(7.0), other.diagnostics[name].double().nan_to_num(7.0)), name
        elif name != "seconds":
            assert value == other.diagnostics[name], name
    assert (one.seed, one.status, one.method, one.dof) == (other.seed, other.status, other.method, other.dof)
