"""A fibre in two pieces, whose masses a parameter sets."""

import torch

import dgm_infer as dgm
from tests.oracles import FLOAT

__all__ = ["CHAINS", "TwoSides", "fibre"]

CHAINS = 12


class TwoSides(dgm.GenerativeModel):
    """``x = |u_1|`` with a round corner, on the left in units of ``far``: 1 comes from u_1 = 1 and from u_1 = -far."""

    input_density = dgm.StandardNormal(5)

    def __init__(self, far):
        super().__init__()
        self.far = far

    def observed(self, u):
        size = (u[..., :1].square() + 1e-4).sqrt()
        right = (1 + u[..., :1] / size) / 2
        # the other inputs bend the fibre a little
        return size * (right + (1 - right) / self.far) + 0.02 * u[..., 1:].sin().sum(-1, keepdim=True)


def fibre(far, batch=3):
    return dgm.condition(TwoSides(far), torch.linspace(0.9, 1.1, batch, dtype=FLOAT).unsqueeze(-1))
