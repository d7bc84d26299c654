"""Results as HTML, for notebooks and reports: tables, pictures and text, without scripts or files of others."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

STYLE = """
.dgm { color: inherit; font: 14px/1.5 system-ui, sans-serif; max-width: 100%; overflow-x: auto; }
.dgm table { border-collapse: collapse; font-size: 13px; margin: .4em 0; }
.dgm th, .dgm td { padding: .2em .7em; text-align: right; border: 0; border-bottom: 1px solid #8884; }
.dgm th:first-child, .dgm td:first-child { text-align: left; white-space: nowrap; }
.dgm pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; background: #8881; padding: .6em .8em; }
.dgm img { image-rendering: pixelated; max-width: 100%; vertical-align: top; }
.dgm figure { margin: .3em .5em .3em 0; display: inline-block; max-width: 100%; overflow-x: auto; }
.dgm figcaption { font-size: 12px; opacity: .8; }
.dgm .said { font-weight: 600; }
"""

_PAGE = """
:root { color-scheme: light dark; --ground: #fdfdfc; --ink: #1c1e21; --card: #fff; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181c; --ink: #dfe2e6; --card: #f4f4f2; } }
body { background: var(--ground); color: var(--ink); margin: 0 auto; padding: 1.2em; max-width: 1080px; }
h1 { font: 600 24px/1.3 system-ui, sans-serif; margin: .2em 0; }
h2 { font: 600 17px/1.3 system-ui, sans-serif; margin: 1.6em 0 .4em; }
section { overflow-x: auto; }
.dgm table.facts th { vertical-align: top; }
.dgm table.facts td { text-align: left; }
.dgm pre.lines { white-space: pre; overflow-x: auto; }
.dgm img.wide { background: var(--card); padding: 4px; border-radius: 4px; image-rendering: auto; }
.dgm img.wide { max-width: max(100%, 600px); box-sizing: border-box; }
"""


def text(words: Any) -> str:
    """Words as they are, with the characters that HTML would read."""
    return html.escape(str(words))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers have four digits."""

    def cell(value: Any) -> str:
        return text(f"{value:.4g}" if isinstance(value, float) else value)

    first = "".join(f"<th>{text(name)}</th>" for name in head)
    rest = "".join("<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{first}</tr></thead><tbody>{rest}</tbody></table>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names, each with what is said of it."""
    lines = "".join(f"<tr><th>{text(name)}</th><td>{text(said)}</td></tr>\n" for name, said in rows)
    return f'<table class="facts"><tbody>\n{lines}</tbody></table>'


def data_uri(picture: bytes) -> str:
    """A PNG as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def figure(picture: bytes | Path | Any, caption: str, *, width: int | None = None) -> str:
    """A PNG, by its bytes or file, or an array of 8 bits, ``[H, W]`` or ``[H, W, 3]``, with its caption."""
    if isinstance(picture, Path):
        picture = picture.read_bytes()
    elif not isinstance(picture, bytes):
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(picture).save(file, format="PNG")
        picture = file.getvalue()
    shown = f' width="{width}"' if width else ' class="wide"'
    named = text(caption)
    return f'<figure><img alt="{named}"{shown} src="{data_uri(picture)}"><figcaption>{named}</figcaption></figure>'


def block(*parts: str) -> str:
    """What a notebook shows: parts in the style of all, in the colours of the notebook."""
    return f'<div class="dgm"><style>{STYLE}</style>{"".join(parts)}</div>'


def page(title: str, lead: str, sections: Iterable[tuple[str, str]], *, again: int | None = None) -> str:
    """A whole page, in light and in dark: a title, what was found in a line, and sections of HTML with their titles.

    Args:
        again: seconds after which a browser reads it again; None for never.
    """
    refresh = "" if again is None else f'<meta http-equiv="refresh" content="{again}">'
    style = f"<style>{STYLE}{_PAGE}</style>"
    body = "".join(f"<section><h2>{text(name)}</h2>{part}</section>\n" for name, part in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1">{refresh}<title>{text(title)}</title>\n{style}'
        f'</head>\n<body><main class="dgm"><h1>{text(title)}</h1><p>{text(lead)}</p>\n{body}</main></body></html>\n'
    )
