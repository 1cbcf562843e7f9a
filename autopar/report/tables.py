"""Tables without lines between rows, and their plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 110
"""Columns of what is printed, unless a terminal is narrower."""


def table_of(title: str, *columns: tuple[str, int] | tuple[str, int, str]) -> Table:
    """columns: (header, width, "right" for numbers); width 0 takes what is left."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        expand=True,
        padding=(0, 1, 0, 0),
    )
    for header, width, *justify in columns:
        table.add_column(
            header,
            width=width or None,
            ratio=None if width else 1,
            justify="right" if justify else "left",
            overflow="fold",
        )
    return table


def plain_text(panels: Iterable[RenderableType], width: int) -> str:
    """What a terminal would print, without colours and trailing spaces."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    for panel in panels:
        console.print(panel, highlight=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
