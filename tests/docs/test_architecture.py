"""The page on the architecture names what is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PICTURE = (ROOT / "docs" / "architecture.svg").read_text()


def test_files_and_folders_that_the_page_names_exist():
    paths = re.findall(r"`((?:dgm_infer|evaluation|tests)/[\w/.]+)`", PAGE)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_picture_has_every_room():
    held = (ROOT / "dgm_infer").iterdir()
    rooms = {path.stem for path in held if path.suffix == ".py" or (path / "__init__.py").exists()}
    drawn = set(re.findall(r"\w+", " ".join(re.findall(r"<text[^>]*>([^<]*)<", PICTURE))))
    # of a few lines each, which everything may import
    assert rooms - drawn <= {"__init__", "differences", "html", "probe"}


def test_a_walk_through_sample_is_six_files_which_import_one_another():
    walk = re.findall(r"^\d\. `([\w/]+)\.py`", PAGE, re.MULTILINE)
    assert len(walk) == 6
    modules = [path.replace("/", ".").removeprefix("dgm_infer.sampling.") for path in walk]
    assert modules[:2] == ["sample", "run"]
    sources = {path: (ROOT / f"{path}.py").read_text() for path in walk}
    assert "from .run import" in sources["dgm_infer/sampling/sample"]
    for name in modules[2:5]:
        assert f"from .{name} import" in sources["dgm_infer/sampling/run"]
    assert "kernel.step(" in sources["dgm_infer/sampling/execution"]
    assert "def step(" in sources[walk[-1]]
