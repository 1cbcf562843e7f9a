"""Processes of this machine that run one generated program after another and compare each with eager training.

Starting processes takes longer than two steps of a tiny model, and a campaign runs hundreds of programs.
"""

from __future__ import annotations

import copy
import multiprocessing as mp
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.compiled import CompiledProgram
from autopar.verify import sgd_with_momentum
from examples.models import Example

STEPS = 2
VANISHING = 1e-3
"""Of the largest parameter's norm: a smaller one (a key's bias, whose gradient is round-off) is compared with this."""
SECONDS = 60.0
"""After which ranks that do not answer are taken for hanging."""


class RankPool:
    """`num_ranks` forked processes with a gloo group. The process that makes it must not have run a backward."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.processes: list[Any] = []

    def error(self, compiled: CompiledProgram, example: Example) -> float:
        """The largest relative error of losses and parameters after STEPS steps on rotated batches.

        Raises RuntimeError with a rank's traceback, or where ranks hang; the pool then starts anew."""
        if not self.processes:
            self._start()
        job = pickle.dumps((compiled, example))
        for jobs in self.jobs:
            jobs.put(job)
        found: list[float] = []
        deadline = time.monotonic() + SECONDS
        while len(found) < self.num_ranks:
            try:
                outcome, value = self.results.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                raise RuntimeError(f"no answer within {SECONDS:.0f} s") from None
            if outcome == "error":
                self.close()
                raise RuntimeError(value)
            found.append(value)
        return max(found)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []

    def _start(self) -> None:
        context: Any = mp.get_context("fork")
        self.results = context.Queue()
        self.jobs = [context.Queue() for _ in range(self.num_ranks)]
        store = str(Path(tempfile.mkdtemp(prefix="rank_pool_")) / "store")
        self.processes = [
            context.Process(target=_work, args=(rank, self.num_ranks, store, jobs, self.results), daemon=True)
            for rank, jobs in enumerate(self.jobs)
        ]
        for process in self.processes:
            process.start()


def _work(rank: int, num_ranks: int, store: str, jobs: Any, results: Any) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout)
    while True:
        compiled, example = pickle.loads(jobs.get())
        try:
            results.put(("ok", _error(compiled, example)))
        except BaseException:
            results.put(("error", traceback.format_exc()))
            raise


def _error(compiled: CompiledProgram, example: Example) -> float:
    """On every rank; 0 but on the first."""
    step = compiled.build()
    rows = compiled.plan.global_batch_size
    batches = [_rotated(example.inputs, rows, shift) for shift in range(STEPS)]
    losses = [float(step(compiled.local_batch(batch))) for batch in batches]
    state = step.full_state_dict()
    return _difference(losses, state, example, batches) if dist.get_rank() == 0 else 0.0


def _difference(
    losses: list[float], state: Mapping[str, torch.Tensor], example: Example, batches: list[dict[str, torch.Tensor]]
) -> float:
    """Losses and trained parameters beside those of the model trained eagerly, whole."""
    model = copy.deepcopy(example.model).train()
    optimizer = sgd_with_momentum([p for p in model.parameters() if p.requires_grad])
    worst = 0.0
    for batch, found in zip(batches, losses, strict=True):
        optimizer.zero_grad()
        loss = replace(example, model=model, inputs=batch).loss()
        torch.autograd.backward(loss)
        optimizer.step()
        expected = float(loss.detach())
        worst = max(worst, abs(found - expected) / abs(expected)) if found == found else float("inf")
    trained = {name: parameter.detach() for name, parameter in model.named_parameters()}
    least = VANISHING * max(float(parameter.norm()) for parameter in trained.values())
    for name, parameter in trained.items():
        error = float((state[name].cpu() - parameter).norm()) / max(float(parameter.norm()), least)
        worst = max(worst, error) if error == error else float("inf")
    return worst


def _rotated(batch: Mapping[str, torch.Tensor], rows: int, shift: int) -> dict[str, torch.Tensor]:
    """`rows` rows of the batch, again from the start where it has less, from row `shift` on."""
    return {name: value[(torch.arange(rows) + shift) % len(value)] for name, value in batch.items()}
