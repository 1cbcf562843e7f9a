"""Pairs of cases and plans for tests that would be slow with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")
Plan = TypeVar("Plan")


def by_turns(cases: Sequence[Case], plans: Sequence[Plan], count: int = 1) -> list[tuple[Case, Plan]]:
    """Pair each case with `count` of the plans, which take turns: a fault of a case or of a plan shows, one of a single
    pair may not."""
    return [(case, plans[(number * count + n) % len(plans)]) for number, case in enumerate(cases) for n in range(count)]
