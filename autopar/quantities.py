"""Numbers as people read them."""

from __future__ import annotations


def bytes_text(num_bytes: float) -> str:
    """1536 -> `1.5 KiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return ""
