"""Questions shared out to forked processes: the same answers as one process gives, whatever becomes of the others."""

from __future__ import annotations

import os
from functools import partial

import pytest

from autopar.explain import explain
from autopar.explain.processes import answers
from tests.autopar.requests import request_for

HERE = os.getpid()


def squared(number: int) -> int:
    return number * number


def test_every_number_is_answered_once_and_in_order() -> None:
    for processes in (1, 2, 5):
        assert answers(squared, 300, processes) == [n * n for n in range(300)]
    assert answers(squared, 0, 2) == []


def test_only_this_process_tells() -> None:
    told = list[tuple[int, int]]()
    assert answers(squared, 300, 2, lambda number: told.append((os.getpid(), number)))[299] == 299 * 299
    numbers = [number for _, number in told]
    assert {pid for pid, _ in told} == {HERE} and numbers == sorted(set(numbers))
    answers(squared, 3, tell=lambda number: told.append((0, number)))
    assert told[len(numbers) :] == [(0, 0), (0, 1), (0, 2)]


def test_what_a_process_that_dies_leaves_is_answered_here() -> None:
    def dying(number: int) -> int:
        if os.getpid() != HERE:
            os._exit(1)
        return squared(number)

    assert answers(dying, 40, 3) == [n * n for n in range(40)]


def test_errors_are_raised_as_they_are() -> None:
    def failing(number: int) -> int:
        if number == 7:
            raise ZeroDivisionError("seven")
        return squared(number)

    for processes in (1, 2):
        with pytest.raises(ZeroDivisionError, match="seven"):
            answers(failing, 12, processes)


@pytest.mark.slow
def test_explanations_do_not_depend_on_processes() -> None:
    asked = partial(explain, request_for("llama", "2x2 a100-80g"), seconds=600.0)
    assert asked(processes=2) == asked()
