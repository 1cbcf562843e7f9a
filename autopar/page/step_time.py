"""The step time as one stacked bar, with a second bar for overlapped time."""

from __future__ import annotations

from autopar.page.markup import TIME_COLORS, Child, Markup, colors_of, element, section, swatch, table
from autopar.report.facts import Facts
from autopar.report.tables import percent
from autopar.units import seconds_text


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
