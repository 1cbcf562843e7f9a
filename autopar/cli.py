"""The command line: `autopar plan | report | simulate | explain | compare | verify | profile | tune | train`.

What a user got wrong is printed without a traceback (which `--traceback` shows) and ends with exit code 2; a
verification that finds a difference, and a rank that fails, end with 1; an error of autopar's own with 70.
"""

from __future__ import annotations

import os
import signal
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
    GivenCluster,
    GivenModel,
    GivenPrecision,
    Memory,
    Model,
    Options,
    Precision,
    Processes,
    Seq,
    Settings,
    Source,
    Timeline,
    compile_job,
    console,
    is_plan_file,
    program_of_source,
    read_cluster,
    read_compression,
    read_constraints,
    read_job,
    require_outputs,
    shows_traceback,
    without_traceback,
)
from autopar.errors import ConstraintError
from autopar.outputs import write_output
from autopar.supervise import exit_on

if TYPE_CHECKING:
    from autopar.compiled import CompiledProgram
    from autopar.integrations.job import Job
    from autopar.profiling.cases import Level
    from autopar.trainer import TrainerConfig, TrainResult

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script; `--traceback` may stand anywhere. SIGINT, SIGTERM and SIGHUP end it with 128 + number."""
    exit_on(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    words = sys.argv[1:]
    asked = ["--traceback"] if "--traceback" in words else []
    app([*asked, *(word for word in words if word != "--traceback")])


@app.callback()
def everywhere(
    traceback: Annotated[bool, typer.Option("--traceback", help="show where an error was raised")] = False,
) -> None:
    """From a single-GPU PyTorch model to a distributed training program."""
    shows_traceback.set(traceback)


@app.command()
@without_traceback
def plan(
    model: Model,
    cluster: ClusterText = "detect",
    processes: Processes = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Precision = "fp32",
    compress: Compress = None,
    settings: Settings = None,
    memory: Memory = None,
    constraints: ConstraintFile = None,
    option: Options = None,
    backend: Backend = None,
    fp8: Fp8 = None,
    out: Annotated[str | None, typer.Option(help="write the plan to this YAML file", metavar="FILE")] = None,
    code: Annotated[
        str | None, typer.Option(help="write the generated program to this folder", metavar="FOLDER")
    ] = None,
    timeline: Timeline = None,
    force: Force = False,
) -> None:
    """Choose the fastest plan that fits, and report what it does."""
    require_outputs(code, [out, timeline], force)
    spec = read_cluster(cluster, processes)
    job = read_job(model, spec.num_devices, batch, seq, option, meta=code is None)
    limits = read_constraints(settings, memory, constraints)
    compiled = compile_job(job, spec, batch, precision, limits, compress=compress, backend=backend, fp8=fp8)
    _print_report(compiled)
    if out:
        print(f"plan written to {write_output(out, compiled.plan.to_yaml(), force)}")
    if code:
        print(f"program written to {compiled.save(code)}")
    _write_timeline(compiled, timeline, force)


@app.command()
@without_traceback
def report(
    source: Source,
    model: GivenModel = None,
    cluster: GivenCluster = None,
    processes: Processes = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: GivenPrecision = None,
    compress: Compress = None,
    settings: Settings = None,
    memory: Memory = None,
    constraints: ConstraintFile = None,
    option: Options = None,
    timeline: Timeline = None,
    force: Force = False,
) -> None:
    """What a plan file, or the plan that would be chosen for a model, does with every layer, and what it costs."""
    require_outputs(None, [timeline], force)
    limits = read_constraints(settings, memory, constraints)
    if is_plan_file(source) and model is None and timeline is None:
        from autopar.plan import Plan
        from autopar.report.summary import plan_summary

        for panel in plan_summary(Plan.from_file(source)):
            console().print(panel)
        print(f"`autopar report {source} --model MODEL` explains every layer and prices the plan anew.")
        return
    compiled = program_of_source(source, model, cluster, processes, batch, seq, precision, limits, option, compress)
    _print_report(compiled)
    _write_timeline(compiled, timeline, force)


@app.command()
@without_traceback
def simulate(
    model: Model,
    cluster: ClusterText = "detect",
    processes: Processes = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Annotated[str, typer.Option(help="fp32, tf32, bf16, fp16 or fp8")] = "bf16",
    framework: Annotated[str, typer.Option(help="autopar, megatron-2021, fsdp, deepspeed-zero3, ...")] = "autopar",
    settings: Settings = None,
    memory: Memory = None,
    constraints: ConstraintFile = None,
    option: Options = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="show the step beside one with this changed; may be repeated. batch=64; tp=4, recompute=full, ...: of "
            "the strategy; device=h100-sxm, inter_node=ib-200g; device.peak=x2, device.bandwidth=2e12, "
            "device.memory=96GiB, intra_node.bandwidth=x0.5, inter_node.latency=1e-5; cluster=..., framework=..., "
            "precision=...",
            metavar="NAME=VALUE",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="fail where it does not fit the memory")] = False,
    timeline: Timeline = None,
    force: Force = False,
) -> None:
    """Predict a strategy given with --set (dp, tp, pp, cp, ep, zero, micro_batches, ...), without searching."""
    from autopar.integrations.job import parse_settings
    from autopar.simulate import predict
    from autopar.simulate.text import comparison_lines, prediction_lines, warning_lines
    from autopar.simulate.what_if import parse_changes

    require_outputs(None, [timeline], force)
    changes = parse_changes(parse_settings(what_if or (), "--what-if"))
    spec = read_cluster(cluster, processes)
    job = read_job(model, spec.num_devices, batch, seq, option, meta=True)
    found = predict(
        job.model,
        spec,
        read_constraints(settings, memory, constraints),
        example_inputs=job.inputs,
        loss_fn=job.loss_fn,
        global_batch_size=batch,
        precision=precision,
        framework=framework,
        check=check,
    )
    for line in (*prediction_lines(found), *warning_lines(found)):
        print(line)
    if changes:
        for line in ("", *comparison_lines(found.what_if(**changes))):
            print(line)
    if timeline is not None:
        print(f"timeline written to {found.write_timeline(timeline, force)}")


@app.command()
@without_traceback
def explain(
    source: Source,
    model: GivenModel = None,
    cluster: GivenCluster = None,
    processes: Processes = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: GivenPrecision = None,
    compress: Compress = None,
    settings: Settings = None,
    memory: Memory = None,
    constraints: ConstraintFile = None,
    option: Options = None,
    timeline: Timeline = None,
    seconds: Annotated[float, typer.Option(help="after which no further question is asked")] = 60.0,
    force: Force = False,
) -> None:
    """Why this plan: what binds it, what other decisions would cost, and what more of everything would buy."""
    from autopar.explain.questions import explain as ask
    from autopar.explain.render import explanation_panels

    require_outputs(None, [timeline], force)
    limits = read_constraints(settings, memory, constraints)
    compiled = program_of_source(source, model, cluster, processes, batch, seq, precision, limits, option, compress)
    for panel in explanation_panels(ask(compiled, seconds=seconds)):
        console().print(panel)
    _write_timeline(compiled, timeline, force)


@app.command()
@without_traceback
def compare(
    first: Annotated[str, typer.Argument(help="a plan file", show_default=False)],
    second: Annotated[str, typer.Argument(help="another plan file", show_default=False)],
    model: Annotated[str | None, typer.Option(help="the model of both, which are then priced anew")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="as in plan, to price both on; by default each on its own")
    ] = None,
    processes: Processes = None,
    seq: Seq = None,
    option: Options = None,
) -> None:
    """Two plans side by side: decisions, stages, placements, time and memory."""
    from autopar.explain.compare import compare as compare_plans
    from autopar.explain.compare import comparison_panels
    from autopar.plan import Plan

    plans = [Plan.from_file(path) for path in (first, second)]
    if model is not None:
        programs = (
            program_of_source(path, model, cluster, processes, None, seq, None, {}, option) for path in (first, second)
        )
        plans = [program.plan for program in programs]
    for panel in comparison_panels(compare_plans(*plans), (first, second)):
        console().print(panel)


@app.command()
@without_traceback
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
    from autopar.verify import sgd_with_momentum, verify_program

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


@app.command()
@without_traceback
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


@app.command()
@without_traceback
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


@app.command()
@without_traceback
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


def _print_report(compiled: CompiledProgram) -> None:
    from autopar.report import report_panels

    for panel in report_panels(compiled):
        console().print(panel)


def _write_timeline(compiled: CompiledProgram, path: str | None, force: bool) -> None:
    if path is not None:
        from autopar.report.timeline import write_timeline

        print(f"timeline written to {write_timeline(compiled, path, force)}")
