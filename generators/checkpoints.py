"""Weights on disk: safetensors beside a JSON description; shipped ones by name, Lightning checkpoints by path.

A generator is rebuilt from ``{"class": a name in the registry, "config": the arguments of its constructor}``; nothing
in a file is ever executed.
"""

import json
import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dgm_infer import GenerativeModel
from dgm_infer.arguments import file_path, flag, mapping
from dgm_infer.arguments.values import shown
from dgm_infer.errors import ArgumentError, CheckpointError, cause, reported_as
from dgm_infer.files import complete_file, writable_folder

from .hub import SCHEME, Address, download, upload
from .iwae import IWAE
from .pose import HumanPose
from .registry import CLASSES
from .weights import read_checkpoint, read_safetensors, refuse_nan

__all__ = ["describe", "load", "save"]

PRETRAINED = Path(__file__).parent / "pretrained"
# Readers of folders of published parameters, by the file that identifies them.
PUBLISHED = {"decoder.npz": IWAE.from_npz, "joint_angle_decoder.npz": HumanPose.from_folder}
FORMAT = "dgm-infer generator 1"
# Key under which trainers/ put the description into a Lightning checkpoint.
CHECKPOINT_KEY = "dgm_infer_generator"
# Prefix of the generator's parameters in a Lightning module.
CHECKPOINT_PREFIX = "generator."


def describe(model: nn.Module) -> dict[str, Any]:
    """The description that a generator is rebuilt from: ``{"format", "class", "config"}``.

    Modules among the values of ``config`` are described likewise, without the format.

    Raises:
        CheckpointError: its class, or that of a part, is not registered, or it has no ``config``.
    """
    return {"format": FORMAT, **_described(model)}


def _described(model: nn.Module) -> dict[str, Any]:
    name = type(model).__name__
    if CLASSES.get(name) is not type(model):
        raise CheckpointError(
            f"a {name} cannot be stored: only {', '.join(CLASSES)} can be rebuilt from a file, and your own classes "
            "decorated with generators.register"
        )
    config = getattr(model, "config", None)
    if not isinstance(config, dict):
        raise CheckpointError(f"a {name} cannot be stored: it has no config, the arguments of its constructor by name")
    for key, value in config.items():
        if callable(value) and not isinstance(value, nn.Module):
            raise CheckpointError(
                f"a {name} cannot be stored: its {key} is a function, which no file describes: make it a module, of a "
                "class that generators.register decorates"
            )
    parts = {key: _described(value) if isinstance(value, nn.Module) else value for key, value in config.items()}
    return {"class": name, "config": parts}


def save(
    model: nn.Module, path: str | os.PathLike, notes: dict[str, Any] | None = None, *, hub: str | None = None
) -> Path:
    """Write ``path.safetensors`` and ``path.json``; returns the former.

    Args:
        model: an instance of a class that can be rebuilt.
        path: with or without the ending.
        notes: JSON values kept in the description, such as how it was trained.
        hub: where they are uploaded to as well, ``"hf://owner/name"`` or ``"hf://owner/name/file"``, a repository of
            Hugging Face that ``load`` then takes by this name; None for nowhere.

    Raises:
        ArgumentError: the files cannot be written or uploaded, or the notes are not JSON values.
        MissingExtraError: ``hub`` needs huggingface_hub.
        CheckpointError: the model's class cannot be rebuilt, or some of its weights are NaN.
    """
    from safetensors.torch import save as serialise

    path = file_path("generators.save", "path", path)
    if hub is not None:
        # before anything is written
        Address.of("save", hub)
    stem = path.with_suffix("") if path.suffix in (".safetensors", ".json") else path
    weights, description = (stem.with_name(stem.name + ending) for ending in (".safetensors", ".json"))
    description_of = describe(model)
    try:
        notes = mapping("generators.save", "notes", notes, "{'epochs': 20}")
        text = json.dumps(description_of | {"notes": notes}, indent=2)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"generators.save(notes=...): must be JSON values: {cause(error)}") from error
    refuse_nan(f"generators.save({type(model).__name__})", model.state_dict())
    state = serialise({name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()})
    writable_folder(weights.parent)
    # neither is replaced before both are complete
    with complete_file(weights) as part, complete_file(description) as other:
        part.write_bytes(state)
        other.write_text(text + "\n")
    if hub is not None:
        upload(hub, weights)
    return weights


