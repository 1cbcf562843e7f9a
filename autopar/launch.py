"""Starting a program's ranks as processes of this machine.

`run_ranks` forks them where that is safe (half a second instead of fifteen) and spawns them otherwise; `launch_main`
runs a script through torch's elastic launcher, as torchrun does. Both have a board (`codegen/runtime/watch.py`), from
which they say which rank the others waited for.
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
from autopar.running.process_group import has_gpus
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
"""How long ranks that this process starts wait for one another in a collective, unless their user says otherwise."""


def run_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    num_ranks: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
    group_seconds: float = GROUP_SECONDS,
    stopped_seconds: float = STOPPED_SECONDS,
    beside: TorchrunRank | None = None,
) -> list[Any]:
    """Call `function(*args)` in num_ranks processes joined by a process group; results by rank.

    beside: torchrun's ranks, each of which makes this call and starts its own rank alone.
    Raises AutoparError as a rank raised it, RankError for anything else, also for a rank that dies without a word, is
    stopped for stopped_seconds, or does not answer in time, all in timeout_seconds and within a collective in
    group_seconds, SystemExit where this process is told to end (SIGTERM), once the ranks have ended. No process is left
    behind, even if this one is killed.
    """
    context: Any = mp.get_context(_start_method())
    processes: list[Any] = []
    receivers: list[Connection] = []
    are_done = False
    is_forked = context.get_start_method() == "fork"
    if not is_forked:
        check_sendable(function, args, who=why_not_forked() or GPUS)
    ranks = range(num_ranks) if beside is None else [beside.rank]
    programs = [given for given in args if isinstance(given, GeneratedProgram)] if is_forked else []
    with temporary_folder() as folder, passing_on_sigterm() as told, share_packages(programs, folder):
        meeting: Callable[[float], Any]
        local: tuple[int, int] | None
        if beside is None:
            meeting, local = partial(_file_store, str(folder / "store"), num_ranks), None
            board_path = str(folder / "board")
            board = Board.at(board_path, num_ranks)
        else:
            board_path, board = "", None
            meeting, local = beside.next_run(), (beside.local_rank, beside.local_size)
        try:
            for rank in ranks:
                receiver, sender = context.Pipe(duplex=False)
                place = (rank, num_ranks, *(local or (rank, num_ranks)))
                given = (place, meeting, group_seconds, os.getpid(), sender, function, args, board_path)
                # Not a daemon: a rank may have processes of its own, such as a DataLoader's workers.
                process = context.Process(target=_rank_main, name=f"rank {rank}", args=given, daemon=False)
                _start(process)
                # Before the next one is forked: only its own rank holds a pipe open, so that its death closes it.
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            if beside is None:
                found = collect(processes, receivers, timeout_seconds, stopped_seconds, board, told)
            else:
                found = _collect_beside(beside, processes, receivers, timeout_seconds, stopped_seconds)
            are_done = True
            return found
        finally:
            end(processes, are_done)


def _start(process: Any) -> None:
    """Raises ConstraintError where a process that is not forked cannot be sent what it works on."""
    try:
        process.start()
    except CANNOT_BE_SENT as error:
        raise not_sendable(error, why_not_forked() or GPUS) from error


def _start_method() -> str:
    """How ranks are started."""
    return "spawn" if why_not_forked() else "fork"


def _file_store(path: str, num_ranks: int, seconds: float) -> Any:
    store: Any = dist.FileStore(path, num_ranks)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=seconds))
    return store


def _collect_beside(
    beside: TorchrunRank, processes: Sequence[Any], receivers: Sequence[Connection], timeout: float, stopped: float
) -> list[Any]:
    """What the processes of all of torchrun's ranks answer. Raises on every rank alike."""
    try:
        outcome = ("ok", collect(processes, receivers, timeout, stopped)[0])
    except (AutoparError, RankError) as error:
        outcome = ("error", error)
    outcomes = beside.exchange(outcome)
    errors = [value for kind, value in outcomes if kind == "error"]
    if errors:  # of what went wrong, rather than of who lost or waited for whom it went wrong for
        lost = (*LOST, "timed out")
        raise min(errors, key=lambda each: any(word in str(each).lower() for word in lost))
    return [value for _, value in outcomes]


