"""Tables of the published comparisons of samplers, from what ``dgm-infer reproduce`` wrote."""

from typing import Any

from .tables import markdown

__all__ = ["gp_probit_table", "quantile_table"]


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
