"""All plans that were priced: time against memory, and why the others lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.page.markup import Child, Markup, details, element, legend, section, swatch, table
from autopar.page.what_if import LeanPlan
from autopar.report.costs import tie_words
from autopar.report.facts import Facts
from autopar.units import bytes_text, counted, seconds_text


@dataclass(frozen=True, slots=True)
class Point:
    """A plan in the drawing. kind: "chosen", "other" or "lean"."""

    words: str
    seconds: float
    num_bytes: float
    kind: str


COLORS = {"chosen": "c0", "other": "c1", "lean": "c2"}
NAMES = {
    "chosen": "chosen",
    "other": "slower",
    "lean": "fastest plans with less memory",
}


def plans_section(facts: Facts, lean: Sequence[LeanPlan], limits: str, is_cut: bool) -> Markup:
    """Return the drawing, the Pareto front, and the other plans, folded.

    limits: the restriction of the search for leaner plans, in words. is_cut: whether its time limit ended it."""
    points = points_of(facts, lean)
    front = pareto_front(points)
    kinds = dict.fromkeys(point.kind for point in points)
    rows: list[list[Child]] = [
        [[swatch(f"dot {COLORS[p.kind]}"), p.words], seconds_text(p.seconds), bytes_text(p.num_bytes)]
        for p in sorted(points, key=lambda p: (p.seconds, p.num_bytes))
        if p in front
    ]
    words = "No other plan is both faster and leaner than a plan on the front, which the line connects. "
    words += f"Leaner plans are {limits}. " if limits and lean else ""
    words += "The time limit ended the search for leaner plans. " if is_cut else ""
    tied = tie_words(facts.plan, facts.figures.step_seconds, facts.others)
    words += f"{tied}." if tied else ""
    return section(
        "Plans",
        legend((f"dot {COLORS[kind]}", NAMES[kind]) for kind in kinds),
        _drawing(points, front) if len(points) > 1 else element("p", _nothing(facts), class_="note"),
        table(("on the front", "one step", "per rank"), rows, "The Pareto front", 2),
        _why_not(facts),
        intro=words if len(points) > 1 else f"{tied}." if tied else "",
    )


def _nothing(facts: Facts) -> str:
    reason = "the plan was given" if facts.is_given else "the constraints leave one parallel configuration"
    return f"No other plan was priced: {reason}."


def points_of(facts: Facts, lean: Sequence[LeanPlan]) -> list[Point]:
    """Return every plan with known time and memory, the chosen one first."""
    figures = facts.figures
    points = [Point(facts.plan, figures.step_seconds, figures.peak_bytes, "chosen")]
    points += [
        Point(row.plan, row.seconds, row.peak_bytes, "other")
        for row in facts.others
        if row.seconds is not None and row.peak_bytes is not None
    ]
    return points + [Point(plan.words, plan.seconds, plan.peak_bytes, "lean") for plan in lean]


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats in time or memory without losing in the other."""
    return [p for p in points if not any(_beats(other, p) for other in points)]


def _beats(point: Point, other: Point) -> bool:
    first, second = (point.seconds, point.num_bytes), (other.seconds, other.num_bytes)
    return first[0] <= second[0] and first[1] <= second[1] and first != second


def _drawing(points: Sequence[Point], front: Sequence[Point]) -> Markup:
    """Draw memory to the right and seconds up. Both axes start near their smallest value."""
    across = _axis([point.num_bytes for point in points])
    up = _axis([point.seconds for point in points])

    def left(point: Point) -> float:
        return 100 * (point.num_bytes - across[0]) / (across[1] - across[0])

    def bottom(point: Point) -> float:
        return 100 * (point.seconds - up[0]) / (up[1] - up[0])

    ordered = sorted(front, key=lambda point: point.num_bytes)
    line = " ".join(f"{left(p):.2f},{100 - bottom(p):.2f}" for p in ordered)
    dots = [
        element(
            "span",
            class_=f"point {COLORS[p.kind]} {p.kind}",
            style=f"left:{left(p):.2f}%;bottom:{bottom(p):.2f}%",
            title=f"{p.words}: {seconds_text(p.seconds)}, {bytes_text(p.num_bytes)}",
        )
        for p in reversed(points)
    ]
    drawn = element("polyline", points=line, class_="front")
    plot = element(
        "svg", drawn, viewBox="0 0 100 100", preserveAspectRatio="none", aria_hidden="true", class_="front-line"
    )
    ticks = [
        element("span", seconds_text(up[0] + part * (up[1] - up[0])), class_="y", style=f"bottom:{100 * part:g}%")
        for part in (0.0, 0.5, 1.0)
    ]
    wide = across[1] - across[0]
    ticks += [
        element("span", bytes_text(across[0] + part * wide), class_="x", style=f"left:{100 * part:g}%")
        for part in (0.0, 0.5, 1.0)
    ]
    words = "; ".join(f"{p.words}: {seconds_text(p.seconds)}, {bytes_text(p.num_bytes)}" for p in points)
    figure = element("div", plot, dots, ticks, class_="plot", role="img", aria_label=f"time against memory: {words}")
    return element(
        "figure",
        element("figcaption", "seconds of a step (up) against bytes of the fullest rank (right)"),
        figure,
        class_="chart",
    )


def _axis(values: Sequence[float]) -> tuple[float, float]:
    """Return an axis's ends, with some room at both sides."""
    least, most = min(values), max(values)
    room = 0.08 * (most - least) or 0.1 * most or 1.0
    return max(least - room, 0.0), most + room


def _why_not(facts: Facts) -> Markup | None:
    """Return all plans that lost, with the reason, folded."""
    if not facts.others:
        return None
    ordered = sorted(facts.others, key=lambda row: math.inf if row.seconds is None else row.seconds)
    rows: list[list[Child]] = [
        [row.plan, row.why, row.seconds_text, "" if row.peak_bytes is None else bytes_text(row.peak_bytes)]
        for row in ordered
    ]
    headers = ("plan", "reason", "one step", "per rank")
    summary = f"Why not the other {counted(len(rows), 'plan')}?"
    return details(summary, table(headers, rows, "Other plans, and why they lost", 2))
