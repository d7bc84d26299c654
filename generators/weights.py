"""Weights of networks in files: safetensors, or PyTorch's own format restricted to files that run no code."""

import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dgm_infer.errors import CheckpointError

__all__ = ["load_weights", "read_checkpoint", "read_safetensors", "refuse_nan", "without_trust"]

# Whether a caller may let a file run code.
_may_trust: ContextVar[bool] = ContextVar("may_trust", default=True)


@contextmanager
def without_trust() -> Iterator[None]:
    """Within the block no file runs code, whatever ``trust=`` says: a configuration may be a stranger's too."""
    token = _may_trust.set(False)
    try:
        yield
    finally:
        _may_trust.reset(token)


def refuse_nan(source: object, weights: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if weights by name hold NaN; infinite values are those of a mask."""
    for name, tensor in weights.items():
        if bad := int(tensor.isnan().sum()):
            raise CheckpointError(
                f"{source}: {bad} of the {tensor.numel()} values of {name!r} are NaN, as after a training that "
                "diverged: take an earlier checkpoint"
            )


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file by name.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: name a .safetensors file")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from error


def read_checkpoint(path: Path, trust: bool = False) -> Any:
    """The content of a file written by ``torch.save``: weights and plain values, nothing that would run code.

    Args:
        path: path of the file.
        trust: load any content, by a pickle that may run any code.

    Raises:
        CheckpointError: the file is missing, damaged, or holds anything else, or no file may be trusted here.
    """
    if trust and not _may_trust.get():
        raise CheckpointError(
            f"trust=True: no command lets {path} run its code: load it in Python, and keep its weights with "
            "generators.save"
        )
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: dgm-infer train writes checkpoints to its run folder")
    try:
        with warnings.catch_warnings():
            # warnings about the pickle protocol of files that are refused below
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        # PyTorch's own message recommends weights_only=False
        found = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"loading it would import {found[1]}" if found else "it is not a plain file of tensors"
        raise CheckpointError(f"{path} holds more than weights and is refused: {reason}") from error
    except Exception as error:  # a file that is not a checkpoint can fail in any way
        reason = str(error).split(". ")[0].splitlines() or ["it ends early"]
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint: {type(error).__name__}, {' '.join(reason)}"
        ) from error


def load_weights(net: nn.Module, path: str | os.PathLike, key: str | None = None, trust: bool = False) -> None:
    """Fill a network with the weights in a file.

    A prefix of all its names in the file (``module.``, ``generator.``) is dropped; other content of a file with such a
    prefix is ignored.

    Args:
        net: the network, of the architecture that the weights were saved from.
        path: a ``.safetensors`` file, or one written by ``torch.save``.
        key: key of the weights, if the file holds several things: ``"state_dict"``, ``"g_ema"``.
        trust: also load a file that holds more than weights, whose pickle may run any code.

    Raises:
        CheckpointError: the file is missing, damaged, refused, or belongs to another network.
    """
    path = Path(path)
    stored = read_safetensors(path) if path.suffix == ".safetensors" else read_checkpoint(path, trust)
    state = _state(path, stored, key)
    expected = net.state_dict()
    state = _without_prefix(state, expected)
    refuse_nan(path, state)
    wrong = _difference(state, expected)
    if wrong:
        raise CheckpointError(f"{path} holds the weights of another network than this {type(net).__name__}: {wrong}")
    net.load_state_dict(state)


def _state(path: Path, stored: Any, key: str | None) -> dict[str, Tensor]:
    if key is not None:
        if not isinstance(stored, Mapping) or key not in stored:
            raise CheckpointError(f"{path} has no {key!r}: it holds {_names(stored)}")
        stored = stored[key]
    if isinstance(stored, nn.Module):
        stored = stored.state_dict()
    if not isinstance(stored, Mapping) or not stored or not all(isinstance(v, Tensor) for v in stored.values()):
        raise CheckpointError(f"{path} holds {_names(stored)}, not tensors by name: give the key of the weights")
    return dict(stored)


def _names(stored: Any) -> str:
    if not isinstance(stored, Mapping):
        return f"a {type(stored).__name__}"
    return ", ".join(map(repr, list(stored)[:8])) + (", ..." if len(stored) > 8 else "") if stored else "nothing"


def _without_prefix(state: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not expected or set(expected) <= set(state):
        return state
    first = next(iter(expected))
    for name in state:
        prefix = name.removesuffix(first)
        if name.endswith(first) and all(prefix + other in state for other in expected):
            return {other: state[prefix + other] for other in expected}
    return state


def _difference(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """The first name or shape that does not match the network's; empty if all match."""
    missing, more = [n for n in expected if n not in state], [n for n in state if n not in expected]
    if len(missing) == len(expected):
        return f"all of its tensors are missing, such as {missing[0]!r}"
    if missing:
        return f"{len(missing)} of its {len(expected)} tensors are missing, such as {missing[0]!r}"
    if more:
        return f"it has no {more[0]!r}" + (f" and no other {len(more) - 1}" if len(more) > 1 else "")
    for name, tensor in expected.items():
        if tensor.shape != state[name].shape:
            return f"{name!r} is {tuple(state[name].shape)} in the file, {tuple(tensor.shape)} in the network"
    return ""
