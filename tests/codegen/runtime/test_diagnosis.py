"""Records of ranks, and what they say of who keeps the others waiting."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.runtime.diagnosis import BATCH, SAME_BATCHES, SAME_CALLS, THE_END, Record, cause_of

NOW = 1000.0


def record(rank: int, *calls: str, inside: bool = True, waiting: bool = True, **known: Any) -> Record:
    """A rank in a collective of its last call, unless it is told otherwise."""
    given: dict[str, Any] = {"place": f"work() at train.py:{rank}", "idle": 9.0, "raised": "", "is_own": False}
    given |= {"raised_at": 0.0, "beat": NOW, "process": 100 + rank} | known
    return Record(**given, is_waiting=waiting, rank=rank, calls=dict(enumerate(calls)), is_inside=inside)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            [record(0, "step 1", "step 2"), record(1, "step 1", inside=False, waiting=False)],
            "rank 1 did not take part in step 2 for 9 s: rank 1 is in work() at train.py:1",
        ),
        (
            [record(0, "step 1"), record(1, "step 1", waiting=False), record(2, "step 1")],
            "the others wait for rank 1 in step 1 (for 9 s): rank 1 is in work() at train.py:1",
        ),
        (
            [record(0, "step 1", "step.evaluate"), record(1, "step 1", "step 2"), record(2, "step 1", "step 2")],
            f"rank 0 calls step.evaluate; ranks 1 and 2 call step 2: {SAME_CALLS}",
        ),
        (
            [record(0, f"step 1{BATCH}8 rows"), record(1, f"step 1{BATCH}4 rows")],
            f"rank 1 calls step 1 with a batch of 4 rows; rank 0 calls step 1 with a batch of 8 rows: {SAME_BATCHES}",
        ),
        (
            [record(0, "step 1", "step 2"), record(1, "step 1", THE_END, inside=False)],
            f"rank 1 calls {THE_END}; rank 0 calls step 2: {SAME_CALLS}",
        ),
        ([record(0, "step 1"), None], "rank 1 did not join the others"),
        ([None, None], ""),
        ([record(rank, "step 1") for rank in range(3)], ""),
    ],
)  # fmt: skip
def test_who_keeps_the_others_waiting_is_named(records: list[Record | None], said: str) -> None:
    assert cause_of(records, NOW) == said


def test_a_rank_of_which_nothing_is_heard_is_named_with_its_last_line() -> None:
    said = cause_of([record(0, "step 1"), record(1, "step 1", beat=NOW - 30)], NOW)
    assert said.startswith("rank 1 (process 101) gives no sign of life for 30 s; it was last in work() at train.py:1")


def test_an_error_of_a_ranks_own_wins_over_those_of_waiting_ones() -> None:
    timed_out = record(0, "step 1", raised="RuntimeError: timed out", raised_at=5.0)
    own = record(1, "step 1", raised="ValueError: bad sample, in work() at train.py:1", is_own=True, raised_at=7.0)
    later = record(2, "step 1", raised="KeyError: 'x'", is_own=True, raised_at=8.0)
    assert cause_of([timed_out, own, later], NOW) == "rank 1 raised ValueError: bad sample, in work() at train.py:1"


def test_a_rank_that_was_killed_is_named_and_not_as_late() -> None:
    gone = record(1, "step 1", inside=False, waiting=False, is_gone=True)
    said = cause_of([record(0, "step 1", "step 2", raised="RuntimeError: connection closed"), gone], NOW)
    assert said.startswith("rank 1 (process 101) ended without an error, in work() at train.py:1: it was killed")


def test_a_rank_that_has_given_up_is_not_the_cause() -> None:
    """The first to raise out of a collective waited for the one that is busy."""
    gave_up = record(0, "step 1", inside=False, waiting=False, raised="RuntimeError: timed out", raised_at=5.0)
    busy = record(1, "step 1", inside=False, waiting=False)
    assert cause_of([gave_up, busy, record(2, "step 1")], NOW).endswith("rank 1 is in work() at train.py:1")


def test_records_are_read_back_as_they_were_written() -> None:
    written = record(3, place="läuft() at große datei.py:1", raised="E" * 5000, is_own=True, is_finishing=True)
    read = Record.from_bytes(written.to_bytes(), 3, {7: "step 1"}, True)
    assert (read.place, read.is_own, read.is_finishing, read.count) == (written.place, True, True, 8)
    assert len(written.to_bytes()) < 4000
