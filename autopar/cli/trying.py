"""`autopar trial`: the best plans, measured on this machine."""

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
    console,
    read_cluster,
    read_job,
    require_outputs,
)
from autopar.cli.output import print_json, say, working
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
    plans: Annotated[int, typer.Option(help="plans to run, the best of each of the best layouts")] = 3,
    steps: Annotated[int, typer.Option(help="steps to time in every round, after two that are not")] = 8,
    rounds: Annotated[int, typer.Option(help="how often the plans take turns")] = 3,
    out: Annotated[str | None, typer.Option(help="write the fastest plan to this YAML file", metavar="FILE")] = None,
    code: Annotated[
        str | None, typer.Option(help="write the fastest plan's program to this folder", metavar="FOLDER")
    ] = None,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Run the best plans for a few steps on this machine, keep the fastest, and note what was measured."""
    require_outputs(code, [out], force)
    if under_launcher() and cluster == "detect":
        raise ConstraintError(
            "ranks of torchrun cannot measure their cluster at once",
            values="--cluster detect",
            alternatives=['--cluster "2x8 h100-sxm", as it is', "--cluster mine.toml, which autopar profile wrote"],
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
        found = try_program(compiled, options)
    if not is_first():
        return
    _print(found.report, as_json)
    if out:
        say(f"plan written to {write_output(out, found.plan.to_yaml(), force)}")
    if code:
        say(f"program written to {found.program.save(code)}")


def _print(report: TrialReport, as_json: bool) -> None:
    if as_json:
        print_json(record_json("trial", report))
        return
    console().print(_table(report))
    for each in report.plans:
        if each.problem:
            say(f"did not run: {each.words}: {each.problem}")
    say(report.words)
    say(f"written to {report.records}")


def _table(report: TrialReport) -> Table:
    has_earlier = any(each.earlier_seconds is not None for each in report.plans)
    columns: list[tuple[str, int] | tuple[str, int, str]] = [("plan", 0), ("predicted", 10, "right")]
    columns += [("measured", 10, "right"), ("half of steps", 17, "right")]
    columns += [("before", 10, "right")] if has_earlier else []
    table = table_of(f"{report.model} on {report.cluster}: a step", *columns, ("chosen by", 17))
    for number, each in enumerate(report.plans):
        before = (
            [] if not has_earlier else ["-" if each.earlier_seconds is None else seconds_text(each.earlier_seconds)]
        )
        chosen = [*(["prediction"] if number == 0 else []), *(["trial"] if number == report.chosen else [])]
        table.add_row(each.words, seconds_text(each.predicted_seconds), *_measured(each), *before, ", ".join(chosen))
    return table


def _measured(each: TriedPlan) -> tuple[str, str]:
    """The median, and the quartiles in its unit."""
    if each.measured_seconds is None or each.low_seconds is None or each.high_seconds is None:
        return "-", "-"
    return seconds_text(each.measured_seconds), f"{seconds_text(each.low_seconds)} to {seconds_text(each.high_seconds)}"
