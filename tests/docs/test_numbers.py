"""The measured tables of docs are those of evaluation/results, which commands write."""

from pathlib import Path

import pytest
from PIL import Image

from evaluation.benchmarks import (
    abc,
    coverage,
    image_tables,
    methods,
    modes,
    multimodal,
    programs,
    replicas,
    samplers,
    scaling,
    targets,
)
from evaluation.benchmarks.documents import PAGES, read_record, renewed

ROOT = Path(__file__).parents[2]

STALE = {
    "docs/evidence.md": ("-1081.40", "-1081.41"),
    "docs/completions.md": (": nearest training images |", ": nearest images |"),
    "docs/images.md": ("largest difference of means |", "largest difference |"),
    "docs/samplers.md": ("simulations per one |", "simulations |"),
    "docs/programs.md": ("| traced / by hand |", "| ratio |"),
}


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_up_to_date(page):
    # if not: python -m evaluation.benchmarks.documents
    printed = (ROOT / page).read_text()
    assert renewed(printed) == printed
    stale = printed.replace(*STALE[page])
    assert stale != printed
    assert renewed(stale) == printed


@pytest.mark.parametrize(
    ("record", "name", "table"),
    [
        ("methods", "methods", methods.table),
        ("coverage", "coverage", coverage.page),
        ("modes", "modes", modes.page),
        ("multimodal", "multimodal", multimodal.page),
        ("replicas", "replicas", replicas.page),
        ("targets", "targets", targets.page),
        ("programs", "programs", programs.page),
        ("abc", "abc", abc.page),
        ("scaling", "scaling", scaling.table),
        ("images_cpu", "images", image_tables.page),
        ("samplers", "samplers", samplers.page),
    ],
)
def test_published_tables_are_those_of_their_records(record, name, table):
    assert table(read_record(record)) == (ROOT / "evaluation" / "results" / f"{name}.md").read_text()


def test_the_crossover_is_drawn_from_the_record():
    # if not: python -m evaluation.benchmarks.crossover
    with Image.open(ROOT / "docs" / "crossover.png") as picture:
        assert picture.info["Source"] == read_record("images_cpu")["date"]
