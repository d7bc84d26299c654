"""Formulas of docs/math.md, which are written in plain text, as MathML: browsers render it without scripts or fonts.

The notation is that of the page: `x_i`, `x_{i+1}`, `A^T`, `exp(-phi)`, names of Greek letters, `sqrt(a)`, `sum_k`. What
it does not know stays as it is written.
"""

import re
from collections.abc import Iterator
from html import escape

__all__ = ["formula", "rendered"]

_SYMBOLS = {
    "beta": "β", "chi": "χ", "eps": "ε", "gamma": "γ", "kappa": "κ", "lam": "λ", "mu": "μ", "phi": "φ", "pi": "π",
    "psi": "ψ", "sigma": "σ", "zeta": "ζ", "Delta": "Δ", "Lambda": "Λ", "Phi": "Φ",
}  # fmt: skip
_BIG = {"sum": "∑", "prod": "∏", "integral": "∫", "int": "∫", "grad": "∇"}
_OPERATORS = {
    "<=": "≤", ">=": "≥", "!=": "≠", "->": "→", "<-": "←", "+-": "±", "||": "‖", "...": "…", "-": "−", "~": "∼",
    ".": "·",
}  # fmt: skip
_ACCENTS = {"hat": "^", "bar": "¯"}
_TOKEN = re.compile(
    r"(?P<space> +)|(?P<accent>[A-Za-z]-(?:hat|bar))|(?P<name>[a-z]{3,}_[a-z]{3,}|E-BFMI)|(?P<word>[A-Za-z]+\d*)"
    r"|(?P<number>\d+(?:\.\d+)?)|(?P<operator><=|>=|!=|->|<-|\+-|\|\||\.\.\.|.)"
)
_OPEN, _CLOSE = {"(": ")", "[": "]", "{": "}"}, set(")]}")
# names that end in a digit which is not an index
_WHOLE = re.compile(r"[A-Za-z]{2,}\d+")


def rendered(page: str) -> str:
    """The Markdown of a page whose blocks of code without a language are formulas."""
    return re.sub(r"^```\n(.*?)^```$", lambda block: formula(block[1]), page, flags=re.DOTALL | re.MULTILINE)


def formula(text: str) -> str:
    """HTML of the lines of a block; what two spaces separate may go on in the next line of a narrow page."""
    lines = []
    for line in text.splitlines():
        parts = (part for part in re.split(r" {2,}", line.strip()) if part)
        lines.append("".join(f'<math alttext="{escape(part)}">{_Reader(part).row()}</math>' for part in parts))
    return '<div class="formula">' + "".join(f"<div>{line}</div>" for line in lines) + "</div>"


