"""Find the user's line among the frames of torch and autopar, for messages."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<text>[^\n]*)')
_FOREIGN = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parents[1]}/",
    "/contextlib.py",
    "/unittest/",
    "/inspect.py",
    "/copy.py",
)


def user_line(stack_trace: str | None) -> str:
    """Return `file:line: text` of the innermost frame outside torch and autopar; "" if there is none.

    stack_trace: as Python prints one.
    """
    frames = [(m["file"], m["line"], m["text"]) for m in _FRAME.finditer(stack_trace or "")]
    return _innermost(frames)


def raised_at(raised: TracebackType | None) -> str:
    """Return the innermost line of the user's code in an exception's traceback."""
    return _innermost([(frame.filename, str(frame.lineno), frame.line or "") for frame in traceback.extract_tb(raised)])


@contextlib.contextmanager
def innermost_lines() -> Iterator[None]:
    """Context manager in which an export notes the user's innermost line of each call, whatever its function's name."""

    def kept(tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        user_frames = [frame for frame in frames if not _is_foreign(frame.filename)]
        return traceback.StackSummary.from_list(user_frames[-1:])

    if not hasattr(torch.fx.proxy.TracerBase, "_filter_traceback_frames"):
        yield
        return
    with mock.patch.object(torch.fx.proxy.TracerBase, "_filter_traceback_frames", kept):
        yield


def _is_foreign(file: str) -> bool:
    return file.startswith("<") or any(part in file for part in _FOREIGN)


def called_at() -> str:
    """Return the innermost line of the user's code among the callers."""
    return _innermost([(frame.filename, str(frame.lineno), frame.line or "") for frame in traceback.extract_stack()])


def _innermost(frames: list[tuple[str, str, str]]) -> str:
    for file, line, text in reversed(frames):
        if not _is_foreign(file):
            return f"{file}:{line}: {text.strip()}"
    return ""
