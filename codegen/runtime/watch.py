"""Watch the ranks of a run, so that a rank that the others wait for is named with what it does instead.

Each rank keeps a record on a board that all ranks read: the calls of the step that it has entered, and the line where
its main thread is, which a thread of its own looks up. Where ranks share a machine the board is shared memory, and a
rank that enters another call than a rank before it raises at once. Otherwise, and where nobody enters at all, the
records say who is behind once a collective gives up (`diagnosis.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import mmap
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from .board import HALF, HEADER, KEPT, SLOT, Board
from .diagnosis import (
    SAME_BATCHES,
    SILENT_SECONDS,
    THE_END,
    Record,
    cause_of,
    certain_cause_of,
    is_of_another,
    mismatch,
)
from .stack import is_of_group, is_waiting, last, place

BOARD = "AUTOPAR_BOARD"
"""The environment variable with the board's file, where the process that started the ranks made one."""

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_BETWEEN_NODES = 2.0
_SECONDS_TO_END = 1.0
_SECONDS_TO_BE_GONE = 10.0
"""For a rank whose connections are closed, on a busy machine."""


P = ParamSpec("P")
R = TypeVar("R")


class RanksDiffer(RuntimeError):
    """The ranks of a run do not do the same, or one of them does not go on; the message names it."""


class DataDiffer(RanksDiffer):
    """The ranks of a run read other batches."""


def error_of(cause: str) -> RanksDiffer:
    """Return the error that tells a cause."""
    return DataDiffer(cause) if cause.endswith(SAME_BATCHES) else RanksDiffer(cause)


