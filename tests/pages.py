"""The code of the pages in docs/, as tests run it."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[str]:
    """The examples of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def in_few_iterations(block: str) -> str:
    # one step of a fixed kernel: adapting it takes longest
    kernel = "dgm.ConstrainedHMC(step_size=0.1, n_steps=1, n_geodesic=1), chains=2"
    block = re.sub(r"\bchains=\d+", kernel, block)
    return re.sub(r"\b(warmup|draws)=\d+", lambda found: f"{found[1]}={'0' if found[1] == 'warmup' else '2'}", block)
