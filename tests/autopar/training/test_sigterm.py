"""A run that is told to end (SIGTERM), wherever it is, writes a last checkpoint, exits with 143, and goes on as if
nothing had been."""

from __future__ import annotations

import functools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar import Ending
from autopar.trainer import Trainer
from autopar.training.callbacks import Callback, TrainState
from autopar.training.checkpoints import latest
from autopar.training.config import TrainerConfig

STEPS, EVERY = 7, 3


class Net(nn.Module):
    """Dropout, so that the random state must go on as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.drop, self.wide = nn.Linear(5, 9), nn.Dropout(0.3), nn.Linear(9, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.smooth_l1_loss(self.wide(self.drop(self.narrow(x).relu())), y)


def batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(4, 5, generator=generator) for name in "xy"}


def tell(rank: int | None) -> None:
    """SIGTERM to this process if it is that rank (to the process of a plain run); of None, to whoever started it."""
    if rank is None:
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGTERM)
            wait_for_the_word()
    elif not dist.is_initialized() or dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGTERM)


def wait_for_the_word() -> None:
    """Until the process that started this one has passed the signal on, however long that takes on a busy machine."""
    deadline = time.monotonic() + 300.0
    while time.monotonic() < deadline:
        noting = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)  # else the signal ends this process
        if isinstance(noting, Ending) and noting._is_told:
            return
        time.sleep(0.01)
    raise AssertionError("SIGTERM was not passed on")


def batches(start: int, told: int | None, rank: int | None) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(start // 4, 1000):
        if number == told and start == 0 and is_training():
            tell(rank)
        yield batch(number)


def held_out(start: int, told: bool, rank: int | None, folder: str) -> Iterator[dict[str, torch.Tensor]]:
    mark = Path(folder, "told")
    for number in range(4):
        if told and number == 1 and is_training() and not mark.exists():
            if not dist.is_initialized() or dist.get_rank() == (rank or 0):
                mark.touch()
            tell(rank)
        yield batch(100 + number)


def is_training() -> bool:
    """Not where the first batch is only looked at."""
    return dist.is_initialized() or not _config.auto_parallel


_config = TrainerConfig(cluster="1 cpu")


class AtCheckpoint(Callback):
    """Tells rank 0 while it is about to go on from a checkpoint that was written."""

    def on_checkpoint(self, state: TrainState) -> None:
        if state.first_step == 0:
            tell(0)


def run(folder: Path, kind: str, rank: int | None = 0, plain: bool = True) -> int | str | None:
    """The exit code of a run; None where it came to its end."""
    global _config
    _config = TrainerConfig(
        cluster="1 cpu" if plain else "2 cpu",
        auto_parallel=not plain,
        constraints={} if plain else {"dp": 2, "zero": 2},
        steps=STEPS,
        learning_rate=0.05,
        log_every=0,
        checkpoint_directory=str(folder),
        checkpoint_every=5 if kind == "checkpoint" else 0,
        evaluation={"every": EVERY, "num_batches": 4},
        collective_seconds=60,
    )
    trainer = Trainer(
        Net(),
        _config,
        functools.partial(batches, told=4 if kind == "data" else None, rank=rank),
        eval_batches=functools.partial(held_out, told=kind == "evaluation", rank=rank, folder=str(folder.parent)),
        callbacks=[AtCheckpoint()] if kind == "checkpoint" else [],
    )
    try:
        trainer.fit()
    except SystemExit as end:
        return end.code
    return None


def trace(folder: Path) -> list[Any]:
    """All that was logged but what depends on the time that it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "learning_rate", "grad_norm", "eval_loss")
    return [{name: line[name] for name in kept if name in line} for line in lines]


@functools.cache
def whole(plain: bool) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        assert run(Path(folder, "run"), "", plain=plain) is None
        return trace(Path(folder, "run"))


@pytest.mark.parametrize(("kind", "step"), [("data", 5), ("evaluation", 3), ("checkpoint", 5)])
def test_a_plain_run_ends_with_a_checkpoint_and_goes_on(kind: str, step: int, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run(tmp_path / "run", kind) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    checkpoint = latest(tmp_path / "run")
    assert checkpoint is not None and checkpoint.name.endswith(str(step))
    assert run(tmp_path / "run", kind) is None
    assert trace(tmp_path / "run") == whole(True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "rank", "step"),
    [("data", 1, 5), ("data", None, 5), ("evaluation", 1, 3), ("evaluation", None, 3), ("checkpoint", 0, 5)],
)
def test_ranks_end_together_whoever_is_told(kind: str, rank: int | None, step: int, tmp_path: Path) -> None:
    assert run(tmp_path / "run", kind, rank, plain=False) == 143
    checkpoint = latest(tmp_path / "run")
    assert checkpoint is not None and checkpoint.name.endswith(str(step))
    assert run(tmp_path / "run", kind, rank, plain=False) is None
    assert trace(tmp_path / "run") == whole(False)


@pytest.mark.slow
@pytest.mark.distributed
def test_without_a_checkpoint_directory_the_run_just_ends(tmp_path: Path) -> None:
    """Also where the ranks are busy with other things than steps."""
    config = TrainerConfig(cluster="2 cpu", constraints={"dp": 2}, steps=1000, log_every=0)
    trainer = Trainer(Net(), config, functools.partial(batches, told=4, rank=None))
    trainer.compile()
    started = time.monotonic()
    with pytest.raises(SystemExit) as end:
        trainer.fit()
    assert end.value.code == 143 and time.monotonic() - started < 60


def test_a_run_in_another_thread_is_not_disturbed(tmp_path: Path) -> None:
    """Only the main thread can hear signals; training works without."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path / "run", "")))
    thread.start()
    thread.join()
    assert results == [None]


def test_a_handler_of_the_scripts_own_is_called_too(tmp_path: Path) -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        assert run(tmp_path / "run", "data") == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_a_signal_that_comes_while_ranks_agree_is_told_of_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending()

    def told_meanwhile(value: torch.Tensor, op: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    try:
        monkeypatch.setattr(dist, "all_reduce", told_meanwhile)
        assert not ending.is_told()
        monkeypatch.setattr(dist, "all_reduce", lambda value, op: None)
        assert ending.is_told()
    finally:
        ending.close()


def test_an_end_that_closes_late_leaves_the_handler_that_is_there_by_then() -> None:
    """As where Lightning puts back the handlers that it found before its callbacks are torn down."""
    kept = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        ending = Ending()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ending.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, kept)
