"""Draws on disk: what is saved is loaded, all of it or nothing."""

import os
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

import dgm_infer as dgm
from dgm_infer.errors import CheckpointError
from dgm_infer.sampling.inference_data import inference_data
from generators import LatentPosterior
from tests.dgm_infer.sampling.short_runs import fibre, run
from tests.disks import largest_file
from tests.models import MASK, image
from tests.oracles import Ellipse, correlated_gaussian
from tests.quick import cases


def assert_same(loaded, draws):
    assert loaded.shape == draws.shape
    if draws.inputs is None:
        assert loaded.inputs is None
    else:
        assert torch.equal(loaded.inputs, draws.inputs)
    assert loaded.latents.keys() == draws.latents.keys()
    for name, value in draws.latents.items():
        assert torch.equal(loaded.latents[name], value)
    assert loaded.stats.keys() == draws.stats.keys()
    for name, value in draws.stats.items():
        assert loaded.stats[name].dtype == value.dtype
        assert torch.equal(loaded.stats[name], value)
    assert loaded.seed == draws.seed
    assert loaded.interrupted == draws.interrupted
    assert type(loaded.kernel) is type(draws.kernel)


SHAPES = {
    "one problem": ((), "inputs"),
    "a batch": ((3,), "inputs"),
    "a batch, latents": ((3,), "latents"),
    "a grid": ((2, 2), "inputs"),
}


@pytest.mark.parametrize(("batch", "keep"), cases(SHAPES, quick=("one problem", "a batch, latents")))
def test_what_is_saved_is_loaded(tmp_path, batch, keep):
    draws = run(fibre(batch), keep=keep)
    draws.save(tmp_path / "posterior.nc")
    loaded = dgm.Draws.load(tmp_path / "posterior.nc")
    assert_same(loaded, draws)
    assert loaded.kernel == draws.kernel
    assert loaded.problem is None


ADAPTED = {
    "a range of steps": (dgm.HMC(n_steps=(2, 5)), lambda: correlated_gaussian((0.1, 1.0)).problem),
    "HMC by length": (dgm.HMC(), lambda: correlated_gaussian((0.1, 1.0)).problem),
    "ConstrainedHMC": (dgm.ConstrainedHMC(), fibre),
    "a grid of problems": (dgm.ConstrainedHMC(), lambda: fibre((2, 2))),
    "one problem": (dgm.ConstrainedHMC(), lambda: dgm.condition(Ellipse(), [2.0])),
}


@pytest.mark.parametrize(("kernel", "make"), cases(ADAPTED, quick=("HMC by length",)))
def test_an_adapted_kernel_is_loaded_and_goes_on_as_it_was(tmp_path, kernel, make):
    problem = make()
    initial = problem.start(3, torch.Generator().manual_seed(5))
    draws = run(problem, kernel, warmup=12, initial=initial)
    draws.save(tmp_path / "posterior.nc")
    loaded = dgm.Draws.load(tmp_path / "posterior.nc", problem=problem)
    assert_same(loaded, draws)
    assert loaded.kernel == draws.kernel
    more, again = (run(problem, k, warmup=0, initial=draws.inputs[:, -1]) for k in (draws.kernel, loaded.kernel))
    assert torch.equal(more.inputs, again.inputs)


def test_loaded_draws_generate_as_the_original_did(tmp_path, draws):
    draws.save(tmp_path / "posterior.nc")
    with pytest.raises(dgm.errors.ArgumentError, match="problem="):
        dgm.Draws.load(tmp_path / "posterior.nc").generate()
    loaded = dgm.Draws.load(tmp_path / "posterior.nc", problem=draws.problem)
    assert torch.equal(loaded.generate(seed=3), draws.generate(seed=3))


def test_loaded_draws_can_be_saved_and_printed(tmp_path, draws):
    draws.save(tmp_path / "first.nc")
    loaded = dgm.Draws.load(tmp_path / "first.nc")
    loaded.save(tmp_path / "second.nc")
    assert_same(dgm.Draws.load(tmp_path / "second.nc"), draws)
    assert "(3, 8, 3)" in repr(loaded)
    assert "z" in repr(loaded)


