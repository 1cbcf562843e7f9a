"""The command line: `autopar plan | report | verify | train`.

What a user got wrong is printed without a traceback and ends with exit code 2; a verification that finds a difference,
and a rank that fails, end with 1.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console

from autopar.errors import AutoparError, ConstraintError

if TYPE_CHECKING:
    from autopar.compiled import CompiledProgram
    from autopar.integrations.job import Job
    from autopar.trainer import TrainerConfig, TrainResult
    from cost_models.machine import Cluster

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="From a single-GPU PyTorch model to a distributed training program.",
)
P = ParamSpec("P")

Model = Annotated[str, typer.Argument(help="module:factory, or hf:path/to/config.json", show_default=False)]
ClusterText = Annotated[
    str, typer.Option(help='"4x8 h100-sxm", a TOML file, or "detect": what this machine has, measured')
]
Processes = Annotated[int | None, typer.Option(help="processes that share this machine, with --cluster detect")]
Batch = Annotated[
    int | None, typer.Option(help="rows of one optimiser step over all ranks [default: the factory's, or 8 per device]")
]
Seq = Annotated[int | None, typer.Option(help="tokens per row [default: the factory's, or at most 128]")]
Precision = Annotated[str, typer.Option(help="fp32 or bf16")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="a constraint: tp=2, dp=4, zero=3 or micro_batches=8; may be repeated", metavar="NAME=VALUE"
    ),
]
Memory = Annotated[str | None, typer.Option(help='bytes that a rank may use, such as "20GiB"')]
ConstraintFile = Annotated[
    str | None, typer.Option("--constraints", help="a YAML or TOML file of constraints", metavar="FILE")
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", help="an argument of the factory or field of the configuration", metavar="NAME=VALUE"
    ),
]


def main() -> None:
    """The console script."""
    app()


def without_traceback(command: Callable[P, None]) -> Callable[P, None]:
    """Print a user's error instead of raising it."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except AutoparError as error:
            Console(stderr=True, soft_wrap=True, highlight=False).print(
                "[bold red]error[/]", str(error).replace("[", "\\["), sep=": "
            )
            raise typer.Exit(2) from None

    return wrapped


@app.command()
@without_traceback
def plan(
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
    out: Annotated[str | None, typer.Option(help="write the plan to this YAML file", metavar="FILE")] = None,
    code: Annotated[
        str | None, typer.Option(help="write the generated program to this folder", metavar="FOLDER")
    ] = None,
) -> None:
    """Choose the fastest plan that fits, and explain it."""
    spec = _cluster(cluster, processes)
    job = _job(model, spec, batch, seq, option, meta=code is None)
    compiled = _compile(job, spec, batch, precision, _constraints(settings, memory, constraints))
    _print_report(compiled)
    if out:
        Path(out).write_text(compiled.plan.to_yaml(), encoding="utf-8")
        print(f"plan written to {out}")
    if code:
        print(f"program written to {compiled.save(code)}")


@app.command()
@without_traceback
def report(
    source: Annotated[str, typer.Argument(help="a plan file, or a model", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="the model of the plan file: explains every layer, priced anew")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="as in plan; the plan file's own by default")] = None,
    processes: Processes = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16; the plan file's own by default")] = None,
    settings: Settings = None,
    memory: Memory = None,
    constraints: ConstraintFile = None,
    option: Options = None,
) -> None:
    """Explain a plan file, or the plan that would be chosen for a model."""
    limits = _constraints(settings, memory, constraints)
    if not source.endswith((".yaml", ".yml")):
        spec = _cluster(cluster or "detect", processes)
        job = _job(source, spec, batch, seq, option, meta=True)
        _print_report(_compile(job, spec, batch, precision or "fp32", limits))
        return
    from autopar.plan import Plan

    given = Plan.from_file(source)
    if model is None:
        from autopar.report.summary import plan_summary

        for panel in plan_summary(given):
            _console().print(panel)
        print(f"`autopar report {source} --model MODEL` explains every layer and prices the plan anew.")
        return
    spec = _cluster(
        cluster or ("detect" if "measured" in given.cluster else given.cluster), processes or given.mesh.num_ranks
    )
    job = _job(model, spec, batch or given.global_batch_size, seq, option, meta=True)
    _print_report(_compile(job, spec, None, precision or given.precision, limits, given))


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
    plan: Annotated[str | None, typer.Option(help="a plan file to verify instead of searching", metavar="FILE")] = None,
    steps: Annotated[int, typer.Option(help="optimiser steps to compare")] = 3,
    max_grad_norm: Annotated[float | None, typer.Option(help="clip gradients to this norm")] = None,
    tolerance: Annotated[float, typer.Option(help="largest relative error that passes")] = 1e-5,
) -> None:
    """Run the generated program beside the single-process model on this machine, and compare."""
    from autopar.verify import sgd_with_momentum, verify_program

    spec = _cluster(cluster, processes)
    job = _job(model, spec, batch, seq, option, meta=False)
    limits = _constraints(settings, memory, constraints)
    compiled = _compile(job, spec, batch, precision, limits, plan, sgd_with_momentum)
    found = verify_program(compiled, job.inputs, steps=steps, max_grad_norm=max_grad_norm)
    print(found)
    is_ok = found.ok(tolerance)
    print(f"{'equal' if is_ok else 'DIFFERENT'} within {tolerance:g}")
    if not is_ok:
        raise typer.Exit(1)


