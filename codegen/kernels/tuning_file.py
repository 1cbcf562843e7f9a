"""The file of launch parameters that were found to be fastest, which processes may share.

    {"NVIDIA H100 80GB HBM3, compute capability 9.0, triton 3.9.0": {
        "rms_norm_forward bfloat16 bfloat16 8192x4096": {
            "tile": "Tile(most=16384, least=2048, per_warp=256, programs=4)",
            "milliseconds": {"Tile(...)": 0.0612, "Tile(...)": null},         null: does not run on this device
            "torch": "2.13.0"}}}

Entries of other devices, and of other versions of the compiler, stay as they are and are not read. A file that cannot
be understood counts as empty, and the next entry replaces it. The first process that brings an entry decides: those
that bring another afterwards are given what is there, so that all who share a file launch alike. Writers hold a lock
on a file beside it, and rename a finished file into place: readers need none.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TuningFile:
    """The entries of `path`, which need not exist; nothing is kept in memory."""

    path: Path

    def entry(self, device: str, case: str, tiles: Collection[str]) -> Entry | None:
        """The entry of a device and case, or None if its tile is not one of `tiles`: kernels may have changed since."""
        return _usable(self._read(), device, case, tiles)

    def settle(self, device: str, case: str, tiles: Collection[str], entry: Entry) -> Entry:
        """The usable entry that is there by now, else `entry`, which then is. Raises OSError where it cannot write."""
        with _locked(self.path.with_name(f".{self.path.name}.lock")):
            sections = self._read()
            usable = _usable(sections, device, case, tiles)
            if usable is None:
                section = sections.get(device)
                sections[device] = {**(section if isinstance(section, dict) else {}), case: entry}
                _replace(self.path, json.dumps(sections, indent=1, sort_keys=True) + "\n")
        return entry if usable is None else usable

    def _read(self) -> dict[str, Any]:
        try:
            sections = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return sections if isinstance(sections, dict) else {}


def _usable(sections: dict[str, Any], device: str, case: str, tiles: Collection[str]) -> Entry | None:
    section = sections.get(device)
    entry = section.get(case) if isinstance(section, dict) else None
    return entry if isinstance(entry, dict) and entry.get("tile") in tiles else None


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}_", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of the file at `path`, which is made; a process that dies gives it up."""
    # There is no such module on Windows, nor are there kernels to tune.
    import fcntl

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
