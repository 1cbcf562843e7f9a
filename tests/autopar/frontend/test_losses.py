"""Losses in real processes: every kind is the single process or is refused. The whole table is benchmarks/losses.py."""

from __future__ import annotations

import pytest

from benchmarks.losses import KINDS, PLANS, kind_of, result

BOTH = "dp2, micro-batches 4"
QUICK = (("masked mean", BOTH),)


def cases() -> list[object]:
    """Every kind over ranks with micro-batches, and under one of the other plans, which take turns; the whole batch at
    once for those that need it."""
    pairs = []
    for number, name in enumerate(KINDS):
        others = [plan for plan in PLANS if not kind_of(name).whole or PLANS[plan]["micro_batches"] == 1]
        others = [plan for plan in others if plan != BOTH]
        pairs += [(name, BOTH), (name, others[number % len(others)])]
    return [pytest.param(*p, id=", ".join(p), marks=() if p in QUICK else pytest.mark.slow) for p in pairs]


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "plan"), cases())
def test_a_loss_is_exact_or_refused(name: str, plan: str) -> None:
    found = result(name, plan, steps=2)
    needs_one = bool(kind_of(name).whole) and PLANS[plan]["micro_batches"] > 1
    assert found.startswith("refused: micro_batches" if needs_one else "exact"), found
