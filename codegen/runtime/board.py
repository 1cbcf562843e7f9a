"""The board on which ranks write their records: memory that they share, or, over several machines, a store."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from .diagnosis import Record

KEPT = 8
"""Calls that a record remembers."""
HEADER = struct.Struct(f"<3Q{KEPT}Q")
_LENGTH = struct.Struct("<2Q")
HALF = 4096
SLOT = 2 * HALF
_SECONDS_TO_WRITE = 2.0
"""How long a record may be half written, by a thread that waits for a busy machine."""


class Board:
    """The records of all ranks. memory: shared by the ranks, if is_shared; else `store` brings those of the others."""

    def __init__(self, memory: mmap.mmap, size: int, is_shared: bool, store: Any = None) -> None:
        self.memory, self.size, self.is_shared, self.store = memory, size, is_shared, store

    @staticmethod
    def at(path: str | Path, size: int) -> Board:
        """Open the board of a file, which is made where there is none."""
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.ftruncate(descriptor, size * SLOT)
            return Board(mmap.mmap(descriptor, size * SLOT), size, is_shared=True)
        finally:
            os.close(descriptor)

    def write_state(self, rank: int, record: Record) -> None:
        """Write what the thread of a rank has found."""
        data = record.to_bytes()[: HALF - _LENGTH.size]
        start = rank * SLOT + HALF
        self.memory[start + _LENGTH.size : start + _LENGTH.size + len(data)] = data
        self.memory[start : start + _LENGTH.size] = _LENGTH.pack(len(data), zlib.crc32(data))
        if self.store is not None:
            self.store.set(str(rank), bytes(self.memory[rank * SLOT : (rank + 1) * SLOT]))

    def read(self, rank: int) -> Record | None:
        """Return a rank's record; None where it has none."""
        deadline = time.monotonic() + _SECONDS_TO_WRITE
        while True:
            slot = self._slot(rank)
            length, check = _LENGTH.unpack_from(slot, HALF)
            data = slot[HALF + _LENGTH.size : HALF + _LENGTH.size + length]
            if length and zlib.crc32(data) == check:
                count, is_inside, names_length, *_ = HEADER.unpack_from(slot)
                names = slot[HEADER.size : HEADER.size + names_length].decode(errors="replace").split("\n")
                numbers = range(max(count - KEPT, 0), count)
                calls = dict(zip(reversed(numbers), reversed(names), strict=False)) if count else {}
                record = Record.from_bytes(data, rank, calls, bool(is_inside))
                return replace(record, is_gone=self.is_shared and _is_gone(record.process))
            if not length or time.monotonic() > deadline:
                return None
            time.sleep(0.002)

    def records(self) -> list[Record | None]:
        """Return the records by rank."""
        return [self.read(rank) for rank in range(self.size)]

    def _slot(self, rank: int) -> bytes:
        if self.store is None:
            return bytes(self.memory[rank * SLOT : (rank + 1) * SLOT])
        with contextlib.suppress(RuntimeError):  # the store's host may be gone
            if self.store.check([str(rank)]):
                return bytes(self.store.get(str(rank)))
        return bytes(SLOT)


def _is_gone(process: int) -> bool:
    """Whether a process of this machine has ended, as far as the system tells."""
    if sys.platform != "linux":
        return False
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError, UnicodeDecodeError):
        return True
