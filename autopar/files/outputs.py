"""Files that commands write: checked before any work, written whole or not at all, never over a file of someone else.

A file of autopar says so with a checksum of its text: in its last line, as a comment of YAML, TOML or HTML; in
"otherData" of a trace. A file that a person edited, or another program wrote, has no such line or another checksum, and
is not replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from pathlib import Path

from autopar.errors import OutputError

_LINE = re.compile(r"(?:#|<!--) written by autopar, sha256 of the above: ([0-9a-f]{64})(?: -->)?\n?\Z")
_OTHER_DATA = re.compile(r'\A\{"otherData": \{"written by autopar, sha256": "([0-9a-f]{64})"\}, ')


def require_writable(path: str | Path, force: bool = False, instead: str | None = None) -> None:
    """Raise OutputError if `write_output` would, as far as this is known beforehand. Changes nothing.

    instead: the alternative to another's file, for callers without `force`.
    """
    path = Path(path)
    require_path(path)
    if _is_device(path):
        return
    if path.is_dir():
        raise OutputError(
            "the output must be a file", values=f"{path} is a folder", alternatives=f"a file in it: {path / 'NAME'}"
        )
    if path.exists() and not force and not is_ours(path):
        raise OutputError(
            "the output file exists, and autopar did not write it, or it was edited since",
            values=str(path),
            alternatives=[instead]
            if instead
            else ["another file name", "--force (in Python force=True), to replace it"],
        )
    require_folder(path.parent)


def require_path(path: Path) -> None:
    """Raise OutputError for a path that no file system accepts."""
    if "\0" in str(path):
        raise OutputError("a path cannot have a null character", values=str(path), alternatives="the path without it")


def require_folder(folder: Path) -> None:
    """Raise OutputError unless files can be created in the folder, or the folder itself. Leaves nothing behind."""
    require_path(folder)
    nearest = folder.absolute()
    while not nearest.exists() and not nearest.is_symlink():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise OutputError(
            "the output's folder cannot be created",
            values=f"{nearest} is not a folder",
            alternatives="a path below an existing folder",
        )
    try:
        # Checking permissions is not enough: root has them on a read-only file system.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise OutputError(
            "the output's folder is not writable",
            values=f"{nearest}: {_reason(error)}",
            alternatives="another folder, or write permission for this one",
        ) from None


def write_output(path: str | Path, text: str, force: bool = False) -> Path:
    """Write marked text, all of it or nothing, and create missing folders. Returns the path. Raises OutputError.

    text: in a format with `#` comments, an HTML page, or a JSON object.
    """
    path = Path(path)
    require_writable(path, force)
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(path.resolve(), _marked(text))
    except OSError as error:
        raise OutputError(
            "the output cannot be written",
            values=f"{path}: {_reason(error)}",
            alternatives="another path, or free space and write permission for this one",
        ) from None
    return path


def is_ours(path: Path) -> bool:
    """Return whether a file is as autopar wrote it, or empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    if mark := _OTHER_DATA.search(text):
        return mark[1] == _digest("{" + text[mark.end() :])
    mark = _LINE.search(text)
    return not text or (mark is not None and mark[1] == _digest(text[: mark.start()]))


def _marked(text: str) -> str:
    if text.startswith("{"):
        return f'{{"otherData": {{"written by autopar, sha256": "{_digest(text)}"}}, {text[1:]}'
    text = text if text.endswith("\n") else text + "\n"
    if text.startswith("<"):
        return f"{text}<!-- written by autopar, sha256 of the above: {_digest(text)} -->\n"
    return f"{text}# written by autopar, sha256 of the above: {_digest(text)}\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def replace_file(path: Path, text: str) -> None:
    """Write an unmarked file such that concurrent readers see all of it or nothing. Creates missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}_")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask())
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _is_device(path: Path) -> bool:
    """Return whether a path is a device or a named pipe, such as /dev/stdout, which is written but never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
