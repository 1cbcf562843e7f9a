"""Starting a program's ranks as processes of this machine.

`launch_program` and `launch_main` go through torch's elastic launcher: errors of one rank end all. `run_ranks` is the
plain form that verification uses: forked processes where nothing but the CPU is used (half a second instead of
fifteen), spawned ones otherwise.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopar.costs.rates import is_cpu
from autopar.errors import AutoparError
from autopar.files.scratch import temporary_folder
from autopar.program import GeneratedProgram
from autopar.running.beside import Beside
from autopar.running.build import build_step, share_packages
from autopar.running.launched import has_gpus
from autopar.running.sendable import CANNOT_BE_SENT, check_sendable, not_sendable
from autopar.running.supervise import STOPPED_SECONDS, collect, end, ending_on_sigterm, exit_on
from autopar.running.supervise import RankError as RankError
from autopar.running.surroundings import check_starting
from autopar.settings.backend import patience_seconds
from codegen.runtime.processes import LOST, after_the_first, end_with_parent, join, note_own_group

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
    beside: Beside | None = None,
) -> list[Any]:
    """Call `function(*args)` in num_ranks processes joined by a process group; results by rank.

    beside: torchrun's ranks, each of which makes this call and starts its own rank alone.
    Raises AutoparError as a rank raised it, RankError for anything else, also for a rank that dies without a word, is
    stopped for stopped_seconds, or does not answer in time, all in timeout_seconds and within a collective in
    group_seconds. No process is left behind, even if this one is killed.
    """
    context: Any = mp.get_context(_start_method())
    processes: list[Any] = []
    receivers: list[Connection] = []
    are_done = False
    is_forked = context.get_start_method() == "fork"
    if not is_forked:
        check_sendable(function, args)
    ranks = range(num_ranks) if beside is None else [beside.rank]
    programs = [given for given in args if isinstance(given, GeneratedProgram)] if is_forked else []
    with temporary_folder() as folder, ending_on_sigterm(), share_packages(programs, folder):
        meeting: Callable[[float], Any]
        local: tuple[int, int] | None
        if beside is None:
            meeting, local = partial(_file_store, str(folder / "store"), num_ranks), None
        else:
            meeting, local = beside.next_run(), (beside.local_rank, beside.local_size)
        try:
            for rank in ranks:
                receiver, sender = context.Pipe(duplex=False)
                place = (rank, num_ranks, *(local or (rank, num_ranks)))
                given = (place, meeting, group_seconds, os.getpid(), sender, function, args)
                # Not a daemon: a rank may have processes of its own, such as a DataLoader's workers.
                process = context.Process(target=_rank_main, name=f"rank {rank}", args=given, daemon=False)
                _start(process)
                # Before the next one is forked: only its own rank holds a pipe open, so that its death closes it.
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            if beside is None:
                found = collect(processes, receivers, timeout_seconds, stopped_seconds)
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
        raise not_sendable(error) from error


def _start_method() -> str:
    """How ranks are started: CUDA, once asked for a device, does not work in a fork."""
    return "fork" if not torch.cuda.is_available() and os.name == "posix" else "spawn"


def _file_store(path: str, num_ranks: int, seconds: float) -> Any:
    store: Any = dist.FileStore(path, num_ranks)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=seconds))
    return store


def _collect_beside(
    beside: Beside, processes: Sequence[Any], receivers: Sequence[Connection], timeout: float, stopped: float
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
        with after_the_first():
            value = function(*args)
            dist.barrier()
        # The bytes themselves: what torch would send of a tensor is fetched from its process, which is gone by then.
        sender.send_bytes(pickle.dumps(("ok", value)))
    except AutoparError as error:
        sender.send(("error", error))
    except SystemExit:
        raise
    except BaseException:
        sender.send(("error", traceback.format_exc()))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending, and has files to remove
        sender.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def launch_program(
    compiled: GeneratedProgram, function: Callable[..., Any], *args: Any, max_restarts: int = 0
) -> list[Any]:
    """Run `function(step, *args)` on every rank, as processes of this machine; returns the results by rank.

    torch's elastic launcher starts them, so a rank that dies ends the others with its error. `function`, `args` and the
    optimiser factory must be picklable (defined at module level).
    """
    check_starting("launch")
    compiled.require_runnable()
    if _start_method() != "fork":
        check_sendable(compiled, function, args)
    count = compiled.plan.num_ranks
    results = elastic_launch(_elastic_config(count, max_restarts), _elastic_main)(compiled, function, args)
    return [results[rank] for rank in range(count)]


def launch_main(main: Path, arguments: Sequence[str], num_ranks: int) -> None:
    """Run a script, such as a saved program's `main.py`, as torchrun would.

    Raises RankError where a rank fails, with the last line that it wrote to stderr (all of which is seen as it comes):
    the first to end, or one that says what went wrong where that one only lost another.
    """
    with temporary_folder() as folder:
        logs = DefaultLogsSpecs(log_dir=str(folder), tee=Std.ERR)
        try:
            elastic_launch(_elastic_config(num_ranks, 0, logs), sys.executable)(str(main), *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            said = _last_words(folder, rank) or _end_of(failure.exitcode)
            others = {other: _last_words(folder, other) for other in range(num_ranks) if other != rank}
            if _is_of_another(said):
                causes = (each for each in others.items() if "Error" in each[1] and not _is_of_another(each[1]))
                rank, said = next(causes, (rank, said))
            raise RankError(f"rank {rank} of {main}: {said}") from None


def _last_words(folder: Path, rank: int) -> str:
    """The last line of a rank's error, or of all that it wrote to stderr; "" where it wrote nothing."""
    written = sorted(folder.glob(f"**/{rank}/stderr.log"))
    lines = written[-1].read_text(errors="replace").strip().splitlines() if written else []
    mark = f"[rank{rank}]: "  # torch's, on each line of an error, once there is a process group
    return ([line for line in lines if line.startswith(mark)] or lines or [""])[-1].removeprefix(mark)


def _is_of_another(said: str) -> bool:
    """Whether an error tells of another rank that is gone."""
    return any(word in said.lower() for word in LOST)


def _end_of(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _elastic_config(count: int, max_restarts: int, logs: Any = None) -> Any:
    # A restarted attempt must not meet the keys of the one before it (pytorch's shared rendezvous store does).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"autopar_{os.getpid()}_{time.monotonic_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        start_method=_start_method(),
        monitor_interval=0.1,
        logs_specs=logs,
    )


def _elastic_main(compiled: GeneratedProgram, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    on_gpu = torch.cuda.is_available() and not is_cpu(compiled.cluster.groups[0])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    join("nccl" if on_gpu else "gloo")
    try:
        with after_the_first():
            result = function(build_step(compiled), *args)
            dist.barrier()  # a rank that leaves while others still use their connections to it can abort
        return result
    finally:
        dist.destroy_process_group()
