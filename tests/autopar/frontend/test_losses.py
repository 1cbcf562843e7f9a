"""The table of losses in real processes: every kind under every plan is the single process or is refused."""

from __future__ import annotations

import pytest

from benchmarks.losses import KINDS, PLANS, kind_of, result

QUICK = (("masked mean", "dp2, micro-batches 4"),)


def cases() -> list[object]:
    pairs = [(name, plan) for name in KINDS for plan in PLANS]
    return [pytest.param(*p, id=", ".join(p), marks=() if p in QUICK else pytest.mark.slow) for p in pairs]


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "plan"), cases())
def test_a_loss_is_exact_or_refused(name: str, plan: str) -> None:
    found = result(name, plan, steps=2)
    needs_one = bool(kind_of(name).whole) and PLANS[plan]["micro_batches"] > 1
    assert found.startswith("refused: micro_batches" if needs_one else "exact"), found
