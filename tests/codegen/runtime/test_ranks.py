"""The processes that other tests start: what fails in one of them is said, and none is left."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.codegen.runtime.ranks import run_ranks


def square(rank: int, world_size: int) -> int:
    return rank**2


def fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("case 7 is wrong")
    dist.barrier()


def die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.distributed
@pytest.mark.parametrize(("function", "message"), [(fail_on_rank_1, "case 7 is wrong"), (die_on_rank_1, "rank 1 died")])
def test_a_rank_that_fails_ends_all(function: Callable[[int, int], None], message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        run_ranks(function, 3)
    assert not multiprocessing.active_children()
    assert "rank 1" in str(caught.value)


@pytest.mark.distributed
def test_results_come_by_rank() -> None:
    assert run_ranks(square, 3) == [0, 1, 4]
