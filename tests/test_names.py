"""What a user imports: a root that can be read, rooms with the rest, and one line that says where a name is."""

from importlib import import_module

import pytest

import dgm_infer as dgm

ROOMS = (
    "diagnosis",
    "errors",
    "models",
    "conditioning",
    "references",
    "kernels",
    "evidence",
    "likelihood_free",
    "interop",
)
ROOT = [
    "condition",
    "check",
    "Fibre",
    "pixels",
    "linear",
    "blur",
    "downsample",
    "image",
    "Target",
    "GenerativeModel",
    "DirectedModel",
    "StandardNormal",
    "Logistic",
    "Product",
    "WithNoise",
    "sample",
    "Draws",
    "resume",
    "extend",
    "collect",
    "ConstrainedHMC",
    "LiftedHMC",
    "HMC",
    "NUTS",
    "ModeJumps",
    "log_evidence",
    "bidirectional",
    "compare",
    "Evidence",
    "ParallelTempering",
    "ContinuousTempering",
    "GibbsTempering",
    "SimulatedTempering",
    "AIS",
    "SMC",
    "Elbo",
    "Gaussian",
    "Mixture",
    "Flow",
    "modes",
    "from_pyro",
    "target_from_pyro",
    "from_simulator",
    "DgmInferError",
]


def test_the_root_is_what_most_work_begins_with():
    assert sorted(dgm.__all__) == sorted(ROOT)
    assert len(ROOT) <= 45


@pytest.mark.parametrize("room", ROOMS)
def test_a_name_of_a_room_is_found_there_and_the_root_says_where(room):
    module = import_module(f"dgm_infer.{room}")
    assert getattr(dgm, room) is module
    for name in module.__all__:
        found = getattr(module, name)
        if name in ROOT:
            assert getattr(dgm, name) is found
        elif not hasattr(dgm, name):
            with pytest.raises(AttributeError, match=rf"^module 'dgm_infer' has no attribute '{name}': use ") as raised:
                getattr(dgm, name)
            home = str(raised.value).rpartition("use ")[2].removesuffix(f".{name}")
            assert name in import_module(home).__all__


def test_what_is_shown_of_the_root_is_its_names_and_rooms():
    assert {name for name in dir(dgm) if not name.startswith("_")} == {*dgm.__all__, *dgm._ROOMS}


def test_a_name_that_is_nowhere_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'dgm_infer' has no attribute 'nuts': did you mean NUTS\?$"):
        _ = dgm.nuts
