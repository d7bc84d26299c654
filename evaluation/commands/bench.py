"""The ``bench`` command: measure beside peers."""

from collections.abc import Sequence

from dgm_infer.autodiff.xla import FOLDER

from .options import make_parser, parse

__all__ = ["run"]


def run(arguments: Sequence[str]) -> None:
    """``dgm-infer bench NAME [--OPTION VALUE ...]``: the options are the arguments of the benchmark's ``bench``."""
    # not in the wheel
    from ..benchmarks import load
    from ..benchmarks.workers import variables

    name = arguments[0]
    bench = load(name)
    parser = make_parser(f"bench {name}", "bench")
    parser.add_function_arguments(bench)
    given = vars(parse(parser, arguments[1:]))
    # what a run has compiled is not there for the next one: compilation is part of what is measured
    with variables({FOLDER: ""}):
        bench(**given)
