"""Estimates of log evidence as every method reports them, ours and those of other libraries, and their table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from dgm_infer import Evidence

from .tables import aligned

__all__ = ["Estimates", "caveats", "table"]


@dataclass(frozen=True)
class Estimates:
    """A method's estimates of log p(x) of some images, and their cost.

    Attributes:
        label: label in tables and pictures.
        log_z: ``[n]``, one per image.
        std_error: ``[n]``.
        status: ``"unbiased"`` (of the evidence itself), ``"consistent"``, ``"lower"``, ``"upper"``, ``"heuristic"``.
        seconds: wall-clock seconds for all images.
        gradient_evaluations: gradients of the target's energy per image, over all its chains; 0 if none is needed.
        notes: further values for JSON.
    """

    label: str
    log_z: Tensor
    std_error: Tensor
    status: str
    seconds: float
    gradient_evaluations: int
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, label: str, evidence: Evidence) -> Self:
        """Those of a result of :func:`dgm_infer.log_evidence`, of any batch shape."""
        chains = evidence.dof + 1
        return cls(
            label,
            evidence.log_z.reshape(-1).cpu(),
            evidence.std_error.reshape(-1).cpu(),
            evidence.status,
            evidence.diagnostics["seconds"],
            evidence.diagnostics["gradient_evaluations"] * chains,
        )

    @property
    def mean(self) -> float:
        """Over the images."""
        return float(self.log_z.double().mean())

    @property
    def mean_error(self) -> float:
        """Standard error of :attr:`mean` for these very images: their estimates' errors are independent."""
        return float(self.std_error.double().square().sum().sqrt() / len(self.std_error))

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "mean": self.mean,
            "mean_error": self.mean_error,
            "status": self.status,
            "seconds": self.seconds,
            "gradient_evaluations": self.gradient_evaluations,
            "log_z": self.log_z.tolist(),
            "std_error": self.std_error.tolist(),
            **self.notes,
        }


def table(rows: Sequence[Estimates]) -> str:
    """One row per method; the errors are standard errors, of the mean over the images and of the typical image."""
    columns = {
        "method": f"<{max(len('method'), *(len(row.label) for row in rows))}",
        "status": "<10",
        "mean log p(x)": "13.3f",
        "error": "6.3f",
        "per image": "8.3f",
        "gradients": "9d",
        "seconds": "7.1f",
    }
    cells = (
        (
            row.label,
            row.status,
            row.mean,
            row.mean_error,
            float(row.std_error.double().median()),
            row.gradient_evaluations,
            row.seconds,
        )
        for row in rows
    )
    return aligned(columns, cells)


def caveats(label: str, evidence: Evidence) -> list[str]:
    """Lines that name the problems (images, by index) with unreliable estimates, and why."""
    return [f"{label}: {finding.line}" for finding in evidence.diagnose()]
