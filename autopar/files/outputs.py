"""Files that commands write: looked at before any work is done, written whole or not at all, never over a stranger's.

A file of ours says so, with a checksum of its text: in its last line, as a comment of YAML, TOML or HTML; in
"otherData" of a trace. What a person has edited, or another program wrote, has no such line or another sum, and is not
overwritten.
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
    """Raises OutputError where `write_output` would, as far as it can be known beforehand. Changes nothing.

    instead: what would do in the place of another's file, where `force` cannot be asked for.
    """
    path = Path(path)
    require_path(path)
    if _is_device(path):
        return
    if path.is_dir():
        raise OutputError("the output must be a file", values=f"{path} is a folder")
    if path.exists() and not force and not is_ours(path):
        raise OutputError(
            "the output exists, and autopar did not write it, or it was edited since",
            values=str(path),
            alternatives=[instead] if instead else ["another file", "--force (in Python force=True), to overwrite it"],
        )
    require_folder(path.parent)


def require_path(path: Path) -> None:
    """Raise OutputError for a path that no file system takes."""
    if "\0" in str(path):
        raise OutputError("a path cannot have a null character", values=str(path), alternatives="the path without it")


def require_folder(folder: Path) -> None:
    """Raises OutputError unless files can be made in it, or it can be made. Leaves nothing behind."""
    require_path(folder)
    nearest = folder.absolute()
    while not nearest.exists() and not nearest.is_symlink():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise OutputError("the output's folder cannot be made", values=f"{nearest} is no folder")
    try:
        # Asking for the permission would not do: root has it on a file system that is read-only.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise OutputError("the output's folder cannot be written to", values=f"{nearest}: {_reason(error)}") from None


def write_output(path: str | Path, text: str, force: bool = False) -> Path:
    """Write marked text, all of it or nothing; returns the path. Raises OutputError. Folders on the way are made.

    text: of a format with `#` comments, an HTML page, or a JSON object.
    """
    path = Path(path)
    require_writable(path, force)
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(path.resolve(), _marked(text))
    except OSError as error:
        raise OutputError("the output cannot be written", values=f"{path}: {_reason(error)}") from None
    return path


def is_ours(path: Path) -> bool:
    """Whether a file is as autopar wrote it, or empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    if found := _OTHER_DATA.search(text):
        return found[1] == _digest("{" + text[found.end() :])
    found = _LINE.search(text)
    return not text or (found is not None and found[1] == _digest(text[: found.start()]))


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
    """Writes a file, unmarked, such that who reads it meanwhile sees all of it or nothing. Folders are made."""
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
    """Whether a path is a device or a named pipe, such as /dev/stdout: written to, never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
