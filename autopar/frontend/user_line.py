"""The user's own line among the frames of torch's and ours, for messages."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import TracebackType

import torch

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<text>[^\n]*)')
_FOREIGN = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).resolve().parents[1]}/",
    "/contextlib.py",
    "/unittest/",
    "/inspect.py",
    "/copy.py",
)


def user_line(stack_trace: str | None) -> str:
    """`file:line: text` of the innermost frame that is neither torch's nor ours; "" if there is none.

    stack_trace: as Python prints one.
    """
    frames = [(m["file"], m["line"], m["text"]) for m in _FRAME.finditer(stack_trace or "")]
    return _innermost(frames)


def raised_at(raised: TracebackType | None) -> str:
    """The innermost line of the user's own code in an exception's traceback."""
    return _innermost([(frame.filename, str(frame.lineno), frame.line or "") for frame in traceback.extract_tb(raised)])


def called_at() -> str:
    """The innermost line of the user's own code among the callers."""
    return _innermost([(frame.filename, str(frame.lineno), frame.line or "") for frame in traceback.extract_stack()])


def _innermost(frames: list[tuple[str, str, str]]) -> str:
    for file, line, text in reversed(frames):
        if not file.startswith("<") and not any(part in file for part in _FOREIGN):
            return f"{file}:{line}: {text.strip()}"
    return ""