def load(name: str | os.PathLike, *, trust: bool = False) -> GenerativeModel:
    """A generator with its weights, in evaluation mode.

    For networks of other projects use :func:`generators.from_module`.

    Args:
        name: a shipped generator (``"digits_vae"``), a ``.safetensors`` file with its ``.json`` beside it (either
            ending or none), those of a repository of Hugging Face (``"hf://owner/name"``, ``"hf://owner/name/file"``,
            ``...@revision``), a Lightning checkpoint (``.ckpt``) written by ``dgm-infer train``, or a folder of
            published parameters: of the IWAE (``decoder.npz``, see :meth:`generators.IWAE.from_npz`) or of the
            human pose (``joint_angle_decoder.npz``, see :meth:`generators.HumanPose.from_folder`).
        trust: also load a checkpoint that holds more than weights, whose pickle may run any code.

    Raises:
        CheckpointError: the file is missing, damaged, or not a generator of this project.
    """
    if not isinstance(name, str | os.PathLike):
        raise CheckpointError(f"load({shown(name)}): expected the name of a shipped generator, or a path")
    flag("load", "trust", trust)
    if str(name).startswith(SCHEME):
        return _load_safetensors(download(str(name)))
    with reported_as(CheckpointError):
        path = file_path("load", "name", name) if name else Path()
    if not path.name:
        raise CheckpointError(f"load({str(name)!r}): expected the name of a shipped generator, or a path")
    if path.suffix == ".npz" and path.is_file():
        path = path.parent
    for file, published in PUBLISHED.items():
        if (path / file).is_file():
            return published(path).eval()
    if path.suffix == ".ckpt":
        return _load_lightning(path, trust)
    if path.suffix == ".json":
        path = path.with_suffix(".safetensors")
    if path.suffix != ".safetensors":
        shipped = PRETRAINED / f"{name}.safetensors"
        beside = path.with_name(f"{path.name}.safetensors")
        if beside.is_file() and not shipped.is_file():
            shipped = beside
        if not shipped.is_file() and path.is_file():
            raise CheckpointError(
                f"{path} does not say what network its weights belong to: build the network and wrap it, "
                f"generators.from_module(net.eval(), latent=D, weights={str(path)!r})"
            )
        if not shipped.is_file():
            names = sorted(p.stem for p in PRETRAINED.glob("*.safetensors"))
            raise CheckpointError(
                f"no generator {str(name)!r}: give one of {', '.join(names)}, or a path to a .safetensors or .ckpt file"
            )
        path = shipped
    return _load_safetensors(path)


def _load_safetensors(path: Path) -> GenerativeModel:
    description = path.with_suffix(".json")
    for file in (path, description):
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist: a generator is a .safetensors file with a .json beside it")
    try:
        what = json.loads(description.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{description} is not JSON: {cause(error)}") from error
    return _build(path, what, read_safetensors(path))


def _load_lightning(path: Path, trust: bool) -> GenerativeModel:
    stored = read_checkpoint(path, trust)
    if not isinstance(stored, dict) or CHECKPOINT_KEY not in stored:
        raise CheckpointError(f"{path} is not a checkpoint of dgm-infer train: it describes no generator")
    state = {
        key.removeprefix(CHECKPOINT_PREFIX): tensor
        for key, tensor in (stored.get("state_dict") or {}).items()
        if key.startswith(CHECKPOINT_PREFIX)
    }
    return _build(path, stored[CHECKPOINT_KEY], state)


def _build(path: Path, what: Any, state: dict[str, torch.Tensor]) -> GenerativeModel:
    name = what.get("class") if isinstance(what, dict) else type(what).__name__
    if not isinstance(what, dict) or what.get("format") != FORMAT or not isinstance(name, str) or name not in CLASSES:
        raise CheckpointError(
            f"{path} describes {name!r}, not one of {', '.join(CLASSES)} (format {FORMAT!r}); import the module that "
            "registers your own class first"
        )
    refuse_nan(path, state)
    try:
        model = _made(what)
        model.load_state_dict(state)
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not fit its own description of a {name}: {cause(error)}") from error
    return cast(GenerativeModel, model.eval())


def _made(what: dict[str, Any]) -> nn.Module:
    """The module of a description, with weights of any values."""
    parts = {
        key: _made(value) if isinstance(value, dict) and value.keys() == {"class", "config"} else value
        for key, value in what["config"].items()
    }
    return CLASSES[what["class"]](**parts)
