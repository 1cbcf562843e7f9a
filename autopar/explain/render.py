"""An explanation as tables: in colour on a terminal, or as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from autopar.explain.explanation import Explanation, WhatIf
from autopar.explain.verdict import TIE
from autopar.ir.mesh import AXIS_NAMES
from autopar.report.costs import TIED
from autopar.report.plan_words import full_words, recompute_modes, zero_stage
from autopar.report.tables import WIDTH, plain_text, table_of
from autopar.units import bytes_text, count_text, seconds_text


def render_explanation(explanation: Explanation, width: int = WIDTH) -> str:
    """The explanation as plain text of at most `width` columns."""
    return plain_text(explanation_panels(explanation), width)


def explanation_panels(explanation: Explanation) -> Iterator[RenderableType]:
    """The explanation's parts in order, for `rich.console.Console.print`."""
    plan = explanation.plan
    seconds = plan.prediction.step_seconds
    yield Text(f"{plan.model} on {plan.cluster}: {full_words(plan)}", style="bold")
    rate = f", {count_text(plan.global_batch_size / seconds)} rows/s" if seconds else ""
    peak = bytes_text(plan.prediction.peak_bytes)
    yield Text(f"{seconds_text(seconds)} a step{rate}; {peak} of {bytes_text(explanation.capacity_bytes)} per rank")
    yield from _given(explanation)
    yield Text("")
    yield from _sentences("What binds", explanation.verdict)
    yield from _sentences("Where the time goes", explanation.time)
    yield _what_ifs(explanation)
    yield _alternatives(explanation)
    if explanation.tied:
        others = "; ".join(explanation.tied)
        yield Text(f"Within {TIED:.0%} of this plan, which predictions do not tell apart: {others}\n")
    if explanation.not_tried:
        yield Text(f"Not tried, the time was up: {', '.join(explanation.not_tried)}\n")


def _given(explanation: Explanation) -> Iterator[RenderableType]:
    mine, best = explanation.plan.prediction.step_seconds, explanation.searched.prediction.step_seconds
    if best < mine * (1 - TIE):
        words = full_words(explanation.searched)
        yield Text(f"The plan was given; the search finds a faster one: {words}, {seconds_text(best)} a step")


def _sentences(title: str, lines: tuple[str, ...]) -> Iterator[RenderableType]:
    yield Text(title, style="bold")
    for line in lines:
        yield Text(f"  - {line[0].upper()}{line[1:]}")
    yield Text("")


def _what_ifs(explanation: Explanation) -> RenderableType:
    table = table_of(
        "What more would buy",
        ("with", 34),
        ("this plan", 10, "right"),
        ("best plan", 10, "right"),
        ("rows/s", 10, "right"),
        ("the best plan then", 0),
    )
    plan = explanation.plan
    now = plan.prediction.step_seconds
    table.add_row("as it is", seconds_text(now), "", _rate(plan.global_batch_size, now), full_words(plan), style="bold")
    for each in explanation.what_ifs:
        table.add_row(
            each.words,
            "" if each.same_plan_seconds is None else seconds_text(each.same_plan_seconds),
            "" if each.seconds is None else seconds_text(each.seconds),
            _rate(each.rows, each.best_seconds),
            _then(each, full_words(plan)),
        )
    return table


def _rate(rows: int, seconds: float | None) -> str:
    return count_text(rows / seconds) if seconds else ""


def _then(each: WhatIf, now: str) -> str:
    if each.problem:
        return each.problem
    return "the same" if each.plan == now else each.plan


def _alternatives(explanation: Explanation) -> RenderableType:
    table = table_of(
        "The best plan with one decision made differently",
        ("decision", 26),
        ("one step", 10, "right"),
        ("peak", 10, "right"),
        ("plan, and why it is slower", 0),
    )
    plan = explanation.plan
    prediction = plan.prediction
    table.add_row(
        "(chosen)",
        seconds_text(prediction.step_seconds),
        bytes_text(prediction.peak_bytes),
        full_words(plan),
        style="bold",
    )
    for each in explanation.alternatives:
        table.add_row(
            f"{each.dimension} {_current(explanation, each.dimension)} -> {each.value}",
            "-" if each.seconds is None else seconds_text(each.seconds),
            "-" if each.peak_bytes is None else bytes_text(each.peak_bytes),
            f"{each.plan}: {each.why}" if each.plan else each.why,
        )
    return table


def _current(explanation: Explanation, dimension: str) -> str:
    """A decision of the explained plan."""
    plan = explanation.plan
    if dimension in AXIS_NAMES:
        sizes = {"pp": plan.pipeline.num_pipeline_ranks, "dp": plan.mesh.num_data_ranks}
        return str(sizes.get(dimension, plan.mesh.size(dimension)))
    found = {
        "zero": str(zero_stage(plan)),
        "micro_batches": str(plan.num_micro_batches),
        "schedule": plan.pipeline.schedule,
        "chunks": str(plan.pipeline.num_chunks),
        "offload": plan.pipeline.offload or "none",
        "recompute": "/".join(recompute_modes(plan)) or "none",
    }
    return found.get(dimension, "")
