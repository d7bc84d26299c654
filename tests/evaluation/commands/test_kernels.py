"""Kernels by class path, as configurations name them."""

import jsonargparse
import pytest

import dgm_infer as dgm
from evaluation.commands.condition import AnyKernel

CONFIGURED = [
    (
        {"class_path": "dgm_infer.kernels.RandomWalk", "init_args": {"metric": "dense"}},
        dgm.kernels.RandomWalk(metric="dense"),
    ),
    (
        {"class_path": "dgm_infer.kernels.EllipticalSlice", "init_args": {"scale": 2.0}},
        dgm.kernels.EllipticalSlice(scale=2.0),
    ),
    ({"class_path": "dgm_infer.kernels.LinearSlice", "init_args": {"width": 0.5}}, dgm.kernels.LinearSlice(0.5)),
    ({"class_path": "dgm_infer.kernels.PseudoMarginalMH"}, dgm.kernels.PseudoMarginalMH()),
    (
        {
            "class_path": "dgm_infer.kernels.Independence",
            "init_args": {"proposal": {"class_path": "dgm_infer.StandardNormal", "init_args": {"dim": 2}}},
        },
        dgm.kernels.Independence(dgm.StandardNormal(2)),
    ),
    (
        {
            "class_path": "dgm_infer.kernels.Alternating",
            "init_args": {
                "first": {"class_path": "dgm_infer.kernels.RandomWalk", "init_args": {"step_size": 0.5}},
                "blocks": ["global", [2, 3]],
            },
        },
        dgm.kernels.Alternating(dgm.kernels.RandomWalk(0.5), dgm.kernels.EllipticalSlice(), blocks=("global", (2, 3))),
    ),
]


@pytest.mark.parametrize(("spec", "kernel"), [pytest.param(*c, id=type(c[1]).__name__) for c in CONFIGURED])
def test_a_configuration_names_kernels_by_class_path(spec, kernel):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--kernel", type=AnyKernel)
    assert parser.instantiate(parser.parse_object({"kernel": spec})).kernel == kernel
