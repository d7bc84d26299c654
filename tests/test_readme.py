"""The Python of the README runs as printed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_example_is_short():
    assert len(BLOCKS[0].strip().splitlines()) <= 18


@pytest.mark.filterwarnings("ignore")
def test_the_examples_run_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert names["completions"].shape == (16, 5, 8, 8)
    assert (names["completions"][..., :4, :] == names["image"][:4]).all()
    assert names["points"].square().sum(-1).allclose(names["points"].new_tensor(2.0))
    assert (tmp_path / "posterior.nc").is_file()
    assert "r_hat" in capsys.readouterr().out
