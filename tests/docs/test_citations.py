"""Every citation in the code resolves in docs/math.md: to a formula, to a place in print, or to a source of its key."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEY = "14 Key of the sources"
MATH = (ROOT / "docs" / "math.md").read_text()
BODY, _ = MATH.split(f"\n## {KEY}")
FOLDERS = ("dgm_infer", "generators", "trainers", "evaluation", "configs", "tests")
CODE = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".yaml")]
# but for the wrong citations below
TEXTS = {path: path.read_text() for path in CODE if path != Path(__file__)}

FORMULA = re.compile(r"\bmath \d+(?:\.\d+)?")
PRINTED = re.compile(
    r"\b[JT] (?:\((?:[A-Z]\.)?\d+(?:\.\d+)?\)|Algorithm \d+|fig\. \d+(?:\.\d+)?|table \w+(?:\.\d+)?|appendix [A-Z]|"
    r"\d+(?:\.\d+)*)"
)
NAME = r"(?:van den |Del )?[A-Z][^\W\d_]+(?:-[A-Z][^\W\d_]+)*"
SOURCE = re.compile(rf"\b({NAME}(?:(?:, | and ){NAME})*(?: et al\.)?) \(?((?:19|20)\d\d)\b")


def one_line(text: str) -> str:
    """Citations may be broken at the end of a line, of a comment too."""
    return re.sub(r"\s*\n\s*(?:# )?", " ", text)


def cited(text: str) -> set[str]:
    text = one_line(text)
    return {*FORMULA.findall(text), *PRINTED.findall(text), *(f"{who} {year}" for who, year in SOURCE.findall(text))}


def section(title: str) -> str:
    return MATH.split(f"\n## {title}")[1].split("\n## ")[0]


@functools.cache
def known() -> frozenset[str]:
    formulas = {f"math {number}" for number in re.findall(r"^##+ (\d+(?:\.\d+)?) ", MATH, re.MULTILINE)}
    in_print = [paragraph for paragraph in MATH.split("\n\n") if paragraph.startswith("In print:")]
    printed = PRINTED.findall(one_line("\n".join([*in_print, section("9 Where print differs")])))
    return frozenset({*formulas, *printed, *sources()})


def sources() -> set[str]:
    """The key's first column."""
    return set(re.findall(r"^\| \*\*(.+?)\*\* \|", section(KEY), re.MULTILINE))


def unresolved(text: str) -> set[str]:
    return cited(text) - known()


def entries() -> dict[str, str]:
    """The text of every formula, by its number."""
    _, *parts = re.split(r"^##+ (.*)\n", MATH, flags=re.MULTILINE)
    titled = zip(parts[::2], parts[1::2], strict=True)
    return {title.split()[0]: text for title, text in titled if re.match(r"\d+\.\d+ ", title)}


def modules(text: str) -> set[str]:
    return set(re.findall(r"`((?:dgm_infer|generators|trainers|evaluation)(?:/\w+)*(?:\.py)?)`", one_line(text)))


def missing(text: str) -> set[str]:
    return {path for path in modules(text) if not (ROOT / path).exists()}


def test_citations_of_the_code_resolve():
    found = {path.relative_to(ROOT).as_posix(): unresolved(text) for path, text in TEXTS.items()}
    assert {path: names for path, names in found.items() if names} == {}
    assert unresolved(BODY) == set()


@pytest.mark.parametrize(
    "citation",
    [
        *("math 3.99", "math 77", "J (999)", "T Algorithm 99", "T 5.50", "J fig. 99", "T appendix Z", "T (E.99)"),
        *("Nobody and Noone 1999", "Nobody, van den Noone and None-Such 2001", "Nobody et al. (2010)"),
    ],
)
def test_an_unknown_citation_is_caught_also_at_the_end_of_a_line(citation):
    for text in (f"as in {citation}.", "# as in " + citation.replace(" ", "\n    # ")):
        assert len(unresolved(text)) == 1


def test_the_code_cites_what_is_looked_for():
    every = set().union(*map(cited, TEXTS.values()))
    assert {"math 4.7", "J Algorithm 1", "T (5.50)", "J fig. 6", "T appendix E", "Neal 2001"} <= every


def test_no_citation_of_a_page_outside_the_repository_is_left():
    outside = re.compile("MATH" + r" ?\d")
    texts = {path: path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))} | TEXTS
    assert [path.name for path, text in texts.items() if outside.search(one_line(text))] == []
    assert outside.search("as in MATH" + " 3")


def test_formulas_are_numbered_without_gaps():
    numbers = [tuple(map(int, number.split("."))) for number in entries()]
    assert len(numbers) == MATH.count("\n### ")
    last = {s: max(n for t, n in numbers if t == s) for s, _ in numbers}
    assert numbers == [(s, n) for s in sorted(last) for n in range(1, last[s] + 1)]


def test_every_formula_names_modules_that_exist():
    assert [number for number, text in entries().items() if not modules(text)] == []
    assert missing(MATH) == set()
    assert missing("`dgm_infer/kernels/nowhere.py`, `generators`") == {"dgm_infer/kernels/nowhere.py"}


def test_the_key_lists_no_source_that_nobody_cites():
    assert sources() - {"J", "T"} - set().union(*map(cited, [BODY, *TEXTS.values()])) == set()
