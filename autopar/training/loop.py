"""The ways to run a `Trainer`'s setup: on ranks that this process starts, as one rank of a launcher, or plainly."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.cluster import ClusterSpec, as_cluster, is_on_cpu
from autopar.compile import compile_with
from autopar.compiled import CompiledProgram
from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from autopar.files.scratch import temporary_folder
from autopar.frontend.state.values import Key
from autopar.launch import RankError, group_seconds, run_ranks
from autopar.running.process_group import destroy_group, start_group, under_launcher
from autopar.running.process_state import check_starting
from autopar.running.weights import read_values, set_values, write_values
from autopar.settings.compile_options import CompileOptions
from autopar.training import checkpoints
from autopar.training.callbacks import sendable_attributes, set_attributes
from autopar.training.config import TrainerConfig
from autopar.training.feeding import check_accumulation, first_batch
from autopar.training.learners import PlainLearner, RankLearner
from autopar.training.loaders import rows_of_batches
from autopar.training.measuring import Memory
from autopar.training.metrics import NO_LOGITS
from autopar.training.result import BY_SIGTERM, TrainResult
from autopar.training.run import Run, Setup
from autopar.training.shapes import plan_for_rows
from codegen.runtime import watch
from codegen.runtime.processes import after_the_first
from cost_models.mixed_cluster import AnyCluster


@contextlib.contextmanager
def process_group(config: TrainerConfig) -> Iterator[None]:
    """Start the default process group for the context, or use the caller's with its own timeout.

    Raises RankError where ranks wait for one that does not go on.
    """
    if dist.is_initialized():
        with _named():
            yield
        return
    start_group(config.collective_seconds, is_on_cpu(config.cluster))
    try:
        with _named(), after_the_first():
            yield
            dist.barrier()  # a rank that leaves while others still use their connections to it can abort
    finally:
        watch.end()
        destroy_group()


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Raise errors of the process group as the RankError that names the rank that did not go on."""
    try:
        yield
    except RuntimeError as error:
        watcher = watch.current()
        if watcher is not None and (cause := watcher.note(error)):
            raise RankError(cause) from error
        if isinstance(error, watch.RanksDiffer):
            raise RankError(str(error)) from error
        raise


def compile_program(setup: Setup) -> CompiledProgram:
    """Compile the setup's model by its configuration; under a launcher on all ranks together.

    Where this process starts the ranks, a checkpoint of another model or optimizer is refused before planning.
    """
    config = setup.config
    if not under_launcher():
        checkpoints.require_same_run(config.checkpoint_directory, setup.model, setup.optimizer)
    cluster = resolve_cluster(config.cluster, config.num_processes)
    if config.measure_memory and config.backend == "inductor" and is_cpu(cluster.groups[0]):
        raise ConstraintError(
            "measure_memory follows every tensor on a CPU, and cannot see those of compiled layers",
            values="measure_memory with backend='inductor'",
            alternatives=["backend='eager'", "measure_memory=False"],
        )
    first = first_batch(setup.batches, config)
    options = CompileOptions(example_inputs=first, loss_fn=setup.loss_fn, optimizer=setup.optimizer, **config.common)
    program = compile_with(setup.model, cluster, options)
    if setup.eval_batches is not None and (reason := program.program.any.no_evaluation):
        raise ConstraintError("this program has no evaluation mode", values=reason, alternatives="no eval_batches")
    if setup.metrics and program.program.any.logits is None:
        raise ConstraintError(NO_LOGITS, values=program.plan.mesh_text, alternatives="no metrics")
    check_accumulation(program, config.gradient_accumulation_steps)
    sizes = rows_of_batches(setup.batches) if config.gradient_accumulation_steps == 1 else set()
    for rows in sizes | (rows_of_batches(setup.eval_batches) if setup.eval_batches is not None else set()):
        plan_for_rows(program.plan, rows)
    return program