@pytest.mark.parametrize("before", [None, b"an older file"], ids=["no file", "an older file"])
def test_a_disk_that_is_full_is_one_line_and_leaves_nothing_behind(tmp_path, draws, before):
    path = tmp_path / "posterior.nc"
    if before is not None:
        path.write_bytes(before)
    # HDF5 itself ends the process when its file cannot grow
    with (
        largest_file(4096),
        pytest.raises(dgm.errors.ArgumentError, match=r"cannot save .*posterior\.nc: File too large"),
    ):
        draws.save(path)
    assert os.listdir(tmp_path) == ([] if before is None else ["posterior.nc"])
    assert before is None or path.read_bytes() == before


def test_a_save_that_is_interrupted_leaves_nothing_behind(tmp_path, draws, monkeypatch):
    def interrupted(self, data):
        self.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draws.save(tmp_path / "posterior.nc")
    assert os.listdir(tmp_path) == []


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path, draws):
    draws.save(tmp_path / "posterior.nc")
    (tmp_path / "other").touch()
    assert (tmp_path / "posterior.nc").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_saving_replaces_an_older_file(tmp_path, draws):
    (tmp_path / "posterior.nc").write_bytes(b"an older file")
    draws.save(tmp_path / "posterior.nc")
    assert_same(dgm.Draws.load(tmp_path / "posterior.nc"), draws)
    assert os.listdir(tmp_path) == ["posterior.nc"]


