"""The top of the page: what was planned, and the figures by which it is judged."""

from __future__ import annotations

from autopar.page.markup import Markup, element
from autopar.report.facts import Facts
from autopar.report.tables import percent
from autopar.units import bytes_text, count_text, fit_text, seconds_text

FLOPS = (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3))


def headline(facts: Facts) -> Markup:
    """Title, the plan in words, and tiles of figures."""
    lines = [
        ("plan", facts.plan),
        ("mesh", facts.axes),
        ("cluster", facts.cluster),
        ("batch", facts.batch),
        ("precision", facts.precision),
        *([("compression", facts.compression)] if facts.compression else []),
        ("fits", fit_text(facts.figures.certainty)),
    ]
    words = [element("div", element("dt", name), element("dd", text)) for name, text in lines]
    return element(
        "header",
        element("button", "theme: auto", id="theme", type="button", hidden=True),
        element("p", "autopar report", class_="kicker"),
        element("h1", element("span", facts.model), " on ", element("span", facts.mesh)),
        element("div", [_tile(*tile) for tile in _tiles(facts)], class_="tiles"),
        element("dl", words, class_="words"),
    )


def _tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """(name, figure, further words)"""
    own = facts.figures
    tiles = [("predicted step", seconds_text(own.step_seconds), f"{count_text(own.rows_per_second)} rows/s")]
    if own.tokens:
        each = count_text(own.tokens_per_second_per_device)
        tiles.append(("tokens/s", count_text(own.tokens_per_second), f"{count_text(own.tokens)} tokens a step"))
        tiles.append((f"tokens/s/{facts.device_word}", each, f"{own.num_devices} {facts.device_words}"))
    tiles.append(("MFU", percent(own.mfu, 1.0), f"{flops_text(own.flops)} of the model a step"))
    capacity = bytes_text(own.capacity_bytes)
    share = percent(own.peak_bytes, own.capacity_bytes)
    tiles.append(("peak memory", bytes_text(own.peak_bytes), f"of {capacity} per rank, {share}"))
    return tiles


def flops_text(flops: float) -> str:
    """`3.11 EFLOP`."""
    unit, scale = next((pair for pair in FLOPS if flops >= pair[1]), FLOPS[-1])
    return f"{flops / scale:.3g} {unit}"


def _tile(name: str, figure: str, more: str) -> Markup:
    parts = element("span", name, class_="name"), element("strong", figure), element("span", more, class_="more")
    return element("div", *parts, class_="tile")
