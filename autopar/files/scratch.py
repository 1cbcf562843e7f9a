"""Temporary folders that end with their process: at its exit, or after a kill when autopar next needs one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

PREFIX = "autopar_"
_LOCK = "in_use"


def lasting_folder() -> Path:
    """Return a new folder that lasts until this process ends; its caller may remove it earlier."""
    folder, lock = _locked_folder()
    # A forked rank also runs Finalize, unlike atexit.
    Finalize(None, _remove, (folder, lock), exitpriority=0)
    return folder


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder, and remove it afterwards."""
    folder, lock = _locked_folder()
    remove = Finalize(None, _remove, (folder, lock), exitpriority=0)
    try:
        yield folder
    finally:
        remove()


def _locked_folder() -> tuple[Path, int]:
    """Return a new folder and its lock. The system frees the lock when this process and its forks end."""
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder / f".{_LOCK}", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Another process's sweep sees the lock only from here on.
    (folder / f".{_LOCK}").rename(folder / _LOCK)
    return folder, lock


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _sweep() -> None:
    """Remove the folders that killed processes of this user left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # Other processes may sweep at the same time.
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
