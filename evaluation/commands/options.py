"""The options of commands: those of a function, on the command line and in YAML."""

import json
import re
from argparse import ArgumentError as ParseError
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from dgm_infer.errors import ConfigError, DgmInferError, extra

from .messages import suggest, with_suggestion

__all__ = ["check_configurations", "make_parser", "parse", "resumed", "run_configured"]


def make_parser(command: str, needs: str, **settings: Any) -> Any:
    """A parser of jsonargparse that raises on mistakes and knows no abbreviations.

    Args:
        command: its words after ``dgm-infer``.
        needs: the extra of the installation that brings what the command needs.
        settings: further arguments of the parser.

    Raises:
        MissingExtraError: jsonargparse is not installed.
    """
    with extra(needs):
        from jsonargparse import ArgumentParser

    return ArgumentParser(prog=f"dgm-infer {command}", exit_on_error=False, allow_abbrev=False, **settings)


def parse(parser: Any, arguments: Sequence[str]) -> Any:
    """The options that the arguments give.

    Raises:
        ConfigError: a mistake in them; the message suggests the nearest option to an unknown one.
    """
    try:
        return parser.parse_args(arguments)
    except ParseError as error:
        raise ConfigError(with_suggestion(str(error), parser.get_defaults().keys())) from error


def check_configurations(arguments: Sequence[str]) -> None:
    """Refuse YAML files of ``--config`` whose values would be other ones than are written.

    YAML takes the last of two equal keys, and reads ``1:30`` as 90 and ``010`` as 8.

    Raises:
        ConfigError: a file has such a value, or is not text.
    """
    with extra("train"):
        import yaml

    given = [after for name, after in pairwise(arguments) if name == "--config"]
    given += [name.removeprefix("--config=") for name in arguments if name.startswith("--config=")]
    for path in map(Path, given):
        # what is missing or not YAML at all has the parser's message
        with suppress(OSError, ValueError, yaml.YAMLError):
            if not path.is_file():
                continue
            try:
                root = yaml.compose(path.read_text())
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path} is not text, and no configuration") from error
            _check_node(path, root)


def _check_node(path: Path, node: Any) -> None:
    import yaml

    line = f"{path}, line {node.start_mark.line + 1}" if node is not None else ""
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        for key, _ in reversed(node.value):
            if names.count(key.value) > 1:
                where = key.start_mark.line + 1
                raise ConfigError(f"{path}, line {where}: {key.value!r} is there twice: keep one")
    if isinstance(node, yaml.ScalarNode) and node.style is None and re.fullmatch(r"[-+]?(0\d+|\d+(:\d+)+)", node.value):
        raise ConfigError(
            f"{line}: {node.value} is not a decimal number in YAML: write it without 0 before it, or quoted"
        )
    children = node.value if isinstance(node, yaml.CollectionNode) else ()
    for child in children:
        for part in child if isinstance(child, tuple) else (child,):
            _check_node(path, part)


# rooms in which a short name stands for a class, by option
_ROOMS = {
    "kernel": "dgm_infer.kernels",
    "latent_kernel": "dgm_infer.kernels",
    "methods": "dgm_infer.evidence",
    "bounds": "dgm_infer.evidence",
    "generator": "generators",
    "images": "trainers",
}


def _class_path(key: str, word: str) -> str:
    """The class path of a short name, as ``dgm_infer.kernels.NUTS`` for NUTS; other words as they are.

    Raises:
        ConfigError: the option takes classes alone, and this is none of them.
    """
    if key not in _ROOMS or not word.isidentifier() or word == "null":
        return word
    room = import_module(_ROOMS[key])
    if isinstance(getattr(room, word, None), type):
        return f"{room.__name__}.{word}"
    if room.__name__.startswith("dgm_infer."):
        classes = [name for name in room.__all__ if name[0].isupper()]
        raise ConfigError(f"{key}: no {word} in {room.__name__}{suggest(word, classes)}; or name a class path")
    return word


