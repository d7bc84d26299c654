"""What commands accept, read from their source without running it."""

import ast
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from dgm_infer.errors import ConfigError

from .messages import as_typed

__all__ = [
    "COMMANDS",
    "USAGE",
    "Command",
    "Option",
    "in_words_of",
    "options",
    "options_of",
    "options_of_training",
    "runnable",
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
    is_flag: bool = False
    """Whether it takes no value."""

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
    """Arguments of the function that are not options."""


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
            "dgm-infer evidence --name mine --generator mine.model --output_noise 0.1 --images pictures --base full "
            "--methods GibbsTempering --bounds null",
        ),
        "estimate_evidence",
    ),
    "reproduce": Command(
        "experiments",
        "run a published experiment; without a name, list them",
        "NAME [--fast] [--data FOLDER] [--seed N] [--output FOLDER] | --resume RUN",
        (
            "dgm-infer reproduce quantile --fast",
            "dgm-infer reproduce pose --data reference --seed 2",
            "dgm-infer reproduce --resume runs/reproduce_pose/TIME",
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
    "watch": Command(
        "train",
        "what a run is at, by reading its folder from beside it",
        "RUN [--every SECONDS] [--once]",
        (
            "dgm-infer watch runs/lens",
            "dgm-infer watch runs/digits/TIME --once",
            "dgm-infer watch runs/lens --every 60",
        ),
        "watch",
        ("run",),
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

# the rooms of what runs by name
_HOMES = {"reproduce": "experiments", "bench": "benchmarks"}

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


def runnable(name: str) -> dict[str, str]:
    """What ``reproduce`` or ``bench`` runs, each with a line; nothing for others, and where it is not installed."""
    if name not in _HOMES or find_spec(f"evaluation.{_HOMES[name]}") is None:
        return {}
    if name == "reproduce":
        from ..experiments import EXPERIMENTS

        return EXPERIMENTS
    return {key: summary_of(module).split(": ", 1)[-1].rstrip(".") for key, module in _benchmarks().items()}


def _benchmarks() -> dict[str, str]:
    """The modules of the benchmarks, which are not in the wheel."""
    return import_module("evaluation.benchmarks").BENCHMARKS


def options(name: str, what: str = "") -> list[Option]:
    """The options of a command, of ``bench`` those of the benchmark ``what``."""
    command = COMMANDS[name]
    if name == "train":
        return options_of_training()
    if name == "bench":
        return options_of(_benchmarks()[what], "bench") if what else []
    if not command.function:
        return []
    own = [o for o in options_of(f"{__package__}.{name}", command.function) if o.name not in command.hidden]
    if name in ("reproduce", "watch"):
        return [replace(option, is_flag=option.annotation == "bool") for option in own]
    return [_CONFIG, *own]


def in_words_of(command: str, text: object) -> str:
    """What the library says, in the words of a command on images: see :func:`~.messages.as_typed`."""
    if command not in ("condition", "evidence"):
        return str(text)
    # before the library is loaded nothing has named a kernel's fields
    kernels = sys.modules.get("dgm_infer.kernels") if command == "condition" else None
    classes = [each for each in vars(kernels).values() if isinstance(each, type)] if kernels else []
    named = [field.name for each in classes if is_dataclass(each) for field in fields(each)]
    return as_typed(str(text), [option.name for option in options(command)], named)


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
