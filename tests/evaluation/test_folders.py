"""Folders of commands: each of one process, and never removed with a result in them."""

import pytest

from dgm_infer.errors import ArgumentError, ConfigError
from dgm_infer.files import write_file
from evaluation.reports.folders import CONFIGURATION, complete_run, new_folder, remove_folders
from tests.disks import WORKERS, fill, together


def test_runs_that_begin_together_have_a_folder_each(tmp_path):
    for _ in range(5):
        folders = together(lambda i: new_folder("run", tmp_path)[0])
        assert len(set(folders)) == WORKERS
        assert all(folder.is_dir() for folder in folders)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", "/proc/nothing"):
        with pytest.raises(ConfigError, match="output: cannot make a folder in"), complete_run("run", root):
            pytest.fail("it was made")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").touch()
    with pytest.raises(ConfigError, match="File exists"), complete_run("run", tmp_path / "runs"):
        pytest.fail("it was made")


def test_a_run_that_fails_leaves_the_folders_of_those_beside_it(tmp_path):
    def run(i):
        try:
            with complete_run("run", tmp_path / "runs", "seed: 1\n") as folder:
                if i % 2:
                    raise ArgumentError("a failure")
                write_file(folder / "result", str(i))
        except ArgumentError:
            return None
        return folder

    for _ in range(20):
        for i, folder in enumerate(together(run)):
            assert folder is None if i % 2 else (folder / "result").read_text() == str(i)


def test_the_configuration_is_there_before_any_result(tmp_path):
    with complete_run("run", tmp_path, "seed: 1\n") as folder:
        assert (folder / CONFIGURATION).read_text() == "seed: 1\n"


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), RuntimeError("a failure"), ConfigError("a failure")], ids=repr
)
def test_a_folder_with_a_result_stays_and_without_one_it_goes(tmp_path, failure):
    with pytest.raises(type(failure)), complete_run("empty", tmp_path / "runs", "seed: 1\n"):
        raise failure
    assert not (tmp_path / "runs").exists()
    assert not hasattr(failure, "__notes__")

    def run():
        with complete_run("run", tmp_path / "runs", "seed: 1\n") as folder:
            write_file(folder / "result", b"all of it")
            raise failure

    with pytest.raises(type(failure)):
        run()
    (folder,) = (tmp_path / "runs" / "run").iterdir()
    assert (folder / "result").read_bytes() == b"all of it"
    assert failure.__notes__ == [f"{folder} keeps what was finished: config.yaml, result"]


def test_a_folder_that_was_there_before_stays(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(KeyboardInterrupt), complete_run("run", tmp_path / "runs"):
        raise KeyboardInterrupt
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


@pytest.mark.parametrize("configuration", [None, "seed: 1\n"])
def test_a_run_on_a_full_disk_is_refused_before_it_begins(tmp_path, monkeypatch, configuration):
    fill(monkeypatch, tmp_path)
    with (
        pytest.raises(ConfigError, match=r"run.*: No space left on device"),
        complete_run("run", tmp_path / "runs", configuration),
    ):
        pytest.fail("it began")
    assert not (tmp_path / "runs").exists()


def test_an_error_in_a_folder_that_has_vanished_is_that_error(tmp_path):
    failure = ArgumentError("a failure")

    def run():
        with complete_run("run", tmp_path, "seed: 1\n") as folder:
            remove_folders([folder])
            raise failure

    with pytest.raises(ArgumentError, match="a failure"):
        run()
    assert not hasattr(failure, "__notes__")
