"""What is wrong with a model, its data or a result, how bad it is and what to do about it, in a printable form."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from .html import block, table, text

__all__ = ["Diagnosis", "DiagnosisWarning", "Finding", "Severity", "diagnosis", "finding"]

Severity = Literal["error", "warning", "note", "useless", "misleading", "imprecise"]
_ORDER: tuple[Severity, ...] = get_args(Severity)


class DiagnosisWarning(UserWarning):
    """What a run finds wrong with its own result; ``diagnose()`` of the result says it again.

    ``warnings.filterwarnings("error", category=dgm.diagnosis.DiagnosisWarning)`` turns such findings into errors.
    """


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong; its text is ``what: remedy``."""

    severity: Severity
    """For a model or its data, ``"error"``: conditioning fails or is wrong; ``"warning"``: it may be; ``"note"``: good
    to know. For a result, ``"useless"``: no number can be used; ``"misleading"``: numbers are wrong by more than their
    errors say; ``"imprecise"``: they are right, but rest on few draws, or cost more than they need to."""
    what: str
    """The fault with its numbers and problems."""
    remedy: str = ""
    """What follows from it and what to do; empty where the fault says it."""
    problems: tuple[int, ...] = (0,)
    """Flat indices of the problems it concerns; ``(0,)`` for a run of one problem."""
    code: str = ""
    """The check that found it, of a model or its data."""

    def __str__(self):
        return f"{self.what}: {self.remedy}" if self.remedy else self.what

    @property
    def line(self) -> str:
        """The same with its severity before it, as a warning has it."""
        return f"{self.severity}: {self}"


@dataclass(frozen=True)
class Diagnosis:
    """Findings, worst first: falsy if there are none, and printed one per line.

    ``pandas.DataFrame(diagnosis)`` has one row per finding.
    """

    findings: tuple[Finding, ...]
    numbers: str
    """The numbers that were looked at, in words."""

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self):
        return len(self.findings)

    def __getitem__(self, index: int) -> Finding:
        return self.findings[index]

    def __str__(self):
        width = max(map(len, _ORDER))
        lines = [f"{each.severity:<{width}}  {each}" for each in self.findings]
        return "\n".join(lines) or f"nothing is wrong: {self.numbers}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(each.severity, each.what, each.remedy) for each in self.findings]
        return block(table(("", "what", "remedy"), rows) if rows else f'<p class="said">{text(self)}</p>')


def finding(severity: Severity, what: str, remedy: str, problems: Tensor) -> Finding:
    """A finding on the problems of a mask ``[*batch]``."""
    return Finding(severity, what, remedy, tuple(problems.cpu().reshape(-1).nonzero().flatten().tolist()))


def diagnosis(findings: Iterable[Finding], numbers: str) -> Diagnosis:
    """Findings in order of their severity."""
    return Diagnosis(tuple(sorted(findings, key=lambda each: _ORDER.index(each.severity))), numbers)
