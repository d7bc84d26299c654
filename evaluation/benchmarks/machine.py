"""The machine that a benchmark runs on: its cores and devices, and what to record of it."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dgm_infer.errors import ConfigError

__all__ = ["available_cores", "check_device", "checked_cores", "device_name", "machine"]


def available_cores() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def checked_cores(cores: int | None) -> int:
    """The number of cores to use; None for all of them."""
    available = available_cores()
    if cores is None:
        return available
    if not 1 <= cores <= available:
        raise ConfigError(f"cores: {cores} must lie between 1 and the {available} available")
    return cores


def check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda, but PyTorch finds no GPU here: give --device cpu")


def device_name(device: str) -> str | None:
    """The name of the GPU, None for a processor."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else None


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """Date, processor, load and versions, for the record of a benchmark."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "available_cores": available_cores(),
        "load_average_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
