"""The ``bench`` command: measure beside peers."""

from collections.abc import Sequence

from .options import make_parser, parse

__all__ = ["run"]


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer bench NAME [--OPTION VALUE ...]``: the options are the arguments of the benchmark's ``bench``."""
    from ..benchmarks import load  # not in the wheel

    name = arguments[0]
    bench = load(name)
    parser = make_parser(f"bench {name}", "bench")
    parser.add_function_arguments(bench)
    bench(**vars(parse(parser, arguments[1:])))
