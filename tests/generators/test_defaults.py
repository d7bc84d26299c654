"""With default settings, from prior draws, the published predator-prey series mixes without any tuning by hand.

Of the quantile models, test_posteriors has the same at fewer iterations.
"""

import pytest
import torch

import dgm_infer as dgm
import generators

pytestmark = pytest.mark.slow


def test_default_settings_mix_on_the_published_data():
    model = generators.LotkaVolterra()
    observed, truth = model.published_observations()
    draws = dgm.sample(dgm.condition(model, observed), chains=64, seed=3, progress=False)
    summary = draws.summary()
    assert bool((summary["r_hat"] <= 1.01).all()), summary
    failed = draws.stats["projection_failed"] | draws.stats["reversal_failed"]
    assert failed.double().mean() < 0.01
    moves = draws.inputs.diff(dim=1).abs().amax(-1) > 0
    # no chain stands still for long: half a hundred rejections in a row do not happen at an acceptance of 0.8
    longest = max(_longest_stay(chain) for chain in moves)
    assert longest < 50
    assert draws.stats["acceptance_rate"].mean() > 0.7
    z = torch.as_tensor(truth)
    assert bool(((summary["mean"] - z.numpy()).abs() < 4 * summary["sd"]).all())


def _longest_stay(moves: torch.Tensor) -> int:
    longest = current = 0
    for moved in moves.tolist():
        current = 0 if moved else current + 1
        longest = max(longest, current)
    return longest
