"""What commands accept, read from their source: help and mistakes are answered before torch is loaded."""

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill

from dgm_infer.errors import ConfigError
from dgm_infer.extras import extra

from .messages import suggest
from .options import check_configurations

__all__ = [
    "COMMANDS",
    "USAGE",
    "Command",
    "Option",
    "answered",
    "completion",
    "options_of",
    "options_of_training",
    "summary_of",
]


@dataclass(frozen=True)
class Option:
    """An option of a command: an argument of the function that runs it."""

    name: str
    annotation: str
    default: str | None
    """As it is written in the source; None for an option that is required."""
    help: str

    @property
    def metavar(self) -> str:
        """What stands for its value in the help."""
        words = {"int": "N", "float": "NUMBER", "str": "TEXT", "bool": "true|false"}
        return words.get(self.annotation.removesuffix(" | None"), "NAME")

    def check(self, value: str) -> None:
        """Refuse what no parser reads as the number that the option is.

        Raises:
            ConfigError: it is none.
        """
        kind = self.annotation.removesuffix(" | None")
        if kind not in ("int", "float") or (value == "null" and kind != self.annotation):
            return
        try:
            float(value)
        except ValueError as error:
            number = "a whole number" if kind == "int" else "a number"
            raise ConfigError(f"{self.name}: {value!r} is not {number}") from error


@dataclass(frozen=True)
class Command:
    """A command, as far as it is known without running it."""

    extra: str
    """The extra of the installation that brings what the command imports; empty for none."""
    line: str
    """What it does."""
    usage: str
    """Its words after its name."""
    examples: tuple[str, ...]
    function: str = ""
    """The function whose arguments are its options; empty for one with options of its own."""
    hidden: tuple[str, ...] = ("resolved", "command")
    """Arguments of the function that are no options."""


_CONFIG = Option("config", "str", "None", "a YAML file with any of the options.")

COMMANDS = {
    "train": Command(
        "train",
        "train a generator; every option of LightningCLI's fit",
        "--config FILE [--OPTION VALUE ...]",
        (
            "dgm-infer train --config configs/train/digits_vae.yaml",
            "dgm-infer train --config mine.yaml --trainer.max_epochs 5 --export.path mine.safetensors",
            "dgm-infer train --config mine.yaml --ckpt_path runs/mine/TIME/checkpoints/last.ckpt",
        ),
    ),
    "condition": Command(
        "train",
        "complete images of which a part, a blur or a thumbnail is observed",
        "--config FILE | --name NAME --generator NAME --images PATH [--OPTION VALUE ...]",
        (
            "dgm-infer condition --config configs/condition/digits_top_half.yaml",
            "dgm-infer condition --name faces --generator mine.Faces --images pictures --mask mask.png --noise 0.05",
            "dgm-infer condition --name sharp --generator digits_vae --images trainers.DigitsData --observe blur:1.0 "
            "--noise 0.05 --kernel LiftedHMC",
        ),
        "condition_images",
    ),
    "evidence": Command(
        "train",
        "estimate log p(x) of images, between two bounds",
        "--config FILE | --name NAME --generator NAME --images PATH [--OPTION VALUE ...]",
        (
            "dgm-infer evidence --config configs/evidence/digits_vae.yaml",
            "dgm-infer evidence --name digits --generator digits_vae --images trainers.DigitsData --methods AIS",
            "dgm-infer evidence --name mine --generator mine.safetensors --images pictures --base laplace --n_images 5",
        ),
        "estimate_evidence",
    ),
    "reproduce": Command(
        "experiments",
        "run a published experiment; without a name, list them",
        "NAME [--fast] [--data FOLDER] [--seed N] [--output FOLDER]",
        (
            "dgm-infer reproduce",
            "dgm-infer reproduce quantile --fast",
            "dgm-infer reproduce pose --data reference --seed 2",
        ),
        "reproduce",
        ("name", "command"),
    ),
    "bench": Command(
        "bench",
        "measure beside peers, in a clone of the repository; without a name, list the measurements",
        "NAME [--OPTION VALUE ...]",
        (
            "dgm-infer bench",
            "dgm-infer bench fibre --seconds 60",
            "dgm-infer bench device --device cuda",
        ),
    ),
    "runs": Command(
        "",
        "list the runs in a folder, the newest first",
        "[FOLDER]",
        (
            "dgm-infer runs",
            "dgm-infer runs runs/digits",
            "dgm-infer runs results",
        ),
    ),
}
"""The commands by name: modules of this folder."""

USAGE = (
    "usage: dgm-infer COMMAND [--OPTION VALUE ...]\n\ncommands:\n"
    + "".join(f"  {name:9}  {command.line}\n" for name, command in COMMANDS.items())
    + "\ndgm-infer COMMAND --help lists a command's options; dgm-infer --version prints the version.\n"
    + 'Completion of words in bash: eval "$(dgm-infer --completion)"\n'
)

