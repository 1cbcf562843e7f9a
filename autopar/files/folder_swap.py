"""Replace an older folder by a finished one, without losing files that are not autopar's."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from autopar.errors import OutputError
from autopar.files.outputs import require_folder, require_path
from autopar.files.text_files import parse_json

MARK = ".autopar.json"
"""The list of a folder's files, relative paths with their sha256. It marks the folder as autopar's."""

TUNING_FILE = "tuning.json"
"""The launch parameters of a saved program's kernels (codegen/kernels/tuning.py), if it was tuned."""

_ALTERNATIVES = ["another folder", "an empty folder", "move its contents elsewhere first"]
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_mark(folder: Path) -> None:
    """List the folder's files in its mark."""
    files = {path.relative_to(folder).as_posix(): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    text = json.dumps({"written by": "autopar", "files": files}, indent=1)
    (folder / MARK).write_text(text + "\n", encoding="utf-8")


def require_replaceable(directory: Path) -> Path:
    """Return the folder's real path if it is absent, empty, or has only files of autopar. Raises OutputError."""
    require_path(directory)
    if directory.is_symlink():
        raise OutputError(
            "the output folder is a symbolic link, which autopar does not follow",
            values=f"{directory} -> {os.readlink(directory)}",
            alternatives=f"{directory.resolve()}, the link's target",
        )
    directory = directory.resolve()
    if directory.exists() and not directory.is_dir():
        raise OutputError("the output must be a folder", values=f"{directory} is a file", alternatives=_ALTERNATIVES)
    if directory.exists() and any(directory.iterdir()):
        _require_ours(directory)
    require_folder(directory.parent)
    return directory


def _require_ours(directory: Path) -> None:
    cwd, home = Path.cwd().resolve(), Path(os.path.expanduser("~")).resolve()
    for place, name in ((cwd, "the working directory"), (home, "the home directory")):
        if directory == place or directory in place.parents:
            relation = "is" if directory == place else "contains"
            raise OutputError(
                "autopar does not replace a folder that is in use",
                values=f"{directory} {relation} {name}, and is not empty",
                alternatives=_ALTERNATIVES,
            )
    listed = read_mark(directory)
    if listed is None:
        raise OutputError(
            f"the output folder is not empty, and autopar did not write it (it has no {MARK})",
            values=f"{directory} with {_some([path.name for path in directory.iterdir()])}",
            alternatives=_ALTERNATIVES,
        )
    strange = strangers(directory, listed)
    if strange:
        raise OutputError(
            "the output folder has files that autopar did not write, or that were edited since",
            values=f"{directory} with {_some(strange)}",
            alternatives=_ALTERNATIVES,
        )


def read_mark(directory: Path) -> dict[str, str] | None:
    """Return the files of a folder of autopar with their checksums, or None for another folder."""
    try:
        mark = parse_json((directory / MARK).read_text(encoding="utf-8"))
        files = mark["files"]
        is_ours = mark["written by"] == "autopar" and all(isinstance(v, str) for v in files.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return files if is_ours else None


def strangers(directory: Path, listed: dict[str, str]) -> list[str]:
    """Return the folder's entries that differ from the mark, including links, which are not followed.

    Python's bytecode of autopar's files, and measured launch parameters of its kernels, belong to autopar.
    """
    names = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_dir() and not path.is_symlink():
            is_known = path.name == "__pycache__" or any(file.startswith(name + "/") for file in listed)
        elif path.is_symlink() or not path.is_file():
            is_known = False
        elif name == MARK or _is_compiled(path, directory, listed):
            is_known = True
        else:
            is_known = name in listed and (name == TUNING_FILE or _sha256(path) == listed[name])
        if not is_known:
            names.append(name)
    return names


@contextlib.contextmanager
def new_folder(directory: Path, contents: str) -> Iterator[Path]:
    """Yield a folder to write into, which then replaces `directory`: complete, or not at all. contents: for messages.

    Raises OutputError for a folder that autopar may not replace, or that cannot be written.
    """
    directory = require_replaceable(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}_", dir=directory.parent))
        try:
            yield fresh
            write_mark(fresh)
            fresh.chmod(0o755)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        replace_folder(fresh, directory)  # `fresh` may then be the old folder's name
    except OSError as error:
        raise OutputError(
            f"{contents} cannot be written",
            values=f"{directory}: {error.strerror or error}",
            alternatives="another folder, or free space and write permission for this one",
        ) from None


def replace_folder(fresh: Path, directory: Path) -> None:
    """Move `fresh` to the place of `directory`, which `require_replaceable` has passed.

    This is one step where the system can exchange two names, so a crash leaves either the old or the new folder.
    """
    if not directory.exists():
        fresh.rename(directory)
    elif not any(directory.iterdir()):
        _fill(fresh, directory)
    else:
        aside = fresh
        if not _exchange(fresh, directory):
            aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}_old_", dir=directory.parent))
            directory.rename(aside)
            fresh.rename(directory)
        _remove(aside, directory)


def _fill(fresh: Path, directory: Path) -> None:
    """Move the files into an empty folder, which stays itself: it may be a shell's folder or a mount point."""
    # The mark comes first, so that a later run can replace what an interrupted run leaves.
    for path in sorted(fresh.iterdir(), key=lambda path: path.name != MARK):
        shutil.move(path, directory / path.name)
    fresh.rmdir()


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names at once. Returns False if the system or the file system cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if exchange is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    done: int = exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    return done == 0


def _remove(aside: Path, directory: Path) -> None:
    """Delete what the older folder's mark lists. Files that appeared since then stay."""
    listed = read_mark(aside) or {}
    strange = strangers(aside, listed)
    if strange:
        rescued = Path(tempfile.mkdtemp(prefix=f"{directory.name}_old_", dir=directory.parent))
        aside.rename(rescued)
        warnings.warn(
            f"{_some(strange)} appeared in {directory} while autopar replaced it; the old folder is now {rescued}",
            stacklevel=2,
        )
        return
    # Delete the files in the folder, not those that the mark names: anyone may have written its text.
    files = [path for path in aside.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in files:
        path.unlink()
    for folder in sorted((path for path in aside.rglob("*") if path.is_dir()), reverse=True):
        folder.rmdir()
    aside.rmdir()


def _is_compiled(path: Path, directory: Path, listed: dict[str, str]) -> bool:
    """Return whether a path is Python's bytecode of a file of autopar: `__pycache__/model.cpython-311.pyc` of
    `model.py`."""
    if path.parent.name != "__pycache__" or path.suffix != ".pyc":
        return False
    source = path.parent.parent / f"{path.name.partition('.')[0]}.py"
    return source.relative_to(directory).as_posix() in listed


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _some(names: list[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
