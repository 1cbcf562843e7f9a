"""A rank that hangs, leaves, reads other data or makes other calls is named, with its line, by whoever waited for it.

Ranks wait for five seconds at most; what is told without waiting comes within a second or two.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import AutoparError, ConstraintError
from autopar.launch import RankError, run_ranks

SECONDS = 5.0


@torch.library.custom_op("autopar_tests::dawdle", mutates_args=())
def dawdle(x: torch.Tensor) -> torch.Tensor:
    """The identity, which one rank does not come back from once the model's numbers say so."""
    if dist.is_initialized() and dist.get_rank() == 1 and float(x.detach().abs().max()) > 500.0:
        time.sleep(600)
    return x.clone()


dawdle.register_fake(torch.empty_like)
dawdle.register_autograd(lambda ctx, gradient: gradient)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.wide = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.wide(dawdle(self.narrow(x)).tanh()), y)


def batch(number: int, rows: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(rows, 6, generator=generator) for name in "xy"}


@functools.cache
def program(zero: int = 3) -> Any:
    constraints = {"dp": 2, "zero": zero}
    return autopar.compile(Net(), "2 cpu", example_inputs=batch(0), constraints=constraints)


def work(step: Any, kind: str) -> float:
    """Four steps, in the third of which rank 1 does what `kind` says."""
    loss, is_odd = torch.zeros(()), dist.get_rank() == 1
    for number in range(4):
        data = batch(number)
        if number == 2 and is_odd:
            if kind == "sleeps":
                time.sleep(600)
            if kind == "leaves":
                break
            if kind == "raises":
                raise KeyError("a file of the data")
            if kind == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        if number == 2 and kind == "forward":
            data = {"x": 1000 + 0 * data["x"], "y": data["y"]}
        local = step.local_batch(data)
        if number == 2 and is_odd and kind == "gradients":
            step.forward_backward(local)
            step.gradients()
            step.update()
            continue
        loss = step(local)
        if number == 2 and is_odd and kind == "saves":
            step.full_state_dict()
        if number == 2 and not is_odd and kind == "barrier":
            dist.barrier()
        if number == 2 and is_odd and kind == "barrier":
            time.sleep(600)
    return float(loss)


def error_of(kind: str) -> str:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        program().launch(work, kind, collective_seconds=SECONDS)
    assert time.monotonic() - started < 60  # of a busy machine
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gradients", "rank 1 calls step.gradients after step 2; rank 0 calls the update of step 3"),
        pytest.param("saves", "rank 1 calls step.full_state_dict", marks=pytest.mark.slow),
        pytest.param("leaves", "rank 1 calls nothing more: it has come to the end", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_make_other_calls_are_named_at_once(kind: str, said: str) -> None:
    error = error_of(kind)
    assert said in error and "every rank must make the same calls" in error


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sleeps", "rank 1 did not take part in step 3 for"),
        ("forward", "the others wait for rank 1 in step 3"),
        ("barrier", "the others wait for rank 1"),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_line(kind: str, said: str) -> None:
    error = error_of(kind)
    where = "dawdle()" if kind == "forward" else "work()"
    assert said in error and f"rank 1 is in {where} at test_named_ranks.py:" in error
    assert "gloo" not in error


@pytest.mark.slow
@pytest.mark.distributed
def test_a_ranks_own_error_wins_over_those_of_who_lost_it() -> None:
    assert "KeyError: 'a file of the data'" in (error := error_of("raises")) and error.startswith("rank 1")
    assert "rank 1 died with exit code -9 (ended by SIGKILL)" in error_of("dies")


@pytest.mark.slow
@pytest.mark.distributed
def test_values_that_a_rank_has_whole_are_read_by_it_alone() -> None:
    """Nothing is exchanged for them, so nobody need take part."""
    straight, alone = (program(0).launch(work, kind, collective_seconds=SECONDS) for kind in ("", "saves"))
    assert straight == alone


def of_rank_one(start: int, change: str) -> Any:
    number = start // 12
    while True:
        is_odd = number == 2 and dist.is_initialized() and dist.get_rank() == 1
        data = batch(number, 8 if is_odd and change == "rows" else 12)
        if is_odd and change == "dtype":
            data = {name: value.double() for name, value in data.items()}
        if is_odd and change == "names":
            data["z"] = data["x"]
        yield data
        number += 1


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param("rows", r"rank 1 calls step 3 with a batch of 8 rows", marks=pytest.mark.slow),
        pytest.param("dtype", r"float64", marks=pytest.mark.slow),
        ("names", r"z"),
    ],
)
def test_a_rank_with_other_batches_is_told_by_fit_before_the_step(change: str, said: str) -> None:
    config = autopar.TrainerConfig(
        cluster="2 cpu", constraints={"dp": 2}, steps=5, log_every=0, collective_seconds=SECONDS
    )
    with pytest.raises(AutoparError, match=said):
        autopar.Trainer(Net(), config, functools.partial(of_rank_one, change=change)).fit()


def wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.distributed
def test_without_a_step_a_collective_that_gives_up_still_names_who_is_missing() -> None:
    with pytest.raises(RankError, match=r"the others wait for rank 1 .*in wait_for_nobody\(\) at test_named_ranks.py"):
        run_ranks(wait_for_nobody, (), 2, group_seconds=SECONDS)


@pytest.mark.distributed
def test_what_launch_takes_is_checked_as_the_trainers_is() -> None:
    for wrong in ({"collective_seconds": float("nan")}, {"collective_seconds": 0}, {"max_restarts": -1}):
        with pytest.raises(ConstraintError, match=f"^{next(iter(wrong))} (is|must be) "):
            program(0).launch(work, "", **wrong)


def fail_once(step: Any, folder: str) -> int:
    """The first attempt fails on rank 1."""
    path = os.path.join(folder, "tried")
    step(step.local_batch(batch(0)))
    if dist.get_rank() == 1 and not os.path.exists(path):
        open(path, "w").close()
        raise OSError("no data yet")
    return int(os.environ["RANK"]) + 10 * int(os.environ["WORLD_SIZE"])


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_are_started_again_and_find_their_place(tmp_path: Any) -> None:
    assert program(0).launch(fail_once, str(tmp_path), max_restarts=1) == [20, 21]
