"""The Python of the README runs as printed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_example_is_short():
    assert len(BLOCKS[0].strip().splitlines()) <= 18


def as_printed(block: str) -> str:
    return block


def in_few_iterations(block: str) -> str:
    """The same calls, of which every one takes seconds."""
    for name, few in (("warmup", 0), ("draws", 5), ("temperatures", 5)):
        block = re.sub(rf"\b{name}=\d+", f"{name}={few}", block)
    return block


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("edit", [in_few_iterations, pytest.param(as_printed, marks=pytest.mark.slow)])
def test_the_examples_run(edit, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in BLOCKS:
        exec(compile(edit(block), "README.md", "exec"), names)
    assert names["completions"].shape == (16, 5, 8, 8)
    assert (names["completions"][..., :4, :] == names["image"][:4]).all()
    assert names["points"].square().sum(-1).allclose(names["points"].new_tensor(2.0))
    assert (tmp_path / "posterior.nc").is_file()
    assert "r_hat" in capsys.readouterr().out
