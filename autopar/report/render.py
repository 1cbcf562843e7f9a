"""The report as tables. `report_panels` is what a terminal prints in colour, `render_report` the same as plain text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.costs.rates import is_cpu
from autopar.costs.updates import training_of
from autopar.ir.compression import NOTHING_COMPRESSED
from autopar.options.scopes import Scope, scopes_of
from autopar.program import GeneratedProgram
from autopar.report.costs import runner_ups, time_rows
from autopar.report.dims import DimNames, name_dims
from autopar.report.pipeline import pipeline_panels
from autopar.report.plan_words import plan_words
from autopar.report.sharding import activation_rows, parameter_rows
from autopar.report.tables import WIDTH, plain_text, table_of
from autopar.report.traffic import Transfer, context_rows, parameter_traffic, reshard_rows
from autopar.units import bytes_text, count_text, seconds_text
from codegen.functions import function_of
from codegen.program import ModuleClass, PipelineProgram, Program
from codegen.runtime.optimizers import parameters_of

BAR_WIDTH = 30


def render_report(compiled: GeneratedProgram, width: int = WIDTH) -> str:
    """The whole report as plain text of at most `width` columns."""
    return plain_text(report_panels(compiled), width)


def report_panels(compiled: GeneratedProgram) -> Iterator[RenderableType]:
    """The report's parts in order, for `rich.console.Console.print`."""
    graph = compiled.best.graph
    names = name_dims(graph, compiled.best.operators)
    yield _header(compiled)
    yield Text("")
    yield from pipeline_panels(compiled)
    for scope in sorted(scopes_of(graph), key=lambda s: bool(s.layer)):
        yield _sharding(compiled, scope, names)
        yield _transfers(compiled, scope, names)
    yield _time(compiled)
    yield _memory(compiled)
    yield _runner_ups(compiled)
    yield from _notes(compiled)


def _header(compiled: GeneratedProgram) -> RenderableType:
    plan = compiled.plan
    lines = [
        ("cluster", str(compiled.cluster)),
        ("mesh", f"{plan.mesh_text}: " + _axes_text(compiled)),
        ("batch", _batch_text(compiled)),
        ("precision", plan.precision + (", linear layers of repeated layers in fp8 (e4m3)" if plan.fp8 else "")),
        *([("compression", str(plan.compression))] if plan.compression else []),
        ("predicted", _prediction_text(compiled)),
    ]
    table = Table(
        box=None,
        show_header=False,
        title=f"{plan.model} on {plan.mesh_text}",
        title_justify="left",
        padding=(0, 2, 0, 0),
    )
    table.title_style = "bold"
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, text)
    return table


def _axes_text(compiled: GeneratedProgram) -> str:
    if compiled.plan.pipeline.stage_meshes:
        return _stage_meshes_text(compiled)
    mesh, pipeline_ranks = compiled.plan.mesh, compiled.plan.pipeline.num_pipeline_ranks
    cluster, parts = compiled.cluster.groups[0], []
    if pipeline_ranks > 1:
        spans = mesh.num_ranks * pipeline_ranks > cluster.devices_per_node
        parts.append(f"pp = {pipeline_ranks} pipeline ranks {'across nodes' if spans else 'inside a node'}")
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        spans = mesh.stride(axis) * size > cluster.devices_per_node
        parts.append(f"{axis} = {size} ranks {'across nodes' if spans else 'inside a node'}")
    return ", ".join(parts) or "one rank"


def _stage_meshes_text(compiled: GeneratedProgram) -> str:
    """`pipeline ranks 0-1: dp2 x tp4 of 8 a100-80g; pipeline rank 2: dp4 of 4 l4`."""
    parts, first = [], 0
    for stage_mesh, run in itertools.groupby(compiled.plan.stage_meshes):
        last = first + len(list(run)) - 1
        numbers = f"pipeline rank {first}" if first == last else f"pipeline ranks {first}-{last}"
        parts.append(f"{numbers}: {stage_mesh.mesh} of {compiled.cluster.groups[stage_mesh.group]}")
        first = last + 1
    return "; ".join(parts)


