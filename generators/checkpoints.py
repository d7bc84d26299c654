"""Weights on disk: safetensors beside a JSON description; shipped ones by name, Lightning checkpoints by path.

A generator is rebuilt from ``{"class": one of CLASSES, "config": its constructor's arguments}``; nothing in a file
is ever executed.
"""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from dgm_infer import GenerativeModel
from dgm_infer.errors import CheckpointError

from .vae import GaussianVAE

__all__ = ["describe", "load", "save"]

CLASSES: dict[str, type[GenerativeModel]] = {"GaussianVAE": GaussianVAE}
PRETRAINED = Path(__file__).parent / "pretrained"
FORMAT = "dgm-infer generator 1"
# Key under which trainers/ put the description into a Lightning checkpoint.
CHECKPOINT_KEY = "dgm_infer_generator"
# Prefix of the generator's parameters in a Lightning module.
CHECKPOINT_PREFIX = "generator."


def describe(model: GenerativeModel) -> dict[str, Any]:
    """What a generator is rebuilt from: ``{"format", "class", "config"}``."""
    name = type(model).__name__
    if CLASSES.get(name) is not type(model):
        raise CheckpointError(f"a {name} cannot be stored: only {', '.join(CLASSES)} can be rebuilt from a file")
    return {"format": FORMAT, "class": name, "config": model.config}


def save(model: GenerativeModel, path: str | os.PathLike, notes: dict[str, Any] | None = None) -> Path:
    """Write ``path.safetensors`` and ``path.json``; returns the former.

    Args:
        model: one of the classes that can be rebuilt.
        path: with or without the ending.
        notes: JSON values kept in the description, such as how it was trained.
    """
    from safetensors.torch import save_file

    weights = Path(path).with_suffix(".safetensors")
    description = json.dumps(describe(model) | {"notes": notes or {}}, indent=2) + "\n"
    weights.parent.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    for target, write in (
        (weights, lambda file: save_file(state, file)),
        (weights.with_suffix(".json"), lambda file: Path(file).write_text(description)),
    ):
        part = target.with_name(target.name + ".part")
        write(part)
        os.replace(part, target)
    return weights


def load(name: str | os.PathLike) -> GenerativeModel:
    """A generator with its weights, in evaluation mode.

    Args:
        name: a shipped generator (``"digits_vae"``), a ``.safetensors`` file with its ``.json`` beside it, or a
            Lightning checkpoint (``.ckpt``) written by ``dgm-infer train``.

    Raises:
        CheckpointError: missing, damaged, or not a generator of this project.
    """
    path = Path(name)
    if path.suffix == ".ckpt":
        return _load_lightning(path)
    if path.suffix != ".safetensors":
        shipped = PRETRAINED / f"{name}.safetensors"
        if not shipped.is_file():
            names = sorted(p.stem for p in PRETRAINED.glob("*.safetensors"))
            raise CheckpointError(
                f"no generator {str(name)!r}: give one of {', '.join(names)}, or a path to a .safetensors or .ckpt file"
            )
        path = shipped
    return _load_safetensors(path)


def _load_safetensors(path: Path) -> GenerativeModel:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    description = path.with_suffix(".json")
    for file in (path, description):
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist: a generator is a .safetensors file with a .json beside it")
    try:
        what = json.loads(description.read_text())
    except ValueError as error:
        raise CheckpointError(f"{description} is not JSON: {error}") from error
    try:
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from error
    return _build(path, what, state)


def _load_lightning(path: Path) -> GenerativeModel:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: dgm-infer train writes checkpoints to its run folder")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} holds more than weights and is refused: {reason}") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(stored, dict) or CHECKPOINT_KEY not in stored:
        raise CheckpointError(f"{path} is not a checkpoint of dgm-infer train: it describes no generator")
    state = {
        key.removeprefix(CHECKPOINT_PREFIX): tensor
        for key, tensor in stored["state_dict"].items()
        if key.startswith(CHECKPOINT_PREFIX)
    }
    return _build(path, stored[CHECKPOINT_KEY], state)


def _build(path: Path, what: Any, state: dict[str, torch.Tensor]) -> GenerativeModel:
    if not isinstance(what, dict) or what.get("format") != FORMAT or what.get("class") not in CLASSES:
        found = what.get("class") if isinstance(what, dict) else type(what).__name__
        raise CheckpointError(f"{path} describes {found!r}, not one of {', '.join(CLASSES)} (format {FORMAT!r})")
    try:
        model = CLASSES[what["class"]](**what["config"])
        model.load_state_dict(state)
    except (TypeError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} does not fit its own description of a {what['class']}: {reason}") from error
    return model.eval()
