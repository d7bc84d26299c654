"""The options of commands: those of a function, on the command line and in YAML."""

from argparse import ArgumentError as ParseError
from collections.abc import Callable, Sequence
from typing import Any

from dgm_infer.errors import ConfigError, DgmInferError
from dgm_infer.extras import extra

from .messages import with_suggestion

__all__ = ["make_parser", "parse", "run_configured"]


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


def run_configured(
    command: str, needs: str, description: str, function: Callable[..., object], arguments: Sequence[str]
) -> None:
    """Run a command whose options are the arguments of a function, all but ``resolved``.

    ``resolved`` is the configuration as it was read, as YAML. ``--config`` names a file with any of the options.

    Raises:
        ConfigError: a mistake in the options or the file.
        DgmInferError: whatever the function raises.
    """
    parser = make_parser(command, needs, description=description)
    parser.add_argument("--config", action="config", help="a YAML file with any of the options")
    parser.add_function_arguments(function, skip={"resolved"})
    options = parse(parser, arguments)
    resolved = parser.dump(options, skip_unset=False)
    try:
        values = vars(parser.instantiate(options))
    except DgmInferError:
        raise
    except ValueError as error:
        # for a list or null, jsonargparse hides what the class itself said
        raise (error.__cause__ if isinstance(error.__cause__, DgmInferError) else ConfigError(str(error))) from error
    values.pop("config")
    function(**values, resolved=resolved)
