"""Problems that a run of chains is given again: those that no folder holds, and others, which are refused."""

import pytest
import torch

import dgm_infer as dgm
from tests.dgm_infer.runs.same import assert_same, fibre, run
from tests.oracles import FLOAT


class TestProblemsThatCannotBeStored:
    @pytest.fixture
    def target(self):
        return dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)

    def test_are_sampled_with_a_warning_and_given_again(self, tmp_path, target):
        options = {"chains": 4, "warmup": 10, "seed": 1, "progress": False}
        whole = dgm.sample(target, dgm.HMC(), draws=9, **options)
        with pytest.warns(UserWarning, match=r"cannot be stored.*dgm\.resume\(run, problem=\.\.\.\)"):
            dgm.sample(target, dgm.HMC(), draws=4, run=tmp_path / "run", **options)
        with pytest.raises(dgm.errors.CheckpointError, match="give problem="):
            dgm.resume(tmp_path / "run", progress=False)
        draws = dgm.extend(tmp_path / "run", 5, target, progress=False)
        assert_same(draws, whole)
        assert_same(dgm.collect(tmp_path / "run", target), whole)

    def test_do_not_go_to_other_processes(self, tmp_path, target):
        with pytest.raises(dgm.errors.ArgumentError, match=r"devices=.*cannot be stored"):
            dgm.sample(target, run=tmp_path / "run", devices=["cpu", "cpu"], progress=False)
        assert not (tmp_path / "run").exists()


def test_another_problem_is_refused(tmp_path):
    run(run=tmp_path / "run")
    for call in (dgm.resume, dgm.collect):
        with pytest.raises(dgm.errors.ArgumentError, match="give the problem that was sampled"):
            call(tmp_path / "run", fibre(0.9))


class Shelf(dgm.Target):
    """A normal density far from where points of a fingerprint are, higher there by a step."""

    dim, dtype = 2, FLOAT

    def __init__(self, step: float):
        super().__init__()
        self.step = step

    def energy(self, x):
        return 0.5 * (x - 20).square().sum(-1) + self.step * (x[..., 0] > 10)


def test_a_problem_that_differs_only_where_chains_are_is_refused_and_the_run_stays_as_it_was(tmp_path):
    initial = torch.full((4, 2), 20.0, dtype=FLOAT)
    options = {"warmup": 5, "seed": 1, "progress": False}
    whole = dgm.sample(Shelf(0.0), dgm.HMC(), initial=initial, draws=9, **options)
    dgm.sample(Shelf(0.0), dgm.HMC(), initial=initial, draws=4, run=tmp_path / "run", **options)
    with pytest.raises(dgm.errors.ArgumentError, match=r"energy of Shelf where chains stopped differs .* by 3"):
        dgm.extend(tmp_path / "run", 5, Shelf(3.0), progress=False)
    assert_same(dgm.extend(tmp_path / "run", 5, Shelf(0.0), progress=False), whole)
