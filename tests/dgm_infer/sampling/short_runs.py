"""Short runs on images of a small network, which the tests of draws look at."""

import torch

import dgm_infer as dgm
from tests.models import MASK, Images, image

CHAINS, DRAWS = 3, 8
KERNEL = dgm.ConstrainedHMC(step_size=0.3, n_steps=1, n_geodesic=1)
MASKS = torch.stack([MASK, MASK.flip(0), MASK.flip(1)])


def fibre(batch=(3,), mask=MASK):
    return dgm.condition(Images().eval(), image(*batch), observe=dgm.pixels(mask))


def run(problem=None, kernel=KERNEL, **changes):
    """From prior draws moved onto the fibre: the annealing of the noise takes most of the time and is not looked at."""
    problem = fibre() if problem is None else problem
    arguments = {"chains": CHAINS, "warmup": 2, "draws": DRAWS, "seed": 4, "progress": False} | changes
    if "initial" not in changes:
        arguments["initial"] = problem.start(arguments["chains"], torch.Generator().manual_seed(3))
    return dgm.sample(problem, kernel, **arguments)
