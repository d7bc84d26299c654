"""ABC in parameter space on all the data: what is accepted and how near simulations come."""

import pytest
import torch

import generators
from evaluation.experiments import parameter_space
from evaluation.experiments.parameter_space import Attempt

MODEL = generators.LotkaVolterra(3)
OBSERVED = MODEL.published_observations()[0][:6]


def starts():
    """Inputs near those that generated the data, to which the chains are told that they belong."""
    z = MODEL.published_observations()[1]
    return torch.cat([z.log() + 2, torch.zeros(6, dtype=torch.float64)]).expand(10, -1).clone()


def chains(tolerance, **changes):
    return parameter_space.chains(
        MODEL, OBSERVED, tolerance, starts(), **{"step": 0.01, "updates": 5, "seed": 1, **changes}
    )


def test_chains_of_a_wide_kernel_move_and_of_a_narrow_one_do_not():
    wide, narrow = chains(1000.0), chains(1e-6)
    assert wide.accepted > 0.9 * wide.simulations == 45
    assert narrow.accepted == 0
    # fresh noise alone keeps them away, the starts' own distance of 0 is not counted
    assert narrow.nearest > 0.1


def test_rejection_counts_what_is_within_the_tolerance():
    one, other = (parameter_space.rejection(MODEL, OBSERVED, eps, simulations=2000, seed=1) for eps in (300.0, 1000.0))
    assert one.simulations == other.simulations == 2000
    assert 0 < one.accepted < other.accepted
    assert one.nearest == other.nearest <= 300


def test_every_attempt_has_a_line():
    attempts = [Attempt("ABC rejection, ε = 1", 1.0, 1000, 0, 12.25)]
    line = "ABC rejection, ε = 1: 0 of 1000 simulations accepted, the nearest 12.25 from the data\n"
    assert parameter_space.describe(attempts) == line
    assert parameter_space.as_results(attempts)["ABC rejection, ε = 1"]["nearest"] == pytest.approx(12.25)
