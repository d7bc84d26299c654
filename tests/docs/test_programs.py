"""Every example of docs/programs.md runs and prints what the page says."""

import warnings

import pytest
import torch

from tests.pages import blocks, in_few_iterations

BLOCKS = blocks("programs.md")


@pytest.mark.filterwarnings("ignore")
def test_the_examples_run(capsys):
    names: dict = {"__name__": "programs"}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for block in BLOCKS:
            exec(compile(in_few_iterations(block), "docs/programs.md", "exec"), names)
    draws, fitted = names["draws"], names["fitted"]
    torch.testing.assert_close(draws.latents["total"], torch.full_like(draws.latents["total"], 3.0))
    assert set(fitted.latents) == {"rate"}
    assert set(names["posterior"].latents) == {"slope", "scale", "effect", "mean effect"}
    printed = capsys.readouterr().out
    assert "21 inputs, 20 outputs; structure: dense (the outputs share their noise)" in printed
    assert "50 independent units of 1 output and 2 local inputs each, 1 global input" in printed
    assert "it branches on a random value: compute both branches and choose with torch.where" in printed


def test_control_an_example_that_fails_is_noticed():
    with pytest.raises(NameError), warnings.catch_warnings():
        exec(compile(BLOCKS[1], "docs/programs.md", "exec"), {"__name__": "programs"})
