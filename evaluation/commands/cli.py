"""The command line ``dgm-infer``: one module of this folder per command, each with ``run(arguments)``."""

import errno
import importlib
import os
import sys
import warnings
from argparse import ArgumentError as ParseError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dgm_infer.errors import ConfigError, DgmInferError, extra

from .answers import answered, completion, shipped
from .messages import one_line, suggest
from .outline import COMMANDS, USAGE, in_words_of

__all__ = ["COMMANDS", "main"]

# What a disk says that takes nothing more.
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 after a line on bad input, 130 if interrupted.

    SIGTERM interrupts as Ctrl-C does; the last line says what was finished, which stays.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if name == "--completion":
        print(completion(), end="")
        return 0
    if name == "--version":
        from dgm_infer import __version__

        print(f"dgm-infer {__version__}")
        return 0
    try:
        if name not in COMMANDS:
            raise ConfigError(f"no command {name!r}{suggest(name, COMMANDS)} (there are {', '.join(COMMANDS)})")
        rest = shipped(arguments[1:])
        if rest[-2:] == ["--help", "full"]:
            rest = rest[:-1]
        elif answered(name, rest):
            # before anything heavy is loaded
            return 0
        if not COMMANDS[name].extra:
            importlib.import_module(f".{name}", __package__).run(rest)
            return 0
        from .keeping import stopped_alike  # after what needs no torch

        with _working_directory_importable(), _warnings_in_one_line(name), stopped_alike():
            with extra(COMMANDS[name].extra):
                command = importlib.import_module(f".{name}", __package__)
                weights = importlib.import_module("generators.weights")
            with weights.without_trust():
                command.run(rest)
    except (DgmInferError, ParseError) as error:
        _say(name, f"error: {one_line(in_words_of(name, error))}", error)
        return 2
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        _say(name, f"error: cannot write {error.filename or 'a file'}: {error.strerror}", error)
        return 2
    except KeyboardInterrupt as error:
        _say(name, "interrupted" if _notes(error) else "interrupted before anything could be kept", error)
        return 130
    return 0


def _notes(error: BaseException) -> list[str]:
    """What was added to an exception on its way: where finished results are."""
    return list(getattr(error, "__notes__", []))


def _say(name: str, line: str, error: BaseException) -> None:
    """One line on the standard error stream."""
    prefix = f"dgm-infer {name}" if name in COMMANDS else "dgm-infer"
    print(f"{prefix}: " + "; ".join([line, *_notes(error)]), file=sys.stderr)


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


@contextmanager
def _warnings_in_one_line(name: str) -> Iterator[None]:
    """Print the project's warnings as its errors are, without a line of source code."""
    from dgm_infer.diagnosis import DiagnosisWarning  # after what needs no torch

    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message, category, filename, lineno, file=None, line=None):
            if category in (UserWarning, DiagnosisWarning):
                print(f"dgm-infer {name}: warning: {one_line(in_words_of(name, message))}", file=sys.stderr)
            else:
                shown(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


if __name__ == "__main__":
    sys.exit(main())
