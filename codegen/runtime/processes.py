"""This process as a rank: it joins the other ranks, and ends when its launcher ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from . import watch
from .diagnosis import is_of_another

_groups = itertools.count()
_own: list[int] = []
"""The identities of groups that autopar started."""
_PR_SET_PDEATHSIG = 1
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_BE_SEEN = 5.0


def join(backend: str, collective_seconds: float | None = None) -> None:
    """`dist.init_process_group` from what the launcher put into the environment; under torchrun this rank ends with it.

    collective_seconds: how long ranks wait for one another; torch's default (1800, of NCCL 600) if None.
    torchrun keeps one store for all its attempts (--max-restarts), in which a new attempt would meet the keys of the
    one before it and wait for ranks that are gone: every attempt gets a prefix of its own, and so does every group of
    an attempt, one after the other.
    Raises ValueError for port 0: torchrun hands it on as it is, while its own store listens elsewhere.
    """
    if os.environ.get("MASTER_PORT") == "0":
        raise ValueError("ranks cannot meet at MASTER_PORT 0; torchrun finds a free port with --standalone")
    if backend == "nccl":
        # Buffers of graphs that NCCL registers fault under expandable segments (pytorch/pytorch#158029).
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    timeout = None if collective_seconds is None else timedelta(seconds=collective_seconds)
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if is_under_torchrun():
        end_with_parent(os.getppid())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agent: Any = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, size, is_master=False, timeout=timeout or default_pg_timeout
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        more |= {
            "store": PrefixStore(f"autopar/attempt_{attempt}/{next(_groups)}", agent),
            "rank": rank,
            "world_size": size,
        }
    dist.init_process_group(backend, **more)
    note_own_group()
    watch.start(collective_seconds)


def note_own_group() -> None:
    """The process group that there is now is autopar's, and none that the script started."""
    _own.append(id(dist.group.WORLD))


def is_own_group() -> bool:
    """Whether autopar started the process group."""
    return id(dist.group.WORLD) in _own


def store_of_ranks() -> Any:
    """The store by which the ranks of the process group met."""
    return _get_default_store()


def is_under_torchrun() -> bool:
    """Whether torchrun, or torch's elastic launcher, is this process's parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent, of that number, is gone, however it went.

    Not asked to end: a rank that waits for others, or is stopped, would not hear it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before it was watched
        os._exit(1)


@contextlib.contextmanager
def after_the_first() -> Iterator[None]:
    """Delay an error that another rank's end caused: launchers report the rank that fails first."""
    try:
        yield
    except RuntimeError as error:
        if is_of_another(str(error)):
            time.sleep(_SECONDS_TO_BE_SEEN)
        raise


def leave(code: int = 0) -> NoReturn:
    """Ends this process as a forked one ends, once all that is registered for its end has run, and without taking the
    interpreter apart: a thread of a communication library that still asks for it aborts the process then ("terminate
    called without an active exception", met in 2 of 40 runs over gloo)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_on(*numbers: int) -> None:
    """Let signals end this process as an exit with code 128 + number, so that it cleans up. In the main thread only.

    Those that are ignored stay so (nohup).
    """
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, exit_at_once)


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End this process as an exit with code 128 + number: a signal's handler."""
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the cleaning
    raise SystemExit(128 + number)


class Ending:
    """A request to end this run (SIGTERM), noted so that the run can end after a step.

    Outside of the main thread, which alone hears signals, nobody tells it. `close` puts back the handler that was
    there. is_alone: that handler is not called as well.
    """

    EXIT_CODE = 128 + signal.SIGTERM

    def __init__(self, device: torch.device | str = "cpu", *, is_alone: bool = False) -> None:
        self._device, self._is_told, self._is_alone = torch.device(device), False, is_alone
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._before = signal.signal(signal.SIGTERM, self._note)
        watch.finish_after_signal()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True
        is_passed_on = self._before is not exit_at_once and not self._is_alone
        if callable(self._before) and (is_passed_on or not self._is_installed):  # closed, below another's handler
            self._before(number, frame)

    def is_told(self) -> bool:
        """Return whether any rank was told to end. Collective; all ranks get the same answer."""
        told = torch.tensor(int(self._is_told), device=self._device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(told, dist.ReduceOp.MAX)
        if was_told := bool(told):  # a signal that came meanwhile is told of by the next call
            self._is_told = True
        return was_told

    def close(self) -> None:
        """Put back the handler that was there before, unless another one has taken this one's place since."""
        if self._is_installed:
            self._is_installed = False
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, self._before)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)
