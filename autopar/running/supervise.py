"""Watching the ranks that this process started: what they answer, whether they live, and ending them."""

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
"""Seconds after which a rank that is stopped (SIGSTOP, Ctrl-Z of it alone) counts as lost."""

_LOOK_SECONDS = 0.25
_LEAVE_SECONDS = 30.0
"""Seconds for ranks that have answered to leave; on a busy machine they may have to wait for it."""
_CAUSE_SECONDS = 0.5
"""Seconds for ranks to say what became of them, or to be seen as dead, after the first one said so."""
_LOST_SECONDS = 10.0
"""Seconds for a rank to be seen as dead whose connections are closed; on a busy machine it may have to wait for it."""
_END_SECONDS = 2.0
"""Seconds for ranks to remove their files in, when they are told to end."""


class RankError(RuntimeError):
    """A rank died, raised, or kept the others waiting; the message has its number and what happened."""


class Sigterm:
    """What becomes of SIGTERM while ranks run: they are told, and end as they see fit.

    Ranks that train write a last checkpoint first. A second signal ends this process at once, as the first one does
    before there are ranks. is_told: whether a signal came.
    """

    def __init__(self) -> None:
        self.is_told = False
        self.processes: Sequence[Any] = ()
        self._passed_on: set[int] = set()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.is_told or not self.processes:
            exit_at_once(number, frame)
        self.is_told = True
        self.pass_on()

    def pass_on(self) -> None:
        """Tell the ranks that do not know yet, if there is something to tell."""
        for process in self.processes if self.is_told else ():
            if process.pid not in self._passed_on and process.is_alive():
                self._passed_on.add(process.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)


@contextlib.contextmanager
def passing_on_sigterm() -> Iterator[Sigterm]:
    """SIGTERM is passed on to ranks in the block, which then ends as an exit with code 143; a caller's own handler
    stays."""
    told = Sigterm()
    is_ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_ours else None
    is_ours = is_ours and (before == signal.SIG_DFL or is_own(before))
    if is_ours:
        signal.signal(signal.SIGTERM, told.note)
    try:
        yield told
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, before)


def is_own(handler: Any) -> bool:
    """Whether a handler of a signal is autopar's, and not the caller's."""
    return handler is exit_at_once or isinstance(getattr(handler, "__self__", None), Sigterm)


def collect(
    processes: Sequence[Any],
    receivers: Sequence[Connection],
    timeout_seconds: float,
    stopped_seconds: float,
    board: Board | None = None,
    told: Sigterm | None = None,
) -> list[Any]:
    """What every process answers, in order; an answer is ("ok", value) or ("error", an AutoparError or a traceback).

    processes: of ranks, named so ("rank 3"). board: their records. told: where SIGTERM is noted.
    Raises an AutoparError as a rank raised it, RankError for anything else, and SystemExit with code 143 once ranks
    that were told to end have.
    """
    found: dict[int, Any] = {}
    stops = _Stops(processes, stopped_seconds)
    deadline, told = time.monotonic() + timeout_seconds, told or Sigterm()
    told.processes = processes
    while len(found) < len(processes):
        open_ranks = [rank for rank in range(len(processes)) if rank not in found]
        if not wait([processes[r].sentinel for r in open_ranks] + [receivers[r] for r in open_ranks], _LOOK_SECONDS):
            stops.look(found)
        told.pass_on()
        if told.is_told and not _are_finishing(board, open_ranks):
            break  # nothing is lost with them: whoever called ends them
        for rank in open_ranks:
            code = processes[rank].exitcode  # asked first: what it sent before it ended is there now
            answer = _answer(receivers[rank])
            if answer is None and code is not None:
                if told.is_told or code == 128 + signal.SIGTERM:  # or this rank alone, which had nothing to write
                    raise SystemExit(128 + signal.SIGTERM)
                raise RankError(f"{processes[rank].name} {_end_of(code)}")
            if answer is None:
                continue
            outcome, value = answer
            if outcome == "error":
                if told.is_told and not isinstance(value, AutoparError):
                    raise SystemExit(128 + signal.SIGTERM)
                _raise(processes, receivers, rank, value, board)
            found[rank] = value
        if time.monotonic() > deadline:
            missing = ", ".join(each.name for rank, each in enumerate(processes) if rank not in found)
            raise RankError(f"no answer in {timeout_seconds:.0f} s from {missing}")
    if told.is_told:
        raise SystemExit(128 + signal.SIGTERM)
    return [found[rank] for rank in range(len(processes))]


