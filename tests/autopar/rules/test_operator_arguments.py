"""Every operator that has a rule, each optional argument away from its default, through the real emitter.

The campaign's cases (benchmarks/faults/operators.py): emitted source run by two simulated ranks under every placement,
forward and backward, against torch's operator on whole tensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from autopar.rules import known_ops
from benchmarks.faults.operators import all_calls, attempt, text_of

SAMPLE = 60
"""About one call in eleven is tried whenever tests run, all of them where slow ones do."""

NOTHING_TO_COMPARE = {"aten.empty", "aten.empty_like", "aten.new_empty"}


def test_every_operator_is_called_and_a_sample_is_exact():
    calls = every()
    called = {".".join(op.split(".")[:2]) for op, _, _ in calls}
    assert {op for op in known_ops() if op.startswith("aten.")} - called == NOTHING_TO_COMPARE
    cheap = [call for call in calls if "conv" not in call[0] and "pool" not in call[0]]
    assert wrong(cheap[:: len(cheap) // SAMPLE]) == []


@pytest.mark.parametrize(
    "text",
    [
        "aten.cross_entropy_loss.default(float32[4, 6, 12], int64[4, 12], ignore_index=0)",
        "aten.cross_entropy_loss.default(float32[12, 6], int64[12], ignore_index=0)",
        "aten.smooth_l1_loss.default(float32[4, 6], float32[4, 6], beta=1.5)",
        "aten.group_norm.default(float32[4, 12, 3], 6, eps=0.1)",
        "aten.embedding.default(float32[12, 6], int64[4, 6], padding_idx=3)",
        "aten.arange.start_step(2, 26, step=2)",
        "aten.arange.default(12.0)",
        "aten.logical_and.default(float32[4, 6], float32[4, 6])",
        "aten.take_along_dim.default(float32[4, 6], int64[4, 6], 1)",
        "aten.view.default(float32[1], [])",
    ],
)
def test_what_was_wrong_before(text):
    """Dropped arguments, arguments too many, and calls that were lowered as another."""
    assert wrong([call for call in every() if text_of(call) == text]) == []
    assert text in {text_of(call) for call in every()}


@pytest.mark.slow
def test_all_are_exact():
    assert wrong(every()) == []


def wrong(calls) -> list[str]:
    faults = [(text_of(call), attempt(call)) for call in calls]
    return [f"{text}: {result.detail}" for text, result in faults if result.outcome not in ("right", "refused")]


@cache
def every() -> tuple[Any, ...]:
    """All calls; to make them takes seconds."""
    return tuple(all_calls())
