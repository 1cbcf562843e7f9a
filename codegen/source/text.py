"""Words inside of source: nothing that a user's names say can end the literal or comment they stand in."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

_TO_PLAIN = str.maketrans({'"': "'", "\\": "/"})


def quoted(text: str) -> str:
    """A string literal, in double quotes where nothing needs an escape."""
    return f'"{text}"' if text.isprintable() and not {'"', "\\"} & set(text) else repr(text)


def plain(text: str) -> str:
    """Words for a comment or a docstring: printable characters on one line, without quotes that could end it, escapes,
    or what argparse would fill in."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return line.translate(_TO_PLAIN).replace("%(", "(").rstrip()


def visible(text: str) -> str:
    """Return `text` with control characters, but newlines and tabs, as escapes: a name cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def is_plain(value: Any) -> bool:
    """Whether a value is numbers, text and None, in dicts, lists and tuples: Python reads back what it prints."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, (*value, *value.values())))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


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


def axes_text(axes: Sequence[str], sizes: Sequence[int]) -> str:
    """`dp2 x tp4`: axes of one rank are left out; empty if none is left."""
    return " x ".join(f"{axis}{size}" for axis, size in zip(axes, sizes, strict=True) if size > 1)


def meshes_text(meshes: Sequence[tuple[Sequence[str], Sequence[int]]]) -> str:
    """(axes, sizes) of every pipeline rank -> `pp2 x dp2 x tp2`.

    Unequal ones one after the other, equal neighbors together: `pp3 (2 of dp2 x tp4, single)`.
    """
    texts = [axes_text(axes, sizes) for axes, sizes in meshes]
    if len(set(texts)) == 1:
        return " x ".join(filter(None, (f"pp{len(texts)}", texts[0])))
    runs = [(text or "single", len(list(equal))) for text, equal in groupby(texts)]
    return f"pp{len(texts)} ({', '.join(f'{count} of {text}' if count > 1 else text for text, count in runs)})"
