"""Every example of docs/interop.md runs and prints what the page says."""

import re
import warnings

import pytest
import torch
from torch.distributions import Distribution

from tests.docs.pages import examples
from tests.files import arviz_groups

BLOCKS = examples("interop.md")
FEW = {"warmup": "0", "draws": "2", "num_posterior_samples": "2"}


def in_few_iterations(block: str) -> str:
    # one step of a fixed kernel: adapting it takes longest
    kernel = "kernel=dgm.ConstrainedHMC(step_size=0.1, n_steps=1, n_geodesic=1), chains=2"
    block = re.sub(r"\bchains=\d+", kernel, block).replace("simulate(200)", "simulate(20)")
    return re.sub(rf"\b({'|'.join(FEW)})=\d+", lambda found: f"{found[1]}={FEW[found[1]]}", block)


@pytest.mark.filterwarnings("ignore")
def test_the_examples_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "interop"}
    # sbi switches the checks of torch's distributions off
    checked = Distribution._validate_args  # type: ignore[attr-defined]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for block in BLOCKS:
            exec(compile(in_few_iterations(block), "docs/interop.md", "exec"), names)
    Distribution.set_default_validate_args(checked)
    assert names["replicates"].shape == (2, 2, 20)
    assert set(names["later"]) == {"line", "y"}
    assert arviz_groups(names["data"]) == {
        *("posterior", "posterior_predictive", "observed_data", "sample_stats", "unconstrained_posterior")
    }
    assert names["ranks"].shape == names["thetas"].shape == (20, 2)
    assert names["coverage"].shape == names["levels"].shape
    assert names["error_bars"].shape == names["found"].shape == (2, 1, 8, 8)
    printed = capsys.readouterr().out
    assert "torch.Size([2, 20, 2]) torch.Size([2, 20, 2])" in printed
    assert "['place', 'spread']" in printed
    assert "tensor(0.)" in printed


def test_control_an_example_that_fails_is_noticed():
    with pytest.raises(NameError), warnings.catch_warnings():
        exec(compile(BLOCKS[1], "docs/interop.md", "exec"), {"__name__": "interop"})
