"""The loops behind `Trainer`: one rank of a generated program, or the plain model on one process."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.cluster import ClusterSpec, as_cluster
from autopar.compile import compile_with
from autopar.compiled import CompiledProgram
from autopar.costs.live_bytes import LiveBytes
from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError, TrainingError
from autopar.files.scratch import temporary_folder
from autopar.launch import group_seconds, run_ranks
from autopar.running.surroundings import check_starting
from autopar.running.weights import read_values, set_values, write_values
from autopar.settings.compile_options import CompileOptions
from autopar.training import checkpoints
from autopar.training.config import Batch, Batches, TrainerConfig, TrainResult
from autopar.training.learners import PlainLearner, RankLearner
from autopar.training.loaders import leaves_of_batch, named_batch, num_rows, peeking, untouched
from autopar.training.progress import TrainingProgress
from codegen.runtime.processes import after_the_first, join
from cost_models.mixed import AnyCluster

WARM_STEPS = 2
"""Steps that the median leaves out: memory is followed in them, and torch allocates what later ones reuse."""


def under_launcher() -> bool:
    """Whether torchrun, or the caller, made this process one rank of several."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


@contextlib.contextmanager
def process_group(collective_seconds: float | None) -> Iterator[None]:
    """The default process group for as long as it takes; the caller's own if there is one, which waits as it does."""
    if dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    join("nccl" if torch.cuda.is_available() else "gloo", collective_seconds)
    try:
        with after_the_first():
            yield
            dist.barrier()  # a rank that leaves while others still use their connections to it can abort
    finally:
        dist.destroy_process_group()


def compile_program(
    model: nn.Module,
    config: TrainerConfig,
    batches: Batches,
    loss_fn: Callable[..., torch.Tensor] | None,
    optimizer: Callable[..., torch.optim.Optimizer],
) -> CompiledProgram:
    """autopar.compile with what the configuration says; under a launcher on all ranks together.

    Where this process starts the ranks, a checkpoint of another model or optimiser is refused before planning.
    """
    if not under_launcher():
        checkpoints.require_own(config.checkpoint_directory, model, optimizer)
    cluster = resolve_cluster(config.cluster, config.num_processes)
    if config.measure_memory and config.backend == "inductor" and is_cpu(cluster.groups[0]):
        raise ConstraintError(
            "on a CPU measure_memory follows every tensor, and those of compiled layers cannot be seen",
            values="measure_memory with backend='inductor'",
            alternatives=["backend='eager'", "measure_memory=False"],
        )
    first = first_batch(batches, config)
    options = CompileOptions(example_inputs=first, loss_fn=loss_fn, optimizer=optimizer, **config.common)
    return compile_with(model, cluster, options)


