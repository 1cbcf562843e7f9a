"""The top of the page: the plan, the figures by which it is judged, and its step time as a stacked bar."""

from __future__ import annotations

from autopar.page.markup import TIME_COLORS, Child, Markup, colors_of, element, section, swatch, table
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


def time_section(facts: Facts) -> Markup:
    """Return a bar of exposed seconds, a bar of hidden seconds on the same scale, and their table."""
    total = facts.figures.step_seconds
    colors = colors_of([row.kind for row in facts.seconds], TIME_COLORS)
    exposed = [(row.kind, row.exposed) for row in facts.seconds]
    hidden = [(row.kind, row.hidden) for row in facts.seconds if row.hidden]
    bars = [_bar("exposed", exposed, total, colors, "")]
    if hidden:
        bars.append(_bar("hidden behind compute", hidden, total, colors, " hidden-part"))
    rows: list[list[Child]] = [
        [
            [swatch(colors[row.kind]), row.kind],
            seconds_text(row.exposed),
            seconds_text(row.hidden) if row.hidden else "",
            percent(row.exposed, total),
        ]
        for row in facts.seconds
    ]
    rows.append(["one step", seconds_text(total), "", "100%"])
    words = "Exposed seconds lengthen the step; hidden seconds overlap with compute."
    figures = table(("", "exposed", "hidden", "of step"), rows, "Predicted time of one step", 3)
    return section("Step time", bars, figures, intro=words)


def _bar(name: str, parts: list[tuple[str, float]], total: float, colors: dict[str, str], more: str) -> Markup:
    pieces = [
        element(
            "span",
            class_=f"part {colors[kind]}{more}",
            style=f"width:{100 * seconds / total:.4f}%",
            title=f"{kind}: {seconds_text(seconds)}",
        )
        for kind, seconds in parts
    ]
    words = f"{name}: " + ", ".join(f"{kind} {seconds_text(seconds)}" for kind, seconds in parts)
    bar = element("div", pieces, class_="stack", role="img", aria_label=words)
    return element("div", element("span", name, class_="bar-name"), bar, class_="bar-row")