def _batch_text(compiled: GeneratedProgram) -> str:
    plan = compiled.plan
    whole, count = plan.global_batch_size // plan.num_micro_batches, plan.num_micro_batches
    rows = sorted({whole // stage_mesh.mesh.num_data_ranks for stage_mesh in plan.stage_meshes})
    noun = "micro-batch" if count == 1 else "micro-batches"
    twice = ", whose forwards run twice, first for sums over the batch" if compiled.best.graph.has_first_pass else ""
    return (
        f"{plan.global_batch_size} rows a step: {count} {noun} of {' or '.join(map(str, rows))} rows per dp rank{twice}"
    )


def _prediction_text(compiled: GeneratedProgram) -> str:
    plan, capacity = compiled.plan, capacity_bytes(compiled)
    seconds, peak = plan.prediction.step_seconds, plan.prediction.peak_bytes
    rate = f", {count_text(plan.global_batch_size / seconds)} rows/s" if seconds else ""
    return f"{seconds_text(seconds)} a step{rate}; {bytes_text(peak)} of {bytes_text(capacity)} per rank"


def capacity_bytes(compiled: GeneratedProgram) -> int:
    """What a rank may use: the user's budget, or the device's memory."""
    budget = compiled.request.constraints.memory_bytes if compiled.request else None
    return budget or compiled.cluster.groups[compiled.plan.fullest_group].device.memory_bytes


def _sharding(compiled: GeneratedProgram, scope: Scope, names: DimNames) -> RenderableType:
    mesh, assignment = compiled.plan.mesh, compiled.best.assignment
    title = _scope_title(scope)
    table = table_of(title, ("", 12), ("what", 40), ("how it lies", 0))
    for index, row in enumerate(parameter_rows(scope, assignment, mesh, names)):
        table.add_row("parameters" if index == 0 else "", row.what, row.how)
    for index, row in enumerate(activation_rows(scope, assignment, mesh, names)):
        table.add_row("results" if index == 0 else "", row.what, row.how)
    return table


def _scope_title(scope: Scope) -> str:
    if not scope.layer:
        return "Outside the layers"
    first, last = scope.instances[0], scope.instances[-1]
    where = first if first == last else f"{first} ... {last}"
    return f"{scope.name} x {scope.count} ({where})"


def _modules(program: Program | PipelineProgram, scope: Scope) -> list[ModuleClass]:
    """The generated classes of a scope: one per layer class, and for the top level one per stage."""
    if scope.layer:
        return [m for p in program.programs for m in p.layers if m.name == scope.name][:1]
    return [p.root for p in program.programs]


def _transfers(compiled: GeneratedProgram, scope: Scope, names: DimNames) -> RenderableType:
    program, plan = compiled.program, compiled.plan
    rows: list[Transfer] = []
    for module in _modules(program, scope):
        rows += reshard_rows(scope, module, names, plan.num_micro_batches)
    best, on_cpu = compiled.best, is_cpu(compiled.cluster.groups[0])
    rows += context_rows(scope, best.operators, best.assignment, plan.mesh, on_cpu, plan.num_micro_batches)
    training = replace(
        training_of(compiled.optimizer, plan.precision, parameters=parameters_of(compiled.model)),
        compression=plan.compression,
    )
    is_shared = not (compiled.needs.is_coupled or plan.pipeline.offload)
    whole = compiled.needs.whole if is_shared else frozenset[str]()
    rows += parameter_traffic(scope, compiled.best.assignment, plan.mesh, training, plan.num_micro_batches, whole)
    if not rows:
        return Text(f"  {_scope_title(scope)}: nothing is sent\n")
    table = table_of("", ("what is sent", 0), ("each time", 34), ("times a step", 12, "right"))
    for row in rows:
        table.add_row(row.words, row.traffic, str(row.count))
    return table


def _time(compiled: GeneratedProgram) -> RenderableType:
    prediction = compiled.plan.prediction
    table = table_of("Predicted time of one step", ("", 42), ("exposed", 10, "right"), ("hidden", 10, "right"), ("", 0))
    total = prediction.step_seconds
    for row in time_rows(prediction.seconds):
        hidden = seconds_text(row.hidden) if row.hidden else ""
        table.add_row(row.kind, seconds_text(row.exposed), hidden, _bar(row.exposed, total))
    table.add_section()
    table.add_row("one step", seconds_text(total), "", "", style="bold")
    return table


def _memory(compiled: GeneratedProgram) -> RenderableType:
    prediction, capacity = compiled.plan.prediction, capacity_bytes(compiled)
    table = table_of(
        "Predicted memory of the fullest rank", ("", 42), ("bytes", 10, "right"), ("of capacity", 12, "right"), ("", 0)
    )
    for kind, size in sorted(prediction.num_bytes.items(), key=lambda pair: -pair[1]):
        table.add_row(kind, bytes_text(size), _percent(size, capacity), _bar(size, capacity))
    table.add_section()
    peak = prediction.peak_bytes
    table.add_row(
        f"peak, of {bytes_text(capacity)}",
        bytes_text(peak),
        _percent(peak, capacity),
        _bar(peak, capacity),
        style="bold",
    )
    return table


def _runner_ups(compiled: GeneratedProgram) -> RenderableType:
    rows = runner_ups(compiled.result)
    if not rows:
        given = "the plan was given" if compiled.result.is_given else "the constraints leave one parallel config"
        return Text(f"Other plans: none was tried, {given}\n")
    table = table_of(
        "Other plans, and why they lost", ("plan", 30), ("one step", 12, "right"), ("compared with the chosen one", 0)
    )
    best = compiled.plan
    table.add_row(f"{plan_words(best)} (chosen)", seconds_text(best.prediction.step_seconds), "", style="bold")
    for row in rows:
        table.add_row(row.plan, row.seconds, row.why)
    return table


def _notes(compiled: GeneratedProgram) -> Iterator[RenderableType]:
    notes: list[str] = []
    unknown = sorted({op.node.op for op in compiled.best.operators.values() if not op.known})
    if unknown:
        notes.append(
            f"without a sharding rule, so every rank computes them whole: {', '.join(unknown)} (autopar.register_rule)"
        )
    cut = {op.node.op.split(".")[1] for op in compiled.best.operators.values() if op.known and function_of(op.node.op)}
    if cut:
        notes.append(f"custom Functions, cut as the operators that they call may be: {', '.join(sorted(cut))}")
    notes += [f"a check of values that the program leaves out: {line}" for line in compiled.best.graph.unchecked]
    if compiled.plan.compression and not compiled.plan.compresses:
        notes.append(NOTHING_COMPRESSED)
    idle = _idle_axes(compiled)
    notes += [f"nothing is split over {axis}: its ranks repeat the same work" for axis in idle]
    if notes:
        yield Text("Notes", style="bold")
        for note in notes:
            yield Text(f"  - {note}")


def _idle_axes(compiled: GeneratedProgram) -> list[str]:
    """Axes that no call makes use of."""
    mesh, options = compiled.plan.mesh, compiled.best.assignment.operators.values()
    return [
        axis
        for i, axis in enumerate(mesh.axes)
        if not any(p[i].is_shard for o in options for p in (*o.inputs, *o.outputs))
    ]


def _bar(part: float, whole: float) -> str:
    filled = round(BAR_WIDTH * min(part / whole, 1.0)) if whole else 0
    return "█" * filled + "·" * (BAR_WIDTH - filled)


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f}%" if share < 9.95 else f"{share:.0f}%"
