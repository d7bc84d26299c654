"""A target on R^D of which no step is exact, and how errors shrink with the step."""

import numpy as np
import torch

import dgm_infer as dgm
from dgm_infer.kernels.integrators import PhasePoint
from dgm_infer.kernels.nuts import energy_of
from tests.oracles import FLOAT

CHAINS = 30


class Quartic(dgm.Target):
    """``|x|^2 / 2 + |x|^4 / 4`` with a coupling: no step of it is exact."""

    def __init__(self):
        super().__init__(None, 4)

    def energy(self, x):
        return 0.5 * x.square().sum(-1) + 0.25 * x.square().sum(-1).square() + x[..., 0] * x[..., 1].sin()


QUARTIC = energy_of(Quartic())


def leapfrog_start():
    rng = torch.Generator().manual_seed(40)
    x, p = torch.randn(CHAINS, 4, generator=rng, dtype=FLOAT), torch.randn(CHAINS, 4, generator=rng, dtype=FLOAT)
    return PhasePoint(x, p, *QUARTIC(x))


def slope(counts, errors):
    return np.polyfit(-np.log(counts), np.log(errors), 1)[0]
