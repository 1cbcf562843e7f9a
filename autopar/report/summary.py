"""Short tables, such as that of a plan file by itself."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table

from autopar.plan import Plan
from autopar.report.costs import time_rows
from autopar.report.plan_words import full_words, recompute_words
from autopar.units import bytes_text, seconds_text


def plan_summary(plan: Plan) -> Iterator[RenderableType]:
    """What a plan file says without its model: mesh, batch, predicted time and memory."""
    table = short_table(f"{plan.model} on {plan.mesh_text}", "", "")
    table.add_row("cluster", plan.cluster)
    table.add_row("plan", f"{full_words(plan)}, {plan.global_batch_size} rows a step, {plan.precision}")
    for index, stage in enumerate(plan.pipeline.stages):
        recomputed = recompute_words(stage)
        words = f"blocks {stage.first}-{stage.last - 1}" + (f", recomputed: {recomputed}" if stage.recompute else "")
        table.add_row(f"stage {index}", words)
    yield table
    times = short_table("Predicted time of one step", "", "exposed", "hidden")
    for row in time_rows(plan.prediction.seconds):
        times.add_row(row.kind, seconds_text(row.exposed), seconds_text(row.hidden) if row.hidden else "")
    times.add_row("one step", seconds_text(plan.prediction.step_seconds), "", style="bold")
    yield times
    memory = short_table("Predicted memory of the fullest rank", "", "bytes")
    for kind, size in sorted(plan.prediction.num_bytes.items(), key=lambda pair: -pair[1]):
        memory.add_row(kind, bytes_text(size))
    memory.add_row("peak", bytes_text(plan.prediction.peak_bytes), style="bold")
    yield memory


def short_table(title: str, *headers: str) -> Table:
    """An empty table with this title; columns without a header, and the first, are flush left."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, header in enumerate(headers):
        table.add_column(
            header, justify="left" if index == 0 or len(headers) == 2 and not header else "right", overflow="fold"
        )
    return table
