"""Processes of this machine that run one generated program after another and compare each with eager training.

Starting processes takes longer than two steps of a tiny model, and a campaign runs hundreds of programs. Eager training
has a process of its own per program, forked from the one that built the model: models of transformers do not compute
the same where they were only unpickled, since their classes register what they capture when they are first built.
"""

from __future__ import annotations

import copy
import multiprocessing as mp
import pickle
import queue
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.compiled import CompiledProgram
from autopar.verify import sgd_with_momentum
from examples.models import Example


@dataclass(frozen=True, slots=True)
class Trained:
    """The loss and the gradients of every step, and the parameters and buffers after the last, all by name."""

    losses: list[float]
    gradients: list[Mapping[str, Tensor]]
    state: Mapping[str, Tensor]


STEPS = 3
VANISHING = 1e-3
"""Of the largest norm of its kind: a smaller tensor (a key's bias, whose gradient is round-off) is compared with it."""
PROGRAMS = 12
"""After which the processes are made anew: a group's threads, which poll, live as long as its process."""
SECONDS = 180.0
"""After which ranks that do not answer are taken for hanging."""


class RankPool:
    """`num_ranks` forked processes with a gloo group. The process that makes it must not have run a backward."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.context: Any = mp.get_context("fork")
        self.processes: list[Any] = []
        self.num_programs = 0
        self.folder = Path()

    def error(self, compiled: CompiledProgram, example: Example) -> float:
        """The largest relative error of losses, gradients, and parameters after STEPS steps on rotated batches.

        Raises RuntimeError with a process's traceback, or where one hangs; the pool then starts anew."""
        if self.num_programs == PROGRAMS:
            self.close()
        if not self.processes:
            self._start()
        self.num_programs += 1
        rows = compiled.plan.global_batch_size
        batches = [_rotated(example.inputs, rows, shift) for shift in range(STEPS)]
        eager = self.context.Process(target=_answer, args=(self.results, _eager, example, batches), daemon=True)
        self.processes.append(eager)
        eager.start()
        (expected,) = self._answers(1)
        eager.join()
        self.processes.remove(eager)
        job = pickle.dumps((compiled, batches, expected))
        for jobs in self.jobs:
            jobs.put(job)
        return max(self._answers(self.num_ranks))

    def _answers(self, count: int) -> list[Any]:
        """What so many processes find."""
        found: list[Any] = []
        deadline = time.monotonic() + SECONDS
        while len(found) < count:
            try:
                is_error, value = pickle.loads(self.results.get(timeout=max(0.1, deadline - time.monotonic())))
            except queue.Empty:
                self.close()
                raise RuntimeError(f"no answer within {SECONDS:.0f} s") from None
            if is_error:
                self.close()
                raise RuntimeError(value)
            found.append(value)
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.num_programs = [], 0
        if self.folder.name:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = Path()

    def _start(self) -> None:
        self.results = self.context.Queue()
        self.jobs = [self.context.Queue() for _ in range(self.num_ranks)]
        self.folder = Path(tempfile.mkdtemp(prefix="rank_pool_"))
        store = str(self.folder / "store")
        self.processes = [
            self.context.Process(target=_work, args=(rank, self.num_ranks, store, jobs, self.results), daemon=True)
            for rank, jobs in enumerate(self.jobs)
        ]
        for process in self.processes:
            process.start()


def _work(rank: int, num_ranks: int, store: str, jobs: Any, results: Any) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout)
    while True:
        _answer(results, _error, *pickle.loads(jobs.get()))


def _answer(results: Any, compute: Callable[..., Any], *arguments: Any) -> None:
    """Put what `compute` returns, or the traceback of what it raises; bytes, since a queue shares tensors' memory."""
    try:
        results.put(pickle.dumps((False, compute(*arguments))))
    except BaseException:
        results.put(pickle.dumps((True, traceback.format_exc())))
        raise


def _error(compiled: CompiledProgram, batches: list[dict[str, Tensor]], expected: Trained) -> float:
    """On every rank; 0 but on the first."""
    step = compiled.build()
    losses, gradients = [], []
    for batch in batches:
        losses.append(float(step.forward_backward(compiled.local_batch(batch))))
        gradients.append(step.gradients())
        step.update()
    found = Trained(losses=losses, gradients=gradients, state=step.full_state_dict())
    return _difference(found, expected) if dist.get_rank() == 0 else 0.0


def _eager(example: Example, batches: list[dict[str, Tensor]]) -> Trained:
    """The losses, the gradients and the trained state of the model on one device."""
    torch.set_num_threads(1)
    model = copy.deepcopy(example.model).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = sgd_with_momentum(list(trained.values()))
    losses, gradients = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = replace(example, model=model, inputs=batch).loss()
        torch.autograd.backward(loss)
        gradients.append({name: p.grad.clone() for name, p in trained.items() if p.grad is not None})
        optimizer.step()
        losses.append(float(loss.detach()))
    kept = {name: b for name, b in model.named_buffers() if name in model.state_dict() and b.is_floating_point()}
    state = {name: p.detach() for name, p in model.named_parameters()} | kept
    return Trained(losses=losses, gradients=gradients, state=state)


def _difference(found: Trained, expected: Trained) -> float:
    """The largest relative one of losses, gradients and state."""
    worst = 0.0
    for loss, other in zip(found.losses, expected.losses, strict=True):
        worst = max(worst, abs(loss - other) / abs(other)) if loss == loss else float("inf")
    own, other_ones = [*found.gradients, found.state], [*expected.gradients, expected.state]
    return max(worst, *(_tensors(these, those) for these, those in zip(own, other_ones, strict=True)))


def _tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative error of a tensor; inf where one that is expected is missing, unless it is all zeros."""
    worst = 0.0
    least = VANISHING * max((float(tensor.norm()) for tensor in expected.values()), default=0.0)
    for name, tensor in expected.items():
        own = found.get(name)
        if own is None:
            worst = float("inf") if tensor.any() else worst
        elif not torch.equal(own.cpu(), tensor):
            error = float((own.cpu() - tensor).norm()) / max(float(tensor.norm()), least)
            worst = max(worst, error) if error == error else float("inf")
    return worst


def _rotated(batch: Mapping[str, Tensor], rows: int, shift: int) -> dict[str, Tensor]:
    """`rows` rows of the batch, again from the start where it has less, from row `shift` on."""
    return {name: value[(torch.arange(rows) + shift) % len(value)] for name, value in batch.items()}
