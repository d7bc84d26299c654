"""The folder of reference data, which published experiments and some benchmarks need."""

import os
from pathlib import Path

from dgm_infer.errors import ConfigError
from dgm_infer.files import REFERENCE_DATA

__all__ = ["reference_folder", "required_data"]


def reference_folder(data: str | None) -> Path | None:
    """The folder that ``data`` names, otherwise the environment variable; None where neither does.

    Raises:
        ConfigError: ``data`` is not a folder.
    """
    if data is not None and not Path(data).is_dir():
        raise ConfigError(f"data: {data} is not a folder; name the reference data's")
    named = data or os.environ.get(REFERENCE_DATA)
    return Path(named) if named else None


def required_data(data: Path | None, name: str, origin: str) -> Path:
    """The reference folder, with ``name`` in it.

    Args:
        data: the folder, if any.
        name: name of the subfolder.
        origin: where the files can be had, for the message.

    Raises:
        ConfigError: it is not there.
    """
    if data is None or not (data / name).is_dir():
        raise ConfigError(
            f"data: {data or 'not given'}; name the folder that has {name} in it (--data FOLDER): {origin}"
        )
    return data