def resolve_cluster(cluster: AnyCluster | str, num_processes: int | None = None) -> AnyCluster:
    """The cluster, with "detect" measured: by rank 0 alone, so that ranks do not disturb one another."""
    if cluster != "detect":
        return as_cluster(cluster)
    if not dist.is_initialized():
        return ClusterSpec.detect(num_processes)
    found: list[Any] = [ClusterSpec.detect(num_processes or dist.get_world_size()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    spec: AnyCluster = found[0]
    return spec


def fit_locally(program: CompiledProgram, config: TrainerConfig, batches: Batches) -> TrainResult:
    """Start the program's ranks on this machine and train; the program's model then has what they learned."""
    check_starting("fit")
    program.require_runnable()
    ranks, patience = program.plan.num_ranks, group_seconds(program, config.collective_seconds)
    with temporary_folder() as folder:
        args = (program, config, batches, folder)
        results: list[TrainResult] = run_ranks(fit_rank, args, ranks, math.inf, patience)
        set_values(program.model, read_values(folder))
    peaks = tuple(peak for result in results for peak in result.peak_bytes)
    return replace(results[0], peak_bytes=peaks, program=program)


def fit_ranks(program: CompiledProgram, config: TrainerConfig, batches: Batches) -> TrainResult:
    """Train as one rank of those that a launcher started; every rank gets the same result and trained model."""
    mine = fit_rank(program, config, batches)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, mine.peak_bytes)
    return replace(mine, peak_bytes=tuple(itertools.chain(*peaks)), program=program)


def fit_rank(
    program: CompiledProgram, config: TrainerConfig, batches: Batches, trained: Path | None = None
) -> TrainResult:
    """This rank's part of the training; peak_bytes holds its own figure.

    trained: where rank 0 leaves the trained values for another process; None puts them into this one's model.
    """
    with _Memory(config.measure_memory) as memory:
        learner = RankLearner(program, config)
        result = _loop(learner, config, batches, program.plan.global_batch_size, memory, program)
    if trained is not None:
        write_values(learner.step.whole_tensors(rank0_only=True), trained)
    else:
        set_values(program.model, learner.step.whole_tensors())
    return result


def fit_plain(
    model: nn.Module,
    config: TrainerConfig,
    batches: Batches,
    loss_fn: Callable[..., torch.Tensor] | None,
    optimizer: Callable[..., torch.optim.Optimizer],
) -> TrainResult:
    """Train the model itself, eagerly, on this process, with the dropout masks that a generated program would draw."""
    rows = num_rows(first_batch(batches, config))
    with _Memory(config.measure_memory) as memory:
        learner = PlainLearner(model=model, loss_fn=loss_fn, factory=optimizer, config=config, batch_size=rows)
        return _loop(learner, config, batches, rows, memory, None)


def first_batch(batches: Batches, config: TrainerConfig) -> Any:
    """The first of the batches, which have the rows of a whole step. Raises ConstraintError, DataError."""
    with peeking(batches):
        first = named_batch(next(batches_from(batches, 0, 1)))
    rows = num_rows(first)
    if config.global_batch_size not in (None, rows):
        raise ConstraintError(
            "a batch has the rows of the whole step, over all ranks",
            values=f"{rows} rows, global_batch_size={config.global_batch_size}",
        )
    return first


def batches_from(batches: Batches, start_sample: int, batch_size: int) -> Iterator[Batch]:
    """Endless batches from a sample on. Raises ConstraintError if there are none."""
    if callable(batches):
        found = batches(start_sample)
        if not isinstance(found, Iterable):
            raise ConstraintError(
                "batches(start) gives no batches", values=type(found).__name__, alternatives="a generator function"
            )
        yield from found
        raise ConstraintError("batches(start) ended", alternatives="an iterator without end, or fewer steps")
    to_skip = start_sample // batch_size
    again = untouched(batches)
    while True:
        count = 0
        for batch in again:
            count += 1
            if to_skip:
                to_skip -= 1
            else:
                yield batch
        if not count:
            raise ConstraintError("there are no batches", values=type(batches).__name__)


def _loop(
    learner: RankLearner | PlainLearner,
    config: TrainerConfig,
    batches: Batches,
    batch_size: int,
    memory: _Memory,
    program: CompiledProgram | None,
) -> TrainResult:
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses: list[float] = []
    seconds: list[float] = []
    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(checkpoints.locked(config.checkpoint_directory))
        checkpoint = checkpoints.resume(config.checkpoint_directory, learner.load, rank == 0)
        first = learner.num_steps
        source = batches_from(batches, learner.num_samples, batch_size)
        progress: TrainingProgress | None = None
        for done in range(first + 1, config.steps + 1):
            batch = named_batch(next(source))
            if rank == 0 and progress is None:
                progress = stack.enter_context(_progress(batch, config, first, program))
            started = time.perf_counter()
            with _stopping(checkpoint):
                losses.append(learner(batch))
            if done == first + 1 and config.checkpoint_directory:
                learner.check()
            seconds.append(time.perf_counter() - started)
            memory.after_step(done - first)
            if progress is not None:
                progress.advance(done, losses[-1], seconds[-1], learner.num_skipped)
            is_due = done == config.steps or (config.checkpoint_every and done % config.checkpoint_every == 0)
            if config.checkpoint_directory and is_due:
                with _stopping(checkpoint):
                    checkpoint = checkpoints.write(
                        config.checkpoint_directory, done, learner.save, rank == 0, _barrier, config.keep_checkpoints
                    )
    steady = seconds[WARM_STEPS:] or seconds
    median = statistics.median(steady) if steady else 0.0
    peaks = () if memory.peak_bytes is None else (memory.peak_bytes,)
    return TrainResult(
        losses=tuple(losses),
        first_step=first,
        step_seconds=median,
        peak_bytes=peaks,
        num_samples=learner.num_samples,
        checkpoint=checkpoint,
        num_skipped=learner.num_skipped,
    )


@contextlib.contextmanager
def _stopping(checkpoint: Path | None) -> Iterator[None]:
    """Raises TrainingError, with what to go on from, for numbers that are no longer finite."""
    try:
        yield
    except FloatingPointError as error:
        kept = f"the last checkpoint, {checkpoint}, is from before" if checkpoint else "there is no checkpoint"
        raise TrainingError(
            "training stopped: its numbers are no longer finite",
            values=f"{error}; {kept}",
            alternatives=["a lower learning_rate, max_grad_norm=1.0, other data", "non_finite='skip' to pass over it"],
        ) from None


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _progress(batch: Batch, config: TrainerConfig, first: int, program: CompiledProgram | None) -> TrainingProgress:
    tokens = max((v.numel() for v in leaves_of_batch(batch) if is_token_tensor(v)), default=0)
    label = program.plan.mesh_text if program else "one process"
    predicted = program.plan.prediction.step_seconds if program else 0.0
    items, unit = (tokens, "tokens") if tokens else (num_rows(batch), "samples")
    return TrainingProgress(
        label=label,
        steps=config.steps,
        first=first,
        num_items=items,
        unit=unit,
        predicted_seconds=predicted,
        log_every=config.log_every,
    )


def is_token_tensor(value: Any) -> bool:
    """Whether an input looks like token numbers: integers in two dimensions."""
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


class _Memory:
    """Follows tensors of the first steps on CPU when asked to; asks the allocator on GPUs."""

    def __init__(self, is_wanted: bool) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.peak_bytes: int | None = None
        self.stack = contextlib.ExitStack()
        self.live = LiveBytes() if is_wanted and not self.on_gpu else None

    def __enter__(self) -> _Memory:
        if self.live is not None:
            self.stack.enter_context(self.live)
        return self

    def __exit__(self, *details: object) -> None:
        self.stack.close()

    def after_step(self, num_done: int) -> None:
        """The second step is the one that counts: the first makes the optimiser's state."""
        if self.on_gpu:
            if num_done == 1:
                torch.cuda.reset_peak_memory_stats()
            self.peak_bytes = torch.cuda.max_memory_allocated()
        elif self.live is not None and num_done <= WARM_STEPS:
            self.peak_bytes = self.live.peak_bytes
            self.live.reset_peak()
            if num_done == WARM_STEPS:
                self.stack.close()
