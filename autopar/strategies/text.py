"""A prediction as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.costs.layer_costs import HIDDEN
from autopar.ir.plan_data import Prediction
from autopar.strategies.prediction import StrategyPrediction, WhatIf, comparison_rows
from autopar.units import bytes_text, fit_text

LEAST_SHARE = 0.0005
"""Kinds below this share of the step are left out."""


def prediction_lines(prediction: Prediction) -> Iterator[str]:
    """Seconds by kind, largest first, then bytes of the fullest rank and of every pipeline rank."""
    yield f"step {prediction.step_seconds:.4g} s"
    for kind, value in sorted(prediction.seconds.items(), key=lambda pair: -pair[1]):
        if value > LEAST_SHARE * prediction.step_seconds:
            beside = " (beside compute)" if kind == HIDDEN else ""
            yield f"  {value:10.4g} s {value / prediction.step_seconds:6.1%}  {kind}{beside}"
    yield f"memory {bytes_text(prediction.peak_bytes)} on the fullest rank"
    for kind, value in sorted(prediction.num_bytes.items(), key=lambda pair: -pair[1]):
        if value:
            yield f"  {bytes_text(value):>10}  {kind}"
    for number, kinds in enumerate(prediction.pipeline_ranks):
        yield f"  pipeline rank {number}: {bytes_text(sum(kinds.values()))}"


def fit_lines(prediction: StrategyPrediction) -> Iterator[str]:
    """Return whether a strategy fits, with the interval, and a warning if the prediction exceeds the memory."""
    yield f"fits: {fit_text(prediction.certainty)}"
    if not prediction.fits:
        yield (
            f"WARNING: does not fit: the fullest rank needs {bytes_text(prediction.peak_bytes)} of "
            f"{bytes_text(prediction.capacity_bytes)} (--check fails instead, and names changes that fit)"
        )


def comparison_lines(what_if: WhatIf) -> Iterator[str]:
    """The parts of two steps side by side, seconds and then bytes."""
    before, after = what_if.before, what_if.after
    yield f"{'':34} {'before':>12} {'after':>12} {'change':>12}"
    yield _row("step", before.step_seconds, after.step_seconds, False)
    for part in comparison_rows(what_if):
        yield _row(part.kind, part.before, part.after, part.group == "memory")
    rows = {value.scenario.global_batch_size for value in (before, after)}
    yield f"rows per second: {what_if.speedup:.3g} times" + (" (another batch)" if len(rows) > 1 else "")
    yield from (f"after: {line}" for line in fit_lines(after))


def _row(name: str, before: float, after: float, is_bytes: bool) -> str:
    if is_bytes:
        more = f"{'-' if after < before else '+'}{bytes_text(abs(after - before))}"
        return f"{name:34} {bytes_text(before):>12} {bytes_text(after):>12} {more:>12}"
    return f"{name:34} {before:10.4g} s {after:10.4g} s {after - before:+10.4g} s"