class _Reader:
    """Reads one formula from left to right."""

    def __init__(self, text: str):
        self._tokens = [(match.lastgroup or "", match[0]) for match in _TOKEN.finditer(text)]
        self._at = 0

    def row(self, end: str = "") -> str:
        """Everything up to a closing bracket, or to the end."""
        return "<mrow>" + "".join(self._parts(end)) + "</mrow>"

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _take(self) -> tuple[str, str]:
        token = self._next()
        self._at += 1
        return token

    def _parts(self, end: str) -> Iterator[str]:
        before = "operator"
        while self._next()[0] != "end" and self._next()[1] != end:
            kind, text = self._next()
            if kind == "space":
                self._take()
                follows = self._next()
                operand = follows[0] in ("word", "name", "number", "accent") or follows[1] in _OPEN
                if follows[1] == "|" and len(self._tokens) > self._at + 1 and self._tokens[self._at + 1][0] == "space":
                    self._take()
                    yield '<mo lspace="0.28em" rspace="0.28em" stretchy="false">|</mo>'
                    before = "operator"
                elif before != "operator" and (operand or follows[1] == "|"):
                    words = before == "word" and follows[0] in ("word", "name") and len(follows[1]) > 1
                    yield f'<mspace width="{"0.33em" if words else "0.17em"}"/>'
                continue
            prefix = before == "operator" and text in ("-", "+")
            before = (
                "word" if kind == "word" and len(text) > 1 else "operator" if self._separates(kind, text) else "one"
            )
            yield self._scripted().replace("<mo", '<mo form="prefix"', prefix)

    @staticmethod
    def _separates(kind: str, text: str) -> bool:
        return kind == "operator" and text not in _CLOSE and text != "|"

    def _scripted(self) -> str:
        """An operand or operator with what stands above and below it."""
        base, below, above = self._atom(), "", ""
        while True:
            text = self._next()[1]
            if text == "_" and not below:
                self._take()
                below = self._script()
            elif text == "^":
                self._take()
                above += self._script()
            elif text in ("'", "*") and base.startswith("<m") and not base.startswith("<mo"):
                self._take()
                above += f"<mo>{'′' if text == chr(39) else '∗'}</mo>"
            else:
                break
        if not (below or above):
            return base
        tag = "msubsup" if below and above else "msub" if below else "msup"
        return f"<{tag}>{base}" + "".join(f"<mrow>{part}</mrow>" for part in (below, above) if part) + f"</{tag}>"

    def _script(self) -> str:
        kind, text = self._take()
        if text in ("-", "+"):
            sign = f"<mo>{_OPERATORS.get(text, text)}</mo>"
            return sign + (self._script() if self._next()[0] in ("word", "number") or self._next()[1] == "(" else "")
        if text in _OPEN and text != "[":
            inside = self.row(_OPEN[text])
            self._take()
            return inside
        if kind == "word" and text not in _SYMBOLS and len(text) <= 2 and text.isalpha():
            script = (
                "".join(f"<mi>{letter}</mi>" for letter in text) if text != "T" else "<mi mathvariant='normal'>T</mi>"
            )
        else:
            script = self._symbol(kind, text)
        # of an index that has an index
        if self._next()[1] == "_":
            self._take()
            script = f"<msub><mrow>{script}</mrow><mrow>{self._script()}</mrow></msub>"
        return script + ("" if self._next()[1] != "'" or not self._take() else "<mo>′</mo>")

    def _atom(self) -> str:
        kind, text = self._take()
        if text == "sqrt":
            if self._next()[0] == "space":
                self._take()
            bracket = self._next()[1] == "("
            if bracket:
                self._take()
                root = self.row(")")
                self._take()
            else:
                root = self._atom()
            return f"<msqrt>{root}</msqrt>"
        return self._symbol(kind, text)

    @staticmethod
    def _symbol(kind: str, text: str) -> str:
        if kind == "number":
            return f"<mn>{text}</mn>"
        if kind == "accent":
            letter, accent = text.split("-")
            return f'<mover accent="true"><mi>{letter}</mi><mo>{_ACCENTS[accent]}</mo></mover>'
        if kind == "name":
            return f"<mtext>{text}</mtext>"
        if kind == "word":
            return _word(text)
        spaced = "" if text not in "/.|()[]{}#" else ' lspace="0" rspace="0"'
        return f'<mo stretchy="false"{spaced}>{escape(_OPERATORS.get(text, text))}</mo>'


def _word(text: str) -> str:
    """A name: a letter, a Greek one, a sum, or letters with an index."""
    if text in _BIG:
        return f'<mo lspace="0.1em" rspace="0.1em">{_BIG[text]}</mo>'
    if text in _SYMBOLS:
        return f"<mi>{_SYMBOLS[text]}</mi>"
    letters = text.rstrip("0123456789")
    if index := text[len(letters) :]:
        if letters in _SYMBOLS or not _WHOLE.fullmatch(text):
            place = "msup" if letters == "chi" else "msub"
            return f"<{place}>{_word(letters)}<mn>{index}</mn></{place}>"
        return f"<mi>{text}</mi>"
    if re.fullmatch("[DN][a-z]", text):
        return f"<msub><mi>{text[0]}</mi><mi>{text[1]}</mi></msub>"
    return f"<mi>{text}</mi>"
