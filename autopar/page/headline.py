"""The top of the page: the plan, and the figures by which it is judged."""

from __future__ import annotations

from autopar.page.markup import Markup, element
from autopar.report.facts import Facts
from autopar.report.tables import percent
from autopar.units import bytes_text, count_text, fit_text, seconds_text

FLOPS = (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3))


def headline(facts: Facts) -> Markup:
    """Return the title, the plan in words, and tiles of figures."""
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
    """Return (name, figure, further words) of each tile."""
    figures = facts.figures
    tiles = [("predicted step", seconds_text(figures.step_seconds), f"{count_text(figures.rows_per_second)} rows/s")]
    if figures.tokens:
        per_device = count_text(figures.tokens_per_second_per_device)
        tiles.append(("tokens/s", count_text(figures.tokens_per_second), f"{count_text(figures.tokens)} tokens a step"))
        tiles.append((f"tokens/s/{facts.device_word}", per_device, f"{figures.num_devices} {facts.device_words}"))
    tiles.append(("MFU", percent(figures.mfu, 1.0), f"{flops_text(figures.flops)} of the model a step"))
    capacity = bytes_text(figures.capacity_bytes)
    share = percent(figures.peak_bytes, figures.capacity_bytes)
    tiles.append(("peak memory", bytes_text(figures.peak_bytes), f"of {capacity} per rank, {share}"))
    return tiles


def flops_text(flops: float) -> str:
    """Return `3.11 EFLOP`."""
    unit, scale = next((pair for pair in FLOPS if flops >= pair[1]), FLOPS[-1])
    return f"{flops / scale:.3g} {unit}"


def _tile(name: str, figure: str, more: str) -> Markup:
    parts = element("span", name, class_="name"), element("strong", figure), element("span", more, class_="more")
    return element("div", *parts, class_="tile")