def resolve_cluster(cluster: AnyCluster | str, num_processes: int | None = None) -> AnyCluster:
    """Return the cluster. Rank 0 alone detects it for "detect", so that ranks do not disturb one another.

    Raises ConstraintError where num_processes differs from the devices of a cluster that the user describes.
    """
    if cluster != "detect":
        described = as_cluster(cluster)
        if num_processes not in (None, described.num_devices):
            raise ConstraintError(
                "num_processes is the number of processes on a detected machine, and this cluster is described",
                values={"num_processes": num_processes, "cluster": str(cluster)},
                alternatives=[f"num_processes={described.num_devices}, or none", 'cluster="detect"'],
            )
        return described
    if not dist.is_initialized():
        return ClusterSpec.detect(num_processes)
    box: list[Any] = [ClusterSpec.detect(num_processes or dist.get_world_size()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    spec: AnyCluster = box[0]
    return spec


def fit_locally(program: CompiledProgram, setup: Setup) -> TrainResult:
    """Start the program's ranks on this machine and train. The program's model gets the trained values."""
    check_starting("fit")
    program.require_runnable()
    ranks, patience = program.plan.num_ranks, group_seconds(program, setup.config.collective_seconds)
    with temporary_folder() as folder:
        outcomes: list[tuple[TrainResult, list[dict[str, Any]], list[tuple[Key, Any]]]] = run_ranks(
            _fit_and_send, (program, setup, folder), ranks, math.inf, patience
        )
        first, attributes, changes = outcomes[0]
        if first.stopped != BY_SIGTERM and not stays_on_disk(setup):
            set_values(program.model, read_values(folder), program.loss_fn)
    set_attributes(setup.callbacks, attributes)
    if program.state is not None:
        program.state.apply(changes)
    peaks = tuple(peak for result, _, _ in outcomes for peak in result.peak_bytes)
    return replace(first, peak_bytes=peaks, program=program, model=program.model)


def _fit_and_send(
    program: CompiledProgram, setup: Setup, folder: Path
) -> tuple[TrainResult, list[dict[str, Any]], list[tuple[Key, Any]]]:
    """Return a rank's result; and rank 0's changes of its callbacks and of the model, as far as they can be sent."""
    result = fit_rank(program, setup, folder)
    if dist.get_rank() > 0:
        return result, [], []
    changes = program.state.changes(is_training=False) if program.state is not None and setup.callbacks else []
    moved = [(change.key, change.new) for change in changes if change.key and change.is_movable]
    return result, sendable_attributes(setup.callbacks), moved


def fit_ranks(program: CompiledProgram, setup: Setup) -> TrainResult:
    """Train as one rank of a launcher. Every rank gets the same result and the trained model."""
    result = fit_rank(program, setup)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, result.peak_bytes)
    return replace(result, peak_bytes=tuple(itertools.chain(*peaks)), program=program, model=program.model)


def fit_rank(program: CompiledProgram, setup: Setup, trained: Path | None = None) -> TrainResult:
    """Train this rank's part; peak_bytes is this rank's.

    trained: the folder where rank 0 leaves the trained values for another process; None sets them in this one's model.
    """
    with Memory(setup.config.measure_memory, is_cpu(program.cluster.groups[0])) as memory:
        learner = RankLearner(program, setup.config)
        result = Run(learner, setup, memory, program).result()
    if stays_on_disk(setup) or result.stopped == BY_SIGTERM:
        return result
    if trained is not None:
        write_values(learner.step.whole_tensors(rank0_only=True, all_written=True), trained)
    else:
        set_values(program.model, learner.step.whole_tensors(all_written=True), program.loss_fn)
    return result


def stays_on_disk(setup: Setup) -> bool:
    """Return whether trained values stay in the last checkpoint, since the model's own are not in memory and would take
    more than half of the machine's."""
    unloaded = [p for p in setup.model.parameters() if p.device.type == "meta"]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    is_written = setup.config.checkpoint_directory is not None
    return is_written and sum(p.numel() * p.element_size() for p in unloaded) > memory / 2


def fit_plain(setup: Setup) -> TrainResult:
    """Train the model itself, eagerly, on this process, with the dropout masks that a generated program would draw."""
    config = setup.config
    first_batch(setup.batches, config)
    with Memory(config.measure_memory, not any(p.is_cuda for p in setup.model.parameters())) as memory:
        learner = PlainLearner(model=setup.model, loss_fn=setup.loss_fn, factory=setup.optimizer, config=config)
        return replace(Run(learner, setup, memory, None).result(), model=setup.model)
