"""Ranks that note their calls on one board: another call than a rank before is told at once, and where a rank is."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from codegen.runtime.board import SLOT, Board
from codegen.runtime.stack import is_of_group, is_waiting
from codegen.runtime.stack import place as place_of
from codegen.runtime.watch import DataDiffer, RanksDiffer, Watch


@pytest.fixture
def ranks() -> Any:
    board = Board(mmap.mmap(-1, 3 * SLOT), 3, is_shared=True)
    found = [Watch(board, rank) for rank in range(3)]
    yield found
    for each in found:
        each.stop()


def test_equal_calls_pass_and_another_one_is_told_before_it_runs(ranks: list[Watch]) -> None:
    for number in range(30):  # more than a record remembers
        for each in ranks:
            with each.entered(f"step {number}"):
                pass
    ran = []
    with ranks[0].entered("step 30"):
        pass
    said = r"^rank \d calls .*; rank \d calls .*: every rank must make the same calls"
    with pytest.raises(RanksDiffer, match=said), ranks[2].entered("step.evaluate after step 30"):
        ran.append(2)
    assert not ran


def test_calls_inside_of_a_call_do_not_count(ranks: list[Watch]) -> None:
    with ranks[0].entered("step 1"), ranks[0].entered("the update of step 1"):
        pass
    with ranks[1].entered("step 1"):
        pass
    assert [each.count for each in ranks] == [1, 1, 0]


def test_other_batches_are_an_error_of_data(ranks: list[Watch]) -> None:
    with ranks[0].entered("step 1 with a batch of 8 rows"):
        pass
    said = "rank 1 calls step 1 with a batch of 6 rows"
    with pytest.raises(DataDiffer, match=said), ranks[1].entered("step 1 with a batch of 6 rows"):
        pass


def test_a_rank_far_behind_is_not_compared_with_calls_that_are_forgotten(ranks: list[Watch]) -> None:
    for number in range(50):
        with ranks[0].entered(f"step {number}"):
            pass
    with ranks[1].entered("step 0"):  # as of rank 0's own first, which nobody remembers
        pass


def test_an_error_that_is_survived_is_no_cause_later(ranks: list[Watch]) -> None:
    with pytest.raises(KeyError), ranks[1].entered("step 1"):
        raise KeyError("x")
    assert ranks[1].raised.startswith("KeyError: 'x', in test_an_error_that_is_survived")
    with ranks[1].entered("step 2"):
        assert not ranks[1].raised


def test_a_call_costs_little(ranks: list[Watch]) -> None:
    """1 % of a step of 40 ms has room for far more than the three calls of a step."""
    started = time.thread_time()
    for number in range(300):
        with ranks[0].entered(f"step {number}"):
            pass
    assert (time.thread_time() - started) / 300 < 100e-6


def test_a_board_is_read_while_it_is_written(tmp_path: Path) -> None:
    mine, theirs = (Board.at(tmp_path / "board", 2) for _ in range(2))
    assert theirs.records() == [None, None]
    own = Watch(mine, 1)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            own.publish()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(200):
            with own.entered(f"step {number}"):
                record = theirs.read(1)
            assert record is not None and record.calls[number] == f"step {number}" and record.is_inside
    finally:
        stop.set()
        thread.join()
        own.stop()


def test_ranks_of_several_machines_read_one_another_from_a_store() -> None:
    store = dist.HashStore()
    boards = [Board(mmap.mmap(-1, 2 * SLOT), 2, is_shared=False, store=store) for _ in range(2)]
    one, other = (Watch(board, rank) for rank, board in enumerate(boards))
    with one.entered("step 1"):
        one.publish()
        with other.entered("step.evaluate"):  # told apart when somebody asks, not at once
            other.publish()
            records = boards[0].records()
    one.stop(), other.stop()
    assert [each and each.calls for each in records] == [{0: "step 1"}, {0: "step.evaluate"}]


def errors_of(*calls: Callable[[], Any]) -> list[BaseException]:
    found = []
    for call in calls:
        with pytest.raises(BaseException) as caught:
            call()
        found.append(caught.value)
    return found


def test_errors_of_the_group_are_told_by_where_they_come_from() -> None:
    def ours() -> None:
        raise RuntimeError("Timed out waiting for recv, says a script of itself")

    def shapes() -> None:
        torch.ones(2) @ torch.ones(3)

    scope: dict[str, Any] = {}
    text = "def lost():\n    raise RuntimeError('another rank is gone')"
    exec(compile(text, f"{Path(dist.__file__).parent}/collective.py", "exec"), scope)
    lost = scope["lost"]
    assert [is_of_group(error) for error in errors_of(ours, shapes, lost)] == [False, False, True]


def test_where_a_rank_is_names_the_users_own_line() -> None:
    def load() -> tuple[FrameType, str]:
        frame: list[FrameType] = []
        seen = threading.Event()

        def look() -> None:
            frame.append(sys._current_frames()[threading.main_thread().ident])  # type: ignore[index]
            seen.set()

        threading.Thread(target=look).start()
        seen.wait(10)  # of threading's own, called from this line
        return frame[0], place_of(frame[0])

    frame, place = load()
    assert place.startswith("load() at test_watch.py:") and not is_waiting(frame)
