"""Ranks end with whoever started them, however it goes, and are noticed when they stop; nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import autopar
from autopar import launch
from autopar.errors import ConstraintError
from autopar.files import scratch
from autopar.launch import RankError, run_ranks
from autopar.trainer import Trainer
from autopar.training.config import TrainerConfig
from codegen.runtime.mesh import Mesh
from codegen.runtime.pipeline_ranks import create_stage_mesh

ROOT = Path(__file__).resolve().parents[3]

PARENT = """
import os, signal, sys, time
from pathlib import Path
from autopar.launch import run_ranks
from autopar.files.scratch import lasting_folder
from autopar.running.supervise import exit_on

def rank(folder):
    import torch.distributed as dist
    lasting_folder()
    Path(folder, str(os.getpid())).touch()
    if dist.get_rank() == 0:
        dist.barrier()  # waits for the other in C, where Python hears no signal
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    if sys.argv[2] == "command":
        exit_on(signal.SIGINT, signal.SIGTERM)
    run_ranks(rank, (sys.argv[1],), 2)
"""

TORCHRUN = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
from codegen.runtime.processes import join
if sys.argv[2] == "orphans":
    join("gloo")
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if not first and dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False).check(["x"]):
    Path(sys.argv[1], "met").touch()
join("gloo")
if first:
    dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False).set("x", "1")
dist.barrier()
keys = dist.distributed_c10d._get_default_store()
assert not keys.check(["mark"]), "a key of the attempt before"
dist.barrier()
keys.set("mark", "1")
if first and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
Path(sys.argv[1], f"done{dist.get_rank()}").touch()
dist.destroy_process_group()
"""


def wait_for(condition, seconds: float = 120.0) -> None:
    """Generous: another program may have the cores."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """A zombie, whose parent has not asked for it, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start(tmp_path: Path, *words: str, script: str = PARENT, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    (tmp_path / "script.py").write_text(script)
    for name in ("pids", "temporary"):
        (tmp_path / name).mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *before, str(tmp_path / "script.py"), str(tmp_path / "pids"), *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def ranks_of(tmp_path: Path) -> list[int]:
    return [int(path.name) for path in (tmp_path / "pids").iterdir()]


def swept(temporary: Path) -> bool:
    with scratch.temporary_folder() as folder:
        return list(temporary.iterdir()) == [folder]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        pytest.param(signal.SIGKILL, "library", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "library", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "command", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "command", marks=pytest.mark.slow),
    ],
)
def test_ranks_end_with_their_parent(number: int, kind: str, tmp_path: Path, monkeypatch) -> None:
    parent = start(tmp_path, kind)
    wait_for(lambda: len(ranks_of(tmp_path)) == 2)
    ranks = ranks_of(tmp_path)
    os.kill(ranks[0], signal.SIGSTOP)  # even one that is stopped
    parent.send_signal(number)
    code = parent.wait(900)
    wait_for(lambda: not any(map(is_alive, ranks)), 30)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    left = list((tmp_path / "temporary").iterdir())
    if number == signal.SIGKILL:
        assert left
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        wait_for(lambda: swept(tmp_path / "temporary"), 30)  # threads of a dead process may be a moment longer
    else:
        assert not [path for path in left if not (path / "in_use").exists()]


def stop_rank_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


@pytest.mark.distributed
def test_a_stopped_rank_is_noticed() -> None:
    with pytest.raises(RankError, match=r"rank 1 \(process \d+\) has been stopped for 1 s"):
        run_ranks(stop_rank_one, (), 2, stopped_seconds=1.0)


def hang() -> None:
    import torch.distributed as dist

    is_hanging = dist.get_rank() == 1
    while is_hanging:
        pass
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_computes_forever_is_named() -> None:
    """When the others, which are given the time to get there on a busy machine, give up waiting for it. Ranks that
    sleep are in test_named_ranks.py."""
    with pytest.raises(RankError, match=r"rank 1 .*in hang\(\) at test_supervise"):
        run_ranks(hang, (), 3, group_seconds=8.0)


def timeouts_of(axes: tuple[str, ...], sizes: tuple[int, ...], parts: bool) -> set[float]:
    """Of all groups, in seconds."""
    if parts:
        create_stage_mesh([(axes, sizes), (axes, sizes)])
    else:
        Mesh.create(axes, sizes).joint(axes[:2])
    groups = torch.distributed.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert len(backends) > 2
    return {backend.options._timeout.total_seconds() for backend in backends}


@pytest.mark.distributed
@pytest.mark.parametrize("parts", [False, True])
def test_all_groups_of_a_mesh_wait_as_long_as_the_first(parts: bool) -> None:
    sizes = (2, 1, 2) if parts else (2, 2, 2)
    timeouts = run_ranks(timeouts_of, (("ddp", "dp", "tp"), sizes, parts), 8, group_seconds=777.0)
    assert timeouts == [{777.0}] * 8


