"""The step's seconds as one stacked bar, with what is hidden beside it."""

from __future__ import annotations

from autopar.page.colours import SECONDS, colours_of
from autopar.page.markup import Child, Markup, element, section, swatch, table
from autopar.report.facts import Facts
from autopar.report.tables import percent
from autopar.units import seconds_text


def time_section(facts: Facts) -> Markup:
    """A bar of exposed seconds, a second one of hidden ones on the same scale, and the table of both."""
    total = facts.figures.step_seconds
    colours = colours_of([row.kind for row in facts.seconds], SECONDS)
    exposed = [(row.kind, row.exposed) for row in facts.seconds]
    hidden = [(row.kind, row.hidden) for row in facts.seconds if row.hidden]
    bars = [_bar("exposed", exposed, total, colours, "")]
    if hidden:
        bars.append(_bar("hidden behind compute", hidden, total, colours, " hidden-part"))
    rows: list[list[Child]] = [
        [
            [swatch(colours[row.kind]), row.kind],
            seconds_text(row.exposed),
            seconds_text(row.hidden) if row.hidden else "",
            percent(row.exposed, total),
        ]
        for row in facts.seconds
    ]
    rows.append(["one step", seconds_text(total), "", "100%"])
    words = "Exposed seconds lengthen the step; hidden ones pass while the rank computes."
    figures = table(("", "exposed", "hidden", "of step"), rows, "Predicted time of one step", 3)
    return section("Step time", bars, figures, intro=words)


def _bar(name: str, parts: list[tuple[str, float]], total: float, colours: dict[str, str], more: str) -> Markup:
    pieces = [
        element(
            "span",
            class_=f"part {colours[kind]}{more}",
            style=f"width:{100 * seconds / total:.4f}%",
            title=f"{kind}: {seconds_text(seconds)}",
        )
        for kind, seconds in parts
    ]
    words = f"{name}: " + ", ".join(f"{kind} {seconds_text(seconds)}" for kind, seconds in parts)
    bar = element("div", pieces, class_="stack", role="img", aria_label=words)
    return element("div", element("span", name, class_="bar-name"), bar, class_="bar-row")
