"""The report on a pipeline: its schedule, its stages, and the memory of each pipeline rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import RenderableType
from rich.text import Text

from autopar.report.facts import Facts, ScheduleFacts
from autopar.report.tables import table_of
from autopar.units import bytes_text, counted, seconds_text

Item = TypeVar("Item")


def pipeline_panels(facts: Facts, lines: Sequence[str], most: int) -> Iterator[RenderableType]:
    """Yield the panels on stages and schedule. A plan of one pipeline rank without recomputation or offload has none.

    lines: the drawing of the schedule. most: the number of stages to list; a longer list shows the first and the last.
    """
    if not facts.stages:
        return
    if facts.offload:
        yield Text("Host memory holds the optimizer state, and the host updates the parameters\n")
    if facts.schedule is not None:
        yield Text(schedule_words(facts.schedule))
        yield from _picture(lines)
    yield _stages(facts, most)
    yield Text("")


def schedule_words(schedule: ScheduleFacts) -> str:
    """Return `Schedule: 1f1b; 8 micro-batches in 61 ms; bubble: pipeline ranks are idle 20% of that time`."""
    idle = [max(share, 0.0) for share in schedule.bubbles]  # rounding can make it negative
    chunks = f", {schedule.num_chunks} stages per pipeline rank" if schedule.num_chunks > 1 else ""
    span = f"{min(idle):.0%}" if f"{min(idle):.0%}" == f"{max(idle):.0%}" else f"{min(idle):.0%} to {max(idle):.0%}"
    return (
        f"Schedule: {schedule.name}{chunks}; {counted(schedule.num_micro_batches, 'micro-batch')} in "
        f"{seconds_text(schedule.makespan)}; bubble: pipeline ranks are idle {span} of that time"
    )


def _picture(lines: Sequence[str]) -> Iterator[RenderableType]:
    for pipeline_rank, line in enumerate(lines):
        yield Text(f"  pp rank {pipeline_rank}  {line}", no_wrap=True)
    if lines:
        split = ", + weight gradients" if any("+" in line for line in lines) else ""
        yield Text(f"  (0 1: forward of a micro-batch, a b: its backward{split}, · idle)")
    yield Text("")


def _stages(facts: Facts, most: int) -> RenderableType:
    table = table_of(
        "Stages, and memory by pipeline rank",
        ("stage", 5, "right"),
        ("pp", 2, "right"),
        ("blocks", 0),
        ("recomputed", 10),
        ("forward", 7, "right"),
        ("backward", 8, "right"),
        ("in flight", 9, "right"),
        ("memory", 7, "right"),
    )
    peaks = [sum(row.num_bytes for row in kinds) for kinds in facts.pipeline_ranks or (facts.memory,)]
    for row in _ends(facts.stages, most):
        if row is None:
            table.add_row("...", "", f"{len(facts.stages) - most + 1} more", *("" for _ in range(5)))
            continue
        seconds = seconds_text(row.forward), seconds_text(row.backward)
        rank, peak = str(row.pipeline_rank), bytes_text(peaks[row.pipeline_rank])
        table.add_row(str(row.stage), rank, row.units, row.recompute, *seconds, str(row.in_flight), peak)
    return table


def _ends(rows: Sequence[Item], most: int) -> list[Item | None]:
    """Return all rows, or the first and the last of too many with None between them."""
    if len(rows) <= most:
        return list(rows)
    half = most // 2
    return [*rows[:half], None, *rows[len(rows) - (most - 1 - half) :]]
