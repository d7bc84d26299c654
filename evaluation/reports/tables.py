"""Tables as text: of aligned columns for the screen, and in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["aligned", "markdown"]


def aligned(columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> str:
    """A table for the screen, two spaces between its columns: a line of headings, then a line per row.

    Args:
        columns: heading -> format of its values, such as ``"10.2f"``; the width, which the format begins with after a
            ``<`` for columns that begin at the left, is that of the heading too.
        rows: one value per column; text stands as it is, at the side of its column.
    """
    formats = list(columns.values())
    widths = [_width(form) for form in formats]
    lines = [[format(heading, width) for heading, width in zip(columns, widths, strict=True)]]
    for row in rows:
        forms = [width if isinstance(v, str) else form for v, form, width in zip(row, formats, widths, strict=True)]
        lines.append([format(value, form) for value, form in zip(row, forms, strict=True)])
    return "".join("  ".join(cells) + "\n" for cells in lines)


def _width(form: str) -> str:
    """Side and width of a format: ``"10.2f"`` as ``">10"``, ``"<8"`` as it is."""
    side, rest = ("<", form[1:]) if form.startswith("<") else (">", form)
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return side + digits


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "".join(f"{line}\n" for line in lines)
