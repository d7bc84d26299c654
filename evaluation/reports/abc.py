"""Tables of the ABC benchmark."""

from statistics import median
from typing import Any

from .tables import markdown

__all__ = ["chains_table", "sequential_table"]


def chains_table(record: dict[str, Any]) -> str:
    """Seconds of chains in one call, and of as many chains one by one."""
    chains = record["chains"]
    n, evaluations = chains["chains"], chains["evaluations"]
    together, alone = (median(chains[f"seconds_{name}"]) for name in ("together", "alone"))
    rows = [
        [f"{n} chains in one call", f"{together:.3g}", f"{together:.3g}", f"{evaluations['together']:.1f}", ""],
        [
            f"one chain, {n} times",
            f"{alone:.3g}",
            f"{n * alone:.3g}",
            f"{evaluations['alone']:.1f}",
            f"{chains['ratio']:.0f}",
        ],
    ]
    header = [
        "",
        "seconds of a call",
        f"seconds of {n} chains",
        "evaluations per transition",
        "times as long",
    ]
    return markdown(header, rows)


def sequential_table(record: dict[str, Any]) -> str:
    """Every method that ran: simulations, seconds, errors and seconds to equal effective size."""
    rows = [
        [
            label,
            str(row["particles"]),
            f"{row['simulations']:.0f}",
            f"{row['seconds']:.3g}",
            f"{row['ess']:.0f}",
            f"{row['rms_error']:.3f}",
            f"{row['effective']:.0f}",
            f"{row['simulations'] / row['effective']:.0f}",
            f"{row['seconds_per_1000']:.3g}",
        ]
        for label, row in record["sequential"].items()
        if "error" not in row
    ]
    header = [
        *("SMC-ABC", "particles", "simulations", "seconds", "ESS of weights", "rms error of means"),
        *("effective draws by the errors", "simulations per one", "seconds per 1000"),
    ]
    return markdown(header, rows)