# the groups of options of training, LightningCLI's and ours: what is in them, only Lightning knows
_TRAINING = (
    Option("seed_everything", "int | None", "0", "seed of all randomness."),
    Option(
        "model",
        "",
        None,
        "what is trained, by class path: trainers.VAETraining, trainers.IWAETraining, ... or your own;\n"
        "--model.help CLASS lists its options.",
    ),
    Option(
        "data",
        "",
        "None",
        "the images, by class path: trainers.DigitsData, trainers.FolderData, ... or your own;\n"
        "--data.help CLASS lists its options.",
    ),
    Option(
        "trainer",
        "",
        "None",
        "options of Lightning's Trainer: --trainer.max_epochs N, --trainer.devices N, ...;\n"
        "dgm-infer train --help full lists them.",
    ),
    Option("threads", "int | None", "None", "PyTorch's threads in this run."),
    Option("ckpt_path", "str | None", "None", "the checkpoint to continue from."),
    Option("export", "", "None", "where the trained generator goes: --export.path FILE."),
    Option("optimizer", "", "None", "an optimizer of torch by class path."),
    Option("lr_scheduler", "", "None", "a schedule of torch by class path."),
    Option("weights_only", "bool | None", "None", "whether a checkpoint may hold weights alone, as Lightning has it."),
)

# endings of files that are read, by the options that name them
_FILES = re.compile(r"\.(npy|npz|png|jpe?g|bmp|webp|tiff?|pt|pth|ckpt|safetensors)$", re.IGNORECASE)
_HOMES = {"reproduce": "experiments", "bench": "benchmarks"}
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
        known = _runnable(name)
        if first in ("", "-h", "--help"):
            # nothing was asked for: what there is
            print(_help(name, command, _options(name, "", known), known), end="")
            return True
        if first.startswith("-"):
            raise ConfigError(f"{first}: the name comes first (there are {', '.join(known)})")
        if first not in known:
            kind = "experiment" if name == "reproduce" else "benchmark"
            raise ConfigError(f"no {kind} {first!r}{suggest(first, known)} (there are {', '.join(known)})")
    else:
        first, known = "", {}
    options = _options(name, first, known)
    if wants_help:
        print(_help(name, command, options, {}), end="")
        return True
    _check(name, arguments[1:] if first else arguments, options)
    return False


def completion() -> str:
    """What bash evaluates to complete commands and their options, and zsh after ``bashcompinit``."""
    cases = []
    for name in COMMANDS:
        words = [f"--{option.name}" for option in _options(name, "", ())]
        if name in ("reproduce", "bench") and find_spec(f"evaluation.{_HOMES[name]}") is not None:
            words = [*_runnable(name), *words]
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


def _runnable(name: str) -> dict[str, str]:
    """What ``reproduce`` or ``bench`` runs, each with a line."""
    if name == "reproduce":
        from ..experiments import EXPERIMENTS

        return EXPERIMENTS
    return {key: summary_of(module).split(": ", 1)[-1].rstrip(".") for key, module in _benchmarks().items()}


def _benchmarks() -> dict[str, str]:
    """The modules of the benchmarks, which are not in the wheel."""
    return import_module("evaluation.benchmarks").BENCHMARKS


def _options(name: str, what: str, known: Iterable[str]) -> list[Option]:
    command = COMMANDS[name]
    if name == "train":
        return options_of_training()
    if name == "bench":
        return options_of(_benchmarks()[what], "bench") if what else []
    if not command.function:
        return []
    own = [o for o in options_of(f"{__package__}.{name}", command.function) if o.name not in command.hidden]
    return own if name == "reproduce" else [_CONFIG, *own]


def options_of_training() -> list[Option]:
    """Those of ``train``, and groups of them, whose options Lightning knows."""
    return [_CONFIG, *_TRAINING]


def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def summary_of(module: str) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(_tree(module)) or "").partition("\n")[0].replace("``", "")


def options_of(module: str, function: str) -> list[Option]:
    """The arguments of a function as options, in its order; their help is its docstring's."""
    found = [node for node in _tree(module).body if isinstance(node, ast.FunctionDef) and node.name == function]
    arguments = found[0].args
    texts = _documented(ast.get_docstring(found[0]) or "")
    pairs = [*zip(reversed(arguments.args), _padded(reversed(arguments.defaults)), strict=False)][::-1]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [
        Option(
            argument.arg,
            "" if argument.annotation is None else ast.unparse(argument.annotation),
            None if default is None else ast.unparse(default),
            texts.get(argument.arg, ""),
        )
        for argument, default in pairs
    ]


def _padded(defaults: Iterable[ast.expr]) -> list[ast.expr | None]:
    """Defaults, from the last, followed by as many None as any function has arguments."""
    return [*defaults, *[None] * 100]


def _documented(docstring: str) -> dict[str, str]:
    """The lines of the section ``Args:``, by argument."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", section[1], re.MULTILINE) if section else []
    return {name: " ".join(text.split()).replace("``", "") for name, text in entries}


def _help(name: str, command: Command, options: Sequence[Option], known: dict[str, str]) -> str:
    parts = [f"usage: dgm-infer {name} {command.usage}\n\n{command.line[0].upper()}{command.line[1:]}.\n"]
    parts += ["\nexamples:\n", *(f"  {line}\n" for line in command.examples)]
    if known:
        width = max(map(len, known))
        parts += [f"\n{name} runs:\n", *(f"  {key:{width}}  {line}\n" for key, line in known.items())]
    if options:
        parts += ["\noptions:\n", *map(_described, options)]
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
    value_of = "" if option.annotation == "bool" else f" {option.metavar}"
    body = fill(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  --{option.name}{value_of}\n{body}\n"


def _check(name: str, arguments: Sequence[str], options: Sequence[Option]) -> None:
    known = {option.name: option for option in options}
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
    if name in ("condition", "evidence") and "print_config" not in "".join(arguments):
        missing = [option.name for option in options if option.default is None and option.name not in given]
        if missing:
            raise ConfigError(f"missing options: {', '.join(missing)}; give them, or --config FILE with them")


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
