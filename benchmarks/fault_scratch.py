"""Whether a case of benchmarks/faults ends, and what it leaves: files in the temporary folder, and processes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self

from autopar.files.scratch import temporary_folder
from benchmarks.faults.case import Result

CASE_SECONDS = 300.0
"""After which a case is counted as a hang: far more than any case takes on a busy machine."""
END_SECONDS = 10.0
"""For processes to end after the last case."""
CACHES = ("torchinductor", "triton")
"""Folders that torch keeps in the temporary folder on purpose."""
HELPERS = ("resource_tracker", "forkserver", "compile_worker")
"""Processes of Python and torch that live as long as this one."""
_SET_CHILD_SUBREAPER = 36


class Scratch:
    """A temporary folder of its own, and all processes that descend from this one.

    Use as a context manager; call `note` after each case and `left` after the last. A process whose parent has died
    becomes a child of this one, so that it is seen.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        self.first_seen: dict[str, str] = {}

    def __enter__(self) -> Self:
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.before = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.folder)
        self.work = set(os.listdir())
        return self

    def __exit__(self, *_: object) -> None:
        tempfile.tempdir, folder = self.before
        del os.environ["TMPDIR"]
        if folder is not None:
            os.environ["TMPDIR"] = folder
        shutil.rmtree(self.folder, ignore_errors=True)

    def note(self, case: str) -> None:
        """Remember the case after which a file or process is there for the first time."""
        for each in self._found():
            self.first_seen.setdefault(each, case)

    def left(self) -> list[str]:
        """Return what is still there, with the case that it came with."""
        with temporary_folder():  # removes the folders of processes that were killed, as the next use of autopar does
            pass
        deadline = time.monotonic() + END_SECONDS
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"{each}, first seen after: {self.first_seen.get(each, 'the last case')}" for each in sorted(found)]

    def _found(self) -> set[str]:
        found = (path for path in self.folder.iterdir() if not path.name.startswith((*CACHES, "pymp-")))
        files = {path.name for path in found if not _is_in_use(path)}
        # Linters and type checkers that run at the same time have caches of their own.
        files |= {f"./{name}" for name in set(os.listdir()) - self.work if not name.endswith("_cache")}
        return files | {f"process {pid} ({command})" for pid, command in living_children().items()}


def _is_in_use(folder: Path) -> bool:
    """Return whether a living process has locked one of autopar's temporary folders, which go with their process."""
    try:
        with (folder / "in_use").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def living_children() -> dict[int, str]:
    """Return the processes that this one has started or inherited, by their ids; helpers of Python are left out."""
    found, pids = {}, list[int]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            pids += map(int, (task / "children").read_text().split())
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state not in "ZX" and not any(name in command for name in HELPERS):
            found[pid] = command[:60].strip()
    return found


class _Hangs(BaseException):
    """Raised in a case that does not end; no `except Exception` of the code under test catches it."""


def bounded(run: Callable[[], Result], seconds: float = CASE_SECONDS) -> Result:
    """Return the result of a case; "hangs" after so many seconds, and "raw" for an error that the case lets out."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise _Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return run()
    except _Hangs:
        return Result("hangs", f"not ended after {seconds:.0f} s")
    except Exception as error:
        return Result("raw", f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
