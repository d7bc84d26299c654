"""``report.html`` of a run folder: one file that holds what was asked, what was found, and how to go on."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from dgm_infer.files import write_file
from dgm_infer.html import figure, page, table, text

__all__ = ["REPORT", "code", "frame", "pictures", "said", "write_report"]

REPORT = "report.html"
"""Its name in the folder of a run."""


def code(words: str) -> str:
    """Lines as they are: a configuration, commands, a table of text."""
    return f'<pre class="lines">{text(words.strip())}</pre>'


def said(words: object) -> str:
    """Sentences, a finding a line."""
    return f"<pre>{text(words)}</pre>"


def frame(values: pd.DataFrame, label: str = "", n: int = 12) -> str:
    """The first rows of a table, with its index."""
    head = (label, *map(str, values.columns))
    return table(
        head, ((str(index), *row) for index, row in zip(values.index, values.head(n).to_numpy(), strict=False))
    )


def pictures(files: Iterable[Path], caption: str | None = None) -> str:
    """Pictures of a run folder, those that are there, with this caption or their names."""
    return "".join(figure(file, caption or file.stem.replace("_", " ")) for file in files if file.is_file())


def write_report(folder: Path, title: str, lead: str, sections: Iterable[tuple[str, str]]) -> None:
    """Write the page, leaving out sections without content.

    Raises:
        ArgumentError: the file cannot be written.
    """
    write_file(folder / REPORT, page(title, lead, [(name, body) for name, body in sections if body]))