def meet(timeout_seconds: float) -> None:
    """Two processes of this machine add a number over gloo. Raises RankError where they do not in that time."""
    sums = run_ranks(_sum_of_ranks, (), 2, timeout_seconds, timeout_seconds)
    if sums != [1.0, 1.0]:
        raise RankError(f"two processes added 0 and 1 over gloo, and got {sums}")


def _sum_of_ranks() -> float:
    number = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(number, group=dist.new_group(backend="gloo"))
    return number.item()


def group_seconds(compiled: GeneratedProgram, wanted: float | None = None) -> float:
    """What is wanted, by default GROUP_SECONDS; more where ranks compile."""
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
    # A forked rank need not look for garbage in what its parent has made, which would also copy it page by page.
    gc.freeze()
    # Ctrl-C reaches every process of a terminal: the parent's answer to it ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_on(signal.SIGTERM)
    torch.set_num_threads(1)
    rank, num_ranks, local_rank, local_size = place
    try:
        on_cpu = any(is_cpu(given.cluster.groups[0]) for given in args if isinstance(given, GeneratedProgram))
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
        # The bytes themselves: what torch would send of a tensor is fetched from its process, which is gone by then.
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
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending, and has files to remove
        sender.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _note(error: BaseException) -> None:
    """Let the other ranks, and this process's parent, know what ends this rank."""
    if (own := watch.current()) is not None:
        own.note(error)


def launch_program(
    compiled: GeneratedProgram,
    function: Callable[..., Any],
    *args: Any,
    max_restarts: int = 0,
    collective_seconds: float | None = None,
) -> list[Any]:
    """Run `function(step, *args)` on every rank, as processes of this machine; returns the results by rank.

    collective_seconds: how long ranks wait for one another, by default 120; a rank that the others wait for longer ends
    the run with an error that names it. max_restarts: how often all ranks are started again after an error.
    Where ranks are spawned (GPUs), `function`, `args` and the optimizer factory must be picklable.
    Raises AutoparError as a rank raised it, RankError for anything else that ends a rank.
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
    """Run a launched rank, which finds its place in the environment too, as under torchrun."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return function(build_step(compiled), *args)


def launch_main(main: Path, arguments: Sequence[str], num_ranks: int) -> None:
    """Run a script, such as a saved program's `main.py`, as torchrun would.

    Raises RankError where a rank fails, with what its record says, or the last line that it wrote to stderr (all of
    which is seen as it comes); SystemExit where this process, or a rank, was told to end and the ranks have ended.
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
    """What went wrong where a rank ended first: an error of a rank's own, also of one that has no record (the script
    starts no watch, or the rank did not come so far), rather than of one that waited, or was ended with the others."""
    said = {rank: _last_words(folder, rank) or _end_of(code)}
    said |= {other: _last_words(folder, other) for other in range(len(records)) if other != rank}
    if not any(each is not None and each.raised and each.is_own for each in records):
        for other, words in said.items():
            is_error = other == rank or "Error" in words
            if records[other] is None and is_error and not is_of_another(words):
                return f"rank {other} of {main}: {words}"
    cause = cause_of(records, time.time())
    return f"{main}: {cause}" if cause else f"rank {rank} of {main}: {said[rank]}"


def _last_words(folder: Path, rank: int) -> str:
    """The last line of a rank's error, or of all that it wrote to stderr; "" where it wrote nothing."""
    written = sorted(folder.glob(f"**/{rank}/stderr.log"))
    lines = written[-1].read_text(errors="replace").strip().splitlines() if written else []
    mark = f"[rank{rank}]: "  # torch's, on each line of an error, once there is a process group
    return ([line for line in lines if line.startswith(mark)] or lines or [""])[-1].removeprefix(mark)


def _end_of(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _elastic_config(count: int, logs: Any) -> Any:
    # A restarted attempt must not meet the keys of the one before it (pytorch's shared rendezvous store does).
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
