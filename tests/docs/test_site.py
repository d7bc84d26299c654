"""The site as it is built: without a warning, links and anchors that lead somewhere, formulas and sections whole."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from docs.formulas import formula

ROOT = Path(__file__).parents[2]
EXTERNAL = re.compile(r"(https?:|mailto:|data:|//)")


class Page(HTMLParser):
    """The anchors of a page and where it points."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.anchors |= {named[key] for key in ("id", "name") if named.get(key)}
        if named.get("href") and tag == "a":
            self.links.append(named["href"])
        self.loaded += [named[key] for key in ("src", "href") if named.get(key) and tag != "a"]


def dead(site: Path, pages: dict[str, Page]) -> list[str]:
    """Links and files of pages that lead nowhere."""
    found = []
    for name, page in pages.items():
        for link in page.links + page.loaded:
            address, anchor = urldefrag(link)
            target = os.path.normpath(os.path.join(os.path.dirname(name), unquote(address))) if address else name
            if EXTERNAL.match(link) or link.startswith("/"):
                continue
            known = pages[target].anchors if target in pages else {unquote(anchor)}
            if not (site / target).is_file() or (anchor and unquote(anchor) not in known):
                found.append(f"{name}: {link}")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built by the tools of the extra ``docs`` in a folder of their own."""
    tools, built = tmp_path_factory.mktemp("tools"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--target", str(tools)]
    subprocess.run([*pip, "jupytext>=1.16", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.25"], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tools), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(built)]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "WARNING" not in made.stderr
    return built


@pytest.mark.slow
def test_the_site_is_built_whole(site):
    pages = {path.relative_to(site).as_posix(): Page(path.read_text()) for path in site.rglob("*.html")}
    pages.pop("404.html")
    assert len(pages) > 60
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert dead(site, pages) == []
    # nothing is loaded from elsewhere
    assert [address for page in pages.values() for address in page.loaded if EXTERNAL.match(address)] == []
    # the control
    pages["index.html"].links += ["nowhere.html", "math.html#nothing"]
    assert dead(site, pages) == ["index.html: nowhere.html", "index.html: math.html#nothing"]


# a section that was not understood is a paragraph; a return value that begins with a role is cut at its first colon
BROKEN = re.compile(
    r"<p>(?:Args|Returns|Raises|Attributes):|:(?:class|func|meth|attr):<|<td>\s*<code>(?:a|an|as|what [^<]*)</code>"
)


@pytest.mark.slow
def test_sections_of_the_reference_are_whole(site):
    pages = list((site / "reference").glob("*.html"))
    assert len(pages) > 10
    found = {path.name: BROKEN.findall(path.read_text()) for path in pages}
    assert {name: parts for name, parts in found.items() if parts} == {}
    # the control
    assert BROKEN.search("<p>Returns: the draws</p>")


@pytest.mark.slow
@pytest.mark.parametrize("word", ["mask", "deblur", "colour", "gpu", "log-likelihood"])
def test_the_index_of_the_search_has_the_words_that_people_look_for(site, word):
    documents = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    first = [page for page in documents if page["location"].startswith(("howto/", "tutorials/"))]
    assert any(re.search(rf"\b{word}\b", f"{page['title']} {page['text']}".lower()) for page in first)


FORMULAS = {
    "u' = u - J^T G^-1 J u": [
        "<msup><mi>u</mi><mrow><mo>′</mo></mrow></msup>",
        "<msup><mi>J</mi><mrow><mi mathvariant='normal'>T</mi></mrow></msup>",
        "<msup><mi>G</mi><mrow><mo>−</mo><mn>1</mn></mrow></msup>",
    ],
    "phi(u1) <= sqrt(2 D)": ["<mi>φ</mi>", "<msub><mi>u</mi><mn>1</mn></msub>", "≤", "<msqrt><mrow><mn>2</mn>"],
    "sum_{i<k} r_i": ["<msub><mo", "∑", "&lt;", "<msub><mi>r</mi><mrow><mi>i</mi></mrow></msub>"],
    "Dx, Dy": ["<msub><mi>D</mi><mi>x</mi></msub>"],
}


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_are_written_as_mathml(text):
    made = formula(text)
    assert [part for part in FORMULAS[text] if part not in made] == []


def test_every_formula_of_the_mathematics_is_one_of_matched_tags():
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / "math.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) > 80
    for block in blocks:
        made = formula(block)
        opened = []
        for end, tag, empty in re.findall(r"<(/?)(\w+)[^>]*?(/?)>", made):
            if end:
                assert opened.pop() == tag, block
            elif not empty:
                opened.append(tag)
        assert opened == [], block
        # letters and digits are all there
        assert len(re.sub(r"<[^>]+>", "", made)) > 0.4 * len(block.replace(" ", "")), block
