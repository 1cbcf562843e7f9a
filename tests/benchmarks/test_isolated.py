"""Work in processes of its own, done by functions that a new process can import."""

from __future__ import annotations

import math
import os
import time

import pytest

from benchmarks.gpu.isolated import NO_TIME, outcomes


def in_time(work, items, item_seconds=600.0, seconds=600.0):
    return list(outcomes(work, items, item_seconds, time.monotonic() + seconds))


def test_what_raises_ends_no_other():
    found = in_time(math.sqrt, [4.0, -1.0, 9.0])
    assert [each.item for each in found] == [4.0, -1.0, 9.0]
    assert [each.value for each in found] == [2.0, None, 3.0]
    assert not found[0].error and "Traceback" in found[1].error and not found[2].error
    assert found[1].reason.startswith("ValueError") and "\n" not in found[1].reason


def test_what_dies_ends_no_other():
    found = in_time(os._exit, [3, 4])
    assert [each.reason for each in found] == [f"its process died with exit code {code}" for code in (3, 4)]


@pytest.mark.slow
def test_what_hangs_is_stopped():
    """Long enough for a process to start and be ready on a busy machine."""
    before = time.monotonic()
    found = in_time(time.sleep, [3600, 0], item_seconds=10.0, seconds=600.0)
    assert [each.error for each in found] == ["stopped after 10 s", ""]
    assert time.monotonic() - before < 900


@pytest.mark.slow
def test_nothing_goes_on_after_the_deadline():
    before = time.monotonic()
    found = in_time(time.sleep, [0, 3600, 0], item_seconds=3600.0, seconds=10.0)
    assert not found[0].error and found[1].error.startswith("stopped after") and found[2].error == NO_TIME
    assert time.monotonic() - before < 900