def with_class_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, and the files of ``--config``, with class paths where they have short names."""
    out: list[str] = []
    option = ""
    for word in arguments:
        if word.startswith("--") and "=" not in word:
            option = word
            out.append(word)
            continue
        given, equals, value = word.partition("=") if word.startswith("--") else (option, "", word)
        full = _in_full(given, value)
        out.append(f"{given}={full}" if equals and word.startswith("--") else full)
        option = ""
    return out


def _in_full(option: str, value: str) -> str:
    """The value of an option, with class paths."""
    key = option[2:].removesuffix("+").removesuffix(".class_path")
    if key == "config":
        return _configured_in_full(value)
    if key != "methods":
        return _class_path(key, value)
    # a list, of which the command line may name one
    found = [_class_path(key, word.strip()) for word in value.split(",")]
    if value.startswith(("[", "{")) or value == "null" or option.endswith("+"):
        return ",".join(found)
    return json.dumps(found)


def _configured_in_full(path: str) -> str:
    """The file's name, or its text where short names in it are replaced."""
    import yaml

    try:
        text = Path(path).read_text()
        root = yaml.compose(text)
    except (OSError, ValueError, yaml.YAMLError):
        return path
    named = []
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if isinstance(part, yaml.MappingNode):
                named += [(key.value, node) for name, node in part.value if name.value == "class_path"]
            else:
                named.append((key.value, part))
    changed = text
    for key, node in reversed(named):
        if isinstance(node, yaml.ScalarNode) and (full := _class_path(key, node.value)) != node.value:
            changed = changed[: node.start_mark.index] + full + changed[node.end_mark.index :]
    return path if changed == text else changed


def run_configured(
    command: str, needs: str, description: str, function: Callable[..., object], arguments: Sequence[str]
) -> None:
    """Run a command whose options are the arguments of a function, all but ``resolved`` and ``resume``.

    ``resolved`` is the configuration as it was read, as YAML, with the seed that was drawn if none was given.
    ``--config`` names a file with any of the options; ``--resume`` the folder of a run that was stopped, which goes on
    with its own configuration.

    Raises:
        ConfigError: a mistake in the options or the file.
        DgmInferError: whatever the function raises.
    """
    from dgm_infer.arguments import random_seed  # with torch, which help and mistakes need not wait for
    from evaluation.reports.folders import CONFIGURATION

    parser = make_parser(command, needs, description=description)
    parser.add_argument("--config", action="config", help="a YAML file with any of the options")
    parser.add_argument("--resume", help="the folder of a run that was stopped, which goes on; without other options")
    parser.add_function_arguments(function, skip={"resolved", "resume"})
    resume = resumed(arguments)
    if resume is not None:
        arguments = ["--config", str(resume / CONFIGURATION)]
    check_configurations(arguments)
    try:
        options = parse(parser, with_class_paths(arguments))
    except ConfigError as error:
        if resume is None:
            raise
        raise ConfigError(f"--resume {resume}: holds no run of {command}: {error}") from error
    if options.seed is None:
        options.seed = random_seed(command, None)
    resolved = parser.dump(options, skip_unset=False)
    try:
        values = vars(parser.instantiate(options))
    except DgmInferError:
        raise
    except ValueError as error:
        # for a list or null, jsonargparse hides what the class itself said
        raise (error.__cause__ if isinstance(error.__cause__, DgmInferError) else ConfigError(str(error))) from error
    values.pop("config")
    values.pop("resume", None)
    function(**values, resolved=resolved, resume=resume)


def resumed(arguments: Sequence[str]) -> Path | None:
    """The folder of ``--resume``, if it is given.

    Raises:
        ConfigError: other options are given too, no run of a command is there, or it has finished.
    """
    from evaluation.reports.folders import CONFIGURATION
    from evaluation.reports.page import REPORT

    given = [*arguments]
    if len(given) == 1 and given[0].startswith("--resume="):
        given = ["--resume", given[0].removeprefix("--resume=")]
    if not any(each == "--resume" or each.startswith("--resume=") for each in given):
        return None
    if len(given) != 2 or given[0] != "--resume":
        raise ConfigError("--resume RUN: takes the folder of a run and no other options: those of the run are kept")
    folder = Path(given[1])
    if not (folder / CONFIGURATION).is_file():
        raise ConfigError(f"--resume {folder}: holds no {CONFIGURATION}: give the folder of a run that was stopped")
    if (folder / REPORT).is_file() and not any(folder.glob("run*")):
        raise ConfigError(f"--resume {folder}: has finished: its results are there")
    return folder