@dataclass(frozen=True)
class SlowAt:
    """Batches of which rank 1 never gets the one at `sample`."""

    sample: int

    def __call__(self, start: int) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            if start == self.sample and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
                time.sleep(1000)
            yield {"x": torch.ones(4, 8)}
            start += 4


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


@pytest.mark.slow
@pytest.mark.distributed
def test_users_say_how_long_ranks_wait_for_one_another() -> None:
    config = TrainerConfig(cluster="2 cpu", steps=3, log_every=0, constraints={"dp": 2}, collective_seconds=8.0)
    with pytest.raises(RankError, match=r"rank 1 .*in __call__\(\) at test_supervise"):
        Trainer(Net(), config, SlowAt(4)).fit()
    for wrong in (0, -1.0, float("nan"), "60"):
        with pytest.raises(ConstraintError, match="collective_seconds is a finite number above 0"):
            TrainerConfig(collective_seconds=wrong)


def load_with_workers() -> list[int]:
    loader = DataLoader(torch.arange(8), batch_size=4, num_workers=2)
    return [int(batch.sum()) for batch in loader]


@pytest.mark.distributed
def test_a_rank_may_have_processes_of_its_own() -> None:
    assert run_ranks(load_with_workers, (), 2) == [[6, 22], [6, 22]]


def with_tensors() -> dict[str, torch.Tensor]:
    return {"rank": torch.full((4,), dist.get_rank()), "weight": nn.Parameter(torch.arange(3.0))}


@pytest.mark.distributed
def test_tensors_are_there_when_their_rank_is_gone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    meeting = partial(launch._file_store, str(tmp_path / "store"), 1)
    task = ((0, 1, 0, 1), meeting, 60.0, os.getpid(), sender, with_tensors, ())
    rank = context.Process(target=launch._rank_main, args=task)
    rank.start()
    rank.join()
    kind, tensors = receiver.recv()
    assert kind == "ok" and tensors["rank"].tolist() == [0] * 4 and tensors["weight"].tolist() == [0.0, 1.0, 2.0]


def leave(code: int) -> None:
    sys.exit(code)


@pytest.mark.distributed
def test_a_rank_that_leaves_is_an_error() -> None:
    with pytest.raises(RankError, match="died with exit code 0"):
        run_ranks(leave, (0,), 2)


def break_off(step: Any, number: int) -> None:
    """The last rank's connections are gone a while before itself, as of a process whose memory is being freed."""
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        time.sleep(1.5)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(600)
    while True:
        dist.all_reduce(torch.ones(1000))


@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_was_ended_is_named_and_not_who_lost_it(number: int) -> None:
    name = signal.Signals(number).name
    with pytest.raises(RankError, match=rf"^rank 1 died with exit code -{number:d} \(ended by {name}\)$"):
        run_ranks(break_off, (None, number), 2)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_launched_rank_that_was_ended_is_named() -> None:
    inputs = torch.ones(4, 4), torch.zeros(4, 4)
    program = autopar.compile(nn.Linear(4, 4), "2 cpu", example_inputs=inputs, loss_fn=nn.functional.mse_loss)
    with pytest.raises(RankError, match=r"^rank 1 died with exit code -9 \(ended by SIGKILL\)$"):
        program.launch(break_off, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_of_torchrun_end_with_it(tmp_path: Path) -> None:
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    parent = start(tmp_path, "orphans", script=TORCHRUN, before=agent)
    wait_for(lambda: len(ranks_of(tmp_path)) == 2)
    ranks = ranks_of(tmp_path)
    parent.kill()
    parent.wait(900)
    wait_for(lambda: not any(map(is_alive, ranks)), 30)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_new_attempt_of_torchrun_meets_no_keys_of_the_last(tmp_path: Path) -> None:
    """The store itself is the old one, which the script tells by a key outside of the prefix."""
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    assert start(tmp_path, "restart", script=TORCHRUN, before=agent).wait(900) == 0
    assert sorted(path.name for path in (tmp_path / "pids").iterdir()) == ["done0", "done1", "met"]


def test_folders_of_the_living_and_of_strangers_stay(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "autopar_notes").mkdir()
    (tmp_path / "autopar_notes" / "text").touch()
    (tmp_path / "autopar_dead").mkdir()
    (tmp_path / "autopar_dead" / "in_use").touch()
    (tmp_path / "autopar_link").symlink_to(tmp_path / "autopar_notes")
    with scratch.temporary_folder() as first, scratch.temporary_folder() as second:
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"autopar_notes", "autopar_link", first.name, second.name}
    assert {path.name for path in tmp_path.iterdir()} == {"autopar_notes", "autopar_link"}


def test_an_error_of_a_rank_that_did_not_come_to_join_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(path: str, num_ranks: int, seconds: float) -> Any:
        if multiprocessing.current_process().name == "rank 1":
            raise OSError("the store's folder is full")
        return store(path, num_ranks, seconds)

    store = launch._file_store
    monkeypatch.setattr(launch, "_file_store", meet)
    with pytest.raises(RankError, match=r"^rank 1: [\s\S]*OSError: the store's folder is full"):
        run_ranks(os.getpid, (), 2)
