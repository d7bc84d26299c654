"""Files that are whole or not there, whoever writes them and whatever the disk does."""

import io
import os
import zipfile

import h5py
import numpy as np
import pytest
import torch
from numpy.lib import format as npy

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, CheckpointError
from dgm_infer.files import write_file
from tests.disks import fill, largest_file, together


def test_a_file_that_the_disk_refuses_is_one_line_and_the_old_one_stays(tmp_path, monkeypatch):
    write_file(tmp_path / "file", "old")
    with largest_file(1000), pytest.raises(ArgumentError, match=r"cannot save .*file: File too large"):
        write_file(tmp_path / "file", bytes(2000))
    fill(monkeypatch, tmp_path)
    with pytest.raises(ArgumentError, match=r"cannot save .*file: No space left on device"):
        write_file(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_generators_that_are_saved_together_are_each_whole(tmp_path):
    model = generators.GaussianVAE(2, (2, 2), (3,))
    together(lambda i: [generators.save(model, tmp_path / "vae") for _ in range(10)])
    assert generators.load(tmp_path / "vae.safetensors").output_shape == (2, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vae.json", "vae.safetensors"]


def test_the_target_of_a_link_is_written_and_the_mode_of_a_file_kept(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    target.chmod(0o600)
    link.symlink_to(target)
    write_file(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert target.stat().st_mode & 0o777 == 0o600


def test_devices_and_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/full"):
        with pytest.raises(ArgumentError, match="a device or a pipe"):
            write_file(path, "text")


@pytest.fixture
def estimate(tmp_path):
    target, base = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2), dgm.Gaussian(torch.zeros(2), 1.0)
    dgm.log_evidence(target, base, dgm.Elbo(samples=4), chains=2, seed=0, progress=False).save(tmp_path / "e.npz")
    return tmp_path / "e.npz"


@pytest.mark.parametrize("name", ["log_z", "std_error", "log_weights", "draws"])
def test_arrays_that_do_not_fit_each_other_are_refused(estimate, name):
    arrays = dict(np.load(estimate))
    np.savez(estimate, **(arrays | {name: np.zeros((7, 3))}))
    with pytest.raises(CheckpointError, match="shapes that do not fit"):
        dgm.Evidence.load(estimate)


def test_an_archive_that_unpacks_to_more_than_there_is_is_refused_before_it_is_unpacked(estimate):
    arrays = dict(np.load(estimate))
    with zipfile.ZipFile(estimate, "w") as file:
        for name, values in arrays.items():
            content = io.BytesIO()
            if name == "draws":
                # a header of 256 TiB, without them
                header = {"descr": "<f8", "fortran_order": False, "shape": (2, 4, 2**42)}
                npy.write_array_header_1_0(content, header)
            else:
                npy.write_array(content, values)
            file.writestr(f"{name}.npy", content.getvalue())
    with pytest.raises(CheckpointError, match=r"needs 2\.62e"):
        dgm.Evidence.load(estimate)


def test_draws_with_a_group_that_holds_itself_are_refused(tmp_path):
    path = tmp_path / "d.nc"
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    dgm.sample(target, dgm.HMC(0.5, 2), chains=2, warmup=0, draws=4, seed=0, progress=False).save(path)
    for within in ("/", "/posterior"):
        with h5py.File(path, "a") as file:
            file[within]["loop"] = file[within]
        with pytest.raises(CheckpointError, match="groups within groups"):
            dgm.Draws.load(path)
        with h5py.File(path, "a") as file:
            del file[within]["loop"]
    dgm.Draws.load(path)
