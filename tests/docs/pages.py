"""Pages of docs as programs: their examples, and what they print."""

import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["examples", "few_iterations", "printed", "unlike"]

DOCS = Path(__file__).parents[2] / "docs"
_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?"
_ESTIMATE = re.compile(rf"({_NUMBER}) \+- ({_NUMBER})")


def examples(page: str) -> list[str]:
    """The examples of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def printed(page: str) -> list[str]:
    """The lines that a page says its examples print."""
    texts: list[str] = re.findall(r"```text\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [line for text in texts for line in text.splitlines()]


def few_iterations(block: str) -> str:
    """An example as short as it can be, to see that it runs."""
    # one step of a fixed kernel: adapting it takes longest
    kernel = "dgm.ConstrainedHMC(step_size=0.1, n_steps=1, n_geodesic=1), chains=2"
    for long, short in (
        (r"chains=\d+, warmup=\d+, draws=\d+", f"{kernel}, warmup=0, draws=2"),
        (r"Normal, steps=\d+", "Normal, steps=5"),
        (r"AIS\(temperatures=\d+\), chains=\d+", "AIS(temperatures=4, pilot_temperatures=4), chains=4"),
    ):
        block = re.sub(long, short, block)
    return block


def unlike(said: list[str], found: list[str], exact: float = 0.02) -> Iterator[str]:
    """Lines that differ: in words; in an estimate ``a +- b`` by 5 standard errors, combined; in a number otherwise.

    Numbers in scientific notation are rounding errors, of which only the order counts.

    Args:
        said, found: lines of a page, and of a run.
        exact: difference of other numbers, which are rounded.
    """
    if len(said) != len(found):
        yield f"{len(said)} lines, not {len(found)}"
    for one, other in zip(said, found, strict=False):
        if re.sub(_NUMBER, "#", one) != re.sub(_NUMBER, "#", other):
            yield f"{one!r}, not {other!r}"
            continue
        for (a, s), (b, t) in zip(_ESTIMATE.findall(one), _ESTIMATE.findall(other), strict=True):
            if abs(float(a) - float(b)) > 5 * (float(s) ** 2 + float(t) ** 2) ** 0.5:
                yield f"{one!r}, not {other!r}"
        for a, b in zip(*(re.findall(_NUMBER, _ESTIMATE.sub("", line)) for line in (one, other)), strict=True):
            if abs(float(a) - float(b)) > (1e-6 if "e" in a else exact):
                yield f"{one!r}, not {other!r}"
