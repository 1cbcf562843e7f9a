"""What processes that are spawned can be sent: they import the script anew, under another name than `__main__`."""

from __future__ import annotations

import ast
import io
import pickle
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch

from autopar.errors import ConstraintError

CANNOT_BE_SENT = (pickle.PicklingError, AttributeError, TypeError)
"""What pickling raises for something that has no name in a module."""
_TORCHRUN = "torchrun --nproc-per-node N script.py, whose processes each make their own"


def check_sendable(*values: Any, who: str) -> None:
    """Raises ConstraintError, before any process is spawned, where one could not be sent these or would start more.

    who: the processes, with the reason why they are spawned, as the subject of a sentence.
    Each of them imports the script's file, so what stands under `if __name__ == "__main__":` is not there for them, and
    what stands outside of it runs again.
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
        pass  # what only a process that is being started may be given, such as a queue
    names = references.of_main
    missing = names if not is_imported else names & _guarded(body or [])
    if missing:
        where = 'under `if __name__ == "__main__":`' if is_imported else "in a session without a script"
        raise ConstraintError(
            f"{who} import the script, so classes and functions of the model and its training must be in a module that "
            "they can import",
            values=f"{', '.join(sorted(missing))} {where}",
            alternatives=["at the level of the script above that line, or in a module of its own", _TORCHRUN],
        )


def not_sendable(error: BaseException, who: str) -> ConstraintError:
    """What to tell of something that pickling refused."""
    return ConstraintError(
        f"{who} are sent what they work on, so it must be picklable",
        values=f"{type(error).__name__}: {error}",
        alternatives=["functions and classes of a module's own level, in place of lambdas and local ones", _TORCHRUN],
    )


class _References(ForkingPickler):
    """Pickles to nowhere. of_main: the names of the script's own classes and functions that come along."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.of_main: set[str] = set()

    def persistent_id(self, value: Any) -> Any:
        """Tensors are left out: their bytes are many, and need no names."""
        return "tensor" if isinstance(value, (torch.Tensor, torch.UntypedStorage)) else None

    def reducer_override(self, value: Any) -> Any:
        """Pickled as usual, but seen."""
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            self.of_main.add(value.__qualname__.partition(".")[0])
        return NotImplemented


def _statements(path: Path) -> list[ast.stmt] | None:
    """A script's, None where it cannot be read."""
    try:
        return ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None


def _guards(body: list[ast.stmt]) -> Iterator[ast.If]:
    """The conditions on `__name__` at a script's own level."""
    for statement in body:
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            yield statement


def _guarded(body: list[ast.stmt]) -> set[str]:
    """Names that are there under a condition on `__name__` alone."""

    def defined(statements: list[ast.stmt]) -> set[str]:
        nodes = (node for statement in statements for node in ast.walk(statement))
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        return {node.name for node in nodes if isinstance(node, kinds)}

    guards = list(_guards(body))
    inside = {name for guard in guards for name in defined(guard.body)}
    return inside - defined([each for each in body if each not in guards])


def _refuse_rerun(main: Any, body: list[ast.stmt], who: str) -> None:
    """Raises ConstraintError where the call is made at the script's own level, outside of a condition on `__name__`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    if frame is None or any(guard.lineno <= frame.f_lineno <= (guard.end_lineno or 0) for guard in _guards(body)):
        return
    raise ConstraintError(
        f"{who} import the script, and would begin again with what started them",
        values=f"line {frame.f_lineno} of {frame.f_code.co_filename}, which runs whenever the file is imported",
        alternatives=['`if __name__ == "__main__":` around it', _TORCHRUN],
    )
