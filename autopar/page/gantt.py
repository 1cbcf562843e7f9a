"""The simulated step of a pipeline: a row per pipeline rank, a bar per action."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.stage_costs import Simulated
from autopar.page.markup import Child, Markup, element, legend, section, table
from autopar.report.facts import Facts
from autopar.report.pipeline import schedule_words
from autopar.strategies.timeline import StepEvent, events_of
from autopar.units import seconds_text

MOST_LABELS = 600
"""Bars show micro-batch numbers up to this many actions."""
LEAST_LABEL = 0.018
"""Bars of at least this share of the width have room for a number."""

COLORS = {"forward": "c0", "backward": "c4", "input gradients": "c4", "weight gradients": "c3"}
ONCE = "c2"
WIDTH = 1000.0


def gantt_section(facts: Facts, simulated: Simulated) -> Markup | None:
    """Return the section, or None for one pipeline rank."""
    if facts.schedule is None:
        return None
    events = [event for event in events_of(simulated) if event.stream == "compute"]
    end = max(event.end for event in events)
    kinds = dict.fromkeys(COLORS.get(event.kind, ONCE) for event in events)
    names = {"c0": "forward", "c4": _backward_name(events), "c3": "weight gradients", "c2": "once per step"}
    parts = [*((color, names[color]) for color in names if color in kinds), ("tint", "idle")]
    lines = [
        _line(rank, [event for event in events if event.pipeline_rank == rank], end, len(events), bubble)
        for rank, bubble in enumerate(facts.schedule.bubbles)
    ]
    ticks = [element("span", seconds_text(end * part / 4), style=f"left:{25 * part}%") for part in range(4)]
    axis = element("div", element("span"), element("div", ticks, class_="ticks"), class_="gantt-line")
    return section(
        "Pipeline",
        legend(parts),
        element("div", lines, axis, class_="gantt"),
        _stages(facts),
        intro=f"{schedule_words(facts.schedule)}. The step ends after {seconds_text(end)}.",
    )


def _backward_name(events: Sequence[StepEvent]) -> str:
    return "input gradients" if any(event.kind == "input gradients" for event in events) else "backward"


def _line(rank: int, events: Sequence[StepEvent], end: float, count: int, bubble: float) -> Markup:
    """Draw one pipeline rank. Bars alternate in shade, so that neighbors can be told apart."""
    paths: dict[tuple[str, int], list[str]] = {}
    labels = []
    for event in events:
        color = COLORS.get(event.kind, ONCE)
        turn = (event.micro_batch or 0) % 2
        left, width = event.start / end * WIDTH, event.seconds / end * WIDTH
        paths.setdefault((color, turn), []).append(f"M{left:.2f} 0h{width:.2f}v1h{-width:.2f}z")
        if count <= MOST_LABELS and width >= LEAST_LABEL * WIDTH and event.micro_batch is not None:
            style = f"left:{left / WIDTH:.3%};width:{width / WIDTH:.3%}"
            labels.append(element("span", event.micro_batch, style=style))
    shapes = [
        element("path", d="".join(parts), class_=f"bar {color} turn{turn}") for (color, turn), parts in paths.items()
    ]
    words = f"pipeline rank {rank}: idle {max(bubble, 0.0):.0%} of its micro-batches' time"
    drawing = element(
        "svg",
        shapes,
        viewBox=f"0 0 {WIDTH:g} 1",
        preserveAspectRatio="none",
        role="img",
        aria_label=words,
    )
    overlay = element("div", labels, class_="numbers", aria_hidden="true")
    return element(
        "div",
        element("span", f"pp {rank}", title=words),
        element("div", drawing, overlay, class_="track"),
        class_="gantt-line",
    )


def _stages(facts: Facts) -> Markup:
    rows: list[list[Child]] = [
        [
            row.stage,
            row.pipeline_rank,
            row.units,
            row.recompute,
            seconds_text(row.forward),
            seconds_text(row.backward),
            row.in_flight,
        ]
        for row in facts.stages
    ]
    headers = ("stage", "pp rank", "blocks", "recomputed", "forward", "backward", "in flight")
    return table(headers, rows, "Stages: seconds are of one micro-batch", 3)
