"""Tables without rules between rows, and their plain text."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from codegen.source.text import visible

WIDTH = 110
"""Columns of the output, unless a terminal is narrower. All output is readable at 80 columns."""

BAR_WIDTH = 16


def table_of(title: str, *columns: tuple[str, int] | tuple[str, int, str]) -> Table:
    """Return an empty table. columns: (header, width, "right" for numbers); width 0 takes the rest, -n a share n of
    it."""
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


def short_table(title: str, *headers: str) -> Table:
    """Return an empty table as wide as its content; the first column and columns without a header are flush left."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        show_header=any(headers),
        min_width=min(len(title), WIDTH),
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for index, header in enumerate(headers):
        is_left = index == 0 or (len(headers) == 2 and not header)
        table.add_column(header, justify="left" if is_left else "right", overflow="fold")
    return table


def error_table(errors: Mapping[str, Sequence[float]]) -> Table:
    """Return the relative errors of a fit by kind: their number, the median and the largest."""
    table = short_table("Error of the fit", "measured", "cases", "median error", "largest")
    for kind, values in errors.items():
        sizes = [abs(value) for value in values]
        table.add_row(kind, str(len(sizes)), f"{statistics.median(sizes):.1%}", f"{max(sizes):.0%}")
    return table


def bullet(text: str) -> Table:
    """Return an item of a list; its further lines align with the first."""
    item = Table.grid(padding=0)
    item.add_column(width=4)
    item.add_column(overflow="fold")
    item.add_row("  - ", Text(text))
    return item


def bar(part: float, total: float) -> str:
    """Draw a share as a bar of BAR_WIDTH characters."""
    filled = round(BAR_WIDTH * min(part / total, 1.0)) if total else 0
    return "█" * filled + "·" * (BAR_WIDTH - filled)


def percent(part: float, total: float) -> str:
    """Return a share in percent: `0.4%`, `12%`."""
    share = 100 * part / total if total else 0.0
    return f"{share:.1f}%" if share < 9.95 else f"{share:.0f}%"


class VisibleConsole(Console):
    """A console that escapes control characters, as names come from models and files."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def plain_text(panels: Iterable[RenderableType], width: int) -> str:
    """Return the text of a terminal, without colors and trailing spaces."""
    stream = io.StringIO()
    console = VisibleConsole(
        file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False, markup=False
    )
    for panel in panels:
        console.print(panel, highlight=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
