"""Every example of docs/flows.md runs, and makes what the page says."""

import contextlib
import re

import pytest
import torch

from tests.docs.pages import examples

BLOCKS = examples("flows.md")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_examples_run():
    names: dict = {}
    # the posterior as the page has it, of a flow trained for a fifth of the time
    few = re.compile(r"draws=200")
    with torch.random.fork_rng(), contextlib.redirect_stdout(None):
        for block in BLOCKS:
            short = few.sub("warmup=60, draws=40", block.replace("range(2000)", "range(400)").replace("=400", "=40"))
            exec(compile(short, "docs/flows.md", "exec"), names)
    points = names["points"]
    assert points.shape == (8, 40, 2)
    assert points[..., 0].mean().item() == pytest.approx(0.6, abs=0.05)
    radius = points.norm(dim=-1)
    assert radius.mean().item() == pytest.approx(1, abs=0.15)
    torch.testing.assert_close(names["flow"].inverse(names["x"]), names["u"].float(), atol=1e-3, rtol=0)
    assert dgm_ok(names["dgm"].check(names["diffusion"]))


def dgm_ok(report) -> bool:
    return report.ok and report.codes == ()
