"""Generators on the hub of Hugging Face: two files of a repository, ``hf://owner/name[/file][@revision]``."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from dgm_infer.arguments.values import shown
from dgm_infer.errors import ArgumentError, CheckpointError, cause, extra

__all__ = ["SCHEME", "Address", "download", "upload"]

SCHEME = "hf://"
"""What an address begins with."""

_ADDRESS = re.compile(
    r"hf://(?P<repository>[\w.-]+/[\w.-]+)(/(?P<file>[\w./-]+?))?(\.safetensors|\.json)?(@(?P<revision>[\w./-]+))?"
)


class Address(NamedTuple):
    """Where a generator is on the hub."""

    repository: str
    stem: str
    revision: str | None

    @classmethod
    def of(cls, call: str, text: str) -> "Address":
        """The parts of ``hf://owner/name[/file][@revision]``; without a file, ``generator``.

        Raises:
            ArgumentError: it has another form.
        """
        found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
        if found is None or ".." in text:
            raise ArgumentError(
                f"{call}({shown(text)}): expected hf://owner/name, hf://owner/name/file or .../file@revision"
            )
        return cls(found["repository"], found["file"] or "generator", found["revision"])


def download(text: str) -> Path:
    """The weights of a generator, downloaded once and kept by the hub's own cache, its description beside them.

    Raises:
        ArgumentError: the address has another form.
        CheckpointError: the hub does not have them, or cannot be reached.
        MissingExtraError: huggingface_hub is not installed.
    """
    address = Address.of("load", text)
    with extra("hub"):
        import huggingface_hub  # type: ignore[import-not-found]
    try:
        paths = [
            Path(
                huggingface_hub.hf_hub_download(
                    repo_id=address.repository, filename=f"{address.stem}{ending}", revision=address.revision
                )
            )
            for ending in (".json", ".safetensors")
        ]
    except Exception as error:
        raise CheckpointError(
            f"{text} cannot be downloaded: {cause(error)}; it needs {address.stem}.safetensors and .json, "
            "as generators.save(..., hub=) uploads them"
        ) from error
    return paths[1]


def upload(text: str, weights: Path) -> None:
    """Upload weights and the description beside them to a repository, which is made if there is none.

    Raises:
        ArgumentError: the address has another form, or names a revision, or the hub does not take them.
        MissingExtraError: huggingface_hub is not installed.
    """
    address = Address.of("save", text)
    with extra("hub"):
        import huggingface_hub  # type: ignore[import-not-found]
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repo_id=address.repository, exist_ok=True)
        for ending in (".json", ".safetensors"):
            api.upload_file(
                path_or_fileobj=os.fspath(weights.with_suffix(ending)),
                path_in_repo=f"{address.stem}{ending}",
                repo_id=address.repository,
                revision=address.revision,
            )
    except Exception as error:
        raise ArgumentError(f"save(hub={text!r}): {cause(error)}; {weights} and its .json are written") from error
