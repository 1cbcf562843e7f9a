"""The output of a command: text, tables, JSON, and the progress of long work."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO

from rich.console import Console, RenderableType

from autopar.compiled import CompiledProgram
from autopar.report import report_panels
from autopar.report.facts import facts_of
from autopar.report.json_facts import facts_json
from autopar.report.tables import WIDTH, VisibleConsole, plain_text
from autopar.report.timeline import write_timeline as write_timeline_file
from codegen.source.text import visible

SECONDS_OF_SILENCE = 3.0
"""A command on a terminal shows its progress after this time."""

_results: ContextVar[TextIO | None] = ContextVar("results", default=None)
"""Standard output while text goes elsewhere."""

_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextlib.contextmanager
def words_to(quiet: bool, as_json: bool) -> Iterator[None]:
    """Discard what the block prints (quiet), or redirect it to standard error, as JSON has standard output to
    itself."""
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
    """Print a line of text, with control characters escaped. as_note: to standard error."""
    print(visible(str(text)), file=sys.stderr if as_note else None)


def show(*panels: RenderableType) -> None:
    """Print tables and texts: with colors on a terminal, else as plain text of WIDTH columns without trailing
    blanks."""
    screen = console()
    if screen.is_terminal:
        for panel in panels:
            screen.print(panel)
    else:
        print(plain_text(panels, WIDTH), end="")


def console() -> Console:
    """Return a console as wide as the terminal, at most WIDTH; a file or pipe gets WIDTH."""
    screen = VisibleConsole(highlight=False)
    return VisibleConsole(
        highlight=False, markup=False, width=min(screen.width, WIDTH) if screen.is_terminal else WIDTH
    )


def print_json(record: dict[str, Any]) -> None:
    """Print one object on standard output. Raises ValueError for numbers that JSON does not have."""
    print(json.dumps(record, indent=1, allow_nan=False), file=_results.get() or sys.stdout, flush=True)


@contextlib.contextmanager
def working(words: str) -> Iterator[Callable[[str], None]]:
    """Show `words` on a terminal's standard error if the block takes longer than SECONDS_OF_SILENCE.

    Yields a function that adds the block's progress to the words.
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


def print_report(compiled: CompiledProgram, as_json: bool) -> None:
    """Print the report of a plan: as one JSON object, or as tables."""
    if as_json:
        print_json(facts_json(facts_of(compiled)))
        return
    show(*report_panels(compiled, console().width))


def write_page(compiled: CompiledProgram, path: str | None, log: str | None, force: bool) -> None:
    """Write the HTML page if there is a path. log: of a training run."""
    if path is not None:
        with working("pricing what-ifs and leaner plans"):
            written = compiled.report_html(path, log=log, force=force)
        say(f"page written to {written}")


def write_timeline(compiled: CompiledProgram, path: str | None, force: bool) -> None:
    """Write the timeline of the predicted step if there is a path."""
    if path is not None:
        say(f"timeline written to {write_timeline_file(compiled, path, force)}")
