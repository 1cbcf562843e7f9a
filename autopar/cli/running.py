"""Commands that run something on this machine: `autopar verify | profile | doctor | tune | train | launch`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from autopar.cli.options import (
    Backend,
    ClusterText,
    Flags,
    Force,
    Fp8,
    Json,
    Model,
    Processes,
    compile_job,
    read_cluster,
    read_job,
)
from autopar.cli.output import console, print_json, say, show, working
from autopar.cluster import as_cluster
from autopar.errors import ConstraintError
from autopar.files.text_files import read_mapping
from autopar.launch import RankError, launch_main, meet
from autopar.models.job import Job, batches_of
from autopar.plan import Plan
from autopar.profiling.cases import Level
from autopar.profiling.profile import profile as measure
from autopar.report.json_facts import record_json
from autopar.report.tables import error_table
from autopar.running.doctor import HANDSHAKE_SECONDS, PROBLEM, WARNING, examine_machine
from autopar.running.process_group import under_launcher
from autopar.running.process_state import check_starting
from autopar.settings.compile_options import check_verify
from autopar.trainer import Trainer
from autopar.training.config import TrainerConfig, overridden
from autopar.training.progress import train_summary
from autopar.training.result import TrainResult
from autopar.tune import tune as fill
from autopar.units import counted
from autopar.verify import sgd_with_momentum, verify_program

SOURCE_FIELDS = ("model", "data", "sequence_length")
"""Keys of a configuration file that are not fields of TrainerConfig."""


def verify(
    model: Model,
    flags: Flags,
    cluster: ClusterText = "detect",
    backend: Backend = None,
    fp8: Fp8 = None,
    plan: Annotated[str | None, typer.Option(help="a plan file to verify instead of searching", metavar="FILE")] = None,
    steps: Annotated[int, typer.Option(help="optimizer steps to compare")] = 3,
    max_grad_norm: Annotated[float | None, typer.Option(help="clip gradients to this norm")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="largest relative error that passes \\[default: 1e-5; under fp8 a bound on all gradients]"),
    ] = None,
) -> None:
    """Train the original model and the generated program side by side on this machine, and compare them."""
    check_verify(steps, max_grad_norm, 0)
    spec = read_cluster(cluster, flags.processes, model)
    job = read_job(model, spec.num_devices, flags, meta=False)
    options = flags.plan_options(backend=backend, fp8=fp8, plan=plan)
    compiled = compile_job(job, spec, options, sgd_with_momentum)
    comparison = verify_program(compiled, job.inputs, steps=steps, max_grad_norm=max_grad_norm)
    say(comparison)
    if comparison.rounds and tolerance is None:
        faults = "; ".join(comparison.faults())
        say(f"DIFFERENT: {faults}" if faults else f"equal up to the rounding of {' and '.join(comparison.rounds)}")
        if faults:
            raise typer.Exit(1)
        return
    tolerance = comparison.tolerance if tolerance is None else tolerance
    is_ok = comparison.ok(tolerance)
    say(f"{'equal' if is_ok else 'DIFFERENT'} within {tolerance:g}")
    if is_ok and (explained := comparison.explained(tolerance)):
        say(f"(some errors are larger, but within the model's own error against fp64: {', '.join(explained)})")
    if not is_ok:
        raise typer.Exit(1)


def profile(
    processes: Processes = None,
    out: Annotated[str, typer.Option(help="the cluster file to write; samples go beside it", metavar="FILE")] = (
        "profile.toml"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="fewer shapes and rounds")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="discard the samples of an earlier run")] = False,
    like: Annotated[
        str | None, typer.Option(help='for GPUs without a built-in entry, a similar cluster: "8 h100-sxm"')
    ] = None,
    force: Force = False,
) -> None:
    """Measure this machine (under torchrun: all machines) and write a cluster file for --cluster."""
    similar = read_cluster(like, None).groups[0] if like else None
    level: Level = "quick" if quick else "full"
    measured = measure(processes, out=out, level=level, fresh=fresh, like=similar, console=console(), force=force)
    if measured is not None:
        show(error_table(measured.errors()))
        say(f"profile written to {out}")


def tune(
    folder: Annotated[str, typer.Argument(help="the folder of a program from `plan --code`", show_default=False)],
    steps: Annotated[int, typer.Option(help="training steps to run", min=1)] = 1,
) -> None:
    """Tune the launch parameters of a saved program's kernels on this machine's GPUs, into its tuning.json."""
    result = fill(folder, steps)
    if result is None:
        say("nothing to tune: this machine has no GPU, and on a CPU torch operators replace the kernels")
        return
    chosen, before = result
    for choice in chosen:
        say(choice)
    say(f"{counted(len(chosen), 'case')} tuned, {len(before)} known before: {Path(folder) / 'tuning.json'}")


def train(
    source: Annotated[str, typer.Argument(help="a YAML or TOML configuration, or a model", show_default=False)],
    flags: Flags,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help='fields that override the file: steps=100 optimizer.lr=3e-4 cluster="8 h100-sxm"',
            metavar="[NAME=VALUE]...",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="as in plan \\[default: detect]")] = None,
    backend: Backend = None,
    fp8: Fp8 = None,
    plan: Annotated[str | None, typer.Option(help="a plan file to use instead of searching", metavar="FILE")] = None,
    data: Annotated[
        str | None, typer.Option(help="text to train on, read as bytes \\[default: a synthetic batch]", metavar="FILE")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps \\[default: 100]")] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--lr", help="AdamW's learning rate \\[default: 0.001]")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="folder of the checkpoints; training resumes from the latest", metavar="FOLDER")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="steps between checkpoints")] = None,
    single: Annotated[bool, typer.Option("--single", help="train the original model in this process")] = False,
) -> None:
    """Plan, start the processes, and train. Under torchrun every process runs this command."""
    from_flags = flags.plan_options(
        cluster=cluster,
        num_processes=flags.processes,
        backend=backend,
        fp8=fp8,
        plan=plan,
        steps=steps,
        learning_rate=learning_rate,
        checkpoint_directory=checkpoint,
        checkpoint_every=checkpoint_every,
        auto_parallel=False if single else None,
    )
    fields = overridden(_fields_of(source), overrides or ())
    overridden_names = [override.partition("=")[0] for override in overrides or ()]
    is_other = (cluster or "cluster" in overridden_names) and (cluster or fields["cluster"]) != "detect"
    if is_other and "num_processes" not in overridden_names:
        fields.pop("num_processes", None)  # it belongs to the file's cluster
    name, text, length = (fields.pop(key, None) for key in SOURCE_FIELDS)
    config = TrainerConfig.from_mapping(fields | from_flags, source)
    job, config = _training_job(str(name), config, replace(flags, seq=flags.seq or length))
    places = dict(zip(SOURCE_FIELDS, (name, data or text, flags.seq or length), strict=True))
    trainer = Trainer(
        job.model,
        config,
        batches_of(job, data or text, config.seed),
        job.loss_fn,
        source={key: value for key, value in places.items() if value is not None},
    )
    _train(trainer, config)


def launch(
    plan: Annotated[str, typer.Argument(help="a plan file", show_default=False)],
    command: Annotated[
        list[str],
        typer.Argument(
            help="after --, a Python script and its arguments", metavar="-- SCRIPT [ARGS]...", show_default=False
        ),
    ],
) -> None:
    """Run a script on this machine in as many processes as a plan has ranks, as torchrun would."""
    script, *arguments = command
    if not Path(script).is_file():
        raise ConstraintError(
            "the script does not exist",
            values=script,
            alternatives="a Python script after --, as in autopar launch plan.yaml -- train.py",
        )
    check_starting("launch")
    launch_main(Path(script), arguments, Plan.from_file(plan).num_ranks)


def _train(trainer: Any, config: TrainerConfig) -> None:
    """Train. The first rank prints the plan before and a summary after."""
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and config.auto_parallel and not under_launcher():
        say(f"{trainer.compile()!r}")
    try:
        result: TrainResult = trainer.fit()
    except RankError as error:
        say(f"error: {error}", as_note=True)
        if config.checkpoint_directory:
            say("note: run the same command to continue from the last checkpoint", as_note=True)
        raise typer.Exit(1) from None
    if is_first:
        show(train_summary(result))


def _fields_of(source: str) -> dict[str, Any]:
    """Return the fields of a configuration file; a model's name is a configuration with only that field."""
    if not source.endswith((".yaml", ".yml", ".toml")):
        return {"model": source}
    fields = read_mapping(source)
    if "model" not in fields:
        raise ConstraintError(
            "the configuration names no model",
            values=source,
            alternatives="a line `model: module:factory` or `model: hf:path/to/config.json` in the file",
        )
    return fields


