"""The store: a write is there as a whole or not at all, damage is found, and one process at a time writes."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError, CheckpointError
from dgm_infer.runs import store as module
from dgm_infer.runs.encoding import decode, decode_tensors, encode, encode_tensors
from dgm_infer.runs.store import Store
from tests.disks import largest_file

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "a.sqlite", "key")


def made(store, **records):
    with store.writing(make=True) as writer:
        writer.write(records)


def read(store, name):
    with store.reading() as reader:
        return reader.read(name)


def test_what_is_written_is_read_at_once_by_others_and_replaced_as_a_whole(store):
    with store.writing(make=True) as writer:
        writer.write({"x": b"1" * 5000, "empty": b""})
        with store.reading() as reader:
            assert reader.names() == ["empty", "x"]
            assert (reader.read("x"), reader.read("empty"), reader.read("y")) == (b"1" * 5000, b"", None)
            assert reader.names("e") == ["empty"]
        writer.write({"x": b"2"})
        assert read(store, "x") == b"2"
    assert os.listdir(store.path.parent) == ["a.sqlite"]


def test_a_file_is_made_while_another_process_looks_at_it(tmp_path):
    path = tmp_path / "run.sqlite"
    path.touch()
    # as one that is about to be refused does
    looks = sqlite3.connect(path, isolation_level=None)
    looks.execute("BEGIN")
    looks.execute("SELECT 1 FROM sqlite_master").fetchall()
    with Store(path, "key").writing(make=True) as writer:
        looks.close()
        writer.write({"a": b"1"})
        assert writer.names() == ["a"]


def test_a_record_larger_than_a_row_is_put_together(store, monkeypatch):
    monkeypatch.setattr(module, "_PART", 7)
    content = bytes(range(100))
    made(store, x=content)
    assert read(store, "x") == content


@pytest.mark.parametrize("at", ["DELETE", "INSERT", "COMMIT", "BEGIN"])
def test_a_write_that_is_interrupted_at_any_statement_leaves_all_of_it_or_nothing(store, at):
    class Killed(BaseException):
        pass

    class Watched:
        def __init__(self, connection):
            self.connection, self.in_transaction = connection, True

        def execute(self, statement, *values):
            after = self.connection.execute(statement, *values)
            if statement.startswith(at):
                raise Killed
            return after

        def rollback(self):
            self.connection.rollback()

    made(store, x=b"before", y=b"before")
    with store.writing() as writer:
        writer._connection = Watched(writer._connection)
        with pytest.raises(Killed):
            writer.write({"x": b"after", "y": b"after"})
    whole = b"before" if at in ("DELETE", "INSERT") else b"after"
    assert (read(store, "x"), read(store, "y")) == (whole, whole)


def test_one_process_at_a_time_writes_and_says_so(store):
    with store.writing(make=True):
        for _ in range(2):
            with pytest.raises(ArgumentError, match="another process goes on"), store.writing(make=True):
                pass
        assert store.is_written
        errors = []

        def other():
            try:
                with store.writing():
                    pass
            except ArgumentError as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(errors) == 1
    assert not store.is_written
    with store.writing():
        pass


def test_the_lock_of_a_killed_process_is_free(store):
    code = f"""
        import os, signal
        from pathlib import Path
        from dgm_infer.runs.store import Store
        with Store(Path({str(store.path)!r}), "key").writing(make=True) as writer:
            writer.write({{"x": b"1"}})
            os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.returncode == -signal.SIGKILL
    with store.writing() as writer:
        assert writer.read("x") == b"1"


