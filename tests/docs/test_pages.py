"""Pages of the site: every example of the how-to pages runs, every link leads somewhere, every page is in the menu."""

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from tests.docs.pages import DOCS, examples

ROOT = DOCS.parent
HOWTO = sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / "howto").glob("*.md"))
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
_LINK = re.compile(r"\]\(((?!\w+:)[^)\s]+)\)")


@pytest.mark.parametrize("page", HOWTO)
def test_the_examples_of_a_how_to_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in examples(page):
            exec(compile(block, page, "exec"), names)
    assert " at 0x" not in capsys.readouterr().out


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in plain}


def dead_links(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere: to no file, or no heading of it."""
    dead = []
    for link in _LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)):
        name, _, anchor = link.partition("#")
        target = page if not name else Path(os.path.normpath(page.parent / name))
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", [*(f"docs/{page}" for page in PAGES), "README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    assert dead_links(ROOT / page, (ROOT / page).read_text()) == []


def test_control_a_dead_link_is_noticed():
    page = DOCS / "tour.md"
    assert dead_links(page, "[a](nowhere.md) [b](math.md#nothing-of-this) [c](math.md) [d](https://x.org)") == [
        "nowhere.md",
        "math.md#nothing-of-this",
    ]


def in_menu(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry if isinstance(entry, list) else entry.values()) for page in in_menu(part)]


def test_every_page_is_in_the_menu_once():
    menu = in_menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text().replace("!!python/name:", ""))["nav"])
    results = {f"results/{path.name}" for path in (ROOT / "evaluation" / "results").glob("*.md")}
    assert sorted(menu) == sorted({*PAGES, *results, "index.md", "CONTRIBUTING.md"})


def test_every_picture_of_the_documentation_is_in_the_gallery():
    shown = set(re.findall(r"\]\((\w+\.png)\)", (DOCS / "gallery.md").read_text()))
    assert shown == {path.name for path in DOCS.glob("*.png")}


def test_the_messages_of_the_faq_are_those_of_the_package():
    """What a heading quotes is in the source, so that a search for a message finds the page."""
    source = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        for folder in ("dgm_infer", "generators", "evaluation/commands")
        for path in (ROOT / folder).rglob("*.py")
    )
    quoted = re.findall(r"^## `(.*)`$", (DOCS / "faq.md").read_text(), re.MULTILINE)
    assert len(quoted) > 12
    assert [message for message in quoted if not all(part.strip() in source for part in message.split("..."))] == []


@pytest.mark.parametrize("word", ["mask", "deblur", "colour", "gpu", "log-likelihood"])
def test_what_people_search_for_is_in_a_title_or_text_of_the_first_pages(word):
    pages = [*HOWTO, "faq.md", "glossary.md", *(page for page in PAGES if page.startswith("tutorials/"))]
    assert any(word in (DOCS / page).read_text().lower() for page in pages)