def damage(path, draws, kind):
    if kind == "a folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("these are not draws")
    elif kind == "empty":
        path.touch()
    elif kind == "foreign":
        foreign: Any = inference_data({"z": torch.zeros(2, 10)}, {"lp": torch.zeros(2, 10)}, 0)
        foreign.to_netcdf(str(path), engine="h5netcdf")
    elif kind.startswith("cut"):
        draws.save(path)
        size = {"cut in half": path.stat().st_size // 2, "cut by a byte": path.stat().st_size - 1}[kind]
        with open(path, "r+b") as file:
            file.truncate(size)
    elif kind == "without its statistics":
        data = draws.to_arviz()
        del data["sample_stats"]
        data.to_netcdf(str(path), engine="h5netcdf")
    elif kind == "more than any memory":
        draws.save(path)
        with h5py.File(path, "a") as file:
            group: Any = file["posterior"]
            name = next(key for key in group if group[key].ndim > 2)
            del group[name]
            # chunks that were never written take no room in the file
            group.create_dataset(name, (2, 4, 2**50), "f8", chunks=(2, 4, 1024))


@pytest.mark.parametrize(
    "kind",
    [
        "missing",
        "a folder",
        "text",
        "empty",
        "foreign",
        "cut in half",
        "cut by a byte",
        "without its statistics",
        "more than any memory",
    ],
)
def test_what_is_no_file_of_draws_is_refused_in_one_line(tmp_path, draws, kind):
    path = tmp_path / "posterior.nc"
    damage(path, draws, kind)
    with pytest.raises(CheckpointError) as caught:
        dgm.Draws.load(path)
    assert "\n" not in str(caught.value)
    assert "posterior.nc" in str(caught.value)


# ----------------------------------------------------------------------------------------------------- files of others


def of_another_file(path, group, name):
    """The values come from a file beside it."""
    (path.parent / "other").write_bytes(bytes(8 * group[name].size))
    shape = group[name].shape
    del group[name]
    group.create_dataset(name, shape, "f8", external=[(path.parent / "other", 0, h5py.h5f.UNLIMITED)])


def virtual(path, group, name):
    layout = h5py.VirtualLayout(group[name].shape, "f8")
    layout[:] = h5py.VirtualSource(path.parent / "other", "z", shape=group[name].shape)
    del group[name]
    group.create_virtual_dataset(name, layout)


def linked(path, group, name):
    del group[name]
    group[name] = h5py.ExternalLink(path.parent / "other", "/z")


@pytest.mark.parametrize("point", [of_another_file, virtual, linked])
def test_a_file_that_points_to_another_is_refused(tmp_path, draws, point):
    path = tmp_path / "posterior.nc"
    draws.save(path)
    with h5py.File(path, "a") as file:
        point(path, file["unconstrained_posterior"], "inputs")
    with pytest.raises(CheckpointError, match=r"Draws\.save writes no such file"):
        dgm.Draws.load(path)


def test_draws_of_another_observation_are_refused(tmp_path, draws):
    draws.save(tmp_path / "posterior.nc")
    other = dgm.condition(draws.problem.model, image(3) + 0.2, observe=dgm.pixels(MASK))
    with pytest.raises(dgm.errors.ArgumentError, match=r"constraint differs .* by 0\.2: give the problem"):
        dgm.Draws.load(tmp_path / "posterior.nc", problem=other)


def decoded(pixel):
    """Posteriors of two images, of which the second has one pixel of this value."""
    torch.manual_seed(0)
    images = torch.zeros(2, 6)
    images[1, 0] = pixel
    decoder = nn.Sequential(nn.Linear(2, 6), nn.Tanh())
    return LatentPosterior(Normals(decoder), images, dgm.StandardNormal(2))


class Normals(nn.Module):
    """Independent normal pixels with means from a network."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, z):
        return Independent(Normal(self.network(z), 0.1), 1)


OTHERS = {
    "an image": (lambda: decoded(0.2), lambda: decoded(0.3)),
    "data of an ABC posterior": (
        lambda: dgm.condition(Ellipse(), [2.0], tolerance=0.1),
        lambda: dgm.condition(Ellipse(), [2.5], tolerance=0.1),
    ),
}


@pytest.mark.parametrize(("make", "other"), OTHERS.values(), ids=OTHERS)
def test_draws_of_another_target_are_refused(tmp_path, make, other):
    path = tmp_path / "posterior.nc"
    draws = run(make(), dgm.HMC(step_size=0.1, n_steps=1), draws=3)
    draws.save(path)
    assert_same(dgm.Draws.load(path, problem=make()), draws)
    with pytest.raises(dgm.errors.ArgumentError, match=r"its energy differs .* give the problem"):
        dgm.Draws.load(path, problem=other())


def test_draws_loaded_without_their_target_still_know_it(tmp_path):
    run(decoded(0.2), dgm.HMC(step_size=0.1, n_steps=1), draws=3).save(tmp_path / "first.nc")
    dgm.Draws.load(tmp_path / "first.nc").save(tmp_path / "second.nc")
    with pytest.raises(dgm.errors.ArgumentError, match=r"its energy differs"):
        dgm.Draws.load(tmp_path / "second.nc", problem=decoded(0.3))


def test_draws_saved_without_a_fingerprint_are_loaded(tmp_path):
    path = tmp_path / "posterior.nc"
    draws = run(decoded(0.2), dgm.HMC(step_size=0.1, n_steps=1), draws=3)
    draws.save(path)
    with h5py.File(path, "a") as file:
        del file["constant_data"]
    assert_same(dgm.Draws.load(path, problem=draws.problem), draws)


def test_draws_are_saved_though_their_energy_fails(tmp_path, monkeypatch):
    draws = run(decoded(0.2), dgm.HMC(step_size=0.1, n_steps=1), draws=3)
    monkeypatch.setattr(LatentPosterior, "energy", lambda self, x: 1 / 0)
    draws.save(tmp_path / "posterior.nc")
    assert_same(dgm.Draws.load(tmp_path / "posterior.nc", problem=draws.problem), draws)


@pytest.mark.parametrize("keep", ["inputs", "latents"])
def test_draws_of_a_fibre_are_not_those_of_a_target_nor_of_another_factor(tmp_path, draws, monkeypatch, keep):
    path = tmp_path / "posterior.nc"
    run(keep=keep).save(path)
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), draws.problem.dim, tuple(draws.problem.batch_shape))
    with pytest.raises(dgm.errors.ArgumentError, match="of another kind"):
        dgm.Draws.load(path, problem=target)
    other = fibre()
    monkeypatch.setattr(type(other.model), "log_factor", lambda self, u: -u.square().sum(-1), raising=False)
    monkeypatch.setattr(type(other.model), "has_log_factor", True, raising=False)
    with pytest.raises(dgm.errors.ArgumentError, match="log density differs"):
        dgm.Draws.load(path, problem=other)


@pytest.mark.parametrize("problem", [5, nn.Linear(2, 3), Ellipse()], ids=["a number", "a network", "a model"])
def test_what_is_no_problem_is_named(tmp_path, draws, problem):
    draws.save(tmp_path / "posterior.nc")
    with pytest.raises(dgm.errors.ArgumentError, match=f"^expected a Target, not a {type(problem).__name__}: "):
        dgm.Draws.load(tmp_path / "posterior.nc", problem=problem)
