"""The README is short; its Python, and that of the tour, runs as printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readme_is_short():
    assert len(README.split()) <= 500
    (example,) = blocks("README.md")
    assert len(example.strip().splitlines()) <= 15


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(((?!https?://)[^)#]+)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def as_printed(block: str) -> str:
    return block


def in_few_iterations(block: str) -> str:
    """The same calls, of which every one takes seconds."""
    for name, few in (("warmup", 0), ("draws", 5), ("temperatures", 5)):
        block = re.sub(rf"\b{name}=\d+", f"{name}={few}", block)
    return block


EDITS = pytest.mark.parametrize("edit", [in_few_iterations, pytest.param(as_printed, marks=pytest.mark.slow)])


def run(page: str, edit) -> dict:
    names: dict = {}
    for block in blocks(page):
        exec(compile(edit(block), page, "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore")
@EDITS
def test_the_example_of_the_readme_runs(edit, capsys):
    assert run("README.md", edit)["completions"].shape == (16, 5, 8, 8)
    assert "32 observed values" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@EDITS
def test_the_examples_of_the_tour_run(edit, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run("docs/tour.md", edit)
    assert names["completions"].shape == (16, 5, 8, 8)
    assert (names["completions"][..., :4, :] == names["image"][:4]).all()
    assert names["points"].square().sum(-1).allclose(names["points"].new_tensor(2.0))
    assert (tmp_path / "posterior.nc").is_file()
    assert "r_hat" in capsys.readouterr().out
