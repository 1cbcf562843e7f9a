"""Tables without lines between rows, and their plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from codegen.text import visible

WIDTH = 110
"""Columns of what is printed, unless a terminal is narrower. Everything can be read at 80."""

BAR_WIDTH = 16


def table_of(title: str, *columns: tuple[str, int] | tuple[str, int, str]) -> Table:
    """columns: (header, width, "right" for numbers); width 0 takes what is left, -n a share n of it."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        show_header=any(header for header, *_ in columns),
        expand=True,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for header, width, *justify in columns:
        table.add_column(
            header,
            width=width if width > 0 else None,
            ratio=None if width > 0 else -width or 1,
            justify="right" if justify else "left",
            overflow="fold",
        )
    return table


def bar(part: float, whole: float) -> str:
    """A share as a bar of BAR_WIDTH characters."""
    filled = round(BAR_WIDTH * min(part / whole, 1.0)) if whole else 0
    return "█" * filled + "·" * (BAR_WIDTH - filled)


def percent(part: float, whole: float) -> str:
    """A share in per cent: `0.4%`, `12%`."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f}%" if share < 9.95 else f"{share:.0f}%"


class VisibleConsole(Console):
    """A console that escapes control characters of what it is given: names come from models and files."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def plain_text(panels: Iterable[RenderableType], width: int) -> str:
    """What a terminal would print, without colours and trailing spaces."""
    stream = io.StringIO()
    console = VisibleConsole(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    for panel in panels:
        console.print(panel, highlight=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
