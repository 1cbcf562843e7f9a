"""Two plans side by side: the decisions that differ, and their effect on time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from autopar.costs.layer_costs import HIDDEN
from autopar.ir.plan_data import StagePlan, labels_text, placements_text, stored_text
from autopar.plan import Plan
from autopar.report.costs import kind_words
from autopar.report.plan_words import recompute_modes, zero_stage
from autopar.report.tables import WIDTH, plain_text, table_of
from autopar.units import bytes_text, seconds_text


@dataclass(frozen=True, slots=True)
class Difference:
    """One line: a decision or tensor, and its value in each plan."""

    what: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Amounts:
    """One line of numbers, in seconds or bytes."""

    kind: str
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of two plans. decisions: all decisions that hold for a whole plan. stages: one line per stage.
    placements: those that differ, by scope and tensor. seconds, num_bytes: by kind. pipeline_ranks: peak bytes of each
    pipeline rank."""

    first: Plan
    second: Plan
    decisions: tuple[Difference, ...]
    stages: tuple[Difference, ...]
    placements: tuple[Difference, ...]
    seconds: tuple[Amounts, ...]
    num_bytes: tuple[Amounts, ...]
    pipeline_ranks: tuple[Amounts, ...]


def compare(first: Plan, second: Plan) -> Comparison:
    """Compare two plans by their files."""
    return Comparison(
        first=first,
        second=second,
        decisions=tuple(_decisions(first, second)),
        stages=tuple(_stages(first, second)),
        placements=tuple(_placements(first, second)),
        seconds=tuple(_amounts(first.prediction.seconds, second.prediction.seconds)),
        num_bytes=tuple(_amounts(first.prediction.num_bytes, second.prediction.num_bytes)),
        pipeline_ranks=tuple(_pipeline_ranks(first, second)),
    )


def _decisions(first: Plan, second: Plan) -> Iterator[Difference]:
    rows: dict[str, Callable[[Plan], str]] = {
        "model": lambda p: p.model,
        "cluster": lambda p: p.cluster,
        "mesh": lambda p: p.mesh_text,
        "global batch": lambda p: str(p.global_batch_size),
        "micro-batches": lambda p: str(p.num_micro_batches),
        "precision": lambda p: p.precision,
        "schedule": lambda p: p.pipeline.schedule or "-",
        "stages per pipeline rank": lambda p: str(p.pipeline.num_chunks),
        "ZeRO stage": lambda p: str(zero_stage(p)),
        "layers recomputed": lambda p: ", ".join(f"{n} {mode}" for mode, n in recompute_modes(p).items()) or "none",
        "on the host": lambda p: p.pipeline.offload or "nothing",
    }
    return (Difference(name, text(first), text(second)) for name, text in rows.items())


def _stages(first: Plan, second: Plan) -> Iterator[Difference]:
    first_stages, second_stages = first.pipeline.stages, second.pipeline.stages
    for index in range(max(len(first_stages), len(second_stages))):
        texts = [_stage_text(stages[index]) if index < len(stages) else "-" for stages in (first_stages, second_stages)]
        yield Difference(f"stage {index}", *texts)


def _stage_text(stage: StagePlan) -> str:
    modes = "; ".join(
        f"{name} " + ", ".join(f"{count} {mode}" for mode, count in runs) for name, runs in stage.recompute.items()
    )
    return f"blocks {stage.first}-{stage.last - 1} ({stage.last - stage.first})" + (f", {modes}" if modes else "")


def _placements(first: Plan, second: Plan) -> Iterator[Difference]:
    for scope in dict.fromkeys((*first.scopes, *second.scopes)):
        tables = [_table(plan, scope) for plan in (first, second)]
        for name in dict.fromkeys((*tables[0], *tables[1])):
            texts = [table.get(name, "follows from neighboring tensors") for table in tables]
            if texts[0] != texts[1]:
                yield Difference(f"{scope}: {name}" if scope else name, *texts)


