"""An explanation as tables, with colors on a terminal or as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from autopar.explain.explanation import Explanation, WhatIf
from autopar.explain.verdict import TIE
from autopar.ir.mesh import AXIS_NAMES
from autopar.report.costs import TIED
from autopar.report.plan_words import full_words, recompute_modes, zero_stage
from autopar.report.tables import WIDTH, bullet, plain_text, table_of
from autopar.units import bytes_text, count_text, seconds_text


def render_explanation(explanation: Explanation, width: int = WIDTH) -> str:
    """Return the explanation as plain text of at most `width` columns."""
    return plain_text(explanation_panels(explanation), width)


def explanation_panels(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield the explanation's parts in order, for `rich.console.Console.print`."""
    plan = explanation.plan
    seconds = plan.prediction.step_seconds
    yield Text(f"{plan.model} on {plan.cluster}: {full_words(plan)}", style="bold")
    rate = f", {count_text(plan.global_batch_size / seconds)} rows/s" if seconds else ""
    peak = bytes_text(plan.prediction.peak_bytes)
    yield Text(f"{seconds_text(seconds)} a step{rate}; {peak} of {bytes_text(explanation.capacity_bytes)} per rank")
    yield from _faster_plan(explanation)
    yield Text("")
    yield from _sentences("What binds", explanation.verdict)
    yield from _sentences("Where the time goes", explanation.time)
    yield _what_ifs(explanation)
    yield Text("")
    yield _alternatives(explanation)
    yield Text("")
    if explanation.tied:
        others = "; ".join(explanation.tied)
        yield Text(f"Predictions cannot rank plans within {TIED:.0%} of each other. As close as that: {others}\n")
    if explanation.not_tried:
        yield Text(f"Not tried before the time limit: {', '.join(explanation.not_tried)}\n")


def _faster_plan(explanation: Explanation) -> Iterator[RenderableType]:
    seconds, best = explanation.plan.prediction.step_seconds, explanation.searched.prediction.step_seconds
    if best < seconds * (1 - TIE):
        words = full_words(explanation.searched)
        yield Text(f"You gave this plan; the search finds a faster one: {words}, {seconds_text(best)} a step")


def _sentences(title: str, lines: tuple[str, ...]) -> Iterator[RenderableType]:
    yield Text(title, style="bold")
    for line in lines:
        yield bullet(f"{line[0].upper()}{line[1:]}")
    yield Text("")


def _what_ifs(explanation: Explanation) -> RenderableType:
    table = table_of(
        "Step time with more resources",
        ("with", 34),
        ("this plan", 10, "right"),
        ("best plan", 10, "right"),
        ("rows/s", 10, "right"),
        ("best plan then", 0),
    )
    plan = explanation.plan
    now = plan.prediction.step_seconds
    table.add_row("today", seconds_text(now), "", _rate(plan.global_batch_size, now), full_words(plan), style="bold")
    for what_if in explanation.what_ifs:
        table.add_row(
            what_if.words,
            "" if what_if.same_plan_seconds is None else seconds_text(what_if.same_plan_seconds),
            "" if what_if.seconds is None else seconds_text(what_if.seconds),
            _rate(what_if.rows, what_if.best_seconds),
            _then(what_if, full_words(plan)),
        )
    return table


def _rate(rows: int, seconds: float | None) -> str:
    return count_text(rows / seconds) if seconds else ""


def _then(what_if: WhatIf, now: str) -> str:
    if what_if.problem:
        return what_if.problem
    return "the same" if what_if.plan == now else what_if.plan


def _alternatives(explanation: Explanation) -> RenderableType:
    table = table_of(
        "The best plan with one changed decision",
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
    for alternative in explanation.alternatives:
        table.add_row(
            f"{alternative.dimension} {_current(explanation, alternative.dimension)} -> {alternative.value}",
            "-" if alternative.seconds is None else seconds_text(alternative.seconds),
            "-" if alternative.peak_bytes is None else bytes_text(alternative.peak_bytes),
            f"{alternative.plan}: {alternative.why}" if alternative.plan else alternative.why,
        )
    return table


def _current(explanation: Explanation, dimension: str) -> str:
    """Return the value of a decision in the explained plan."""
    plan = explanation.plan
    if dimension in AXIS_NAMES:
        sizes = {"pp": plan.pipeline.num_pipeline_ranks, "dp": plan.mesh.num_data_ranks}
        return str(sizes.get(dimension, plan.mesh.size(dimension)))
    values = {
        "zero": str(zero_stage(plan)),
        "micro_batches": str(plan.num_micro_batches),
        "schedule": plan.pipeline.schedule,
        "chunks": str(plan.pipeline.num_chunks),
        "offload": plan.pipeline.offload or "none",
        "recompute": "/".join(recompute_modes(plan)) or "none",
    }
    return values.get(dimension, "")
