"""Watching the ranks that this process started: what they answer, whether they live, and ending them."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from autopar.errors import AutoparError

STOPPED_SECONDS = 10.0
"""Seconds after which a rank that is stopped (SIGSTOP, Ctrl-Z of it alone) counts as lost."""

_LOOK_SECONDS = 0.25
_LEAVE_SECONDS = 30.0
"""Seconds for ranks that have answered to leave; on a busy machine they may have to wait for it."""
_SILENT_SECONDS = 10.0
"""Seconds for ranks that wait for one that has given up to notice, and to say so."""
_END_SECONDS = 2.0
"""Seconds for ranks to remove their files in, when they are told to end."""


class RankError(RuntimeError):
    """A rank died or raised; the message holds its number and traceback."""


def collect(
    processes: Sequence[Any], receivers: Sequence[Connection], timeout_seconds: float, stopped_seconds: float
) -> list[Any]:
    """What every process answers, in order; an answer is ("ok", value) or ("error", an AutoparError or a traceback).

    processes: of ranks, named so ("rank 3").
    Raises an AutoparError as a rank raised it, RankError for anything else.
    """
    found: dict[int, Any] = {}
    stops = _Stops(processes, stopped_seconds)
    deadline = time.monotonic() + timeout_seconds
    while len(found) < len(processes):
        open_ranks = [rank for rank in range(len(processes)) if rank not in found]
        if not wait([processes[r].sentinel for r in open_ranks] + [receivers[r] for r in open_ranks], _LOOK_SECONDS):
            stops.look(found)
        for rank in open_ranks:
            code = processes[rank].exitcode  # asked first: what it sent before it ended is there now
            answer = _answer(receivers[rank])
            if answer is None and code is not None:
                raise RankError(f"{processes[rank].name} {_end_of(code)}")
            if answer is None:
                continue
            outcome, value = answer
            if outcome == "error":
                _raise(processes, receivers, rank, value, found)
            found[rank] = value
        if time.monotonic() > deadline:
            missing = ", ".join(each.name for rank, each in enumerate(processes) if rank not in found)
            raise RankError(f"no answer in {timeout_seconds:.0f} s from {missing}")
    return [found[rank] for rank in range(len(processes))]


def _answer(receiver: Connection) -> tuple[str, Any] | None:
    """The rank's answer; None where there is none yet, or never will be because the rank is gone."""
    try:
        answer: tuple[str, Any] | None = receiver.recv() if receiver.poll() else None
    except (EOFError, OSError):
        time.sleep(0.01)  # it closed its end, and is about to be gone
        return None
    return answer


def _raise(
    processes: Sequence[Any], receivers: Sequence[Connection], rank: int, value: Any, found: dict[int, Any]
) -> None:
    if isinstance(value, AutoparError):
        raise value
    time.sleep(0.5)  # a rank that died breaks the others' connections: name it first
    causes = [f"{p.name} {_end_of(p.exitcode)}; " for p in processes if p.exitcode not in (None, 0)]
    if not causes and "imed out" in str(value):
        silent = _silent(processes, receivers, {rank, *found})
        causes = [f"{processes[r].name} (process {processes[r].pid}) stands still; " for r in silent]
    raise RankError(f"{''.join(causes)}{processes[rank].name}: {value}")


def _end_of(code: int) -> str:
    """How a rank ended, in words; an exit with 128 + number is how a rank ends that a signal told to (`exit_on`)."""
    number = -code if code < 0 else code - 128
    by = f" (ended by {signal.Signals(number).name})" if number in set(signal.Signals) else ""
    return f"died with exit code {code}{by}"


def _silent(processes: Sequence[Any], receivers: Sequence[Connection], heard: set[int]) -> list[int]:
    """Ranks that neither answer nor end after another one has given up waiting: they are not in a collective, which its
    end breaks off."""
    deadline, heard = time.monotonic() + _SILENT_SECONDS, set(heard)
    while time.monotonic() < deadline and len(heard) < len(processes):
        heard |= {
            r
            for r, process in enumerate(processes)
            if r not in heard and (_answer(receivers[r]) is not None or process.exitcode is not None)
        }
        time.sleep(0.05)
    return [rank for rank in range(len(processes)) if rank not in heard]


class _Stops:
    """Notices ranks that are stopped, by what the system says of their state (on Linux)."""

    def __init__(self, processes: Sequence[Any], seconds: float) -> None:
        self.processes, self.seconds = processes, seconds
        self.looks = [0] * len(processes)
        self.last = 0.0

    def look(self, found: dict[int, Any]) -> None:
        """Raises RankError. Looks are counted rather than time: this process may have been stopped itself."""
        if time.monotonic() - self.last < _LOOK_SECONDS:
            return
        self.last = time.monotonic()
        for rank, process in enumerate(self.processes):
            is_stopped = rank not in found and _state(process.pid) == "T"
            self.looks[rank] = self.looks[rank] + 1 if is_stopped else 0
            if self.looks[rank] * _LOOK_SECONDS > self.seconds:
                raise RankError(
                    f"{process.name} (process {process.pid}) has been stopped for {self.seconds:.0f} s, by SIGSTOP or "
                    "a debugger"
                )


def _state(pid: int) -> str:
    """A letter as in `ps`; "" where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def end(processes: Sequence[Any], are_done: bool = False) -> None:
    """No process is left when this returns. are_done: they have answered, and are leaving by themselves."""
    deadline = time.monotonic() + _LEAVE_SECONDS * are_done
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def exit_on(*numbers: int) -> None:
    """Let signals end this process as an exit with code 128 + number, so that it cleans up. In the main thread only.

    Those that are ignored stay so (nohup).
    """
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit)


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as an exit with code 143, unless the caller has a handler of its own for it."""
    is_ours = threading.current_thread() is threading.main_thread()
    is_ours = is_ours and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if is_ours:
        exit_on(signal.SIGTERM)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleaning
    raise SystemExit(128 + number)