def _table(plan: Plan, scope: str) -> dict[str, str]:
    """Return every entry of a scope by "kind name"."""
    if scope not in plan.scopes:
        return {}
    decisions, mesh = plan.scopes[scope], plan.mesh
    entries = {f"input {n}": placements_text(p, mesh) for n, p in decisions.inputs.items()}
    entries |= {n: stored_text(s, mesh) for n, s in decisions.parameters.items()}
    entries |= {f"call {n}": labels_text(labels, mesh) for n, labels in decisions.calls.items()}
    return entries | {f"result {n}": placements_text(p, mesh) for n, p in decisions.tensors.items()}


def _amounts(first: Mapping[str, float], second: Mapping[str, float]) -> Iterator[Amounts]:
    kinds = sorted({*first, *second}, key=lambda k: (-max(first.get(k, 0.0), second.get(k, 0.0)), k))
    for kind in kinds:
        if first.get(kind) or second.get(kind):
            yield Amounts(kind, first.get(kind, 0.0), second.get(kind, 0.0))


def _pipeline_ranks(first: Plan, second: Plan) -> Iterator[Amounts]:
    peaks = [[sum(kinds.values()) for kinds in plan.prediction.pipeline_ranks] for plan in (first, second)]
    for index in range(max(map(len, peaks))):
        values = [rank_peaks[index] if index < len(rank_peaks) else 0.0 for rank_peaks in peaks]
        yield Amounts(f"pipeline rank {index}", *values)


# --- text -------------------------------------------------------------------------------------------------------


def render_comparison(comparison: Comparison, names: tuple[str, str] = ("A", "B"), width: int = WIDTH) -> str:
    """Return the comparison as plain text of at most `width` columns."""
    return plain_text(comparison_panels(comparison, names), width)


def comparison_panels(comparison: Comparison, names: tuple[str, str] = ("A", "B")) -> Iterator[RenderableType]:
    """Yield the comparison's parts in order, for `rich.console.Console.print`."""
    yield _differences("Decisions", comparison.decisions, names)
    yield Text("")
    if comparison.stages:
        yield _differences("Stages", comparison.stages, names)
        yield Text("")
    if comparison.placements:
        yield _differences("Placements that differ", comparison.placements, names)
        yield Text("")
    else:
        yield Text("Placements that differ: none\n")
    first, second = comparison.first.prediction, comparison.second.prediction
    exposed = tuple(row for row in comparison.seconds if row.kind != HIDDEN)
    hidden = tuple(row for row in comparison.seconds if row.kind == HIDDEN)
    total = Amounts("one step", first.step_seconds, second.step_seconds)
    yield _numbers("Predicted time of one step", (*exposed, total), names, seconds_text, hidden)
    yield Text("")
    peak = Amounts("peak", first.peak_bytes, second.peak_bytes)
    yield _numbers("Predicted memory of the fullest rank", (*comparison.num_bytes, peak), names, bytes_text)
    if comparison.pipeline_ranks:
        yield Text("")
        yield _numbers("Peak of each pipeline rank", comparison.pipeline_ranks, names, bytes_text, has_total=False)


def _differences(title: str, rows: tuple[Difference, ...], names: tuple[str, str]) -> RenderableType:
    table = table_of(title, ("", 34), (names[0], 0), (names[1], 0))
    for row in rows:
        table.add_row(row.what, row.first, row.second, style="bold" if row.first != row.second else "")
    return table


def _numbers(
    title: str,
    rows: tuple[Amounts, ...],
    names: tuple[str, str],
    text: Callable[[float], str],
    after: tuple[Amounts, ...] = (),
    has_total: bool = True,
) -> RenderableType:
    """Return a table of numbers. rows: the last row is the total. after: rows that the total does not include."""
    table = table_of(title, ("", 42), (names[0], 14, "right"), (names[1], 14, "right"), ("difference", 0, "right"))
    for row in rows:
        is_total = has_total and row is rows[-1]
        if is_total:
            table.add_section()
        more = row.second - row.first
        change = f" ({more / row.first:+.0%})" if row.first and row.second else ""
        difference = f"{'+' if more > 0 else '-'}{text(abs(more))}{change}" if more else "0"
        cells = [text(value) if value else "-" for value in (row.first, row.second)]
        table.add_row(kind_words(row.kind), *cells, difference, style="bold" if is_total else "")
    for row in after:
        table.add_row(f"({row.kind})", text(row.first), text(row.second), "")
    return table
