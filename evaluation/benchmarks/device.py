"""``dgm-infer bench device``: what runs on a GPU, line by line, in eight minutes; the same in small on a processor.

Parts run in processes of their own, one after the other, each for its share of the minutes: one that hangs costs its
share and no more, and what it measured before is kept. A part can be run alone, and is then added to the record.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dgm_infer.errors import CheckpointError
from generators import IWAE

from ..experiments.reference import reference_folder
from ..reports.records import plain, write_record
from ..reports.tables import markdown
from .device_parts import PARTS, SIZES, DeviceTask
from .machine import check_device, checked_cores, device_name
from .publishing import DEVICES, by_device, cores_of, new_record, publish, versions
from .settings import check_counts, check_positive, check_seed, names_of, writable_folder
from .workers import run_workers, threads

__all__ = ["bench", "table"]

_DTYPES = ("float32", "float64")
# Shares of the time, and seconds per part for its process to start and end.
_SHARES = {"fibre": 4, "images": 4, "faces": 2, "evidence": 2, "replicas": 2, "training": 1}
_STARTING = 6


def bench(
    parts: str = ",".join(PARTS),
    dtypes: str = ",".join(_DTYPES),
    device: Literal["cpu", "cuda"] = "cpu",
    minutes: float = 8,
    cores: int | None = None,
    data: str | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Measure sampling, evidence and training on a device.

    Args:
        parts: names, separated by commas: fibre, images, faces, evidence, replicas, training. Parts that an earlier run
            has measured are kept.
        dtypes: float32, float64, separated by commas.
        device: cuda, or cpu, where less is done at once.
        minutes: for all parts together, at most.
        cores: threads of PyTorch; null for all.
        data: the reference folder, with iwae_mnist in it, for evidence and replicas; null for the environment variable
            DGM_INFER_REFERENCE_DATA, and without it the shipped network of digits.
        seed: seed of all randomness.
        output: folder for ``device_<device>.json`` and ``device.md``.

    Returns:
        path of the JSON file.
    """
    chosen = names_of("parts", parts, PARTS)
    kept = tuple(names_of("dtypes", dtypes, _DTYPES))
    check_positive(minutes=minutes)
    check_counts(parts=len(chosen), dtypes=len(kept))
    check_seed(seed)
    check_device(device)
    cores = checked_cores(cores)
    iwae = _published_iwae(data)
    folder = writable_folder(output)
    path = folder / f"device_{device}.json"
    settings = {"parts": ",".join(chosen), "dtypes": dtypes, "device": device, "minutes": minutes, "cores": cores}
    record = new_record(
        "device",
        {**settings, "seed": seed},
        ["dgm-infer", "torch"],
        device_name=device_name(device),
        sizes=SIZES[device]._asdict(),
    )
    before = json.loads(path.read_text())["parts"] if path.exists() else {}
    record["parts"] = {name: before[name] for name in PARTS if name in before and name not in chosen}
    shares = {name: _SHARES[name] / sum(_SHARES[part] for part in chosen) for name in chosen}
    for name in chosen:
        seconds = max(1.0, shares[name] * 60 * minutes - _STARTING)
        print(f"{name}, {seconds:.0f} s", flush=True)
        task = DeviceTask(name, kept, seconds, device, seed, iwae, SIZES[device])
        record["parts"][name] = _measured(task, cores, record["command"])
        # after every part: what was measured survives whatever happens to the next
        record["parts"] = {part: record["parts"][part] for part in PARTS if part in record["parts"]}
        write_record(path, record)
    publish(path, "device", table(folder))
    return path


def _published_iwae(data: str | None) -> str | None:
    """The folder of the published IWAE if it is there, None if nobody named one.

    Raises:
        CheckpointError: one was named, and is not there.
    """
    folder = reference_folder(data)
    if folder is None:
        return None
    try:
        IWAE.from_npz(folder)
    except CheckpointError:
        if data is not None:
            raise
        return None
    return str(folder)


def _measured(task: DeviceTask, cores: int, command: str) -> dict[str, Any]:
    """The lines of a part, as its process reports them."""
    lines: list[dict[str, Any]] = []

    def heard(message: str) -> None:
        lines.append(json.loads(message))
        print(f"  {_words(lines[-1])}", flush=True)

    (outcome,) = run_workers(
        "evaluation.benchmarks.device_parts:run",
        [task],
        environment=threads(cores),
        patience=task.seconds,
        report=heard,
    )
    part = {"command": command, "seconds": task.seconds, "lines": lines, "errors": []}
    if outcome.error is not None:
        print(f"  {outcome.error}", flush=True)
        part["errors"].append(outcome.error)
    return plain(part)


def _words(line: Mapping[str, Any]) -> str:
    if "rate" not in line:
        return f"{line['line']}, {line['dtype']}: {line.get('left_out') or line.get('error')}"
    words = f"{line['title']}, {line['dtype']}: {_rate(line['rate'])} {line['unit']}/s"
    return words if line["waits"] is None else f"{words}, {line['waits']} waits"


def table(folder: Path) -> str:
    """Markdown of the results in a folder, on a processor and on a GPU."""
    parts = ["# On a device\n"]
    for device, record in by_device(folder, "device").items():
        if record is None:
            parts.append(f"{DEVICES[device]}: not measured.\n")
            continue
        cores = cores_of(record["settings"]["cores"])
        where = record["device_name"] or f"{cores} of {record['processor']}"
        rows = [row for part in record["parts"].values() for row in map(_row, part["lines"])]
        errors = [f"- {name}: {error}\n" for name, part in record["parts"].items() for error in part["errors"]]
        parts += [
            f"## {DEVICES[device]}\n\n`{record['command']}`, {record['date']}, on {where}; {versions(record)}. "
            "Made: seconds of conditioning, warm-up and compilation; first: of the first piece of work, in which the "
            "host's waits for the device are counted.\n",
            markdown(_HEADER, rows),
            *(["".join(errors)] if errors else []),
        ]
    return "\n".join(parts)


_HEADER = ("line", "dtype", "rate", "ESS/s, smallest", "R-hat, worst", "waits per piece", "made, s", "first, s", "GiB")


def _row(line: Mapping[str, Any]) -> Sequence[str]:
    if "rate" not in line:
        return [line["line"], line["dtype"], line.get("left_out") or line["error"], *["-"] * (len(_HEADER) - 3)]
    return [
        line["title"],
        line["dtype"],
        f"{_rate(line['rate'])} {line['unit']}/s",
        _number(line.get("min_ess_per_second"), ".3g"),
        _number(line.get("max_r_hat"), ".3f"),
        _number(line["waits"], "d"),
        f"{line['making']:.1f}",
        f"{line['first']:.2f}",
        _number(line.get("peak_gib"), ".1f"),
    ]


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
