"""The place of a thread, and the origin of an error: a collective, the runtime, or a line of the user's own."""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch

_RUNTIME, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)
_RAISES = dis.opmap["RAISE_VARARGS"]


def is_of_group(error: BaseException) -> bool:
    """Return whether an error comes out of a collective, by where it was raised: in torch.distributed, or from C++ in
    the runtime that calls it."""
    if not isinstance(error, RuntimeError) or error.__traceback__ is None:
        return False
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    if _is_in(frame, f"{_TORCH}/distributed"):
        return True
    return is_waiting(frame) and frame.f_code.co_code[traceback.tb_lasti] != _RAISES


def is_waiting(frame: FrameType) -> bool:
    """Whether the innermost call is one of torch.distributed, of the runtime, or of autograd's engine."""
    return _is_in(frame, f"{_TORCH}/distributed") or _is_in(frame, f"{_TORCH}/autograd/graph.py") or _is_runtime(frame)


def _is_runtime(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__package__"))
    return _is_in(frame, _RUNTIME) or (package.startswith("autopar_program") and package.endswith(".runtime"))


def _is_in(frame: FrameType, folder: str) -> bool:
    return frame.f_code.co_filename.startswith(folder)


def last(traceback: TracebackType | None) -> FrameType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return None if traceback is None else traceback.tb_frame


def place(frame: FrameType | None) -> str:
    """The innermost line of the user's own, as "data() at train.py:31"; of all lines where none is."""
    innermost = frame
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    name = frame.f_code.co_name
    where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return where if name == "<module>" else f"{name}() at {where}"


def _is_users(frame: FrameType) -> bool:
    file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")).partition(".")[0]
    is_ours = package in ("autopar", "codegen", "search", "cost_models") or package.startswith("autopar_program")
    return not (is_ours or file.startswith((sys.prefix, sys.base_prefix, "<")) or "site-packages" in file)
