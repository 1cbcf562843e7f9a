"""Watch the ranks that this process started: collect their answers, notice those that die, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from autopar.errors import AutoparError
from codegen.runtime.board import Board
from codegen.runtime.diagnosis import Record, cause_of, certain_cause_of, is_of_another
from codegen.runtime.processes import exit_at_once
from codegen.runtime.processes import exit_on as exit_on

STOPPED_SECONDS = 10.0
"""Seconds after which a stopped rank (SIGSTOP, or Ctrl-Z of it alone) counts as lost."""

_LOOK_SECONDS = 0.25
_LEAVE_SECONDS = 30.0
"""Seconds for ranks that have answered to leave. A busy machine may delay them."""
_CAUSE_SECONDS = 0.5
"""Seconds, after the first error of a rank, for the others to report theirs or to be seen as dead."""
_LOST_SECONDS = 10.0
"""Seconds for a rank whose connections closed to be seen as dead. A busy machine may delay it."""
_END_SECONDS = 2.0
"""Seconds for ranks to remove their files after they are told to end."""


class RankError(RuntimeError):
    """A rank died, raised, or kept the others waiting. The message has its number and what happened."""


class Sigterm:
    """Pass SIGTERM on to the ranks, which end as they see fit.

    Ranks that train write a last checkpoint first. Before there are ranks, the first signal ends this process at once;
    later the second one does. is_received: whether a signal came.
    """

    def __init__(self) -> None:
        self.is_received = False
        self.processes: Sequence[Any] = ()
        self._passed_on: set[int] = set()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.is_received or not self.processes:
            exit_at_once(number, frame)
        self.is_received = True
        self.pass_on()

    def pass_on(self) -> None:
        """Send a signal that came to the ranks that did not get it yet."""
        for process in self.processes if self.is_received else ():
            if process.pid not in self._passed_on and process.is_alive():
                self._passed_on.add(process.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)


@contextlib.contextmanager
def passing_on_sigterm() -> Iterator[Sigterm]:
    """Pass SIGTERM on to ranks inside the block. The block then exits with code 143. A caller's own handler stays."""
    sigterm = Sigterm()
    is_ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_ours else None
    is_ours = is_ours and (before == signal.SIG_DFL or is_autopar_handler(before))
    if is_ours:
        signal.signal(signal.SIGTERM, sigterm.note)
    try:
        yield sigterm
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, before)


def is_autopar_handler(handler: Any) -> bool:
    """Return whether a signal handler is autopar's, and not the caller's."""
    return handler is exit_at_once or isinstance(getattr(handler, "__self__", None), Sigterm)


def collect(
    processes: Sequence[Any],
    receivers: Sequence[Connection],
    timeout_seconds: float,
    stopped_seconds: float,
    board: Board | None = None,
    sigterm: Sigterm | None = None,
) -> list[Any]:
    """Return what every process answers, in order: ("ok", value), or ("error", an AutoparError or a traceback).

    processes: the ranks, by name ("rank 3"). board: their records. sigterm: notes SIGTERM.
    Raises an AutoparError as a rank raised it, RankError for any other failure, and SystemExit with code 143 after the
    ranks ended on SIGTERM.
    """
    answers: dict[int, Any] = {}
    stops = _Stops(processes, stopped_seconds)
    deadline, sigterm = time.monotonic() + timeout_seconds, sigterm or Sigterm()
    sigterm.processes = processes
    while len(answers) < len(processes):
        open_ranks = [rank for rank in range(len(processes)) if rank not in answers]
        if not wait([processes[r].sentinel for r in open_ranks] + [receivers[r] for r in open_ranks], _LOOK_SECONDS):
            stops.look(answers)
        sigterm.pass_on()
        if sigterm.is_received and not _are_finishing(board, open_ranks):
            break  # these ranks have nothing to write: the caller ends them
        for rank in open_ranks:
            code = processes[rank].exitcode  # before the answer, which has then arrived if the rank has ended
            answer = _answer(receivers[rank])
            if answer is None and code is not None:
                if sigterm.is_received or code == 128 + signal.SIGTERM:  # or this rank alone, without data to write
                    raise SystemExit(128 + signal.SIGTERM)
                raise RankError(f"{processes[rank].name} {_end_of(code)}")
            if answer is None:
                continue
            outcome, value = answer
            if outcome == "error":
                if sigterm.is_received and not isinstance(value, AutoparError):
                    raise SystemExit(128 + signal.SIGTERM)
                _raise(processes, receivers, rank, value, board)
            answers[rank] = value
        if time.monotonic() > deadline:
            missing = ", ".join(process.name for rank, process in enumerate(processes) if rank not in answers)
            raise RankError(f"no answer in {timeout_seconds:.0f} s from {missing}")
    if sigterm.is_received:
        raise SystemExit(128 + signal.SIGTERM)
    return [answers[rank] for rank in range(len(processes))]