@pytest.mark.parametrize("kind", ["removed", "moved", "replaced"])
def test_a_file_that_is_not_there_any_more_is_told_of_and_writing_goes_on_when_it_is_back(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    store = Store(folder / "a.sqlite", "key")
    with store.writing(make=True) as writer:
        writer.write({"x": b"1"})
        if kind == "removed":
            shutil.rmtree(folder)
        else:
            folder.rename(tmp_path / "elsewhere")
        if kind == "replaced":
            folder.write_text("a file")
        with pytest.raises(ArgumentError, match="not there any more"):
            writer.write({"x": b"2"})
        if kind == "moved":
            (tmp_path / "elsewhere").rename(folder)
            writer.write({"x": b"3"})
    if kind == "moved":
        assert read(store, "x") == b"3"
    else:
        with pytest.raises(CheckpointError, match="missing or damaged"):
            read(store, "x")


def test_a_full_disk_is_one_line_and_the_file_is_as_it_was(store):
    with store.writing(make=True) as writer:
        writer.write({"x": b"1"})
        with largest_file(2**17), pytest.raises(ArgumentError, match=r"cannot be written: .*(full|I/O)"):
            writer.write({"x": bytes(2**20)})
        assert writer.read("x") == b"1"
        # and when there is room again
        writer.write({"x": bytes(2**20)})
    assert read(store, "x") == bytes(2**20)


def test_a_link_is_not_followed(store, tmp_path):
    made(store, x=b"1")
    (tmp_path / "b.sqlite").symlink_to(store.path)
    linked = Store(tmp_path / "b.sqlite", "key")
    for use in (linked.reading, lambda: linked.writing(make=True)):
        with pytest.raises(CheckpointError, match="symbolic link"), use():
            pass


def test_records_of_another_shard_are_not_taken(store):
    made(store, x=b"1")
    with pytest.raises(CheckpointError, match="not what was written"):
        read(Store(store.path, "another"), "x")


def assert_found(path, store, content):
    try:
        assert read(store, "x") == content
    except CheckpointError as error:
        return "\n" not in str(error)
    return False


def test_flipped_bits_and_truncations_are_found(store):
    content = bytes(torch.randint(256, (20000,), generator=torch.Generator().manual_seed(0)).tolist())
    made(store, x=content)
    whole = store.path.read_bytes()
    places = torch.randint(8 * len(whole), (200,), generator=torch.Generator().manual_seed(1)).tolist()
    found = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        store.path.write_bytes(damaged)
        found += assert_found(store.path, store, content)
    # the content is three fifths of the file; much of the rest is what SQLite leaves empty
    assert found > 100
    for size in torch.randint(len(whole), (50,), generator=torch.Generator().manual_seed(2)).tolist():
        store.path.write_bytes(whole[:size])
        assert assert_found(store.path, store, content)


NO_LOCKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
static int refused(int command) { return command == F_SETLK || command == F_SETLKW || command == F_GETLK; }
int fcntl(int file, int command, ...) {
    va_list rest; va_start(rest, command); void *value = va_arg(rest, void *); va_end(rest);
    if (refused(command)) { errno = ERROR; return -1; }
    return ((int (*)(int, int, void *))dlsym(RTLD_NEXT, "fcntl"))(file, command, value);
}
int fcntl64(int file, int command, ...) {
    va_list rest; va_start(rest, command); void *value = va_arg(rest, void *); va_end(rest);
    if (refused(command)) { errno = ERROR; return -1; }
    return ((int (*)(int, int, void *))dlsym(RTLD_NEXT, "fcntl64"))(file, command, value);
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("error", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_a_file_system_without_locks_is_named(tmp_path, error):
    (tmp_path / "locks.c").write_text(NO_LOCKS)
    library = tmp_path / "locks.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-DERROR={error}", "-o", library, tmp_path / "locks.c", "-ldl"], check=True
    )
    code = f"""
        from pathlib import Path
        from dgm_infer.runs.store import Store
        with Store(Path({str(tmp_path / "a.sqlite")!r}), "key").writing(make=True):
            pass
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "has no file locks" in ended.stderr.splitlines()[-1]


# ------------------------------------------------------------------------------------------------------------- encoding


def again(value):
    return decode(encode(value, "it"), "it")


def test_plain_values_and_containers_come_back():
    values = {"a": (1, 2.5, float("inf"), "x", None, True), 3: [torch.Size([1]), {1}, torch.float32, slice(1, None)]}
    assert again(values) == values
    assert again(dgm.HMC(step_size=0.3)) == dgm.HMC(step_size=0.3)
    assert again(torch.tanh) is torch.tanh
    network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh())
    found = again(network)
    assert torch.equal(found(torch.ones(2)), network(torch.ones(2)))


def test_what_is_shared_stays_shared():
    one = dgm.StandardNormal(2)
    weight = torch.nn.Parameter(torch.ones(2))
    a, b, c, d = again((one, one, weight, weight))
    assert a is b
    assert c is d


@pytest.mark.parametrize(
    "value",
    [lambda x: x, threading.Lock(), torch.eye(2).to_sparse(), torch.empty(2, device="meta"), os.system, iter([1])],
    ids=["a lambda", "a lock", "sparse", "meta", "the system's", "an iterator"],
)
def test_what_cannot_be_stored_is_one_line(value):
    with pytest.raises(ArgumentError, match=r"it cannot be stored: .*") as caught:
        encode(value, "it")
    assert "\n" not in str(caught.value)


def test_no_file_makes_python_run_what_it_names(tmp_path):
    """The control of a pickle: it would make the file."""

    class Wicked:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    with pytest.raises(ArgumentError, match="not made of its attributes"):
        encode(Wicked(), "it")
    for tree in ('["class", "os:system"]', '["object", 0, "subprocess:Popen", []]', '["class", "antigravity:x"]'):
        from safetensors.torch import save

        with pytest.raises(CheckpointError, match="standard library"):
            decode(save({}, {"tree": tree}), "it")
    with pytest.raises(CheckpointError, match="import the module nowhere first"):
        decode(save({}, {"tree": '["object", 0, "nowhere:Thing", []]'}), "it")


def test_tensors_come_back_bit_for_bit():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        value = (torch.randn(3, 4) * 3).to(dtype)[:, 1:]
        found = decode_tensors(encode_tensors({"x": value}))["x"]
        assert found.dtype == dtype
        assert torch.equal(found, value)