@app.command()
@without_traceback
def train(
    source: Annotated[str, typer.Argument(help="a YAML or TOML configuration, or a model", show_default=False)],
    cluster: Annotated[str | None, typer.Option(help="as in plan [default: detect]")] = None,
    processes: Processes = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16 [default: fp32]")] = None,
    settings: Settings = None,
    memory: Memory = None,
    constraints: ConstraintFile = None,
    option: Options = None,
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
        "plan": plan,
        "steps": steps,
        "learning_rate": learning_rate,
        "checkpoint_directory": checkpoint,
        "checkpoint_every": checkpoint_every,
        "auto_parallel": False if single else None,
        "constraints": _constraints(settings, memory, constraints) or None,
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
        _console().print(train_summary(result))


def _configuration(source: str, flags: dict[str, Any]) -> tuple[TrainerConfig, str, str | None, int | None]:
    """(trainer configuration, model, data, sequence length) of a file or a model's name, flags over it."""
    from autopar.trainer import TrainerConfig, read_mapping

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
        spec = as_cluster(config.cluster) if config.cluster != "detect" else _cluster("detect", config.num_processes)
        config, num_devices = dataclasses.replace(config, cluster=spec), spec.num_devices
    return _job_of(name, num_devices, config.global_batch_size, seq, option, meta=False), config


def _cluster(text: str, processes: int | None) -> Cluster:
    from autopar.training import resolve_cluster

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec = resolve_cluster(text, processes)
    for warning in caught:
        print(f"note: {warning.message}", file=sys.stderr)
    return spec


def _job(model: str, cluster: Cluster, batch: int | None, seq: int | None, option: list[str] | None, meta: bool) -> Job:
    return _job_of(model, cluster.num_devices, batch, seq, option, meta)


def _job_of(
    model: str, num_devices: int, batch: int | None, seq: int | None, option: list[str] | None, meta: bool
) -> Job:
    from autopar.integrations.job import load_job, parse_settings

    options = parse_settings(option or (), "--option")
    return load_job(model, num_devices=num_devices, batch=batch, seq=seq, options=options, meta=meta)


def _constraints(settings: list[str] | None, memory: str | None, file: str | None) -> dict[str, Any]:
    from autopar.integrations.job import constraints_of

    return constraints_of(settings or (), memory, file)


def _compile(
    job: Job,
    cluster: Cluster,
    batch: int | None,
    precision: str,
    constraints: dict[str, Any],
    plan: Any = None,
    optimizer: Any = None,
) -> CompiledProgram:
    import autopar

    return autopar.compile(
        job.model,
        cluster,
        example_inputs=job.inputs,
        loss_fn=job.loss_fn,
        global_batch_size=batch,
        precision=precision,
        constraints=constraints,
        plan=plan,
        optimizer=optimizer,
    )


def _print_report(compiled: CompiledProgram) -> None:
    from autopar.report import report_panels

    console = _console()
    for panel in report_panels(compiled):
        console.print(panel)


def _console() -> Console:
    """As wide as the terminal up to the report's width, which is also what a file gets."""
    from autopar.report.render import WIDTH

    console = Console(highlight=False)
    return Console(highlight=False, width=min(console.width, WIDTH) if console.is_terminal else WIDTH)
