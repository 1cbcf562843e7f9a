"""Commands that run something on this machine: `autopar verify | profile | tune | train`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli_options import (
    Backend,
    Batch,
    ClusterText,
    Compress,
    ConstraintFile,
    Force,
    Fp8,
    Memory,
    Model,
    Options,
    Precision,
    Processes,
    Seq,
    Settings,
    compile_job,
    console,
    read_cluster,
    read_compression,
    read_constraints,
    read_job,
)
from autopar.errors import ConstraintError

if TYPE_CHECKING:
    from autopar.integrations.job import Job
    from autopar.profiling.cases import Level
    from autopar.trainer import TrainerConfig, TrainResult


def verify(
    model: Model,
    cluster: ClusterText = "detect",
    processes: Processes = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Precision = "fp32",
    settings: Settings = None,
    memory: Memory = None,
    constraints: ConstraintFile = None,
    option: Options = None,
    backend: Backend = None,
    compress: Compress = None,
    fp8: Fp8 = None,
    plan: Annotated[str | None, typer.Option(help="a plan file to verify instead of searching", metavar="FILE")] = None,
    steps: Annotated[int, typer.Option(help="optimiser steps to compare")] = 3,
    max_grad_norm: Annotated[float | None, typer.Option(help="clip gradients to this norm")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="largest relative error that passes [default: 1e-5; of fp8, its rounding]")
    ] = None,
) -> None:
    """Run the generated program beside the single-process model on this machine, and compare."""
    from autopar.arguments import check_numbers, check_verify
    from autopar.verify import sgd_with_momentum, verify_program

    check_verify(steps, max_grad_norm, 0)
    check_numbers({"tolerance": tolerance})
    spec = read_cluster(cluster, processes)
    job = read_job(model, spec.num_devices, batch, seq, option, meta=False)
    limits = read_constraints(settings, memory, constraints)
    compiled = compile_job(
        job, spec, batch, precision, limits, plan, sgd_with_momentum, backend=backend, compress=compress, fp8=fp8
    )
    found = verify_program(compiled, job.inputs, steps=steps, max_grad_norm=max_grad_norm)
    print(found)
    tolerance = found.tolerance if tolerance is None else tolerance
    is_ok = found.ok(tolerance)
    print(f"{'equal' if is_ok else 'DIFFERENT'} within {tolerance:g}")
    if is_ok and found.explained(tolerance):
        print(f"(or as near to it as the model's own training is to fp64: {', '.join(found.explained(tolerance))})")
    if not is_ok:
        raise typer.Exit(1)


def profile(
    processes: Processes = None,
    out: Annotated[str, typer.Option(help="the cluster's TOML file; samples go beside it", metavar="FILE")] = (
        "profile.toml"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="fewer shapes and rounds")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="do not go on with an earlier run's samples")] = False,
    like: Annotated[
        str | None, typer.Option(help='for GPUs not known by name, a cluster like theirs: "8 h100-sxm"')
    ] = None,
    force: Force = False,
) -> None:
    """Measure this machine (under torchrun: all of them) and write it down for --cluster."""
    from autopar.profiling.profile import profile as measure
    from autopar.profiling.profile import summary_table

    given = read_cluster(like, None).groups[0] if like else None
    level: Level = "quick" if quick else "full"
    found = measure(processes, out=out, level=level, fresh=fresh, like=given, console=console(), force=force)
    if found is not None:
        console().print(summary_table(found))
        print(f"profile written to {out}")


def tune(
    folder: Annotated[str, typer.Argument(help="of a program that `plan --code` wrote", show_default=False)],
    steps: Annotated[int, typer.Option(help="training steps to run", min=1)] = 1,
) -> None:
    """Choose the launch parameters of a saved program's kernels, on this machine's GPUs, into its tuning.json."""
    from autopar.launch import RankError
    from autopar.tune import tune as fill

    try:
        found = fill(folder, steps)
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if found is None:
        print("there is no GPU here, so there is nothing to tune: on a CPU the kernels' torch formulas run")
        return
    chosen, before = found
    for choice in chosen:
        print(choice)
    print(f"{len(chosen)} cases tuned, {len(before)} were known before: {Path(folder) / 'tuning.json'}")


def train(
    source: Annotated[str, typer.Argument(help="a YAML or TOML configuration, or a model", show_default=False)],
    cluster: Annotated[str | None, typer.Option(help="as in plan [default: detect]")] = None,
    processes: Processes = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16 [default: fp32]")] = None,
    compress: Compress = None,
    settings: Settings = None,
    memory: Memory = None,
    constraints: ConstraintFile = None,
    option: Options = None,
    backend: Backend = None,
    fp8: Fp8 = None,
    plan: Annotated[str | None, typer.Option(help="a plan file to use instead of searching", metavar="FILE")] = None,
    data: Annotated[
        str | None, typer.Option(help="text to train on, read as bytes; a made-up batch by default", metavar="FILE")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="optimiser steps [default: 100]")] = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", help="AdamW's learning rate [default: 0.001]")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="folder to write checkpoints to and to resume from", metavar="FOLDER")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="steps between checkpoints")] = None,
    single: Annotated[bool, typer.Option("--single", help="train the plain model on this process")] = False,
) -> None:
    """Plan, start the processes, and train. Under torchrun every process calls this."""
    from autopar.trainer import Trainer

    flags = {
        "cluster": cluster,
        "num_processes": processes,
        "global_batch_size": batch,
        "precision": precision,
        "compression": read_compression(compress),
        "backend": backend,
        "fp8": fp8,
        "plan": plan,
        "steps": steps,
        "learning_rate": learning_rate,
        "checkpoint_directory": checkpoint,
        "checkpoint_every": checkpoint_every,
        "auto_parallel": False if single else None,
        "constraints": read_constraints(settings, memory, constraints) or None,
    }
    config, name, text, length = _configuration(source, {k: v for k, v in flags.items() if v is not None})
    job, config = _training_job(name, config, seq or length, option)
    from autopar.integrations.job import batches_of

    trainer = Trainer(job.model, config, batches_of(job, data or text, config.seed), job.loss_fn)
    _train(trainer, config)


def _train(trainer: Any, config: TrainerConfig) -> None:
    """Fit with a word before and after, on the first rank only."""
    from autopar import training
    from autopar.launch import RankError
    from autopar.report.summary import train_summary

    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and config.auto_parallel and not training.under_launcher():
        print(f"{trainer.compile()!r}")
    try:
        result: TrainResult = trainer.fit()
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        if config.checkpoint_directory:
            print("the same command continues from the last checkpoint", file=sys.stderr)
        raise typer.Exit(1) from None
    if is_first:
        console().print(train_summary(result))


def _configuration(source: str, flags: dict[str, Any]) -> tuple[TrainerConfig, str, str | None, int | None]:
    """(trainer configuration, model, data, sequence length) of a file or a model's name, flags over it."""
    from autopar.text_files import read_mapping
    from autopar.trainer import TrainerConfig

    if not source.endswith((".yaml", ".yml", ".toml")):
        return TrainerConfig.from_mapping(flags), source, None, None
    fields = read_mapping(source)
    if "model" not in fields:
        raise ConstraintError(
            f"{source} names no model", alternatives="model: module:factory or hf:path/to/config.json"
        )
    name, data, length = (fields.pop(key, None) for key in ("model", "data", "sequence_length"))
    return TrainerConfig.from_mapping(fields | flags, source), str(name), data, length


def _training_job(
    name: str, config: TrainerConfig, seq: int | None, option: list[str] | None
) -> tuple[Job, TrainerConfig]:
    """The job, and the configuration with its cluster resolved (measured once, unless ranks must agree on it)."""
    import dataclasses

    from autopar import training
    from autopar.cluster import as_cluster

    num_devices = int(os.environ.get("WORLD_SIZE", "1"))
    if config.auto_parallel and not training.under_launcher():
        spec = (
            as_cluster(config.cluster) if config.cluster != "detect" else read_cluster("detect", config.num_processes)
        )
        config, num_devices = dataclasses.replace(config, cluster=spec), spec.num_devices
    return read_job(name, num_devices, config.global_batch_size, seq, option, meta=False), config
