"""What the site shows besides this folder: README.md as its first page, CONTRIBUTING.md, and the measured results.

Links in these files are written for readers of the repository; here they are pointed at the same files of the site.
"""

import posixpath
import re
from pathlib import Path

import jupytext
from formulas import rendered
from mkdocs.structure.files import File

README, CONTRIBUTING, RESULTS, TUTORIALS = "README.md", "CONTRIBUTING.md", "evaluation/results", "docs/tutorials"
MATH = "math.md"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
# the first colon is gone where a description begins with a role
_ROLE = re.compile(r"(?<![\w/]):?(?:attr|class|data|func|meth):(?=<code>)")


def on_files(files, config):
    """Add the files that lie outside ``docs``."""
    root = Path(config.config_file_path).parent
    for path in sorted((root / TUTORIALS).glob("*.md")):
        # the same as a notebook, for those who would rather run than read
        uri = path.relative_to(root / "docs").with_suffix(".ipynb").as_posix()
        notebook = jupytext.writes(jupytext.reads(path.read_text(), fmt="md"), fmt="ipynb")
        files.append(File.generated(config, uri, content=notebook))
    for path in [root / README, root / CONTRIBUTING, *sorted((root / RESULTS).iterdir())]:
        source = path.relative_to(root).as_posix()
        files.append(File.generated(config, _uri(source), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Follow the links from where the page's source lies in the repository."""
    here = page.file.src_uri
    folder = posixpath.dirname(_source(here))

    def point(link: re.Match) -> str:
        target = _uri(posixpath.normpath(posixpath.join(folder, link[1])))
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    text = _LINK.sub(point, markdown)
    if here == MATH:
        text = rendered(text)
    if folder == TUTORIALS:
        title, _, rest = text.partition("\n")
        name = posixpath.basename(here).replace(".md", ".ipynb")
        text = f"{title}\n\n[This page as a notebook]({name})\n{rest}"
    return text


def on_page_content(html, page, config, files):
    """Leave out the roles of docstrings, as in ``:class:`Name```, which Markdown does not know."""
    return _ROLE.sub("", html)


def _uri(source: str) -> str:
    """Where a file of the repository is found in the site."""
    if source == README:
        return "index.md"
    return source.replace(RESULTS, "results", 1).removeprefix("docs/")


def _source(uri: str) -> str:
    if uri == "index.md":
        return README
    if uri == CONTRIBUTING:
        return uri
    return uri.replace("results/", f"{RESULTS}/", 1) if uri.startswith("results/") else f"docs/{uri}"
