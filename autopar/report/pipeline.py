"""The report's part on a pipeline: its schedule, stages and memory by pipeline rank."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from autopar.costs.layer_costs import FIXED_KINDS
from autopar.costs.stage_costs import Simulated
from autopar.program import GeneratedProgram
from autopar.report.stages import picture, stage_rows
from autopar.report.tables import table_of
from autopar.report.timeline import simulation_of
from autopar.units import bytes_text, seconds_text


def pipeline_panels(compiled: GeneratedProgram) -> Iterator[RenderableType]:
    """The panels on stages and schedule; none for a plan of one pipeline rank that keeps everything on the device."""
    plan = compiled.plan
    if plan.pipeline.is_plain or compiled.request is None:
        return
    simulated = simulation_of(compiled)
    if plan.pipeline.offload:
        yield Text("The optimizer's state lives in host memory, and the host updates the parameters\n")
    if plan.pipeline.num_pipeline_ranks > 1:
        yield Text(_schedule_text(compiled, simulated))
        yield from _picture(simulated)
    yield _stages(compiled, simulated)
    if plan.pipeline.num_pipeline_ranks > 1:
        yield _memory(simulated)


def _schedule_text(compiled: GeneratedProgram, simulated: Simulated) -> str:
    plan, timeline = compiled.plan, simulated.timeline
    chunks = plan.pipeline.num_chunks
    idle = timeline.bubble_fractions
    each = f", {chunks} stages per pipeline rank" if chunks > 1 else ""
    span = f"{min(idle):.0%}" if f"{min(idle):.0%}" == f"{max(idle):.0%}" else f"{min(idle):.0%} to {max(idle):.0%}"
    return (
        f"Schedule: {plan.pipeline.schedule}{each}; {plan.num_micro_batches} micro-batches in "
        f"{seconds_text(timeline.makespan)}, of which pipeline ranks are idle for {span} (bubble)"
    )


def _picture(simulated: Simulated) -> Iterator[RenderableType]:
    lines = picture(simulated)
    if not lines:
        yield Text("")
    else:
        for pipeline_rank, line in enumerate(lines):
            yield Text(f"  pipeline rank {pipeline_rank}  {line}", no_wrap=True)
        split = ", + weight gradients" if any("+" in line for line in lines) else ""
        yield Text(f"  (0 1 2: forward of a micro-batch, a b c: its backward{split}, · idle)\n")


def _stages(compiled: GeneratedProgram, simulated: Simulated) -> RenderableType:
    table = table_of(
        "Stages",
        ("stage", 5, "right"),
        ("pp rank", 8, "right"),
        ("blocks", 0),
        ("recomputed", 18),
        ("forward", 9, "right"),
        ("backward", 9, "right"),
        ("in flight", 9, "right"),
    )
    for row in stage_rows(compiled.plan, compiled.best.graph, simulated):
        seconds = seconds_text(row.forward), seconds_text(row.backward)
        table.add_row(str(row.stage), str(row.pipeline_rank), row.units, row.recompute, *seconds, str(row.in_flight))
    return table


def _memory(simulated: Simulated) -> RenderableType:
    kinds = sorted({k for own in simulated.memory for k in own}, key=_order)
    table = table_of(
        "Predicted memory by pipeline rank",
        ("", 0),
        *((kind.replace("optimizer state", "optimizer"), 11, "right") for kind in kinds),
        ("peak", 9, "right"),
    )
    for pipeline_rank, own in enumerate(simulated.memory):
        sizes = (bytes_text(own.get(kind, 0.0)) for kind in kinds)
        table.add_row(f"pipeline rank {pipeline_rank}", *sizes, bytes_text(sum(own.values())))
    return table


def _order(kind: str) -> tuple[int, str]:
    return (FIXED_KINDS.index(kind) if kind in FIXED_KINDS else len(FIXED_KINDS), kind)
