"""Start a program's ranks as processes of this machine.

`run_ranks` forks them where that is safe (half a second instead of fifteen) and spawns them otherwise. `launch_main`
runs a script through torch's elastic launcher, as torchrun does. Both read a board (`codegen/runtime/watch.py`), and
so can name the rank that the others waited for.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopar.costs.rates import is_cpu
from autopar.errors import AutoparError
from autopar.files.scratch import temporary_folder
from autopar.program import GeneratedProgram
from autopar.running.build import build_step, share_packages
from autopar.running.process_group import destroy_group, has_gpus
from autopar.running.process_state import check_starting
from autopar.running.start_method import CANNOT_BE_SENT, GPUS, check_sendable, not_sendable, why_not_forked
from autopar.running.supervise import STOPPED_SECONDS, collect, end, exit_on, passing_on_sigterm
from autopar.running.supervise import RankError as RankError
from autopar.running.torchrun_rank import TorchrunRank
from autopar.settings.arguments import check_numbers, whole
from autopar.settings.backend import patience_seconds
from codegen.runtime import watch
from codegen.runtime.board import Board
from codegen.runtime.diagnosis import LOST, THE_END, Record, cause_of, is_of_another
from codegen.runtime.processes import after_the_first, end_with_parent, note_own_group
from codegen.runtime.watch import BOARD

TIMEOUT_SECONDS = 600.0
GROUP_SECONDS = 120.0
"""How long ranks of this process wait for one another in a collective, unless their user says otherwise."""


def run_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    num_ranks: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
    group_seconds: float = GROUP_SECONDS,
    stopped_seconds: float = STOPPED_SECONDS,
    torchrun_rank: TorchrunRank | None = None,
) -> list[Any]:
    """Call `function(*args)` in num_ranks processes joined by a process group; return the results by rank.

    torchrun_rank: this process, where each of torchrun's ranks makes this call and starts its own rank alone.
    timeout_seconds: limits the whole call, group_seconds one collective, stopped_seconds the time that a rank may be
    stopped. Raises AutoparError as a rank raised it, and RankError for any other error, for a rank that dies, and for
    these limits. Raises SystemExit on SIGTERM to this process, after the ranks have ended. No process is left behind,
    even if this one is killed.
    """
    context: Any = mp.get_context(_start_method())
    processes: list[Any] = []
    receivers: list[Connection] = []
    are_done = False
    is_forked = context.get_start_method() == "fork"
    if not is_forked:
        check_sendable(function, args, who=why_not_forked() or GPUS)
    ranks = range(num_ranks) if torchrun_rank is None else [torchrun_rank.rank]
    programs = [argument for argument in args if isinstance(argument, GeneratedProgram)] if is_forked else []
    with temporary_folder() as folder, passing_on_sigterm() as sigterm, share_packages(programs, folder):
        meeting: Callable[[float], Any]
        local: tuple[int, int] | None
        if torchrun_rank is None:
            meeting, local = partial(_file_store, str(folder / "store"), num_ranks), None
            board_path = str(folder / "board")
            board = Board.at(board_path, num_ranks)
        else:
            board_path, board = "", None
            meeting, local = torchrun_rank.next_run(), (torchrun_rank.local_rank, torchrun_rank.local_size)
        try:
            for rank in ranks:
                receiver, sender = context.Pipe(duplex=False)
                place = (rank, num_ranks, *(local or (rank, num_ranks)))
                task = (place, meeting, group_seconds, os.getpid(), sender, function, args, board_path)
                # Not a daemon: a rank may have processes of its own, such as a DataLoader's workers.
                process = context.Process(target=_rank_main, name=f"rank {rank}", args=task, daemon=False)
                _start(process)
                # Close before the next fork: only the rank itself may hold its pipe open, so that its death closes it.
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            if torchrun_rank is None:
                values = collect(processes, receivers, timeout_seconds, stopped_seconds, board, sigterm)
            else:
                values = _collect_from_all(torchrun_rank, processes, receivers, timeout_seconds, stopped_seconds)
            are_done = True
            return values
        finally:
            end(processes, are_done)


def _start(process: Any) -> None:
    """Start a process. Raises ConstraintError where a spawned process cannot be sent its arguments."""
    try:
        process.start()
    except CANNOT_BE_SENT as error:
        raise not_sendable(error, why_not_forked() or GPUS) from error


def _start_method() -> str:
    """Return the start method of ranks."""
    return "spawn" if why_not_forked() else "fork"


def _file_store(path: str, num_ranks: int, seconds: float) -> Any:
    store: Any = dist.FileStore(path, num_ranks)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=seconds))
    return store


def _collect_from_all(
    torchrun_rank: TorchrunRank,
    processes: Sequence[Any],
    receivers: Sequence[Connection],
    timeout: float,
    stopped: float,
) -> list[Any]:
    """Return the answers of all torchrun ranks' processes. Raises the same error on every rank."""
    try:
        outcome = ("ok", collect(processes, receivers, timeout, stopped)[0])
    except (AutoparError, RankError) as error:
        outcome = ("error", error)
    outcomes = torchrun_rank.exchange(outcome)
    errors = [value for kind, value in outcomes if kind == "error"]
    if errors:  # prefer a rank's own error to one of a rank that waited for it
        lost = (*LOST, "timed out")
        raise min(errors, key=lambda error: any(word in str(error).lower() for word in lost))
    return [value for _, value in outcomes]


