"""The start of ranks: forked where a fork can compute, which takes half a second, else spawned.

A spawned process imports the script again, under another name than `__main__`, and receives its work by pickling.
"""

from __future__ import annotations

import ast
import io
import os
import pickle
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch

from autopar.errors import ConstraintError

GPUS = "processes of a machine with GPUs"
_PROBE_SECONDS = 10.0


def why_not_forked() -> str:
    """Return which processes must be spawned, as the subject of a sentence; "" where forks are safe."""
    if os.name != "posix":
        return "processes of this system"
    if torch.cuda.is_available():  # a fork cannot use CUDA once this process has
        return GPUS
    if not _fork_has_gradients():
        return (
            "processes cannot be forked here, since autograd has started threads in this one (a compiled backward, or "
            "nested reentrant checkpoints), which a fork lacks. Those that are spawned instead"
        )
    return ""


def _fork_has_gradients() -> bool:
    """Return whether a fork of this process can run a backward, by trying it in one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, where the process has threads
        child = os.fork()
    if child == 0:
        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 2)
            torch.set_num_threads(1)
            with torch.enable_grad(), torch.inference_mode(False), torch.device("cpu"):
                torch.autograd.backward(torch.ones(1, requires_grad=True).mul(2.0).sum())
        except BaseException:
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + _PROBE_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.001)
    os.kill(child, 9)  # it waits for a lock that a missing thread holds
    os.waitpid(child, 0)
    return False


CANNOT_BE_SENT = (pickle.PicklingError, AttributeError, TypeError)
"""Errors that pickling raises for an object without a name in a module."""
_TORCHRUN = "torchrun --nproc-per-node N script.py, whose processes each make their own"


def check_sendable(*values: Any, who: str) -> None:
    """Raise ConstraintError before any process is spawned, where pickling would fail or a process would start others.

    who: the processes, with the reason why they are spawned, as the subject of a sentence.
    Each process imports the script's file. So it lacks all names under `if __name__ == "__main__":`, and runs all
    statements outside of it again.
    """
    main = sys.modules.get("__main__")
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    is_imported = path is not None and not (spec is not None and spec.name.endswith("__main__"))
    body = _statements(Path(path)) if is_imported and path is not None else None
    if body is not None:
        _refuse_rerun(main, body, who)
    references = _References()
    try:
        references.dump(values)
    except CANNOT_BE_SENT as error:
        raise not_sendable(error, who) from error
    except RuntimeError:
        pass  # an object, such as a queue, that only a starting process may receive
    names = references.of_main
    missing = names if not is_imported else names & _guarded(body or [])
    if missing:
        where = 'under `if __name__ == "__main__":`' if is_imported else "in a session without a script"
        raise ConstraintError(
            f"{who} import the script, so classes and functions of the model and its training must be in a module that "
            "they can import",
            values=f"{', '.join(sorted(missing))} {where}",
            alternatives=["define them at the level of the script above that line, or in another module", _TORCHRUN],
        )


def not_sendable(error: BaseException, who: str) -> ConstraintError:
    """Return the error for an object that pickling refused."""
    return ConstraintError(
        f"{who} receive the model, the data and the functions of a call, so these must be picklable",
        values=f"{type(error).__name__}: {error}",
        alternatives=["use functions and classes of a module's level in place of lambdas and local ones", _TORCHRUN],
    )


class _References(ForkingPickler):
    """Pickle to nowhere. of_main: the names of the script's classes and functions among the references."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.of_main: set[str] = set()

    def persistent_id(self, value: Any) -> Any:
        """Leave tensors out: they have many bytes and refer to no names."""
        return "tensor" if isinstance(value, (torch.Tensor, torch.UntypedStorage)) else None

    def reducer_override(self, value: Any) -> Any:
        """Note names of the script, then pickle as usual."""
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            self.of_main.add(value.__qualname__.partition(".")[0])
        return NotImplemented


def _statements(path: Path) -> list[ast.stmt] | None:
    """Return a script's statements, None where it cannot be read."""
    try:
        return ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None


def _guards(body: list[ast.stmt]) -> Iterator[ast.If]:
    """Yield the conditions on `__name__` at the script's level."""
    for statement in body:
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            yield statement


def _guarded(body: list[ast.stmt]) -> set[str]:
    """Return the names that exist only under a condition on `__name__`."""

    def defined(statements: list[ast.stmt]) -> set[str]:
        nodes = (node for statement in statements for node in ast.walk(statement))
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        return {node.name for node in nodes if isinstance(node, kinds)}

    guards = list(_guards(body))
    inside = {name for guard in guards for name in defined(guard.body)}
    return inside - defined([statement for statement in body if statement not in guards])


def _refuse_rerun(main: Any, body: list[ast.stmt], who: str) -> None:
    """Raise ConstraintError where the call is at the script's level, outside of a condition on `__name__`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    if frame is None or any(guard.lineno <= frame.f_lineno <= (guard.end_lineno or 0) for guard in _guards(body)):
        return
    raise ConstraintError(
        f"{who} import the script, and would make this call again",
        values=f"line {frame.f_lineno} of {frame.f_code.co_filename}, which runs whenever the file is imported",
        alternatives=['put it under `if __name__ == "__main__":`', _TORCHRUN],
    )
