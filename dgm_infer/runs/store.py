"""The store: named records in one SQLite file, each with a checksum; a write is one transaction.

SQLite runs with ``journal_mode=DELETE`` and ``synchronous=EXTRA``, which is FULL with the folder synchronised too when
the journal is deleted: a write that has returned survives a power cut. The other modes need more than a plain file (WAL
needs memory shared by all processes, which network file systems do not have) or leave a journal behind. What it costs,
a few synchronisations, is paid once per checkpoint.

The process that writes a file holds SQLite's reserved lock on it between its transactions. Readers are let in, a second
writer is refused at once, and the operating system frees the lock of a process that ends, however it ends.
"""

import hashlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ..errors import ArgumentError, CheckpointError, cause

_SETTINGS = ("journal_mode = DELETE", "synchronous = EXTRA", "cell_size_check = ON")

_Result = TypeVar("_Result")

# Bytes of a record that one row holds: below the 10^9 at which SQLite refuses a value.
_PART = 2**28
# Seconds that a transaction waits for readers of the same file, or for its writer.
_PATIENCE = 60.0

_TABLE = (
    "CREATE TABLE records (name TEXT NOT NULL, part INTEGER NOT NULL, parts INTEGER NOT NULL, content BLOB NOT NULL, "
    "checksum BLOB NOT NULL, PRIMARY KEY (name, part))"
)
# What reading a damaged file raises: SQLite's errors, and text or sizes that are none.
_DAMAGE = (sqlite3.Error, ValueError, OverflowError, MemoryError, TypeError)


class Reader:
    """The records of a file as they are at one moment."""

    def __init__(self, path: Path, key: str, connection: sqlite3.Connection):
        self.path, self._key, self._connection = path, key, connection

    def names(self, prefix: str = "") -> list[str]:
        """Names of records that begin so, in order."""
        rows = self._query("SELECT DISTINCT name FROM records ORDER BY name", ())
        return [name for (name,) in rows if isinstance(name, str) and name.startswith(prefix)]

    def read(self, name: str) -> bytes | None:
        """The content of a record; None if there is none of this name.

        Raises:
            CheckpointError: it is not what was written.
        """
        rows = self._query("SELECT part, parts, content, checksum FROM records WHERE name = ? ORDER BY part", (name,))
        for i, (part, parts, content, checksum) in enumerate(rows):
            whole = part == i and parts == len(rows) and isinstance(content, bytes)
            if not whole or checksum != self._checksum(name, part, parts, content):
                raise CheckpointError(f"{self.path} is damaged: its record {name!r} is not what was written")
        if len(rows) == 1:
            return rows[0][2]
        return b"".join(content for _, _, content, _ in rows) if rows else None

    def _query(self, query: str, values: tuple) -> list:
        def found() -> list:
            # a process that was killed as it made the file has made no table
            if self._connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                return []
            return self._connection.execute(query, values).fetchall()

        return _checked(self.path, found)

    def _checksum(self, name: str, part: int, parts: int, content: bytes | memoryview) -> bytes:
        digest = hashlib.blake2b(f"{self._key}/{name}/{part}/{parts}/".encode(), digest_size=16)
        digest.update(content)
        return digest.digest()


class Writer(Reader):
    """The records of a file that nobody else writes as long as this is open."""

    def write(self, records: Mapping[str, bytes | None]) -> None:
        """Add records, or replace those of the same name, or remove them by None: all of them, or none.

        Raises:
            ArgumentError: the file cannot be written, or has become another process's; it is as it was.
        """
        connection = self._connection
        try:
            if not connection.in_transaction:
                connection.execute("BEGIN IMMEDIATE")
            for name, content in records.items():
                connection.execute("DELETE FROM records WHERE name = ?", (name,))
                if content is None:
                    continue
                # views: of large records a copy would be half of the memory
                pieces = [memoryview(content)[i : i + _PART] for i in range(0, len(content), _PART)] or [b""]
                for part, piece in enumerate(pieces):
                    checksum = self._checksum(name, part, len(pieces), piece)
                    row = (name, part, len(pieces), piece, checksum)
                    connection.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?)", row)
            connection.execute("COMMIT")
            connection.execute("BEGIN IMMEDIATE")
        except BaseException as error:
            with suppress(sqlite3.Error):
                connection.rollback()
            with suppress(sqlite3.Error):
                connection.execute("BEGIN IMMEDIATE")
            if isinstance(error, sqlite3.Error):
                why = cause(error) if self.path.exists() else "it is not there any more"
                raise ArgumentError(f"{self.path} cannot be written: {why}") from error
            raise


