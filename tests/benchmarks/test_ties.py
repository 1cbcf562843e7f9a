"""Rules among runs that predictions do not tell apart: a choice, pairs and a worst case by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published_runs.predictions import Predictions
from benchmarks.published_runs.ties import RULES, Worst, judged, worst_of
from tests.benchmarks.test_published import ROW


def worst(seconds: float, slow: float, bubble: float = 0.0, used: float = 0.5, may_fail: bool = False) -> Worst:
    return Worst(seconds, slow, seconds + bubble, used, may_fail)


KNOWN = {
    "a": worst(1.00, 1.50, 0.1, 0.9, may_fail=True),
    "b": worst(1.02, 1.20, 0.2, 0.8),
    "c": worst(1.03, 1.60, 0.0, 0.4),
    "far": worst(1.05, 1.05, 0.0, 0.1),
    "slowest": worst(2.00, 2.00),
}
MEASURED = {"a": 3.0, "b": 1.0, "c": 2.0, "far": 0.5, "slowest": 4.0, "unpredicted": 0.1}


@pytest.mark.parametrize(
    ("rule", "chosen", "right", "pairs"),
    [
        # a-b, a-c, b-c, b-far and c-far are within 4 % of each other; a rule orders them as measured where both agree.
        ("predicted fastest", "a", 1, 5),  # b before c; but a before both, and both before far
        ("on a slow network", "b", 4, 5),  # b before a and c, far before b and c; but a before c
        ("most memory free", "c", 4, 5),  # c before a, b before a, far before both; but c before b
        ("what surely fits", "b", 3, 5),  # both before a, b before c; but both before far
        ("surely fits, slow network", "b", 5, 5),
        ("twice the bubble", "c", 2, 5),  # c before a, far before b; not a before b, c before b and far
    ],
)
def test_choices_and_pairs_by_hand(rule: str, chosen: str, right: int, pairs: int) -> None:
    rows: list[dict[str, Any]] = [{"id": name, "iter_time_s": seconds} for name, seconds in MEASURED.items()]
    found = judged({(): rows, ("few",): rows[:4]}, KNOWN, RULES[rule])
    assert found.regrets == (pytest.approx(MEASURED[chosen] / MEASURED["far"] - 1),)
    assert found.drawn == pytest.approx(found.regrets[0])  # of five runs a part is all
    assert (found.right, found.pairs) == (right, pairs)


def test_a_slow_network_takes_as_much_more_as_is_sent_between_nodes() -> None:
    over = {**ROW, "gpus_total": 16, "dp": 16, "tp": 1, "pp": 1, "micro_batch": 1, "grad_accum": 1, "global_batch": 16}
    outcome = Predictions().outcome({**over, "inter_node": "EFA"})
    found, kind = worst_of(outcome), "gradient and parameter synchronisation"
    sent = outcome.prediction.seconds[kind] + outcome.prediction.seconds["hidden communication"]
    assert 0 < found.on_slow_network - found.seconds <= 1.001 * sent
    alone = {**ROW, "dp": 8, "tp": 1, "pp": 1, "micro_batch": 1, "grad_accum": 2, "global_batch": 16}
    inside = worst_of(Predictions().outcome(alone))
    assert inside.on_slow_network == inside.seconds == inside.with_long_bubble
