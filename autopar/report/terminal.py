"""The report as tables: `report_panels` for a terminal with colors, `render_report` as plain text.

The report fits one terminal page: long lists are cut and give the number of omitted rows. `--html` and `--json` have
all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.plan import Plan
from autopar.program import GeneratedProgram
from autopar.report.costs import tie_words, time_rows
from autopar.report.facts import Facts, ScopeFacts, chosen_words, facts_of
from autopar.report.figures import Figures
from autopar.report.pipeline import pipeline_panels
from autopar.report.plan_words import full_words, recompute_words
from autopar.report.sharding import Row
from autopar.report.stages import picture
from autopar.report.tables import WIDTH, bar, bullet, percent, plain_text, short_table, table_of
from autopar.report.timeline import simulation_of
from autopar.units import bytes_text, count_text, fit_text, seconds_text

MOST_LINES = 89
MOST_SCOPES = 3
"""Layer classes shown in full, those with most layers first."""
ROWS = ((7, 7), (7, 5), (6, 4), (5, 4), (5, 3), (4, 3), (4, 2), (3, 2), (2, 2))
"""Row limits of a table part, for layer classes and for everything else. The report takes the first pair with which it
has at most MOST_LINES lines."""
MOST_NOTES = 4

Item = TypeVar("Item")


def render_report(compiled: GeneratedProgram, width: int = WIDTH) -> str:
    """Return the whole report as plain text of at most `width` columns."""
    return plain_text(report_panels(compiled, width), width)


def report_panels(compiled: GeneratedProgram, width: int = WIDTH) -> list[RenderableType]:
    """Return the report's parts in order, for `rich.console.Console.print` on a console of `width` columns."""
    facts = facts_of(compiled)
    lines = picture(simulation_of(compiled)) if facts.schedule is not None else []
    panels: list[RenderableType] = []
    for of_layers, rows in ROWS:
        panels = list(_panels(facts, lines, chosen_words(compiled), of_layers, rows))
        if plain_text(panels, width).count("\n") <= MOST_LINES:
            break
    return panels


def _panels(facts: Facts, lines: list[str], chosen: str, of_layers: int, rows: int) -> Iterator[RenderableType]:
    yield _header(facts)
    yield Text("")
    yield from pipeline_panels(facts, lines, max(rows + 1, 5))
    shown = _shown_scopes(facts)
    for scope in shown:
        yield from _scope(scope, of_layers if scope.name else rows)
    if len(shown) < len(facts.scopes):
        rest = [f"{scope.name} x {scope.count}" for scope in facts.scopes if scope not in shown]
        yield Text(f"Further layers: {', '.join(rest)}\n")
    yield _time(facts)
    yield Text("")
    yield _memory(facts)
    yield Text("")
    yield from _others(facts, chosen, rows)
    yield from _notes(facts)


def plan_summary(plan: Plan) -> Iterator[RenderableType]:
    """Yield the contents of a plan file without its model: mesh, batch, predicted time and memory."""
    table = short_table(f"{plan.model} on {plan.mesh_text}", "", "")
    table.add_row("cluster", plan.cluster)
    table.add_row("plan", f"{full_words(plan)}, {plan.global_batch_size} rows a step, {plan.precision}")
    for index, stage in enumerate(plan.pipeline.stages):
        recomputed = recompute_words(stage)
        words = f"blocks {stage.first}-{stage.last - 1}" + (f", recomputed: {recomputed}" if stage.recompute else "")
        table.add_row(f"stage {index}", words)
    yield table
    yield Text("")
    times = short_table("Predicted time of one step", "", "exposed", "hidden")
    for row in time_rows(plan.prediction.seconds):
        times.add_row(row.kind, seconds_text(row.exposed), seconds_text(row.hidden) if row.hidden else "")
    times.add_row("one step", seconds_text(plan.prediction.step_seconds), "", style="bold")
    yield times
    yield Text("")
    memory = short_table("Predicted memory of the fullest rank", "", "bytes")
    for kind, size in sorted(plan.prediction.num_bytes.items(), key=lambda pair: -pair[1]):
        memory.add_row(kind, bytes_text(size))
    memory.add_row("peak", bytes_text(plan.prediction.peak_bytes), style="bold")
    yield memory


def figures_words(figures: Figures, device: str) -> str:
    """Return `30.6 ms a step: 33.5k tokens/s, 8.37k tokens/s/GPU, 64 rows/s; MFU 35%`. device: the word for a
    device."""
    parts = [f"{count_text(figures.rows_per_second)} rows/s"]
    if figures.tokens:
        per_device = f"{count_text(figures.tokens_per_second_per_device)} tokens/s/{device}"
        parts = [f"{count_text(figures.tokens_per_second)} tokens/s", per_device, *parts]
    utilization = f"MFU {percent(figures.mfu, 1.0)}"
    return f"{seconds_text(figures.step_seconds)} a step: {', '.join(parts)}; {utilization}"


def memory_words(figures: Figures) -> str:
    """Return `23 MiB of 8 GiB per rank (0.3%)`."""
    peak, capacity = figures.peak_bytes, figures.capacity_bytes
    return f"{bytes_text(peak)} of {bytes_text(capacity)} per rank ({percent(peak, capacity)})"


def _header(facts: Facts) -> RenderableType:
    lines = [
        ("cluster", facts.cluster),
        ("mesh", facts.axes),
        ("batch", facts.batch),
        ("precision", facts.precision),
        *([("compression", facts.compression)] if facts.compression else []),
        ("predicted", figures_words(facts.figures, facts.device_word)),
        ("memory", memory_words(facts.figures)),
        ("fits", fit_text(facts.figures.certainty)),
    ]
    table = Table(box=None, show_header=False, title=facts.title, title_justify="left", padding=(0, 2, 0, 0))
    table.title_style = "bold"
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, text)
    return table