def _are_finishing(board: Board | None, ranks: Sequence[int]) -> bool:
    """Whether one of these ranks has something to write before it ends."""
    records = [] if board is None else [board.read(rank) for rank in ranks if rank < board.size]
    return any(each is not None and each.is_finishing for each in records)


def _answer(receiver: Connection) -> tuple[str, Any] | None:
    """The rank's answer; None where there is none yet, or never will be because the rank is gone."""
    try:
        answer: tuple[str, Any] | None = receiver.recv() if receiver.poll() else None
    except (EOFError, OSError):
        time.sleep(0.01)  # it closed its end, and is about to be gone
        return None
    return answer


def _raise(
    processes: Sequence[Any], receivers: Sequence[Connection], rank: int, value: Any, board: Board | None
) -> None:
    """Raise what went wrong: a rank's own error rather than the error of one that waited for it."""
    if isinstance(value, AutoparError):
        raise value
    said = {rank: value}
    deadline = time.monotonic() + _CAUSE_SECONDS
    while time.monotonic() < deadline and len(said) < len(processes):
        for other in range(len(processes)):
            answer = None if other in said else _answer(receivers[other])
            if answer is not None:
                said[other] = answer[1] if answer[0] == "error" else ""
                if isinstance(said[other], AutoparError):
                    raise said[other]
        time.sleep(0.02)
    if board is not None and all(map(is_of_another, said.values())):
        deadline = time.monotonic() + _LOST_SECONDS
        while time.monotonic() < deadline and not _is_clear(processes, board.records()):
            time.sleep(0.1)
    if any(process.exitcode == 128 + signal.SIGTERM for process in processes):
        raise SystemExit(128 + signal.SIGTERM)
    causes = [f"{p.name} {_end_of(p.exitcode)}" for p in processes if p.exitcode not in (None, 0)]
    records = [] if board is None else board.records()
    own = [each for each in records if each is not None and each.raised and each.is_own]
    early = [other for other, text in said.items() if text and other < len(records) and records[other] is None]
    if causes:  # a rank that died breaks the others' connections, which is no news
        more = f"; {processes[rank].name}: {value}" if own or rank in early or not records else ""
        raise RankError(f"{'; '.join(causes)}{more}")
    if own:  # the first to raise: what others raise after it may come from its end
        first = min(own, key=lambda each: each.raised_at)
        raise RankError(f"rank {first.rank}: {said.get(first.rank) or first.raised}")
    if early:  # raised before it joined the others, and so has no record
        rank = min(early, key=lambda other: is_of_another(said[other]) or "timed out" in said[other].lower())
        raise RankError(f"{processes[rank].name}: {said[rank]}")
    if cause := cause_of(records, time.time()) if records else "":
        raise RankError(cause)
    raise RankError(f"{processes[rank].name}: {value}")


def _is_clear(processes: Sequence[Any], records: Sequence[Record | None]) -> bool:
    """Whether it is seen who closed connections that others lost."""
    return bool(certain_cause_of(records)) or any(process.exitcode not in (None, 0) for process in processes)


def _end_of(code: int) -> str:
    """How a rank ended, in words; an exit with 128 + number is how a rank ends that a signal told to (`exit_on`)."""
    number = -code if code < 0 else code - 128
    by = f" (ended by {signal.Signals(number).name})" if number in set(signal.Signals) else ""
    return f"died with exit code {code}{by}"


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
