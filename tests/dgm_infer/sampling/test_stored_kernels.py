"""Draws keep their kernel by class path and fields."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.linear_maps import DiagonalMap, LowRankMap
from dgm_infer.sampling.stored import UnknownKernel, from_json, to_json
from dgm_infer.settings import Settings

DATA = Path(__file__).parents[2] / "data"
STORED = json.loads((DATA / "stored_0.1.0.json").read_text())


@dataclass(frozen=True, eq=False)
class Either(Settings):
    """A kernel of a user's own, made of two others."""

    first: Any = None
    share: float = 0.5

    def check(self, problem): ...

    def init(self, problem, position): ...

    def step(self, problem, state, rng): ...


class Plain:
    """A kernel without fields."""

    def check(self, problem): ...

    def init(self, problem, position): ...

    def step(self, problem, state, rng): ...


KERNELS = [
    dgm.HMC(step_size=0.1, n_steps=(2, 5)),
    dgm.HMC(step_size=torch.tensor([0.25, 0.5]), trajectory_length=1.5),
    dgm.NUTS(step_size=torch.tensor(0.1, dtype=torch.float64), n_steps=31),
    dgm.NUTS(metric="low_rank"),
    dgm.HMC(metric=DiagonalMap(torch.tensor([0.5, 2.0]))),
    dgm.LiftedHMC(0.1, trajectory="nuts", metric=LowRankMap(torch.ones(3), torch.eye(3)[:, :2], torch.ones(2) / 2)),
    dgm.ConstrainedHMC(solver="newton", compile=True),
    Either(dgm.HMC(step_size=torch.tensor([0.3])), 0.25),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_a_kernel_is_made_again_as_it_was(kernel):
    stored = json.loads(json.dumps(to_json(kernel)))
    again = from_json(stored)
    assert again == kernel
    assert type(again) is type(kernel)


def test_tensors_keep_their_type():
    kernel = from_json(to_json(dgm.HMC(step_size=torch.tensor([0.1], dtype=torch.float32))))
    assert kernel.step_size.dtype == torch.float32


def test_a_kernel_without_fields_is_made_again():
    assert isinstance(from_json(to_json(Plain())), Plain)


def test_shipped_kernels_are_stored_by_the_name_that_users_know():
    assert to_json(dgm.HMC())["class_path"] == "dgm_infer.HMC"
    assert to_json(Plain())["class_path"] == f"{__name__}.Plain"


class Made(Plain):
    """A plain class that was made with an argument."""

    def __init__(self, share=0.5):
        self.share = share


def a_plain_class_with_attributes():
    return to_json(Made(0.9))


def fields_that_json_cannot_hold():
    return to_json(Either(first=lambda: 0))


def a_module_that_is_not_imported():
    return {"class_path": "antigravity.HMC", "init_args": {}}


def a_class_that_is_not_a_kernel():
    return {"class_path": "dgm_infer.Gaussian", "init_args": {}}


def a_field_of_another_version():
    return {"class_path": "dgm_infer.HMC", "init_args": {"friction": 0.5}}


@pytest.mark.parametrize(
    "stored",
    [
        a_plain_class_with_attributes,
        fields_that_json_cannot_hold,
        a_module_that_is_not_imported,
        a_class_that_is_not_a_kernel,
        a_field_of_another_version,
    ],
)
def test_what_cannot_be_made_again_names_itself_and_samples_nothing(stored):
    values = stored()
    kernel = from_json(json.loads(json.dumps(values)))
    assert isinstance(kernel, UnknownKernel)
    assert values["class_path"] in repr(kernel)
    # and is stored again as it was
    assert to_json(kernel) == json.loads(json.dumps(values))
    target = dgm.Target(lambda x: x.square().sum(-1), 2)
    with pytest.raises(dgm.errors.ArgumentError, match=values["class_path"].replace(".", r"\.")):
        dgm.sample(target, kernel, progress=False)


def test_loading_imports_no_module_that_a_file_names():
    import sys

    from_json(a_module_that_is_not_imported())
    assert "antigravity" not in sys.modules


def test_draws_of_an_unknown_kernel_load_with_a_warning(tmp_path, monkeypatch):
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    draws = dgm.sample(target, dgm.HMC(), chains=2, warmup=5, draws=3, seed=1, progress=False)
    monkeypatch.setattr("dgm_infer.sampling.draws.to_json", lambda kernel: a_module_that_is_not_imported())
    draws.save(tmp_path / "draws.nc")
    with pytest.warns(UserWarning, match="antigravity.HMC is not available"):
        loaded = dgm.Draws.load(tmp_path / "draws.nc", problem=target)
    assert torch.equal(loaded.inputs, draws.inputs)
    assert isinstance(loaded.kernel, UnknownKernel)


def test_evidence_of_the_first_version_loads():
    evidence = dgm.Evidence.load(DATA / "evidence_ais_0.1.0.npz")
    assert evidence.log_z.tolist() == pytest.approx(STORED["log_z"], abs=1e-12)
    assert (evidence.status, evidence.method, evidence.dof) == ("unbiased", "AIS", 2)
    assert evidence.draws.shape == (3, 1, 2, 2)
    assert {"ess", "acceptance", "gradient_evaluations"} <= set(evidence.diagnostics)


def test_draws_refuse_a_problem_of_another_size(tmp_path):
    target = dgm.Target(lambda x: x.square().sum(-1), 2, (2,))
    dgm.sample(target, chains=3, warmup=5, draws=4, seed=1, progress=False).save(tmp_path / "draws.nc")
    other = dgm.Target(lambda x: x.square().sum(-1), 3, (2,))
    with pytest.raises(dgm.errors.ArgumentError, match=r"\(2, 2\).*\(2, 3\)"):
        dgm.Draws.load(tmp_path / "draws.nc", problem=other)
