"""Folders of runs: a checkpoint counts as a whole, damage is named, and one process at a time goes on."""

import json

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.runs.folder import RunFolder, Shard


def part(first, n):
    return {"inputs": torch.arange(first, first + n).view(1, n)}


def folder(path, problem="problem", **others):
    return RunFolder.make(path, {"shards": [{}, {}]}, problem, others)


def test_parts_of_all_checkpoints_are_read_in_order(tmp_path):
    shard = Shard(tmp_path / "shard")
    assert shard.progress() is None
    assert shard.read() is None
    assert shard.draws() == {}
    shard.write({"count": 0}, "warming", {})
    for first in range(0, 36, 3):
        shard.write({"count": first + 3}, ("state", first), part(first, 3))
    assert torch.equal(shard.draws()["inputs"], torch.arange(36).view(1, 36))
    checkpoint = shard.read()
    assert checkpoint is not None
    assert checkpoint.state == ("state", 33)
    assert checkpoint.progress["count"] == 36
    # of earlier states nothing is left
    assert len(list(shard.folder.glob("state-*"))) == 1


@pytest.mark.parametrize("at", ["state", "draws", "progress"])
def test_a_process_that_ends_while_it_writes_leaves_the_checkpoint_before(tmp_path, monkeypatch, at):
    from dgm_infer.runs import folder as module

    shard, write = Shard(tmp_path / "shard"), module.write_file
    shard.write({"count": 3}, "first", part(0, 3))

    class Killed(BaseException):
        pass

    def killed(path, content):
        if path.name.startswith(at):
            raise Killed
        write(path, content)

    monkeypatch.setattr(module, "write_file", killed)
    with pytest.raises(Killed):
        shard.write({"count": 5}, "second", part(3, 2))
    monkeypatch.undo()
    checkpoint = shard.read()
    assert checkpoint is not None
    assert (checkpoint.state, checkpoint.progress["count"]) == ("first", 3)
    assert torch.equal(shard.draws()["inputs"], part(0, 3)["inputs"])
    # and the next one is whole
    shard.write({"count": 4}, "third", part(3, 1))
    assert torch.equal(shard.draws()["inputs"], part(0, 4)["inputs"])


def test_what_a_run_is_made_from_is_stored(tmp_path):
    made = folder(tmp_path / "a" / "run", torch.ones(3), kernel=dgm.HMC(step_size=0.3), initial=None)
    again = RunFolder.open("resume", made.path)
    assert torch.equal(again.stored("problem"), torch.ones(3))
    assert again.stored("kernel") == dgm.HMC(step_size=0.3)
    assert again.stored("initial") is None
    assert len(again.shards) == 2


def test_a_problem_that_cannot_be_stored_is_asked_for(tmp_path):
    made = folder(tmp_path / "run", lambda x: x)
    assert "cannot be stored" in made.manifest["unstored"]
    with pytest.raises(dgm.errors.CheckpointError, match="give problem="):
        made.stored("problem")


def test_a_kernel_that_cannot_be_stored_leaves_no_folder(tmp_path):
    with pytest.raises(dgm.errors.ArgumentError, match=r"kernel=.*cannot be stored.*not lambdas"):
        folder(tmp_path / "run", kernel=lambda x: x)
    assert not (tmp_path / "run").exists()


def test_a_folder_takes_one_run(tmp_path):
    folder(tmp_path / "run")
    with pytest.raises(dgm.errors.ArgumentError, match=r"dgm\.resume.*dgm\.extend.*another folder"):
        folder(tmp_path / "run")


def test_paths_that_are_no_run_are_named(tmp_path):
    with pytest.raises(dgm.errors.CheckpointError, match="no run is there"):
        RunFolder.open("resume", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(dgm.errors.ArgumentError, match="cannot be written to"):
        folder(tmp_path / "file" / "run")
    (tmp_path / "run.json").write_text('{"format": "of another"}')
    with pytest.raises(dgm.errors.CheckpointError, match="not the manifest of a run"):
        RunFolder.open("resume", tmp_path)


@pytest.mark.parametrize("name", ["state", "draws", "progress"])
def test_a_damaged_file_is_named(tmp_path, name):
    shard = Shard(tmp_path / "shard")
    shard.write({"count": 3}, "first", part(0, 3))
    (path,) = shard.folder.glob(f"{name}*")
    path.write_bytes(path.read_bytes()[:20])
    read = shard.draws if name == "draws" else shard.read
    with pytest.raises(dgm.errors.CheckpointError, match=path.name):
        read()


def test_one_process_at_a_time_goes_on_with_a_run(tmp_path):
    made = folder(tmp_path / "run")
    with made.locked(), pytest.raises(dgm.errors.ArgumentError, match="another process"), RunFolder(made.path).locked():
        pass
    # and afterwards the next one
    with made.locked():
        pass


def test_the_manifest_is_replaced_as_a_whole(tmp_path):
    made = folder(tmp_path / "run")
    made.rewrite({**made.manifest, "draws": 5})
    assert json.loads((made.path / "run.json").read_text())["draws"] == 5
    made.remove()
    assert not made.path.exists()
