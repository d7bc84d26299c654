"""What check() and condition() find in the log factor of a model."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import ModelError
from tests.oracles import Ellipse


def log_factor(function):
    """A sound model of two inputs with this log factor."""
    return type("Weighted", (Ellipse,), {"log_factor": lambda self, u: function(u)})().eval()


LOG_FACTORS = {
    "hidden_randomness": (lambda u: torch.randn(u.shape[:-1]).to(u), "returns different outputs for the same inputs"),
    "batch_statistics": (lambda u: (u - u.mean(0)).square().sum(-1), "changes the output of a row when the other rows"),
    "observed": (lambda u: u.sum(-1) + 1j, r"gives torch\.complex128 .* must be one real number per input"),
}


@pytest.mark.parametrize(("code", "function", "words"), [(k, *v) for k, v in LOG_FACTORS.items()], ids=LOG_FACTORS)
def test_a_log_factor_is_held_to_what_outputs_are(code, function, words):
    model, state = log_factor(function), torch.get_rng_state()
    with pytest.raises(ModelError, match=rf"^Weighted\.log_factor {words}"):
        dgm.condition(model, [2.0])
    report = dgm.check(model)
    assert report.codes == (code,)
    assert report.findings[0].what.startswith("Weighted.log_factor")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sound_log_factor_passes():
    model = log_factor(lambda u: -u.square().sum(-1))
    assert dgm.check(model)
    dgm.condition(model, [2.0])
    dgm.condition(model, [2.0], tolerance=0.1)
