"""The results of a benchmark: a record as JSON, and a page in Markdown beside it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import machine
from .settings import options

__all__ = ["DEVICES", "by_device", "cores_of", "measured_before", "new_record", "publish", "versions"]

DEVICES = {"cpu": "CPU", "cuda": "GPU"}
"""The devices that pages compare, and how they call them."""


def new_record(benchmark: str, settings: Mapping[str, Any], packages: Sequence[str], **facts: Any) -> dict[str, Any]:
    """What a record begins with: the command that repeats it, the machine, further facts and the settings."""
    command = f"dgm-infer bench {benchmark} {options(settings)}"
    return {"command": command, **machine(packages), **facts, "settings": dict(settings)}


def measured_before(path: Path, settings: Mapping[str, Any], *parts: str) -> dict[str, dict[str, Any]]:
    """The named parts of the record at ``path`` if its settings are these, else empty ones."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"settings": {}}
    same = {**record["settings"], **settings} == record["settings"]
    return {part: record[part] if same else {} for part in parts}


def publish(path: Path, benchmark: str, page: str) -> None:
    """Write the page beside the record at ``path``, print it, and say where both are."""
    (path.parent / f"{benchmark}.md").write_text(page)
    print(page, end="")
    print(f"results in {path.parent}: {path.name}, {benchmark}.md")


def by_device(folder: Path, benchmark: str) -> dict[str, dict[str, Any] | None]:
    """The records ``<benchmark>_<device>.json`` of a folder by device, None for what was not measured."""
    paths = {device: folder / f"{benchmark}_{device}.json" for device in DEVICES}
    return {device: json.loads(path.read_text()) if path.exists() else None for device, path in paths.items()}


def versions(record: Mapping[str, Any]) -> str:
    """The versions of a record's packages in words."""
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)


def cores_of(n: int) -> str:
    """``"1 core"``, ``"2 cores"``."""
    return f"{n} {'core' if n == 1 else 'cores'}"
