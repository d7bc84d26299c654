"""What another library's exception contributes to a message."""

import pytest
import torch
from torch import nn

from dgm_infer.errors import cause


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not found", "not found"),
        ("two\nlines", "two lines"),
        ("  the first line\n\tand a table\n\tof shapes", "the first line"),
        ("what failed\n\nand a stack of calls", "what failed"),
        ("Errors:\n  none of these keys:\n\tweight\n  bias", "Errors: none of these keys: weight"),
        ("", "ValueError"),
        ("word " * 100, "word " * 39 + "..."),
    ],
)
def test_a_cause_is_the_first_paragraph(text, words):
    assert cause(ValueError(text)) == words


def test_of_weights_that_do_not_fit_the_first_is_named():
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 3).load_state_dict({"weight": torch.zeros(1, 1), "bias": torch.zeros(3)})
    assert "size mismatch for weight" in cause(caught.value)
    assert "\n" not in cause(caught.value)
