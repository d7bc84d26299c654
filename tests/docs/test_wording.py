"""Plain wording: phrases that readers stumbled over, and their kind, are in no text of the project."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("dgm_infer", "generators", "trainers", "evaluation", "configs", "docs")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "mkdocs.yml", "Makefile")
TEXTS = [ROOT / page for page in PAGES] + [
    path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".md", ".yaml")
]

_COUNTED = "draw|gradient|evaluation|iteration|transition|number|step|value|second|byte|call|simulation|Jacobian"
_EACH = "chain|problem|kept draw|draw|iteration|transition|image|row"
KINDS = {
    "per chain, not a chain": rf"\b(?:{_COUNTED})s an? (?:{_EACH})\b",
    "no sentence begins with a dangling Of": r'(?:^|(?<=[.;:] )|(?<=""")) *(?:#:? )?Of (?!course)[a-z0-9`]',
    "is not an X, not is no X": r"(?<![Tt]here )(?<![Ww]here )\b(?:is|are|was|were) no "
    r"(?!more\b|longer\b|less\b|fewer\b|one\b|doubt|larger|smaller|better|worse|faster|slower|shorter)[a-z]+",
    "expensive, not dear": r"\bdear(?:er|est)?\b",
    "again, not anew": r"\banew\b",
    "in vain, or wasted": r"\bfor nothing\b",
    "1.5 times as fast": r"\bhalf as fast again\b|\bhalf as long again\b",
    "negated, reversed": r"\bturned round\b",
    "in chunks": r"\bworked off\b",
}
PHRASES = (
    "falls to 0.05 of its start",
    "strand on the way",
    "moves travel",
    "must show temperatures",
    "each the other's second try",
    "the way up that they were taken",
    "let it compute in its inputs' type",
    "the first must be the smaller",
    "nothing is in the way",
    "nobody knows of what",
    "none that the decoder gives",
    "0.1 of their size away",
    "there is nothing in it to condition on",
    "misses the observation by",
    "Above which no step size is used",
    "a range (low, high) of such",
    "a whole number, 1 or more",
    "right as the chains grow",
    "of a start that is not given",
    "have not travelled",
    "say little",
    "seen too small",
    "of where its chains began",
    "of prior plus beta times distortion",
    "hardly makes such data",
    "of which nothing has been told",
    "over all of which no mean",
    "make up for no energy",
    "numbers have 32 bits",
    "from too high an energy",
    "looks as if it had not",
    "of a start of its own the points",
    "no matter of a metric",
    "another function of its inputs than it seems",
    "worth their rounding",
    "is not its end",
)


def found(text: str) -> list[str]:
    """What a text has of the kinds and phrases, with the kind."""
    matches = ((kind, match[0]) for kind, words in KINDS.items() for match in re.finditer(words, text, re.MULTILINE))
    kinds = [f"{words.strip()!r}: {kind}" for kind, words in matches]
    return kinds + [phrase for phrase in PHRASES if phrase in text]


@pytest.mark.parametrize("folder", [*FOLDERS, "pages"])
def test_texts_are_plain(folder):
    paths = [path for path in TEXTS if (path.parent == ROOT) == (folder == "pages")]
    paths = [path for path in paths if folder == "pages" or path.is_relative_to(ROOT / folder)]
    assert paths
    odd = {str(path.relative_to(ROOT)): words for path in paths if (words := found(path.read_text()))}
    assert odd == {}


@pytest.mark.parametrize(
    ("odd", "plain"),
    [
        ("16 gradients a chain", "16 gradients per chain"),
        ('"""Of the moves above."""', '"""Acceptance of the moves above."""'),
        ("A bound is no fault", "A bound is not a fault; there is no fault"),
        ("gradients are dear", "gradients are expensive"),
        ("chains came to it anew", "chains came to it again"),
        ("the model hardly makes such data", "such data are unlikely under the model"),
    ],
)
def test_control_odd_wording_is_noticed(odd, plain):
    assert len(found(odd)) == 1
    assert found(plain) == []
