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
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.compiled import CompiledProgram
from autopar.verify import sgd_with_momentum
from examples.models import Example

Trained = tuple[list[float], Mapping[str, Tensor]]
"""The loss of every step, and the parameters after the last."""

STEPS = 2
VANISHING = 1e-3
"""Of the largest parameter's norm: a smaller one (a key's bias, whose gradient is round-off) is compared with this."""
SECONDS = 60.0
"""After which ranks that do not answer are taken for hanging."""


class RankPool:
    """`num_ranks` forked processes with a gloo group. The process that makes it must not have run a backward."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.context: Any = mp.get_context("fork")
        self.processes: list[Any] = []

    def error(self, compiled: CompiledProgram, example: Example) -> float:
        """The largest relative error of losses and parameters after STEPS steps on rotated batches.

        Raises RuntimeError with a process's traceback, or where one hangs; the pool then starts anew."""
        if not self.processes:
            self._start()
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
        self.processes = []

    def _start(self) -> None:
        self.results = self.context.Queue()
        self.jobs = [self.context.Queue() for _ in range(self.num_ranks)]
        store = str(Path(tempfile.mkdtemp(prefix="rank_pool_")) / "store")
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
    losses = [float(step(compiled.local_batch(batch))) for batch in batches]
    state = step.full_state_dict()
    return _difference((losses, state), expected) if dist.get_rank() == 0 else 0.0


def _eager(example: Example, batches: list[dict[str, Tensor]]) -> Trained:
    """The losses and the trained parameters of the model on one device."""
    torch.set_num_threads(1)
    model = copy.deepcopy(example.model).train()
    optimizer = sgd_with_momentum([p for p in model.parameters() if p.requires_grad])
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = replace(example, model=model, inputs=batch).loss()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _difference(found: Trained, expected: Trained) -> float:
    """The largest relative one of losses and parameters."""
    worst = 0.0
    for loss, other in zip(found[0], expected[0], strict=True):
        worst = max(worst, abs(loss - other) / abs(other)) if loss == loss else float("inf")
    least = VANISHING * max(float(parameter.norm()) for parameter in expected[1].values())
    for name, parameter in expected[1].items():
        error = float((found[1][name].cpu() - parameter).norm()) / max(float(parameter.norm()), least)
        worst = max(worst, error) if error == error else float("inf")
    return worst


def _rotated(batch: Mapping[str, Tensor], rows: int, shift: int) -> dict[str, Tensor]:
    """`rows` rows of the batch, again from the start where it has less, from row `shift` on."""
    return {name: value[(torch.arange(rows) + shift) % len(value)] for name, value in batch.items()}