def _training_job(name: str, config: TrainerConfig, flags: Flags) -> tuple[Job, TrainerConfig]:
    """Load the job, and resolve the configuration's cluster (measured here, unless ranks must agree on it)."""
    num_devices = int(os.environ.get("WORLD_SIZE", "1"))
    if config.auto_parallel and not under_launcher():
        spec = (
            as_cluster(config.cluster)
            if config.cluster != "detect"
            else read_cluster("detect", config.num_processes, name)
        )
        config, num_devices = replace(config, cluster=spec), spec.num_devices
    flags = replace(flags, batch=config.global_batch_size)
    return read_job(name, num_devices, flags, meta=False, lazy=config.auto_parallel), config


COLORS = {WARNING: "yellow", PROBLEM: "bold red"}


def doctor(as_json: Json = False) -> None:
    """Check whether this machine can train: versions, GPUs, communication, limits and compilers, with advice."""
    with working("two processes meet over gloo"):
        health = examine_machine(lambda: meet(HANDSHAKE_SECONDS))
    if as_json:
        print_json(record_json("doctor", health))
    else:
        for check in health.checks:
            style = COLORS.get(check.status, "green")
            show(Text.assemble((f"{check.status:8}", style), f"{check.name}: {check.found}"))
            if check.advice:
                show(Text(f"        -> {check.advice}"))
    if health.has_problem:
        raise typer.Exit(1)