def _are_finishing(board: Board | None, ranks: Sequence[int]) -> bool:
    """Return whether one of these ranks writes something before it ends."""
    records = [] if board is None else [board.read(rank) for rank in ranks if rank < board.size]
    return any(record is not None and record.is_finishing for record in records)


def _answer(receiver: Connection) -> tuple[str, Any] | None:
    """Return the rank's answer; None before there is one, and for a rank that is gone."""
    try:
        answer: tuple[str, Any] | None = receiver.recv() if receiver.poll() else None
    except (EOFError, OSError):
        time.sleep(0.01)  # the rank closed its end, and is about to be gone
        return None
    return answer


def _raise(
    processes: Sequence[Any], receivers: Sequence[Connection], rank: int, value: Any, board: Board | None
) -> None:
    """Raise a rank's own error in preference to the error of a rank that waited for it."""
    if isinstance(value, AutoparError):
        raise value
    reports = {rank: value}
    deadline = time.monotonic() + _CAUSE_SECONDS
    while time.monotonic() < deadline and len(reports) < len(processes):
        for other in range(len(processes)):
            answer = None if other in reports else _answer(receivers[other])
            if answer is not None:
                reports[other] = answer[1] if answer[0] == "error" else ""
                if isinstance(reports[other], AutoparError):
                    raise reports[other]
        time.sleep(0.02)
    if board is not None and all(map(is_of_another, reports.values())):
        deadline = time.monotonic() + _LOST_SECONDS
        while time.monotonic() < deadline and not _is_clear(processes, board.records()):
            time.sleep(0.1)
    if any(process.exitcode == 128 + signal.SIGTERM for process in processes):
        raise SystemExit(128 + signal.SIGTERM)
    causes = [f"{p.name} {_end_of(p.exitcode)}" for p in processes if p.exitcode not in (None, 0)]
    records = [] if board is None else board.records()
    raised = [record for record in records if record is not None and record.raised and record.is_own]
    early = [other for other, text in reports.items() if text and other < len(records) and records[other] is None]
    if causes:  # a rank that died breaks the others' connections, so their errors say nothing new
        suffix = f"; {processes[rank].name}: {value}" if raised or rank in early or not records else ""
        raise RankError(f"{'; '.join(causes)}{suffix}")
    if raised:  # the first error: later ones may be its consequence
        first = min(raised, key=lambda record: record.raised_at)
        raise RankError(f"rank {first.rank}: {reports.get(first.rank) or first.raised}")
    if early:  # it raised before it joined the others, and so has no record
        rank = min(early, key=lambda other: is_of_another(reports[other]) or "timed out" in reports[other].lower())
        raise RankError(f"{processes[rank].name}: {reports[rank]}")
    if cause := cause_of(records, time.time()) if records else "":
        raise RankError(cause)
    raise RankError(f"{processes[rank].name}: {value}")


def _is_clear(processes: Sequence[Any], records: Sequence[Record | None]) -> bool:
    """Return whether it is clear which rank closed the connections that others lost."""
    return bool(certain_cause_of(records)) or any(process.exitcode not in (None, 0) for process in processes)


def _end_of(code: int) -> str:
    """Say how a rank ended. An exit code of 128 + number means that it ended on a signal (`exit_on`)."""
    number = -code if code < 0 else code - 128
    by = f" (ended by {signal.Signals(number).name})" if number in set(signal.Signals) else ""
    return f"died with exit code {code}{by}"


class _Stops:
    """Notice stopped ranks by the state that the system reports (on Linux)."""

    def __init__(self, processes: Sequence[Any], seconds: float) -> None:
        self.processes, self.seconds = processes, seconds
        self.looks = [0] * len(processes)
        self.last = 0.0

    def look(self, answers: dict[int, Any]) -> None:
        """Raise RankError for a stopped rank. Count looks, not time: this process may have been stopped itself."""
        if time.monotonic() - self.last < _LOOK_SECONDS:
            return
        self.last = time.monotonic()
        for rank, process in enumerate(self.processes):
            is_stopped = rank not in answers and _state(process.pid) == "T"
            self.looks[rank] = self.looks[rank] + 1 if is_stopped else 0
            if self.looks[rank] * _LOOK_SECONDS > self.seconds:
                raise RankError(
                    f"{process.name} (process {process.pid}) has been stopped for {self.seconds:.0f} s, by SIGSTOP or "
                    "a debugger"
                )


def _state(pid: int) -> str:
    """Return a process's state as a letter, as `ps` has it; "" where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def end(processes: Sequence[Any], are_done: bool = False) -> None:
    """End all processes. are_done: they have answered and leave by themselves."""
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
