"""The settings of a benchmark: checks before anything is measured, and the command that repeats it."""

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dgm_infer import files
from dgm_infer.arguments import positive
from dgm_infer.errors import ArgumentError, ConfigError, reported_as

__all__ = ["check_counts", "check_positive", "check_seed", "names_of", "options", "writable_folder"]


def check_counts(least: int = 1, **counts: int) -> None:
    for name, value in counts.items():
        if value < least:
            raise ConfigError(f"{name}: {value} must be {least} or more")


def check_positive(**values: float) -> None:
    for name, value in values.items():
        with reported_as(ConfigError):
            positive("bench", name, value)


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:
        raise ConfigError(f"seed: {seed} must be >= 0 and less than 2**31")


def names_of(option: str, given: str, known: Collection[str]) -> list[str]:
    """The names that an option has, separated by commas.

    Raises:
        ConfigError: one is not known.
    """
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: {name!r} is not one of {', '.join(known)}")
    return names


def writable_folder(output: str) -> Path:
    """The folder of results, made if need be, before anything is measured."""
    try:
        return files.writable_folder(Path(output))
    except ArgumentError as error:
        raise ConfigError(f"output: {error}") from error


def options(settings: Mapping[str, Any]) -> str:
    """Settings as a command line has them."""
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
    return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in values.items() if value is not None)
