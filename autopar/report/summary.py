"""Short tables: a plan file by itself, and a training run that has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table

from autopar.plan import Plan
from autopar.report.costs import time_rows
from autopar.report.plan_words import full_words, recompute_words
from autopar.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from autopar.trainer import TrainResult


def plan_summary(plan: Plan) -> Iterator[RenderableType]:
    """What a plan file says without its model: mesh, batch, predicted time and memory."""
    table = _table(f"{plan.model} on {plan.layout}", "", "")
    table.add_row("cluster", plan.cluster)
    table.add_row("plan", f"{full_words(plan)}, {plan.global_batch_size} rows a step, {plan.precision}")
    for index, stage in enumerate(plan.pipeline.stages):
        recomputed = recompute_words(stage)
        words = f"blocks {stage.first}-{stage.last - 1}" + (f", recomputed: {recomputed}" if stage.recompute else "")
        table.add_row(f"stage {index}", words)
    yield table
    times = _table("Predicted time of one step", "", "exposed", "hidden")
    for row in time_rows(plan.prediction.seconds):
        times.add_row(row.kind, seconds_text(row.exposed), seconds_text(row.hidden) if row.hidden else "")
    times.add_row("one step", seconds_text(plan.prediction.step_seconds), "", style="bold")
    yield times
    memory = _table("Predicted memory of the fullest rank", "", "bytes")
    for kind, size in sorted(plan.prediction.num_bytes.items(), key=lambda pair: -pair[1]):
        memory.add_row(kind, bytes_text(size))
    memory.add_row("peak", bytes_text(plan.prediction.peak_bytes), style="bold")
    yield memory


def train_summary(result: TrainResult) -> RenderableType:
    """Loss, speed and memory of a run, beside what was predicted."""
    table = _table("Training", "", "measured", "predicted")
    plan = result.program.plan if result.program else None
    steps = result.first_step + len(result.losses)
    table.add_row("steps", f"{result.first_step} to {steps}" if result.first_step else f"{steps}", "")
    if result.losses:
        table.add_row("loss", f"{result.losses[0]:.4f} -> {result.losses[-1]:.4f}", "")
        predicted = seconds_text(plan.prediction.step_seconds) if plan else ""
        table.add_row("one step (median)", seconds_text(result.step_seconds), predicted)
    if result.peak_bytes:
        peak = bytes_text(plan.prediction.peak_bytes) if plan else ""
        table.add_row("peak memory of a rank", bytes_text(max(result.peak_bytes)), peak)
    if result.checkpoint:
        table.add_row("checkpoint", str(result.checkpoint), "")
    return table


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, header in enumerate(headers):
        table.add_column(
            header, justify="left" if index == 0 or len(headers) == 2 and not header else "right", overflow="fold"
        )
    return table
