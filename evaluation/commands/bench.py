"""The ``bench`` command: measure beside peers."""

from collections.abc import Sequence
from importlib.util import find_spec

from dgm_infer.errors import ConfigError

from .messages import suggest
from .options import make_parser, parse

__all__ = ["run"]


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer bench NAME [--OPTION VALUE ...]``: the options are the arguments of the benchmark's ``bench``."""
    if find_spec("evaluation.benchmarks") is None:
        raise ConfigError("benchmarks are not part of the installed package: run this in a clone of the repository")
    from ..benchmarks import BENCHMARKS, load

    known = ", ".join(BENCHMARKS)
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(f"usage: dgm-infer bench NAME [--OPTION VALUE ...]\n\nbenchmarks: {known}\n")
        return
    if name not in BENCHMARKS:
        raise ConfigError(f"no benchmark {name!r}{suggest(name, BENCHMARKS)} (there are {known})")
    bench = load(name)
    parser = make_parser(f"bench {name}", "bench")
    parser.add_function_arguments(bench)
    bench(**vars(parse(parser, arguments[1:])))
