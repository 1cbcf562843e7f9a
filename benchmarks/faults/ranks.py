"""One rank hangs, leaves, dies, reads other data or makes other calls, under `launch` and `fit`: it is named, with the
cause, within the seconds that ranks wait for one another, and no process or file is left behind."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.launch import RankError
from benchmarks.fault_scratch import living_children
from benchmarks.faults.case import Case, Result, drawn

SECONDS, MARGIN = 4.0, 60.0
"""How long ranks wait, and what starting and ending processes on a busy machine may take on top."""
HANGS = ("data", "forward", "callback", "barrier", "stop")
CALLS = ("evaluate", "gradients", "save", "clip", "leave", "skip")
OTHER_DATA = ("rows", "dtype", "names")
ENDS = ("raise", "kill", "exit")
FIT = ("data", "forward", "callback", "stop", *OTHER_DATA, *ENDS)
AT = 3
"""The step in which it happens."""


@torch.library.custom_op("autopar_faults::linger", mutates_args=())
def linger(x: torch.Tensor) -> torch.Tensor:
    """The identity, in which a rank stays where its numbers are large."""
    if _is_at_fault() and float(x.detach().abs().max()) > 1e3:
        time.sleep(600)
    return x.clone()


linger.register_fake(torch.empty_like)
linger.register_autograd(lambda ctx, gradient: gradient)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(linger(self.up(x)).relu()), y)


def cases(count: int | None, seed: int) -> Iterator[Case]:
    """A hang takes some ten seconds, all else two."""
    kinds = [("launch", kind, zero) for kind in (*HANGS, *CALLS, *OTHER_DATA, *ENDS) for zero in (0, 3)]
    kinds += [("fit", kind, zero) for kind in FIT for zero in (0, 3)]
    found = (
        Case(f"{kind} of rank 1 under {how}, zero {zero}", partial(_tried, how, kind, zero))
        for how, kind, zero in kinds
    )
    yield from drawn(found, count, seed)


def _tried(how: str, kind: str, zero: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            return _judged(how, kind, zero, Path(folder))
        finally:
            tempfile.tempdir = before


def _judged(how: str, kind: str, zero: int, folder: Path) -> Result:
    program, started = _program(zero), time.monotonic()
    run: Callable[[], Any] = partial(program.launch, work, kind, collective_seconds=SECONDS)
    if how == "fit":
        config = autopar.TrainerConfig(
            cluster="2 cpu", constraints={"dp": 2, "zero": zero}, steps=6, log_every=0, collective_seconds=SECONDS
        )
        run = autopar.Trainer(Net(), config, partial(batches, kind=kind), callbacks=[Hanging(kind)]).fit
    try:
        losses = run()
    except (AutoparError, RankError) as error:
        said = str(error)
    except BaseException as error:
        return Result("raw", f"{type(error).__name__}: {error}".splitlines()[0])
    else:
        # Where every rank has all values, one may read them alone, and no rank waits for one that has left at the end.
        is_harmless = kind == "save" and zero == 0 and losses[0] == losses[1]
        return Result("right") if is_harmless else Result("wrong", "nobody noticed")
    seconds = time.monotonic() - started
    who = "rank 0" if kind == "callback" else "rank 1"
    if seconds > SECONDS + MARGIN:
        return Result("hangs", f"named after {seconds:.0f} s")
    if children := living_children():
        return Result("leftovers", f"processes {children} were left behind")
    if left := [path.name for path in folder.iterdir() if not path.name.startswith(("torchinductor", "pymp"))]:
        return Result("leftovers", f"left {left}")
    is_named = who in said.splitlines()[0] or (kind in OTHER_DATA and "program was made for" in said)
    is_raw = "gloo" in said or not (is_named or kind in OTHER_DATA)
    return Result("raw" if is_raw else "refused", said.splitlines()[0])


@functools.cache
def _program(zero: int) -> Any:
    return autopar.compile(Net(), "2 cpu", example_inputs=batch(0), constraints={"dp": 2, "zero": zero})


def batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(8, 8, generator=generator) for name in "xy"}


def _is_at_fault() -> bool:
    return dist.is_initialized() and dist.get_rank() == 1


def changed(given: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The batch of the step in which it happens, on the rank to which it does; of a forward, on all."""
    if kind == "forward":
        return {"x": given["x"] * 1e5, "y": given["y"]}
    if not _is_at_fault():
        return given
    if kind == "data":
        time.sleep(600)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "raise":
        raise LookupError("a sample is missing")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(7)
    if kind == "rows":
        return {name: value[:6] for name, value in given.items()}
    if kind == "dtype":
        return {name: value.double() for name, value in given.items()}
    return {**given, "more": given["x"]} if kind == "names" else given


def batches(start: int, kind: str) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(start // 8, 100):
        yield changed(batch(number), kind) if number == AT and dist.is_initialized() else batch(number)


class Hanging(autopar.Callback):
    """A callback, which rank 0 alone calls."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_step(self, state: Any) -> None:
        if self.kind == "callback" and state.step == AT:
            time.sleep(600)


def work(step: Any, kind: str) -> float:
    """A loop of a user's own."""
    loss = 0.0
    for number in range(6):
        is_now, is_odd = number == AT, _is_at_fault()
        given = changed(batch(number), kind) if is_now else batch(number)
        if is_now and is_odd and kind == "leave":
            break
        if is_now and is_odd and kind == "skip":
            continue
        local = step.local_batch(given)
        if is_now and is_odd and kind == "clip":
            step.forward_backward(local)
            step.clip(1.0)
            step.update()
            continue
        loss = float(step(local))
        if is_now and is_odd and kind == "evaluate":
            step.evaluate(local)
        if is_now and is_odd and kind == "save":
            step.full_state_dict()
        if is_now and is_odd and kind == "gradients":
            step.forward_backward(local)
        if is_now and kind == "callback" and not is_odd:
            time.sleep(600)
        if is_now and kind == "barrier":
            time.sleep(600) if is_odd else dist.barrier()
    return loss
