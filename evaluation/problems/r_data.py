"""Data frames of R, as its packages hold them (``.rda``, ``.RData``)."""

import bz2
import gzip
import lzma
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgm_infer.errors import CheckpointError, cause

__all__ = ["read_frame"]

_OPENERS = {b"\x1f\x8b": gzip.decompress, b"BZ": bz2.decompress, b"\xfd7": lzma.decompress}
_SYMBOL, _PAIRS, _CHARACTERS, _FACTS, _INTEGERS, _REALS, _STRINGS, _LIST = 1, 2, 9, 10, 13, 14, 16, 19
_NIL, _SEEN = 254, 255
_MISSING = -(2**31)


def read_frame(path: Path) -> dict[str, Tensor]:
    """The columns of the one data frame in a file, float64; of a factor, the numbers of its levels from 0.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        packed = path.read_bytes()
        data = _OPENERS[packed[:2]](packed)
        if data[:7] not in (b"RDX2\nX\n", b"RDX3\nX\n"):
            raise ValueError(f"its first bytes are {data[:7]!r}")
        ((_, (columns, attributes)),) = _Reader(data[7:]).read()[0]
        return {name: _column(*column) for name, column in zip(attributes["names"][0], columns, strict=True)}
    except (OSError, LookupError, TypeError, ValueError, EOFError, struct.error, lzma.LZMAError) as error:
        raise CheckpointError(f"{path} holds no data frame of R: {cause(error)}") from error


def _column(values: Any, attributes: dict[str, Any]) -> Tensor:
    """Numbers, or levels of a factor from 0."""
    column = torch.tensor(values, dtype=torch.float64)
    if (column == _MISSING).any():
        raise ValueError("a value is missing")
    return column - 1 if "levels" in attributes else column


class _Reader:
    """What R's serialisation to big-endian binary holds, as far as data frames need: (value, attributes) pairs."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0
        self.symbols: list[Any] = []
        version, *_ = self._numbers("i", 3)
        if version == 3:
            self._bytes(self._integer())

    def _bytes(self, n: int) -> bytes:
        if n < 0 or self.at + n > len(self.data):
            raise EOFError("it ends too early")
        self.at += n
        return self.data[self.at - n : self.at]

    def _numbers(self, kind: str, n: int) -> tuple[Any, ...]:
        return struct.unpack(f">{n}{kind}", self._bytes(n * struct.calcsize(f">{kind}")))

    def _integer(self) -> int:
        return self._numbers("i", 1)[0]

    def read(self) -> tuple[Any, dict[str, Any]]:
        flags = self._integer()
        kind, has_attributes, has_tag = flags & 255, bool(flags & 512), bool(flags & 1024)
        if kind == _NIL:
            return (), {}
        if kind == _SEEN:
            return self.symbols[(flags >> 8) - 1], {}
        if kind == _SYMBOL:
            self.symbols.append(self.read()[0])
            return self.symbols[-1], {}
        if kind == _PAIRS:
            return self._pairs(has_attributes, has_tag), {}
        if kind == _CHARACTERS:
            n = self._integer()
            return None if n == -1 else self._bytes(n).decode(), {}
        n = self._integer()
        if kind in (_INTEGERS, _FACTS):
            value: Any = self._numbers("i", n)
        elif kind == _REALS:
            value = self._numbers("d", n)
        elif kind == _STRINGS:
            value = tuple(self.read()[0] for _ in range(n))
        elif kind == _LIST:
            value = tuple(self.read() for _ in range(n))
        else:
            raise ValueError(f"it has an object of type {kind}")
        return value, dict(self.read()[0]) if has_attributes else {}

    def _pairs(self, has_attributes: bool, has_tag: bool) -> tuple[tuple[str, Any], ...]:
        """A list of named values; what follows one is read in turn, not nested."""
        pairs = []
        while True:
            if has_attributes:
                self.read()
            name = self.read()[0] if has_tag else ""
            pairs.append((name, self.read()))
            flags = self._integer()
            if flags & 255 == _NIL:
                return tuple(pairs)
            if flags & 255 != _PAIRS:
                raise ValueError(f"a list goes on with type {flags & 255}")
            has_attributes, has_tag = bool(flags & 512), bool(flags & 1024)
