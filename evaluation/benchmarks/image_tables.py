"""Samplers of completions side by side: the page of ``dgm-infer bench images``, and the tables of the documentation."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..reports.mixing import R_HAT
from ..reports.tables import markdown

__all__ = ["details", "page", "ratios", "sweep_table", "tables"]

Record = Mapping[str, Any]
_RATE = "min_ess_per_second"
_PEERS = ("NUTS on latents", "Pyro NUTS", "Mici with JAX")
# with other chains, starts or dtypes after it
_IN_JAX = ("BlackJAX", "NumPyro")


def tables(record: Record) -> str:
    """All of a record: ratios, every problem, the sweep."""
    parts = [ratios(record)]
    for entry in record["problems"].values():
        parts += [f"\n### {_capital(entry['title'])}\n\n", details(entry)]
    if record["sweep"]:
        parts += ["\n### Sweep of the noise\n\n", sweep_table(record)]
    return "".join(parts)


def ratios(record: Record) -> str:
    """How many times faster, in smallest bulk ESS per second: one row per problem."""
    baselines, in_jax = _baselines(record), _in_jax(record)
    peers = [*_PEERS, *in_jax]
    others = {*baselines, *peers[1:], "default", "NUTS, noise 0.01"}
    rows = []
    for entry in record["problems"].values():
        methods, agreement = entry["methods"], entry.get("agreement") or {}
        default = "default" if "default" in methods else "constrained"
        ours = [label for label in methods if label not in others]
        best = max((_rate(methods, label) or 0 for label in ours), default=0)
        rows.append(
            [
                _capital(entry["title"]),
                *(_ratio(_rate(methods, "constrained"), _rate(methods, label)) for label in baselines),
                *(_ratio(_rate(methods, default), _rate(methods, label)) for label in peers),
                _ratio(_rate(methods, default), best),
                _number(agreement.get("largest")),
            ]
        )
    header = ["problem", *(f"constrained / {label}" for label in baselines)]
    header += [*(f"default / {label}" for label in peers), "default / best of ours", "largest difference of means"]
    return markdown(header, rows)


def details(entry: Record) -> str:
    """One row per method on one problem, and a line for whatever was not measured."""
    if "left_out" in entry and not entry["methods"]:
        return f"Not measured: {entry['left_out']}.\n"
    header = ["method", "ESS/s, smallest", "ESS/s, median", "R-hat, worst", f"R-hat <= {R_HAT}", "constraint error"]
    header += ["chains x draws", "steps per draw", "warm-up, s", "all, s"]
    below, energies = _below_the_best(entry["methods"]), any("energy" in row for row in entry["methods"].values())
    header += [*(["mean energy"] if energies else []), *(["below the best mode, nats"] if below else [])]
    rows, notes = [], []
    for label, row in entry["methods"].items():
        notes += [f"- {label}: {reason}\n" for reason in _reasons(row)]
        if "chains" in row:
            further = [_energy(row)] if energies else []
            further += [f"{below[label]:.2f}" if label in below else "-"] if below else []
            rows.append([_named(label, row), *_cells(row), *further])
    agreement = entry.get("agreement")
    if agreement and agreement["between"]:
        share = f"{agreement['compared']} of {agreement['possible']} comparisons with both R-hat at most {R_HAT}"
        notes.append(
            f"- The means differ by at most {agreement['largest']:.2f} combined standard errors "
            f"({' and '.join(agreement['between'])}), in {share}.\n"
        )
    return markdown(header, rows) + ("\n" + "".join(notes) if notes else "")


def _cells(row: Record) -> list[str]:
    error = row["constraint_error"]
    return [
        _number(row[_RATE]),
        _number(row["median_ess_per_second"]),
        "-" if row["max_r_hat"] is None else f"{row['max_r_hat']:.3f}",
        f"{row['mixed']:.0%}",
        "-" if error is None else f"{error:.0e}",
        f"{row['chains']} x {row['draws']}",
        "-" if row["steps"] is None else f"{row['steps']:.1f}",
        f"{row['warmup_seconds']:.1f}",
        f"{row['seconds']:.1f}",
    ]


def _energy(row: Record) -> str:
    """Energy of all problems together."""
    return f"{sum(row['energy']):.1f}" if "energy" in row else "-"


def _below_the_best(methods: Mapping[str, Record]) -> dict[str, float]:
    """By how much the best mode that a method visited has less mass than the best of all, on its worst image."""
    # none where no descent arrived
    masses = {label: row["mass"] for label, row in methods.items() if None not in row.get("mass", [None])}
    best = [max(column) for column in zip(*masses.values(), strict=True)]
    return {label: max(b - own for b, own in zip(best, row, strict=True)) for label, row in masses.items()}


def sweep_table(record: Record) -> str:
    """Smallest bulk ESS per second by method and width of the noise."""
    rows = []
    for entry in record["sweep"].values():
        widths = sorted({float(sd) for by_sd in entry["methods"].values() for sd in by_sd}, reverse=True)
        for sd in widths:
            cells = [_number(by_sd.get(f"{sd:g}", {}).get(_RATE)) for by_sd in entry["methods"].values()]
            worst = [by_sd.get(f"{sd:g}", {}).get("max_r_hat") for by_sd in entry["methods"].values()]
            shown = [f"{cell} (R-hat {r:.2f})" if r else cell for cell, r in zip(cells, worst, strict=True)]
            rows.append([entry["title"], f"{sd:g}", *shown])
    labels = next(iter(record["sweep"].values()))["methods"]
    return markdown(["observed", "noise", *labels], rows)


def page(record: Record) -> str:
    """The page of ``dgm-infer bench images``."""
    settings, versions = record["settings"], record["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    cores = "1 core" if settings["cores"] == 1 else f"{settings['cores']} cores"
    machine = f"on {cores} of {record['processor']}, load at the start"
    return f"""# Completions of images, sampler beside sampler

{settings["images"]} images per problem; bulk ESS of the generator's latents, over (image, latent) pairs, per second of
the whole budget, start-up, compilation and warm-up included. Constraint errors are relative to the scale of the data.

{tables(record)}
`{record["command"]}`, {record["date"]}, {machine} {record["load_average_at_start"]}; {named}.
"""


def _baselines(record: Record) -> list[str]:
    labels = (label for entry in record["problems"].values() for label in entry["methods"])
    return [label for label in dict.fromkeys(labels) if label.startswith("constrained ")]


def _in_jax(record: Record) -> list[str]:
    """Peers in JAX that a record has."""
    labels = (label for entry in record["problems"].values() for label in entry["methods"])
    return [label for label in dict.fromkeys(labels) if label.startswith(_IN_JAX)]


def _named(label: str, row: Record) -> str:
    return f"{label}: {row['kernel']}" if label == "default" else label


def _reasons(row: Record) -> Iterable[str]:
    yield from row["errors"]
    if "left_out" in row:
        yield row["left_out"]


def _rate(methods: Record, label: str) -> float | None:
    return methods.get(label, {}).get(_RATE)


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "-" if ours is None or not theirs else _number(ours / theirs)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _capital(title: str) -> str:
    return title[0].upper() + title[1:]