def meet(timeout_seconds: float) -> None:
    """Let two processes of this machine add a number over gloo. Raises RankError where that takes longer or fails."""
    sums = run_ranks(_sum_of_ranks, (), 2, timeout_seconds, timeout_seconds)
    if sums != [1.0, 1.0]:
        raise RankError(f"two processes added 0 and 1 over gloo, and got {sums}")


def _sum_of_ranks() -> float:
    number = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(number, group=dist.new_group(backend="gloo"))
    return number.item()


def group_seconds(compiled: GeneratedProgram, wanted: float | None = None) -> float:
    """Return the wanted limit, by default GROUP_SECONDS; more where ranks compile."""
    return max(GROUP_SECONDS if wanted is None else wanted, patience_seconds(compiled.program))


def _rank_main(
    place: tuple[int, int, int, int],
    meeting: Callable[[float], Any],
    group_seconds: float,
    parent: int,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    board: str = "",
) -> None:
    end_with_parent(parent)
    # A rank need not collect its parent's garbage, which would also copy the parent's memory page by page.
    gc.freeze()
    # Ctrl-C reaches every process of a terminal: the parent's answer to it ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_on(signal.SIGTERM)
    torch.set_num_threads(1)
    rank, num_ranks, local_rank, local_size = place
    try:
        on_cpu = any(is_cpu(item.cluster.groups[0]) for item in args if isinstance(item, GeneratedProgram))
        backend = "nccl" if not on_cpu and has_gpus(local_size) else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(local_rank)
        timeout = timedelta(seconds=group_seconds)
        store = meeting(group_seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        note_own_group()
        watch.start(group_seconds, Board.at(board, num_ranks) if board else None)
        with after_the_first():
            value = function(*args)
            with watch.entered(THE_END):
                dist.barrier()  # a rank that leaves while others still use their connections to it can abort
        # Send bytes: torch would send a tensor by reference to this process, which is gone by then.
        sender.send_bytes(pickle.dumps(("ok", value)))
    except AutoparError as error:
        _note(error)
        sender.send(("error", error))
    except SystemExit:
        raise
    except BaseException as error:
        _note(error)
        sender.send(("error", traceback.format_exc()))
    finally:
        watch.end()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process is ending, and has files to remove
        sender.close()
        if dist.is_initialized():
            destroy_group()


def _note(error: BaseException) -> None:
    """Tell the other ranks, and the parent, what ended this rank."""
    if (watcher := watch.current()) is not None:
        watcher.note(error)


def launch_program(
    compiled: GeneratedProgram,
    function: Callable[..., Any],
    *args: Any,
    max_restarts: int = 0,
    collective_seconds: float | None = None,
) -> list[Any]:
    """Run `function(step, *args)` on every rank, as processes of this machine; return the results by rank.

    collective_seconds: how long ranks wait for one another, by default 120. Longer waits end the run with an error that
    names the rank they waited for. max_restarts: how often all ranks start again after an error.
    Where ranks are spawned (GPUs), `function`, `args` and the optimizer factory must be picklable.
    Raises AutoparError as a rank raised it, RankError for any other end of a rank.
    """
    check_starting("launch")
    check_numbers({"collective_seconds": collective_seconds})
    whole("max_restarts", max_restarts, 0)
    compiled.require_runnable()
    patience = group_seconds(compiled, collective_seconds)
    for attempts_left in reversed(range(max_restarts + 1)):
        try:
            return run_ranks(_launched, (compiled, function, args), compiled.plan.num_ranks, math.inf, patience)
        except (AutoparError, RankError):
            if not attempts_left:
                raise
    raise AssertionError("no attempt")


def _launched(compiled: GeneratedProgram, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a launched rank, which finds its rank in the environment too, as under torchrun."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return function(build_step(compiled), *args)


def launch_main(main: Path, arguments: Sequence[str], num_ranks: int) -> None:
    """Run a script, such as a saved program's `main.py`, as torchrun would.

    Raises RankError where a rank fails, with its record's error or the last line of its stderr (which is shown as it
    comes). Raises SystemExit where this process or a rank got SIGTERM, after the ranks have ended.
    """
    with temporary_folder() as folder:
        logs = DefaultLogsSpecs(log_dir=str(folder), tee=Std.ERR)
        board = Board.at(folder / "board", num_ranks)
        try:
            with _in_environment(BOARD, str(folder / "board")):
                elastic_launch(_elastic_config(num_ranks, logs), sys.executable)(str(main), *arguments)
        except SignalException as error:
            raise SystemExit(128 + int(error.sigval)) from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode == 128 + signal.SIGTERM:
                raise SystemExit(failure.exitcode) from None
            raise RankError(_failure(str(main), folder, board.records(), rank, failure.exitcode)) from None


@contextlib.contextmanager
def _in_environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _failure(main: str, folder: Path, records: Sequence[Record | None], rank: int, code: int) -> str:
    """Return the error of the rank that failed first: its own one, even without a record (where the script starts no
    watch, or the rank failed early), in preference to those of ranks that waited or were ended with the others."""
    messages = {rank: _last_words(folder, rank) or _end_of(code)}
    messages |= {other: _last_words(folder, other) for other in range(len(records)) if other != rank}
    if not any(record is not None and record.raised and record.is_own for record in records):
        for other, message in messages.items():
            is_error = other == rank or "Error" in message
            if records[other] is None and is_error and not is_of_another(message):
                return f"rank {other} of {main}: {message}"
    cause = cause_of(records, time.time())
    return f"{main}: {cause}" if cause else f"rank {rank} of {main}: {messages[rank]}"


def _last_words(folder: Path, rank: int) -> str:
    """Return the last line of a rank's error, or of its stderr; "" where it wrote nothing."""
    written = sorted(folder.glob(f"**/{rank}/stderr.log"))
    lines = written[-1].read_text(errors="replace").strip().splitlines() if written else []
    mark = f"[rank{rank}]: "  # torch puts it before each line of an error, once there is a process group
    return ([line for line in lines if line.startswith(mark)] or lines or [""])[-1].removeprefix(mark)


def _end_of(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _elastic_config(count: int, logs: Any) -> Any:
    # A restarted attempt must not meet the keys of the one before it, as in pytorch's shared rendezvous store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"autopar_{os.getpid()}_{time.monotonic_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=logs,
    )
