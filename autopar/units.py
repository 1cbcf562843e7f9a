"""Format numbers for people."""

from __future__ import annotations

from collections.abc import Iterable

from codegen.source.text import bytes_text as bytes_text
from cost_models.certainty import Certainty


def fit_text(certainty: Certainty) -> str:
    """Return whether predicted bytes fit, with their interval: `within the error (90% interval 76-88 GiB)`.

    A plan that fits by its prediction alone stays legal in all cases.
    """
    low, high = bytes_text(certainty.low_bytes).split(), bytes_text(certainty.high_bytes).split()
    low = low[:1] if low[1] == high[1] else low
    separator = "-" if len(low) == 1 else " to "
    interval = " ".join(high) if low[0] == high[0] else f"{' '.join(low)}{separator}{' '.join(high)}"
    return f"{certainty.fit} (90% interval {interval})"


def seconds_text(seconds: float) -> str:
    """Format seconds with three digits: 0.0123 -> `12.3 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return "0 s" if seconds <= 0 else f"{_digits(seconds / 1e-6)} us"


def count_text(number: float) -> str:
    """Format a count with three digits: 1234567 -> `1.23M`."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{_digits(number / scale)}{unit}"
    return f"{number:.0f}" if number >= 100 or number == int(number) else _digits(number)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`, `4 micro-batches`."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number} {noun}{ending}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def either_text(names: Iterable[str]) -> str:
    """Names of which one is to be chosen: `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