def _shown_scopes(facts: Facts) -> list[ScopeFacts]:
    """Return the operators outside layers and the classes with most layers, in the model's order."""
    by_count = sorted((scope for scope in facts.scopes if scope.name), key=lambda scope: -scope.count)
    largest = by_count[:MOST_SCOPES]
    return [scope for scope in facts.scopes if not scope.name or scope in largest]


def _scope(scope: ScopeFacts, rows: int) -> Iterator[RenderableType]:
    table = table_of(scope.title, ("", 10), ("", -5), ("", -6))
    # Parameters of several modules with equal placements share a row.
    for name, all_rows in (("parameters", _alike(scope.parameters)), ("results", list(scope.results))):
        shared, rest = _apart(all_rows)
        listed = [Row("all of these", shared), *rest] if shared else rest
        for index, row in enumerate(_cut(listed, rows)):
            table.add_row(name if index == 0 else "", row.what, row.how)
        if len(listed) > rows:
            table.add_row("", f"... and {len(listed) - rows + 1} more", "")
    yield table
    if not scope.transfers:
        yield Text("no communication\n")
        return
    transfers = table_of("", ("communication", 0), ("size", 30), ("a step", 6, "right"))
    # The largest traffic comes first.
    ordered = sorted(scope.transfers, key=lambda transfer: -transfer.num_bytes * transfer.count)
    for transfer in _cut(ordered, rows):
        transfers.add_row(transfer.words, transfer.traffic, f"x {transfer.count}")
    if len(ordered) > rows:
        transfers.add_row(f"... and {len(ordered) - rows + 1} more", "", "")
    yield transfers
    yield Text("")


def _alike(rows: Sequence[Row]) -> list[Row]:
    """Join rows with equal words."""
    names: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        names.setdefault((row.how, row.parts), []).append(row.what)
    return [Row(", ".join(members), how, parts) for (how, parts), members in names.items()]


def _apart(rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """Split rows into the words that all rows share and the rows without these words; one row shares none."""
    common = [part for part in rows[0].parts if all(part in row.parts for row in rows)] if len(rows) > 1 else []
    if not common:
        return "", list(rows)
    differing = [(row, tuple(part for part in row.parts if part not in common)) for row in rows]
    if not any(parts for _, parts in differing):
        return "", [Row("all", ", ".join(common))]
    return ", ".join(common), [Row(row.what, ", ".join(parts)) for row, parts in differing]


def _cut(rows: Sequence[Item], most: int) -> Sequence[Item]:
    """Return all rows, or the first of too many; the caller adds a row that counts the others."""
    return rows if len(rows) <= most else rows[: most - 1]


def _time(facts: Facts) -> RenderableType:
    total = facts.figures.step_seconds
    table = table_of("Predicted time of one step", ("", 38), ("exposed", 8, "right"), ("hidden", 8, "right"), ("", 0))
    for row in facts.seconds:
        hidden = seconds_text(row.hidden) if row.hidden else ""
        table.add_row(row.kind, seconds_text(row.exposed), hidden, bar(row.exposed, total))
    table.add_row("one step", seconds_text(total), "", "", style="bold")
    return table


def _memory(facts: Facts) -> RenderableType:
    peak, capacity = facts.figures.peak_bytes, facts.figures.capacity_bytes
    title = "Predicted memory of the fullest rank"
    table = table_of(title, ("", 38), ("bytes", 8, "right"), ("share", 8, "right"), ("", 0))
    for row in facts.memory:
        size = row.num_bytes
        table.add_row(row.kind, bytes_text(size), percent(size, capacity), bar(size, capacity))
    total = f"peak, of {bytes_text(capacity)}"
    table.add_row(total, bytes_text(peak), percent(peak, capacity), bar(peak, capacity), style="bold")
    return table


def _others(facts: Facts, chosen: str, most: int) -> Iterator[RenderableType]:
    if not facts.others:
        reason = "the plan was given" if facts.is_given else "the constraints leave one parallel configuration"
        yield Text(f"Other plans: none; {reason}\n")
        return
    bounds = [row for row in facts.others if row.is_bound]
    rows = [row for row in facts.others if not row.is_bound]
    table = table_of("Other plans, and why they lost", ("plan", -5), ("one step", 9, "right"), ("why", -6))
    table.add_row(f"{chosen} (chosen)", seconds_text(facts.figures.step_seconds), "", style="bold")
    for row in _cut(rows, most):
        table.add_row(row.plan, row.seconds_text, row.why)
    if len(rows) > most:
        table.add_row(f"... and {len(rows) - most + 1} more", "", "")
    yield table
    if bounds:
        named = ", ".join(f"{row.plan} ({row.seconds_text})" for row in bounds[:most])
        more = f", and {len(bounds) - most} more" if len(bounds) > most else ""
        yield Text(f"Ruled out by a lower bound: {named}{more}")
    tied = tie_words(chosen, facts.figures.step_seconds, facts.others)
    if tied:
        yield Text(tied)
    yield Text("")


def _notes(facts: Facts) -> Iterator[RenderableType]:
    if not facts.notes:
        return
    yield Text("Notes", style="bold")
    for note in facts.notes[:MOST_NOTES]:
        yield bullet(note)
    if len(facts.notes) > MOST_NOTES:
        yield bullet(f"and {len(facts.notes) - MOST_NOTES} more")