@dataclass(eq=False)
class Watch:
    """One rank's part of the watch; `start` makes it. seconds: how long the ranks' collectives wait."""

    board: Board
    rank: int
    seconds: float | None = None
    count: int = 0
    names: list[str] = field(default_factory=list)
    depth: int = 0
    raised: str = ""
    is_own: bool = False
    raised_at: float = 0.0
    is_finishing: bool = False

    def __post_init__(self) -> None:
        self._digests = [0] * KEPT
        self._changed, self._stop = time.monotonic(), threading.Event()
        self._main, self.process = threading.get_ident(), os.getpid()
        self._lock = threading.Lock()
        self._has_warned = False
        self.publish()
        threading.Thread(target=self._poll, name="autopar watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    @contextlib.contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """Note that this rank makes a call that all ranks must make. A call inside of another does not count.

        Raises RanksDiffer where another rank has made another one in its place, and for errors of the process group
        whose cause is on another rank.
        """
        self.depth += 1
        try:
            if self.depth == 1:
                self.enter(name)
            yield
        except BaseException as error:
            is_end = isinstance(error, (SystemExit, GeneratorExit))
            if self.depth == 1 and not is_end and (cause := self.note(error)):
                raise error_of(cause) from error
            raise
        finally:
            self.depth -= 1
            if self.depth == 0:
                self._changed = time.monotonic()
                self._write(is_inside=False)

    def enter(self, name: str) -> None:
        """Note the begin of a call, as `entered` does, whose end is not noted."""
        self.raised = ""  # whoever goes on has survived it
        self.names = [*self.names[1 - KEPT :], name]
        self._digests[self.count % KEPT] = zlib.crc32(name.encode())
        self.count += 1
        self._changed = time.monotonic()
        self._write(is_inside=True)
        if self.board.is_shared:
            self._compare(name)

    def _write(self, is_inside: bool) -> None:
        names = "\n".join(self.names).encode()[: HALF - HEADER.size]
        start = self.rank * SLOT
        self.board.memory[start + HEADER.size : start + HEADER.size + len(names)] = names
        header = HEADER.pack(self.count, is_inside, len(names), *self._digests)
        self.board.memory[start : start + HEADER.size] = header

    def _compare(self, name: str) -> None:
        """Raise RanksDiffer where a rank has made another call than this one, which it may be waiting in."""
        index = self.count - 1
        digest = self._digests[index % KEPT]
        for rank in range(self.board.size):
            count, _, _, *digests = HEADER.unpack_from(self.board.memory, rank * SLOT)
            if rank != self.rank and index < count < index + KEPT and digests[index % KEPT] != digest:
                records = [record for record in self.board.records() if record is not None]
                said = mismatch(records) or f"rank {rank} does not make the call of rank {self.rank}: {name}"
                raise error_of(said)

    def note(self, error: BaseException) -> str:
        """Note an error that ends this rank; return its cause on another rank, "" where it is this one's own."""
        if os.getpid() != self.process:
            return ""
        if not self.raised:
            where = place(last(error.__traceback__)) if error.__traceback__ else ""
            first = next(iter(str(error).splitlines()), "")
            self.raised = f"{type(error).__name__}: {first}" + (f", in {where}" if where else "")
            is_cause_elsewhere = isinstance(error, RanksDiffer) or is_of_group(error)
            self.is_own, self.raised_at = not is_cause_elsewhere, time.time()
            self.publish()
        if self.is_own or isinstance(error, RanksDiffer):
            return ""
        # Until a rank that is being killed is gone, or the records of other machines are here, or are seen not to come.
        wait = _SECONDS_TO_END if self.board.is_shared else SILENT_SECONDS + _SECONDS_BETWEEN_NODES
        wait = _SECONDS_TO_BE_GONE if is_of_another(str(error)) else wait
        deadline = time.monotonic() + wait
        while not (cause := certain_cause_of(records := self.board.records())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return cause or cause_of(records, time.time())

    def publish(self) -> None:
        """Write where this rank is now."""
        with self._lock:
            frame = sys._current_frames().get(self._main)
            self.board.write_state(
                self.rank,
                Record(
                    place=place(frame) if frame is not None else "",
                    is_waiting=frame is not None and is_waiting(frame),
                    idle=time.monotonic() - self._changed,
                    raised=self.raised,
                    is_own=self.is_own,
                    raised_at=self.raised_at,
                    beat=time.time(),
                    process=os.getpid(),
                    is_finishing=self.is_finishing,
                ),
            )

    def _poll(self) -> None:
        pause = _SECONDS_BETWEEN_NODES if self.board.store is not None else _SECONDS_BETWEEN_LOOKS
        while not self._stop.wait(pause):
            with contextlib.suppress(RuntimeError, ValueError, OSError):  # the store's host may be gone
                self.publish()
                self._warn()

    def _warn(self) -> None:
        """Say on stderr who is behind shortly before the backend gives up: NCCL's own end of a wait is no exception
        but the end of the process."""
        if self._has_warned or self.seconds is None or not self.depth or dist.get_backend() == "gloo":
            return
        if time.monotonic() - self._changed > 0.9 * self.seconds:
            self._has_warned = True
            if cause := cause_of(self.board.records(), time.time()):
                print(f"[rank{self.rank}]: {cause}", file=sys.stderr, flush=True)


# The watch of this process --------------------------------------------------------------------------------------------


class _Process:
    """The watch of this process, and its process group. inherited: those of its parent, in a fork."""

    watch: Watch | None = None
    group: Any = None
    inherited: ClassVar[list[Any]] = []


_process = _Process()


def share(other: Any) -> None:
    """Let a copy of this module, in a generated package, note calls with this one's watch."""
    other._process = _process


def current() -> Watch | None:
    """Return this rank's watch, if there is one."""
    return _process.watch


def entered(name: str) -> contextlib.AbstractContextManager[None]:
    """Note a call, as `Watch.entered` does, where there is a watch."""
    return contextlib.nullcontext() if _process.watch is None else _process.watch.entered(name)


def finish_after_signal() -> None:
    """Note that this rank ends by itself after a signal, once it has written what it must."""
    if _process.watch is not None:
        _process.watch.is_finishing = True
        _process.watch.publish()


def noted(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let each call of a step's method, or of a function of a step, be noted.

    name: with {done}, the steps before it, or {coming}, the next one's number.
    """

    def with_note(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **named: P.kwargs) -> R:
            done = args[0].rng.step  # type: ignore[attr-defined]
            with entered(name.format(done=done, coming=done + 1)):
                return method(*args, **named)

        return call

    return with_note


def start(seconds: float | None = None, board: Board | None = None) -> None:
    """Watch this process as a rank of the process group that is initialized. Collective, unless a board is given.

    Torch's "fake" group has no other ranks: there is nothing to watch.
    """
    group = dist.group.WORLD
    if not dist.is_initialized() or (dist.get_world_size() == 1 and board is None) or _process.group is group:
        return
    if dist.get_backend() == "fake":
        return
    end()
    rank, size = dist.get_rank(), dist.get_world_size()
    if board is None and (path := os.environ.get(BOARD)):
        board = Board.at(path, size)
    if board is None:
        atexit.register(_come_to_the_end)
    _process.watch, _process.group = Watch(board or _agreed_board(rank, size), rank, seconds), group
    sys.excepthook = _noting(sys.excepthook)


def end() -> None:
    """End the watch of this process, whose process group ends."""
    if _process.watch is not None and _process.watch.process != os.getpid():
        _process.inherited.append((_process.watch, _process.group))  # in a fork: its end would wait for lost threads
    elif _process.watch is not None:
        _process.watch.stop()
    _process.watch = _process.group = None


def _come_to_the_end() -> None:
    """Let ranks that still wait for this one, a script's that ends, know why."""
    if _process.watch is not None and not _process.watch.raised:
        with contextlib.suppress(RanksDiffer):
            _process.watch.enter(THE_END)
        _process.watch.publish()


def _noting(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Note the error that ends this process before it is printed."""

    def noted(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        cause = "" if _process.watch is None else _process.watch.note(error)
        hook(kind, error, traceback)
        if cause:
            print(f"[rank{dist.get_rank() if dist.is_initialized() else '?'}]: {cause}", file=sys.stderr, flush=True)

    return hook if getattr(hook, "is_watch", False) else _marked(noted)


def _marked(hook: Any) -> Callable[..., Any]:
    hook.is_watch = True
    return hook  # type: ignore[no-any-return]


def _agreed_board(rank: int, size: int) -> Board:
    """A board in memory that all ranks share without a name in any folder; or, of several machines, a store's."""
    address: list[Any] = [None]
    descriptor = -1
    if rank == 0 and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("autopar_board")
        os.ftruncate(descriptor, size * SLOT)
        address = [(socket.gethostname(), f"/proc/{os.getpid()}/fd/{descriptor}")]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else None
    dist.broadcast_object_list(address, src=0, device=device)
    board = None
    if address[0] is not None and address[0][0] == socket.gethostname():
        with contextlib.suppress(OSError):
            board = Board.at(address[0][1], size)
    are_shared: list[Any] = [None] * size
    dist.all_gather_object(are_shared, board is not None)
    if descriptor >= 0:
        os.close(descriptor)
    if board is not None and all(are_shared):
        return board
    return Board(mmap.mmap(-1, size * SLOT), size, is_shared=False, store=_store())


def _store() -> Any:
    """A client of the launcher's store that is this thread's alone; None where there is none."""
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    where, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt, stores = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), vars(dist)
    with contextlib.suppress(RuntimeError):
        client = stores["TCPStore"](where, port, is_master=False, timeout=timedelta(seconds=10))
        return stores["PrefixStore"](f"autopar/watch_{attempt}", client)
    return None
