"""`autopar trial`: measure the best plans on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from autopar.cli.options import (
    Backend,
    ClusterText,
    Flags,
    Force,
    Fp8,
    Json,
    Model,
    read_cluster,
    read_job,
    require_outputs,
)
from autopar.cli.output import print_json, say, show, working
from autopar.errors import ConstraintError
from autopar.files.outputs import write_output
from autopar.profiling.trials import profile_of
from autopar.report.json_facts import record_json
from autopar.report.tables import table_of
from autopar.running.process_group import is_first, under_launcher
from autopar.settings.compile_options import TrialOptions
from autopar.trial import first_program, shared_cores, try_program
from autopar.trial_report import TrialReport, TriedPlan
from autopar.units import seconds_text


def trial(
    model: Model,
    flags: Flags,
    cluster: ClusterText = "detect",
    backend: Backend = None,
    fp8: Fp8 = None,
    plans: Annotated[int, typer.Option(help="plans to run: the best plan of each of the best meshes")] = 3,
    steps: Annotated[int, typer.Option(help="timed steps per round, after two warm-up steps")] = 8,
    rounds: Annotated[int, typer.Option(help="rounds; every plan runs once per round")] = 3,
    out: Annotated[str | None, typer.Option(help="write the fastest plan to this YAML file", metavar="FILE")] = None,
    code: Annotated[
        str | None, typer.Option(help="write the fastest plan's program to this folder", metavar="FOLDER")
    ] = None,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Run the best plans for a few steps on this machine, keep the fastest, and record the measurements."""
    require_outputs(code, [out], force)
    if under_launcher() and cluster == "detect":
        raise ConstraintError(
            "trial cannot measure the cluster under torchrun",
            values="--cluster detect",
            alternatives=['--cluster "2x8 h100-sxm", the cluster by name', "--cluster FILE, from autopar profile"],
        )
    spec = read_cluster(cluster, flags.processes, model)
    job = read_job(model, spec.num_devices, flags, meta=False)
    options = TrialOptions(
        example_inputs=job.inputs,
        loss_fn=job.loss_fn,
        plans=plans,
        steps=steps,
        rounds=rounds,
        profile=profile_of(cluster),
        **flags.plan_options(backend=backend, fp8=fp8),
    )
    if is_first() and (note := shared_cores(spec)):
        say(f"note: {note}", as_note=True)
    with working(f"planning for {spec}"):
        compiled = first_program(job.model, spec, options)
    with working("measuring"):
        result = try_program(compiled, options)
    if not is_first():
        return
    _print(result.report, as_json)
    if out:
        say(f"plan written to {write_output(out, result.plan.to_yaml(), force)}")
    if code:
        say(f"program written to {result.program.save(code)}")


def _print(report: TrialReport, as_json: bool) -> None:
    if as_json:
        print_json(record_json("trial", report))
        return
    show(_table(report))
    for tried in report.plans:
        if tried.problem:
            say(f"failed: {tried.words}: {tried.problem}")
    say(report.words)
    say(f"measurements written to {report.records}")


def _table(report: TrialReport) -> Table:
    has_earlier = any(tried.earlier_seconds is not None for tried in report.plans)
    columns: list[tuple[str, int] | tuple[str, int, str]] = [("plan", 0), ("predicted", 10, "right")]
    columns += [("measured", 10, "right"), ("half of steps", 17, "right")]
    columns += [("before", 10, "right")] if has_earlier else []
    table = table_of(f"{report.model} on {report.cluster}: a step", *columns, ("chosen by", 17))
    for number, tried in enumerate(report.plans):
        before = (
            [] if not has_earlier else ["-" if tried.earlier_seconds is None else seconds_text(tried.earlier_seconds)]
        )
        chosen = [*(["prediction"] if number == 0 else []), *(["trial"] if number == report.chosen else [])]
        table.add_row(tried.words, seconds_text(tried.predicted_seconds), *_measured(tried), *before, ", ".join(chosen))
    return table


def _measured(tried: TriedPlan) -> tuple[str, str]:
    """Return the median and the quartiles in words."""
    if tried.measured_seconds is None or tried.low_seconds is None or tried.high_seconds is None:
        return "-", "-"
    return seconds_text(
        tried.measured_seconds
    ), f"{seconds_text(tried.low_seconds)} to {seconds_text(tried.high_seconds)}"
