"""Words inside of source: nothing that a user's names say can end the literal or comment they stand in."""

from __future__ import annotations

import re

_TO_PLAIN = str.maketrans({'"': "'", "\\": "/"})


def quoted(text: str) -> str:
    """A string literal, in double quotes where nothing needs an escape."""
    return f'"{text}"' if text.isprintable() and not {'"', "\\"} & set(text) else repr(text)


def plain(text: str) -> str:
    """Words for a comment or a docstring: printable characters on one line, without quotes that could end it, escapes,
    or what argparse would fill in."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return line.translate(_TO_PLAIN).replace("%(", "(").rstrip()


def is_path(text: str) -> bool:
    """Whether a module's path has letters, digits and dots only, so that it can stand in an f-string."""
    return re.fullmatch(r"[\w.]*", text) is not None


def bytes_text(num_bytes: float) -> str:
    """Bytes as text: 1536 -> `1.5 KiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return ""
