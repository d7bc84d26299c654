"""What commands answer without torch: help, lists, completion of words, and mistakes."""

import ast
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill

from dgm_infer.errors import ConfigError, extra

from .messages import suggest
from .options import check_configurations
from .outline import COMMANDS, Command, Option, options, runnable

__all__ = ["answered", "completion", "shipped", "shipped_path"]

# endings of files that are read, by the options that name them
_FILES = re.compile(r"\.(npy|npz|png|jpe?g|bmp|webp|tiff?|pt|pth|ckpt|safetensors)$", re.IGNORECASE)
_PATHS = ("generator", "images", "observe", "mask", "ckpt_path")


def answered(name: str, arguments: Sequence[str]) -> bool:
    """Whether a command is answered without running it: by its help, printed, or the list of what it runs.

    Raises:
        ConfigError: a mistake that can be seen without torch: an unknown option, a missing file, a number that is none.
    """
    command = COMMANDS[name]
    first = arguments[0] if arguments else ""
    wants_help = any(word in ("-h", "--help") for word in arguments)
    if name == "bench" and find_spec("evaluation.benchmarks") is None:
        raise ConfigError("benchmarks are not part of the installed package: run this in a clone of the repository")
    if name in ("reproduce", "bench"):
        known = runnable(name)
        if first in ("", "-h", "--help"):
            # nothing was asked for: what there is
            print(_help(name, command, options(name), known), end="")
            return True
        if name == "reproduce" and first.partition("=")[0] == "--resume":
            return False
        if first.startswith("-"):
            raise ConfigError(f"{first}: the name comes first (there are {', '.join(known)})")
        if first not in known:
            kind = "experiment" if name == "reproduce" else "benchmark"
            raise ConfigError(f"no {kind} {first!r}{suggest(first, known)} (there are {', '.join(known)})")
    else:
        first, known = "", {}
    accepted = options(name, first)
    if wants_help:
        print(_help(name, command, accepted, {}), end="")
        return True
    _check(name, arguments[1:] if first else arguments, accepted)
    return False


def completion() -> str:
    """What bash evaluates to complete commands and their options, and zsh after ``bashcompinit``."""
    cases = []
    for name in COMMANDS:
        words = [f"--{option.name}" for option in options(name)]
        words = [*runnable(name), *words]
        cases.append(f'    {name}) words="{" ".join([*words, "--help"])}" ;;')
    return "\n".join(
        [
            "_dgm_infer() {",
            "  local words",
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            f'    *) words="{" ".join(COMMANDS)} --help --version --completion" ;;',
            "  esac",
            '  [ "$COMP_CWORD" -eq 1 ] && words="' + " ".join(COMMANDS) + ' --help --version --completion"',
            '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
            "}",
            "complete -o default -F _dgm_infer dgm-infer",
            "",
        ]
    )


def _help(name: str, command: Command, accepted: Sequence[Option], known: dict[str, str]) -> str:
    parts = [f"usage: dgm-infer {name} {command.usage}\n\n{command.line[0].upper()}{command.line[1:]}.\n"]
    parts += ["\nexamples:\n", *(f"  {line}\n" for line in command.examples)]
    if known:
        width = max(map(len, known))
        parts += [f"\n{name} runs:\n", *(f"  {key:{width}}  {line}\n" for key, line in known.items())]
    if accepted:
        parts += ["\noptions:\n", *map(_described, accepted)]
    if command.function and name != "reproduce":
        parts.append(
            "\nWhere a class is named, its short name will do (NUTS for dgm_infer.kernels.NUTS), and so does the class "
            "path\nof your own; --kernel.help CLASS lists its fields, which are options too: --kernel.step_size 0.1.\n"
        )
    return "".join(parts)


def _described(option: Option) -> str:
    try:
        value = None if option.default is None else ast.literal_eval(option.default)
    except ValueError:
        # an object, of which the text says more than its call
        value = None
    default = "" if value is None or isinstance(value, bool) else f" (default: {value})"
    text = option.help.removesuffix(".") + default + (" (required)" if option.default is None else "")
    value_of = "" if option.is_flag else f" {option.metavar}"
    body = fill(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  --{option.name}{value_of}\n{body}\n"


def _check(name: str, arguments: Sequence[str], accepted: Sequence[Option]) -> None:
    known = {option.name: option for option in accepted}
    given: dict[str, str | None] = {}
    for position, word in enumerate(arguments):
        if not word.startswith("--") or word == "--":
            continue
        full, equals, value = word[2:].partition("=")
        key = full.rstrip("+").partition(".")[0]
        follows = arguments[position + 1] if position + 1 < len(arguments) else None
        if key not in known:
            if key == "print_config":
                continue
            shown = word if equals or follows is None or follows.startswith("--") else f"{word} {follows}"
            raise ConfigError(f"unknown option: {shown}{suggest(key, known)}")
        given[key] = None
        if key == full:
            given[key] = value if equals else follows
            if given[key] is not None and not str(given[key]).startswith("--"):
                known[key].check(str(given[key]))
                _check_file(key, given[key])
            if key == "config" and given[key]:
                given |= dict.fromkeys(_keys_of(Path(str(given[key])), known))
    if name in ("condition", "evidence") and "resume" not in given and "print_config" not in "".join(arguments):
        missing = [option.name for option in accepted if option.default is None and option.name not in given]
        if missing:
            raise ConfigError(f"missing options: {', '.join(missing)}; give them, or --config FILE with them")


def shipped(arguments: Sequence[str]) -> list[str]:
    """The arguments, with ``configs/...`` in place where the package has it and the working directory does not."""
    return [shipped_path(word) for word in arguments]


def shipped_path(word: str) -> str:
    """One such argument, or a path that a configuration names."""
    option, equals, path = word.rpartition("=")
    if not path.startswith("configs/") or Path(path).exists():
        return word
    package = Path(__file__).parents[1]
    # of an installation, or of a clone
    homes = [root / path for root in (package, package.parent) if (root / path).exists()]
    return f"{option}{equals}{homes[0]}" if homes else word


def _keys_of(path: Path, known: dict[str, Option]) -> Iterable[str]:
    """The options that a configuration gives; all where only the parser can say.

    Raises:
        ConfigError: there is no such file, or it gives an unknown option, or names a file that is missing.
    """
    if not path.is_file():
        raise ConfigError(f"config: {path} " + ("is not a file" if path.exists() else "does not exist"))
    check_configurations(["--config", str(path)])
    with extra("train"):
        import yaml

    try:
        root = yaml.compose(path.read_text())
    except yaml.YAMLError:
        return known
    if not isinstance(root, yaml.MappingNode):
        return known
    found = {key.value: value for key, value in root.value}
    if "<<" in found:
        return known
    for key, value in found.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown option {key}{suggest(key, known)}")
        if isinstance(value, yaml.ScalarNode):
            _check_file(key, value.value)
    return found


def _check_file(key: str, value: str | None) -> None:
    if (
        key in _PATHS
        and value
        and _FILES.search(value)
        and "://" not in value
        and not Path(value).expanduser().exists()
    ):
        raise ConfigError(f"{key}: {value} does not exist")
