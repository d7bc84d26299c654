"""Tables of the published comparisons, from what ``dgm-infer reproduce`` wrote."""

from typing import Any

from .tables import markdown

__all__ = ["GOAL", "boltzmann_table", "gp_probit_table", "quantile_table", "radon_table", "seconds_to"]

# The error in log Z that times are given to.
GOAL = 0.1

# as the experiments name them
_NAMES = {
    "SMC": "SMC, frozen schedule",
    "ST": "simulated tempering",
    "Gibbs CT": "Gibbs tempering",
    "CT-HMC": "joint tempering",
    "AIS, diagonal": "AIS, diagonal base",
}


def quantile_table(record: dict[str, Any]) -> str:
    """Samplers of the generalised lambda distribution: R-hat, efficiency, and posterior means with their spread."""
    rows = []
    for label, row in record["results"]["methods"].items():
        latents = row["latents"].values()
        least = min(latent["ess_per_second"] for latent in latents)
        means = [f"{latent['mean']:.3f} ({latent['sd']:.3f})" for latent in latents]
        rows.append([label, f"{row['seconds']:.0f}", f"{row['max_r_hat']:.3f}", f"{least:.3g}", *means])
    names = list(next(iter(record["results"]["methods"].values()))["latents"])
    return markdown(["", "seconds", "R-hat, worst", "ESS per second, worst", *names], rows)


def gp_probit_table(record: dict[str, Any]) -> str:
    """Pseudo-marginal samplers of a classifier: what a draw costs, and what it is worth."""
    rows = []
    for label, row in record["results"]["methods"].items():
        per_cubic = sorted(row["ess_per_1000_cubic_operations"].values())
        median = (per_cubic[(len(per_cubic) - 1) // 2] + per_cubic[len(per_cubic) // 2]) / 2
        rows.append(
            [
                label,
                str(row["draws"]),
                f"{row['seconds']:.0f}",
                f"{row['target_acceptance']:.2f}",
                f"{row['estimates_per_draw']:.1f}",
                f"{row['cubic_operations_per_draw']:.1f}",
                f"{per_cubic[0]:.2f}",
                f"{median:.2f}",
                f"{row['r_hat']:.2f}",
                str(row["longest_stay"]),
            ]
        )
    header = ["sampler", "draws", "seconds", "accepted", "estimates per draw", "cubic operations per draw"]
    return markdown([*header, "ESS per 1000 of them, worst", "median", "R-hat", "longest stay"], rows)


def boltzmann_table(record: dict[str, Any]) -> str:
    """Errors of every method at every length of its runs; the smallest of a column in bold."""
    methods, plain = record["results"]["methods"], record["results"]["plain_hmc"]
    errors = {label: [_errors(entry) for entry in entries] for label, entries in methods.items()}
    best = [min(column) for column in zip(*(row for rows in errors.values() for row in rows), strict=True)]
    rows = []
    for label, entries in methods.items():
        for i, (entry, row) in enumerate(zip(entries, errors[label], strict=True)):
            cells = [format(error, form) for error, form in zip(row, (".3f", ".2f", ".2f"), strict=True)]
            cells = [f"**{c}**" if e == b else c for c, e, b in zip(cells, row, best, strict=True)]
            name = "" if i else _NAMES.get(label, label)
            effort = [f"{entry['seconds']:.1f}", f"{entry['gradient_evaluations'] / 1e6:.1f}e6"]
            rows.append([name, *effort, *cells, f"{seconds_to(entry):.0f}"])
    moments = (f"{plain[name]['value']:.2f}" for name in ("mean", "covariance"))
    rows.append(["plain HMC", f"{plain['seconds']:.1f}", "", "", *moments, f"R-hat {plain['max_r_hat']:.1f}"])
    header = ["method", "seconds", "gradients", "log Z", "mean", "covariance", f"seconds to {GOAL:g} in log Z"]
    return markdown(header, rows)


def _errors(entry: dict[str, Any]) -> tuple[float, float, float]:
    return entry["log_z_rmse"], entry["mean"]["value"], entry["covariance"]["value"]


def seconds_to(entry: dict[str, Any]) -> float:
    """Seconds to an error of :data:`GOAL` in log Z, which falls with the square root of time."""
    return entry["seconds"] * (entry["log_z_rmse"] / GOAL) ** 2


def radon_table(record: dict[str, Any]) -> str:
    """Estimates of log Z, without the bound."""
    rows = [
        [_NAMES.get(label, label), f"{row['mean']:.2f}", f"{row['mean_error']:.2f}", f"{row['seconds']:.0f}"]
        for label, row in record["results"]["methods"].items()
        if row["status"] != "lower"
    ]
    return markdown(["method", "log Z", "standard error", "seconds"], rows)
