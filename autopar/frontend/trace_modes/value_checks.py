"""Leave out checks of values in forward: `if labels.max() >= n: raise ...`, which a graph cannot do.

If one way of a branch on a tensor's value only raises or warns, the branch changes nothing of a forward that succeeds.
So the other way is traced, and the line is reported. Any other branch on values stays an error.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import linecache
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.frontend.fakes import in_this_thread

_HOME = f"{Path(__file__).parents[2]}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_WARNINGS = frozenset({"warn", "warning", "warning_once", "warn_once", "info", "debug", "print"})
_CHECKS = ("_check_tensor_all", "_check_tensor_all_with", "_assert_async")
_PARTED = (ast.BoolOp, ast.UnaryOp)


@contextlib.contextmanager
def skipped_checks(lines_found: dict[str, None] | None = None) -> Iterator[None]:
    """Context manager in which checks of values pass. found: gets `file:line: text` of each."""
    lines: dict[str, None] = {} if lines_found is None else lines_found

    def truth(value: Any) -> bool:
        frame = sys._getframe(2)  # behind this function's frame and that of in_this_thread
        wanted = _passing(frame) if _is_unknown(value) else None
        if wanted is None:
            return bool(symbolic(value) if isinstance(value, torch.SymBool) else numeric(value))
        lines[_told(frame)] = None
        return wanted

    def checked(*args: Any, **kwargs: Any) -> None:
        lines[_told(sys._getframe(2))] = None

    numeric: Callable[[Any], Any] = torch.Tensor.__bool__
    symbolic: Callable[[Any], Any] = torch.SymBool.__bool__
    with contextlib.ExitStack() as stack:
        for owner, original in ((torch.Tensor, numeric), (torch.SymBool, symbolic)):
            stack.enter_context(mock.patch.object(owner, "__bool__", in_this_thread(truth, original)))
        for name in _CHECKS:
            stack.enter_context(mock.patch.object(torch, name, in_this_thread(checked, getattr(torch, name))))
        yield


def in_check() -> bool:
    """Return whether the user's code is within the condition of a check, which a program leaves out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_HOME, _TORCH)):
        frame = frame.f_back
    if frame is None or _statement(frame.f_code.co_filename, _position(frame)) is None:
        return False
    return not any(map(_catches, _callers(frame)))


def _position(frame: FrameType) -> tuple[int | None, ...]:
    return list(frame.f_code.co_positions())[frame.f_lasti // 2]


def _is_unknown(value: Any) -> bool:
    """Return whether a value has no number while forward is traced."""
    if isinstance(value, torch.SymBool):
        return value.node.maybe_as_bool() is None and not value.node.has_hint()
    if isinstance(value, FakeTensor):
        return value.constant is None
    return isinstance(value, Tensor) and (torch._is_functional_tensor(value) or get_proxy_mode() is not None)


def _told(frame: FrameType) -> str:
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{name}:{line}: {linecache.getline(name, line).strip()}"


def _passing(frame: FrameType) -> bool | None:
    """Return the value with which the check in `frame` passes; None if the value decides something else."""
    position = _operand(frame)
    statement = _statement(frame.f_code.co_filename, position)
    if statement is None or any(_catches(caller) for caller in _callers(frame)):
        return None
    wanted = isinstance(statement, ast.Assert)
    part = statement.test
    while isinstance(part, _PARTED):
        if isinstance(part, ast.UnaryOp):
            if not isinstance(part.op, ast.Not):
                break
            part, wanted = part.operand, not wanted
            continue
        inner = next((value for value in part.values if _holds(value, position)), None)
        if inner is None:
            return wanted
        part = inner
    return wanted


def _operand(frame: FrameType) -> tuple[int | None, ...]:
    """Return the position of the expression whose truth is asked for: first and last line, first and last column.

    A jump has the position of everything that it decides; the instruction before it made the value.
    """
    code, index = frame.f_code.co_code, frame.f_lasti // 2
    if any(word in dis.opname[code[2 * index]] for word in ("JUMP", "TO_BOOL")):
        index -= 1
        while dis.opname[code[2 * index]] == "EXTENDED_ARG":
            index -= 1
    return list(frame.f_code.co_positions())[index]


@lru_cache(maxsize=512)
def _statement(file: str, position: tuple[int | None, ...]) -> ast.If | ast.Assert | None:
    """Return the check whose condition is at `position`."""
    for node in _tree(file):
        if isinstance(node, (ast.If, ast.Assert)) and _holds(node.test, position):
            is_pure = not any(isinstance(part, (ast.NamedExpr, ast.Await)) for part in ast.walk(node.test))
            return node if is_pure and (isinstance(node, ast.Assert) or _only_warns(node)) else None
    return None


@lru_cache(maxsize=128)
def _tree(file: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's source; none if there is no source."""
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


def _holds(node: ast.expr, position: tuple[int | None, ...]) -> bool:
    line, last, column, end = position
    if None in position or node.end_lineno is None or node.end_col_offset is None:
        return False
    return (node.lineno, node.col_offset) <= (line, column) and (last, end) <= (node.end_lineno, node.end_col_offset)


def _only_warns(node: ast.If) -> bool:
    """Return whether the code under the condition only raises, warns or prints."""
    *before, last = node.body
    ends = isinstance(last, ast.Raise)
    return all(map(_is_warning, before)) and (ends or (_is_warning(last) and not node.orelse))


def _is_warning(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    name = call.func if isinstance(call, ast.Call) else None
    return (isinstance(name, ast.Attribute) and name.attr in _WARNINGS) or (
        isinstance(name, ast.Name) and name.id in _WARNINGS
    )


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frames of the user's code, from `frame` up to the first of autopar's."""
    caller: FrameType | None = frame
    while caller is not None and not caller.f_code.co_filename.startswith(_HOME):
        yield caller
        caller = caller.f_back


def _catches(frame: FrameType) -> bool:
    """Return whether an exception at the frame's line would be caught there and then change what forward does."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    if file.startswith(_TORCH):
        return False
    holding = (block for block in _tree(file) if isinstance(block, ast.Try) and _is_within(line, block.body))
    return any(not isinstance(handler.body[-1], ast.Raise) for block in holding for handler in block.handlers)


def _is_within(line: int, body: list[ast.stmt]) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or 0)