class Store:
    """A file of records.

    Args:
        path: of the file.
        key: part of every checksum: the records of another run, or shard, are not taken for this one's.
    """

    def __init__(self, path: Path, key: str):
        self.path, self.key = path, key

    @property
    def exists(self) -> bool:
        return self.path.exists()

    @property
    def is_written(self) -> bool:
        """Whether a process is writing it."""
        try:
            with self.writing():
                return False
        except CheckpointError:
            return False
        except ArgumentError:
            return True

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """The records at this moment, while others may write.

        Raises:
            CheckpointError: there is no such file, it is a link, or it is damaged.
        """
        connection = self._connect("rw", _PATIENCE)
        try:
            _checked(self.path, lambda: connection.execute("BEGIN"))
            yield Reader(self.path, self.key, connection)
        finally:
            _close(connection)

    @contextmanager
    def writing(self, make: bool = False, patience: float = 0.0) -> Iterator[Writer]:
        """The records, for one process at a time.

        Args:
            make: whether to make the file if there is none.
            patience: seconds to wait for another process to end.

        Raises:
            ArgumentError: another process writes it, it cannot be written, or its file system has no locks.
            CheckpointError: as :meth:`reading`.
        """
        new = make and not self.path.exists()
        connection = self._connect("rwc" if make else "rw", patience)
        try:
            try:
                connection.execute("BEGIN IMMEDIATE")
                if make and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                    connection.execute(_TABLE)
                elif new:
                    raise sqlite3.OperationalError("database is locked")
            except sqlite3.Error as error:
                raise self._refusal(error) from error
            connection.execute(f"PRAGMA busy_timeout = {int(1000 * _PATIENCE)}")
            yield Writer(self.path, self.key, connection)
        finally:
            _close(connection)

    def _connect(self, mode: str, patience: float) -> sqlite3.Connection:
        if self.path.is_symlink():
            raise CheckpointError(f"{self.path} is a symbolic link, which is not followed")

        def connected() -> sqlite3.Connection:
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            found = sqlite3.connect(uri, timeout=patience, isolation_level=None, check_same_thread=False, uri=True)
            for setting in _SETTINGS:
                found.execute(f"PRAGMA {setting}")
            return found

        if mode == "rw":
            return _checked(self.path, connected)
        try:
            return connected()
        except sqlite3.Error as error:
            raise self._refusal(error) from error

    def _refusal(self, error: sqlite3.Error) -> Exception:
        """Why a file cannot be written, told apart: another process, no locks, a disk that refuses."""
        code = getattr(error, "sqlite_errorcode", 0)
        locked = code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or "locked" in str(error)
        if (locked or code == sqlite3.SQLITE_IOERR_LOCK) and not _has_locks(self.path.parent):
            return ArgumentError(
                f"{self.path.parent}: its file system has no file locks, which keep two processes from one run: give a "
                "folder on a disk that has"
            )
        if locked:
            return ArgumentError(f"{self.path}: another process goes on with this run: wait for it to end")
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            return CheckpointError(f"{self.path} is damaged: {cause(error)}")
        return ArgumentError(f"{self.path} cannot be written: {cause(error)}")


def _has_locks(folder: Path) -> bool:
    """Whether files of a folder can be locked: one that nobody else knows can."""
    with suppress(sqlite3.Error, OSError), tempfile.TemporaryDirectory(prefix=".locks-", dir=folder) as own:
        connection = sqlite3.connect(Path(own) / "probe", timeout=0, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            return True
        finally:
            connection.close()
    return False


def _checked(path: Path, read: Callable[[], _Result]) -> _Result:
    try:
        return read()
    except _DAMAGE as error:
        raise CheckpointError(f"{path} is missing or damaged: {cause(error)}") from error


def _close(connection: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):
        connection.rollback()
    connection.close()
