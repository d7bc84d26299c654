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
        raise CheckpointError(
            f"{path} holds more than weights and is refused: {reason}; save net.state_dict() instead"
        ) from error
    except Exception as error:  # a file that is not a checkpoint can fail in any way
        reason = str(error).split(". ")[0].splitlines() or ["it ends early"]
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint: {type(error).__name__}, {' '.join(reason)}"
        ) from error


def load_weights(net: nn.Module, path: str | os.PathLike, key: str | None = None, trust: bool = False) -> None:
    """Fill a network with the weights in a file.

    A prefix of all its names in the file (``module.``, ``generator.``) is dropped; other content of a file with such a
    prefix is ignored. Where several prefixes fit, as in a checkpoint of a generator and its moving average, ``key``
    chooses.

    Args:
        net: the network, of the architecture that the weights were saved from.
        path: a ``.safetensors`` file, or one written by ``torch.save``.
        key: key of the weights, if the file holds several things: ``"state_dict"``, ``"g_ema"``; or the prefix of their
            names, after such a key: ``"state_dict.generator_ema"``; ``""`` or ``"state_dict."`` for names
            without a prefix.
        trust: also load a file that holds more than weights, whose pickle may run any code.

    Raises:
        CheckpointError: the file is missing, damaged, refused, belongs to another network, or holds several that fit.
    """
    path = Path(path)
    stored = read_safetensors(path) if path.suffix == ".safetensors" else read_checkpoint(path, trust)
    state = _state(path, stored, key)
    expected = net.state_dict()
    state = _without_prefix(path, state, expected, key)
    refuse_nan(path, state)
    wrong = _difference(state, expected)
    if wrong:
        raise CheckpointError(f"{path} holds the weights of another network than this {type(net).__name__}: {wrong}")
    net.load_state_dict(state)


def _state(path: Path, stored: Any, key: str | None) -> dict[str, Tensor]:
    if key:
        found = _at(stored, key)
        if found is None:
            raise CheckpointError(f"{path} has no {key!r}: it holds {_names(stored)}")
        stored = found
    if isinstance(stored, nn.Module):
        stored = stored.state_dict()
    if not isinstance(stored, Mapping) or not stored or not all(isinstance(v, Tensor) for v in stored.values()):
        raise CheckpointError(f"{path} holds {_names(stored)}, not tensors by name: give the key of the weights")
    return dict(stored)


def _at(stored: Any, key: str) -> Any:
    """What a file holds under a key, or under a prefix of names; dots lead from one to the next; None if nothing."""
    if isinstance(stored, nn.Module):
        stored = stored.state_dict()
    if not isinstance(stored, Mapping):
        return None
    if key in stored:
        return stored[key]
    prefix = key.rstrip(".") + "."
    named = {name.removeprefix(prefix): v for name, v in stored.items() if str(name).startswith(prefix)}
    if named:
        return named
    first, _, rest = key.partition(".")
    return _at(stored.get(first), rest) if rest else stored.get(first)


def _names(stored: Any) -> str:
    if not isinstance(stored, Mapping):
        return f"a {type(stored).__name__}"
    return ", ".join(map(repr, list(stored)[:8])) + (", ..." if len(stored) > 8 else "") if stored else "nothing"


def _without_prefix(
    path: Path, state: dict[str, Tensor], expected: Mapping[str, Tensor], key: str | None
) -> dict[str, Tensor]:
    """The tensors of the network, by its own names.

    Raises:
        CheckpointError: the file holds several networks of this architecture.
    """
    if not expected or set(expected) == set(state):
        return state
    if key is not None and key.rpartition(".")[2] == "" and _holds(state, "", expected):
        return {name: state[name] for name in expected}
    first = next(iter(expected))
    ends = [name.removesuffix(first) for name in state if name.endswith(f".{first}") or name == first]
    named = {end: {name: state[end + name] for name in expected} for end in ends if _holds(state, end, expected)}
    found = {end: own for end, own in named.items() if not _difference(own, expected)} or named
    if not found or list(found) == [""]:
        return state
    one, *others = found.values()
    if any(not torch.equal(one[name], other[name]) for other in others for name in expected if other is not one):
        before = "" if key is None else key.rstrip(".") + "."
        keys = " or ".join(f"key={before + end.rstrip('.')!r}" for end in found)
        raise CheckpointError(f"{path} holds {len(found)} networks of this architecture: choose by {keys}")
    return one


def _holds(state: Mapping[str, Tensor], prefix: str, expected: Mapping[str, Tensor]) -> bool:
    return all(prefix + name in state for name in expected)


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
