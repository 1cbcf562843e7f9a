"""The memory of a rank by kind against its capacity, and over the step."""

from __future__ import annotations

from autopar.costs.memory_timeline import RankMemory, memory_over_time
from autopar.costs.stage_costs import Simulated
from autopar.page.markup import MEMORY_COLORS, Child, Markup, colors_of, element, legend, section, swatch, table
from autopar.report.facts import Facts, MemoryRow, memory_order
from autopar.report.tables import percent
from autopar.units import bytes_text, seconds_text

MOST_PANELS = 16
"""The most pipeline ranks with a curve over time."""

COLUMNS = 480
"""Slices of a step; each shows its maximum."""


def memory_section(facts: Facts, simulated: Simulated) -> Markup:
    """Return bars of every pipeline rank, their table, and curves over the step."""
    ranks = facts.pipeline_ranks or (facts.memory,)
    capacity = max(facts.figures.capacity_bytes, facts.figures.peak_bytes)
    kinds = sorted({row.kind for rank_rows in ranks for row in rank_rows}, key=memory_order)
    colors = colors_of(kinds, MEMORY_COLORS)
    names = [f"pipeline rank {index}" for index in range(len(ranks))] if len(ranks) > 1 else ["every rank"]
    scale = _scale(capacity, max(sum(row.num_bytes for row in rank_rows) for rank_rows in ranks))
    ends = " capacity" if scale == capacity else ""
    bars = [_bar(name, rank_rows, kinds, colors, scale, ends) for name, rank_rows in zip(names, ranks, strict=True)]
    words = f"A rank may use {bytes_text(facts.figures.capacity_bytes)}. "
    words += "All ranks of a pipeline rank need equal memory." if len(ranks) > 1 else "All ranks need equal memory."
    if scale < capacity:
        words += f" The bars end at {bytes_text(scale)}, as the plan needs far less than the capacity."
    return section(
        "Memory",
        legend((colors[kind], kind) for kind in kinds),
        bars,
        _table(names, ranks, kinds, colors, facts.figures.capacity_bytes),
        _over_time(names, simulated, scale),
        intro=words,
    )


def _scale(capacity: float, peak: float) -> float:
    """Return the bytes at the right end: the capacity, or less if the bars would be too short to see."""
    return capacity if peak > 0.2 * capacity else min(capacity, 2.0 * peak)


def _bar(
    name: str, rows: tuple[MemoryRow, ...], kinds: list[str], colors: dict[str, str], scale: float, ends: str
) -> Markup:
    sizes = {row.kind: row.num_bytes for row in rows}
    peak = sum(sizes.values())
    pieces = [
        element(
            "span",
            class_=f"part {colors[kind]}",
            style=f"width:{100 * sizes[kind] / scale:.4f}%",
            title=f"{kind}: {bytes_text(sizes[kind])}",
        )
        for kind in kinds
        if sizes.get(kind)
    ]
    words = f"{name}: " + ", ".join(f"{kind} {bytes_text(sizes[kind])}" for kind in kinds if sizes.get(kind))
    bar = element("div", pieces, class_=f"stack{ends}", role="img", aria_label=words)
    label = element("span", f"{name}: {bytes_text(peak)}", class_="bar-name")
    return element("div", label, bar, class_="bar-row")


def _table(
    names: list[str],
    ranks: tuple[tuple[MemoryRow, ...], ...],
    kinds: list[str],
    colors: dict[str, str],
    capacity: float,
) -> Markup:
    """Return a row per pipeline rank, or for one pipeline rank a row per kind."""
    if len(ranks) > 1:
        rows: list[list[Child]] = []
        for name, rank_rows in zip(names, ranks, strict=True):
            sizes = {row.kind: row.num_bytes for row in rank_rows}
            peak = sum(sizes.values())
            rows.append([name, *(bytes_text(sizes.get(kind, 0.0)) for kind in kinds), bytes_text(peak)])
        return table(("", *kinds, "peak"), rows, "Predicted memory of a rank, by pipeline rank", len(kinds) + 1)
    peak = sum(row.num_bytes for row in ranks[0])
    rows = [
        [[swatch(colors[row.kind]), row.kind], bytes_text(row.num_bytes), percent(row.num_bytes, capacity)]
        for row in ranks[0]
    ]
    rows.append(["peak", bytes_text(peak), percent(peak, capacity)])
    return table(("", "bytes", "of capacity"), rows, "Predicted memory of the fullest rank", 2)


def _over_time(names: list[str], simulated: Simulated, scale: float) -> Markup:
    """Draw a curve per pipeline rank."""
    ranks = memory_over_time(simulated)
    panels = [_panel(name, rank, scale) for name, rank in list(zip(names, ranks, strict=True))[:MOST_PANELS]]
    more = len(ranks) - len(panels)
    end = max((rank.moments[-1].end for rank in ranks if rank.moments), default=0.0)
    words = f"Over one step of {seconds_text(end)}. The peak of an action is drawn for its whole duration."
    parts = ("c0", "persistent"), ("c4", "kept by micro-batches in flight"), ("c6", "alive while an action runs")
    subject = "1 more pipeline rank is" if more == 1 else f"{more} more pipeline ranks are"
    note = element("p", f"{subject} not drawn.", class_="note") if more > 0 else None
    return element("div", element("h3", "Over time"), element("p", words, class_="note"), legend(parts), panels, note)


def _panel(name: str, rank: RankMemory, scale: float) -> Markup:
    in_flight, peak = _columns(rank)
    height = 100.0

    def area(values: list[float]) -> str:
        tops = [height - height * min(value / scale, 1.0) for value in values]
        points = "".join(f"L{index} {top:.2f}L{index + 1} {top:.2f}" for index, top in enumerate(tops))
        return f"M0 {height:g}{points}L{COLUMNS} {height:g}Z"

    shapes = [
        element("path", d=area([rank.fixed + value for value in peak]), class_="area running"),
        element("path", d=area([rank.fixed + value for value in in_flight]), class_="area kept"),
        element("path", d=area([rank.fixed] * COLUMNS), class_="area fixed"),
    ]
    words = f"{name}: at most {bytes_text(rank.peak_bytes)}, of which {bytes_text(rank.fixed)} are persistent"
    drawing = element(
        "svg",
        shapes,
        viewBox=f"0 0 {COLUMNS} {height:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=words,
        class_="over-time",
    )
    return element("div", element("span", words, class_="bar-name"), drawing, class_="bar-row")


def _columns(rank: RankMemory) -> tuple[list[float], list[float]]:
    """Return two maxima per slice of the step, both without persistent memory: kept bytes, and all bytes."""
    in_flight, peak = [0.0] * COLUMNS, [0.0] * COLUMNS
    end = rank.moments[-1].end if rank.moments else 0.0
    for moment in rank.moments if end else ():
        first = int(moment.start / end * COLUMNS)
        last = max(first + 1, round(moment.end / end * COLUMNS))
        for column in range(min(first, COLUMNS - 1), min(last, COLUMNS)):
            in_flight[column] = max(in_flight[column], moment.kept)
            peak[column] = max(peak[column], moment.kept + moment.running)
    return in_flight, peak
