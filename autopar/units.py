"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable

from codegen.text import bytes_text as bytes_text
from cost_models.certainty import Certainty


def fit_text(certainty: Certainty) -> str:
    """Whether predicted bytes fit, and what like ones took: `within the error, nine of ten like it took 76 to 88 GiB`.

    What fits by the prediction alone stays legal, whatever this says.
    """
    low, high = bytes_text(certainty.low_bytes).split(), bytes_text(certainty.high_bytes).split()
    low = low[:1] if low[1] == high[1] else low
    interval = high if low[0] == high[0] else (*low, "to", *high)
    return f"{certainty.fit}, nine of ten like it took {' '.join(interval)}"


def seconds_text(seconds: float) -> str:
    """Seconds as text of three digits: 0.0123 -> `12.3 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return "0 s" if seconds <= 0 else f"{_digits(seconds / 1e-6)} us"


def count_text(number: float) -> str:
    """A count as text of three digits: 1234567 -> `1.23M`."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{_digits(number / scale)}{unit}"
    return f"{number:.0f}" if number >= 100 or number == int(number) else _digits(number)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def either_text(names: Iterable[str]) -> str:
    """Names of which one is to be chosen: `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
