"""Where a command's words go: to a person, to a program that reads JSON, or nowhere; and a sign that it still works."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO

from rich.console import Console

from codegen.text import visible

SECONDS_OF_SILENCE = 3.0
"""After which a command on a terminal says what it is doing."""

_results: ContextVar[TextIO | None] = ContextVar("results", default=None)
"""Standard output while words go elsewhere."""

_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextlib.contextmanager
def words_to(quiet: bool, as_json: bool) -> Iterator[None]:
    """What is printed inside goes nowhere, or to standard error where JSON has standard output to itself."""
    if not (quiet or as_json):
        yield
        return
    before, was_quiet = _results.set(sys.stdout), _is_quiet.set(quiet)
    try:
        with contextlib.redirect_stdout(io.StringIO() if quiet else sys.stderr):
            yield
    finally:
        _results.reset(before)
        _is_quiet.reset(was_quiet)


def say(text: object, *, as_note: bool = False) -> None:
    """Print a line of words, with control characters escaped. as_note: to standard error."""
    print(visible(str(text)), file=sys.stderr if as_note else None)


def print_json(found: dict[str, Any]) -> None:
    """One object on standard output. Raises ValueError for numbers that JSON has not."""
    print(json.dumps(found, indent=1, allow_nan=False), file=_results.get() or sys.stdout, flush=True)


@contextlib.contextmanager
def working(words: str) -> Iterator[Callable[[str], None]]:
    """Says `words` on a terminal's standard error while the block takes longer than SECONDS_OF_SILENCE.

    The block gets a function that adds to them how far it is.
    """
    screen = Console(stderr=True)
    if _is_quiet.get() or not screen.is_terminal:
        yield lambda _: None
        return
    status = screen.status(words)
    timer = threading.Timer(SECONDS_OF_SILENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda more: status.update(f"{words}: {more}")
    finally:
        timer.cancel()
        timer.join()
        status.stop()
