"""The command line, and the composition root: the only module here that imports upwards."""

import difflib
import os
import re
import sys
from argparse import ArgumentError as ParseError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dgm_infer.errors import ConfigError, DgmInferError
from dgm_infer.extras import extra

__all__ = ["main"]

USAGE = """usage: dgm-infer COMMAND [--OPTION VALUE ...]

commands:
  train      train a generator: --config FILE (every option of LightningCLI's fit)
  condition  complete images of which a part is observed: --config FILE
  evidence   estimate log p(x) of images, between two bounds: --config FILE
  reproduce  run a published experiment: NAME [--fast] [--data FOLDER]
  bench      measure beside peers: NAME (every option of the benchmark's)

dgm-infer COMMAND --help lists a command's options; dgm-infer --version prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 after a line on bad input, 130 if interrupted with nothing kept."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if name == "--version":
        from dgm_infer import __version__

        print(f"dgm-infer {__version__}")
        return 0
    try:
        if name not in COMMANDS:
            raise ConfigError(f"no command {name!r}{suggest(name, COMMANDS)} (there are {', '.join(COMMANDS)})")
        with _working_directory_importable():
            COMMANDS[name](arguments[1:])
    except (DgmInferError, ParseError) as error:
        prefix = f"dgm-infer {name}" if name in COMMANDS else "dgm-infer"
        print(f"{prefix}: error: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dgm-infer {name}: interrupted before anything could be kept", file=sys.stderr)
        return 130
    return 0


def _condition(arguments: Sequence[str]) -> None:
    with extra("train"):
        from .condition import condition_images

    _configured("condition", "Complete images of which a part is observed.", condition_images, arguments)


def _evidence(arguments: Sequence[str]) -> None:
    with extra("train"):
        from .evidence import estimate_evidence

    _configured("evidence", "Estimate log p(x) of images, between two bounds.", estimate_evidence, arguments)


def _configured(name: str, description: str, function: Callable[..., object], arguments: Sequence[str]) -> None:
    """Run a command whose options are the arguments of a function, all but ``resolved``."""
    with extra("train"):
        from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog=f"dgm-infer {name}", description=description, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="a YAML file with any of the options")
    parser.add_function_arguments(function, skip={"resolved"})
    try:
        options = parser.parse_args(arguments)
    except ParseError as error:
        raise ConfigError(_with_suggestion(str(error), parser.get_defaults().keys())) from error
    resolved = parser.dump(options, skip_unset=False)
    try:
        values = vars(parser.instantiate(options))
    except DgmInferError:
        raise
    except ValueError as error:
        # of a list or null, jsonargparse hides what the class itself said
        raise (error.__cause__ if isinstance(error.__cause__, DgmInferError) else ConfigError(str(error))) from error
    values.pop("config")
    function(**values, resolved=resolved)


def _train(arguments: Sequence[str]) -> None:
    with extra("train"):
        # Lightning builds its command line with it; its own error would not name the extra
        import jsonargparse  # noqa: F401

        from .train import train

    train(list(arguments))


def _reproduce(arguments: Sequence[str]) -> None:
    from argparse import RawDescriptionHelpFormatter

    from ..experiments import EXPERIMENTS, REFERENCE_DATA, reproduce

    with extra("experiments"):
        from jsonargparse import ArgumentParser

    width = max(map(len, EXPERIMENTS))
    lines = "".join(f"\n  {name:{width}}  {line}" for name, line in EXPERIMENTS.items())
    parser = ArgumentParser(
        prog="dgm-infer reproduce",
        description=f"Run a published experiment:{lines}",
        formatter_class=RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", default="", help="one of the experiments above")
    parser.add_argument("--fast", action="store_true", help="a smoke run under a minute, whose numbers mean little")
    parser.add_argument("--data", help=f"the reference folder, where one is needed (default: ${REFERENCE_DATA})")
    parser.add_argument("--seed", type=int, default=1, help="of all randomness (default: 1)")
    parser.add_argument("--output", default="runs", help="folder of all runs (default: runs)")
    try:
        options = vars(parser.parse_args(arguments))
    except ParseError as error:
        raise ConfigError(_with_suggestion(str(error), parser.get_defaults().keys())) from error
    name = options["name"]
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment {name!r}{suggest(name, EXPERIMENTS)} (there are {', '.join(EXPERIMENTS)})")
    reproduce(**options, command=["dgm-infer", "reproduce", *arguments])


def _bench(arguments: Sequence[str]) -> None:
    from ..benchmarks import BENCHMARKS, load

    known = ", ".join(BENCHMARKS)
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(f"usage: dgm-infer bench NAME [--OPTION VALUE ...]\n\nbenchmarks: {known}\n")
        return
    if name not in BENCHMARKS:
        raise ConfigError(f"no benchmark {name!r}{suggest(name, BENCHMARKS)} (there are {known})")
    bench = load(name)
    with extra("bench"):
        from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog=f"dgm-infer bench {name}", exit_on_error=False, allow_abbrev=False)
    parser.add_function_arguments(bench)
    try:
        options = parser.parse_args(arguments[1:])
    except ParseError as error:
        raise ConfigError(_with_suggestion(str(error), parser.get_defaults().keys())) from error
    bench(**vars(options))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": _train,
    "condition": _condition,
    "evidence": _evidence,
    "reproduce": _reproduce,
    "bench": _bench,
}


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """A user's own classes are named by class path and live where the command is run."""
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def one_line(message: str) -> str:
    """jsonargparse's report without the parts that name no mistake, on one line."""
    lines = [line.strip() for line in message.splitlines()]
    noise = re.compile(r"(Does not validate against any|Subtypes:|Errors:$|Given value( type)?:|$)")
    kept = [line for line in lines if not noise.match(line)]
    # of a union's complaints, those about a plain string or null say nothing once there is another
    specific = [line for line in kept if not re.fullmatch(r"- Expected a <class '(str|NoneType)'>", line)]
    kept = specific if any(line.startswith("-") for line in specific) else kept
    text = " ".join(line.removeprefix("- ") for line in kept)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    # training's word "fit" is implied, never typed
    text = text.replace("fit.", "")
    return re.sub(r'Parser key "([^"]+)":', r"\1:", text)


def suggest(word: str, known) -> str:
    """``"; did you mean 'x'?"``, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _with_suggestion(message: str, options) -> str:
    unknown = re.search(r"unrecognized arguments: --([\w.]+)|[Oo]ption '([\w.]+)'(?: is not accepted)?$", message)
    if unknown is None:
        return message
    word = unknown[1] or unknown[2]
    group = re.search(r"Group '([\w.]+)'", message)
    prefix = f"{group[1]}." if group else ""
    known = [key.removeprefix(prefix) for key in options if key.startswith(prefix)]
    return message + suggest(word, known)


if __name__ == "__main__":
    sys.exit(main())
