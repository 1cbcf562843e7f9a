"""A training run in a process of its own that faults are done to, and what must hold after it: see benchmarks/faults.

The run and its ranks are forked from a process that has imported and planned everything, so one takes seconds.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.trainer import Trainer
from autopar.training.config import TrainerConfig
from benchmarks.faults.case import Result
from codegen.runtime.processes import exit_on
from examples.models import gpt2

STEPS = 12
WAIT_SECONDS = 120.0
"""For a process to be gone: far more than it should take, on a machine that has other work."""


def batches(start: int) -> Iterator[dict[str, Tensor]]:
    while True:
        tokens = torch.randint(96, (8, 16), generator=torch.Generator().manual_seed(start))
        yield {"input_ids": tokens, "labels": tokens.clone()}
        start += 8


def held_out(start: int) -> Iterator[dict[str, Tensor]]:
    return batches(start + 10_000)


@functools.cache
def trainer(every: int = 1) -> Trainer:
    """Planned once; dropout, so that the random state must be resumed as well. every: steps between checkpoints; with
    none of them the run evaluates instead."""
    config = TrainerConfig(
        cluster="2 cpu", constraints={"dp": 2, "zero": 2}, steps=STEPS, checkpoint_every=every,
        checkpoint_directory="unset", evaluation={} if every else {"every": 2, "num_batches": 6},
        keep_checkpoints=2, log_every=0,
    )  # fmt: skip
    model = gpt2(layers=1, width=16, num_heads=2, dropout=0.1).model
    made = Trainer(model, config, batches, eval_batches=None if every else held_out)
    made.compile()
    return made


class Found(NamedTuple):
    """The first step of a run, the losses from there on, and those of its evaluations by their steps."""

    first: int
    losses: list[float]
    evaluated: dict[str, float]

    def is_end_of(self, whole: Found) -> bool:
        """Whether this run did what a whole one does from there on."""
        return self.losses == whole.losses[self.first :] and self.evaluated.items() <= whole.evaluated.items()


class Run:
    """A run in `folder`: checkpoints and temporary files go there, and the losses of its end."""

    def __init__(self, folder: Path, every: int = 1) -> None:
        self.folder, self.losses = folder, folder / "losses.json"
        (folder / "temporary").mkdir(exist_ok=True)
        trainer(every)
        self.process = multiprocessing.get_context("fork").Process(target=_main, args=(folder, every))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ranks(self) -> list[int]:
        """The processes that it has started."""
        try:
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except OSError:
            return []

    def wait(self) -> int | None:
        """Its exit code (negative: by that signal), None if it does not end, which it is then made to."""
        self.process.join(WAIT_SECONDS)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        return code

    def result(self) -> Found | None:
        """What came of a run that came to its end."""
        return Found(*json.loads(self.losses.read_text())) if self.losses.exists() else None


def _main(folder: Path, every: int) -> None:
    exit_on(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # as the command line does
    tempfile.tempdir = str(folder / "temporary")
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    made = trainer(every)
    config = replace(made.setup.config, checkpoint_directory=str(folder / "run"))
    made.setup = replace(made.setup, config=config)
    result = made.fit()
    evaluated = {each["step"]: each["loss"] for each in result.evaluations}
    (folder / "losses.json").write_text(json.dumps([result.first_step, result.losses, evaluated]))


@functools.cache
def unbroken(every: int = 1) -> tuple[Found, float]:
    """What a run does that nothing happens to, and the seconds that it takes."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    started = time.monotonic()
    run = Run(folder, every)
    code, found = run.wait(), run.result()
    shutil.rmtree(folder)
    assert code == 0 and found is not None, f"the run that nothing happens to ended with {code}"
    return found, time.monotonic() - started


def attempt(fault: Any, expected_code: int | None = None, every: int = 1) -> Result:
    """What comes of `fault(run)`: the run must end, with expected_code if given, and its ranks, and be resumable."""
    whole, _ = unbroken(every)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        run = Run(folder, every)
        ranks = fault(run)
        code = run.wait()
        if code is None:
            return Result("hangs", f"the run did not end in {WAIT_SECONDS:.0f} s")
        if expected_code is not None and code not in (0, expected_code):
            return Result("wrong", f"exit code {code} instead of {expected_code}")
        if left := _living(ranks):
            return Result("leftovers", f"ranks {left} were left behind")
        again = Run(folder, every)
        code, found = again.wait(), again.result()
        if found is None:
            return Result("raw", f"the run that was started again ended with {code}")
        if not found.is_end_of(whole):
            return Result("wrong", f"the resumed losses from step {found.first} on differ")
        temporary = list((folder / "temporary").iterdir())
        if temporary:
            return Result("leftovers", f"left {temporary}")
        return Result("right", f"resumed at step {found.first}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _living(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        left = [pid for pid in pids if _is_alive(pid)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
