"""A folder of checkpoints: one sub-folder per step, complete or absent, the newest two or more kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from . import checkpoint_files as files
from .checkpoint_files import CheckpointError, DamagedError

KEPT = 2
"""The least number: one may turn out to be damaged."""
_NAME = re.compile(r"step-(\d+)")
_PARTIAL = re.compile(r"\.{1,2}step-\d+\.partial(\.partial)?")
_LOCK = ".in_use"


def latest(directory: str | Path | None) -> Path | None:
    """The newest complete checkpoint, or None; whether its tensors are intact is known only when it is loaded."""
    complete = [path for path in _folders(directory) if _is_complete(path)]
    return complete[-1] if complete else None


def resume(directory: str | Path | None, load: Callable[[Path], None], is_first: bool = True) -> Path | None:
    """Load the newest intact checkpoint, and return it; None where there is none to load. Collective.

    load: raises DamagedError, on all ranks, before it changes anything. What is damaged or incomplete is passed over
    with a warning and, where an intact one is found, renamed by the first rank (is_first). Raises CheckpointError where
    all are damaged, and what `load` raises otherwise, as for the checkpoint of another model.
    """
    if directory is not None and any((Path(directory) / name).exists() for name in (files.MANIFEST, files.OLD_FORMAT)):
        raise CheckpointError(f"{directory} is a checkpoint itself, and not a folder of them; name another folder")
    damaged: list[str] = []
    passed: list[Path] = []
    for path in reversed(_folders(directory)):
        is_complete = _is_complete(path)
        try:
            load(path)
        except DamagedError as error:
            reason = str(error).splitlines()[0]
            damaged += [reason] if is_complete else []
            passed.append(path)
            if is_first:
                warnings.warn(f"passed over a damaged checkpoint: {reason}", stacklevel=2)
            continue
        for folder in passed if is_first else ():
            _set_aside(folder, "damaged")
        return path
    if damaged:
        raise CheckpointError(f"every checkpoint of {directory} is damaged: {'; '.join(damaged)}")
    return None


def write(
    directory: str | Path,
    step: int,
    save: Callable[[Path], None],
    is_first: bool,
    wait: Callable[[], None],
    keep: int = KEPT,
) -> Path:
    """Let `save` write beside its place, and rename when every rank is done. Collective, returns the checkpoint.

    is_first: whether this rank does the renaming. wait: a barrier of all ranks. keep: how many stay, itself included.
    What is in its place already is renamed, or removed if it is a checkpoint.
    """
    home = Path(directory)
    fresh, final = home / f".step-{step:08d}.partial", home / f"step-{step:08d}"
    if is_first:
        _make(home)
        shutil.rmtree(fresh, ignore_errors=True)
    wait()
    try:
        save(fresh)
    except BaseException:
        if is_first:  # a full disk needs the place
            shutil.rmtree(fresh, ignore_errors=True)
        raise
    wait()
    if is_first:
        replaced = _set_aside(final, "replaced") if final.exists() or final.is_symlink() else None
        files.move(fresh, final)
        complete = [path for path in _folders(home) if _is_complete(path)]
        for old in (*complete[: -max(keep, KEPT)], *([replaced] if replaced else [])):
            if files.holds_only_a_checkpoint(old):
                files.remove(old)
    wait()
    return final


@contextlib.contextmanager
def locked(directory: str | Path | None) -> Iterator[None]:
    """Nobody else writes into the folder meanwhile; for one rank of a run. The lock goes with its process.

    What runs that were killed had begun to write is removed. Raises CheckpointError naming who has the folder.
    """
    if directory is None:
        yield
        return
    home = Path(directory)
    _make(home)
    # A record lock: unlike flock's, what this process forks does not keep it.
    try:
        handle = os.open(home / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise CheckpointError(f"{home} cannot be written to: {error.strerror}") from None
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            raise CheckpointError(f"another trainer writes its checkpoints into {home}: {holder}") from None
        os.ftruncate(handle, 0)
        with contextlib.suppress(OSError):  # on a full disk the lock is still there, without its name
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        for path in home.iterdir():
            if _PARTIAL.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _make(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{home} cannot be a folder of checkpoints: {error.strerror}") from None


def _folders(directory: str | Path | None) -> list[Path]:
    """Return all paths that are named like a checkpoint, in the order of their steps."""
    home = Path(directory) if directory is not None else None
    if home is None or not home.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in home.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def _is_complete(path: Path) -> bool:
    """Whether its manifest is there, as it was written."""
    try:
        files.read_manifest(path)
    except DamagedError:
        # One whose manifest is damaged was complete once, and may be all that there is.
        return (path / files.MANIFEST).exists()
    except CheckpointError:
        return True  # of an older format: loading it says so
    return True


def _set_aside(path: Path, why: str) -> Path:
    """Moves a checkpoint out of the way, and out of the count of those that are kept; gives its new path."""
    target, number = path.with_name(f"{path.name}.{why}"), 1
    while target.exists() or target.is_symlink():
        number += 1
        target = path.with_name(f"{path.name}.{why}-{number}")
    path.rename(target)
    return target
