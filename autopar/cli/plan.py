"""`autopar plan`: choose a plan for a model, and write it, its program and its report."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.options import (
    Backend,
    ClusterText,
    Flags,
    Force,
    Fp8,
    Json,
    Model,
    Page,
    Timeline,
    compile_job,
    read_cluster,
    read_job,
    require_outputs,
)
from autopar.cli.output import print_report, say, write_page, write_timeline
from autopar.files.outputs import write_output
from autopar.profiling.trials import profile_of
from autopar.trial_report import trial_notes


def plan(
    model: Model,
    flags: Flags,
    cluster: ClusterText = "detect",
    backend: Backend = None,
    fp8: Fp8 = None,
    out: Annotated[str | None, typer.Option(help="write the plan to this YAML file", metavar="FILE")] = None,
    code: Annotated[
        str | None, typer.Option(help="write the generated program to this folder", metavar="FOLDER")
    ] = None,
    timeline: Timeline = None,
    html: Page = None,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Choose the fastest plan that fits, and report it."""
    require_outputs(code, [out, timeline, html], force)
    spec = read_cluster(cluster, flags.processes, model)
    job = read_job(model, spec.num_devices, flags, meta=code is None, lazy=True)
    compiled = compile_job(job, spec, flags.plan_options(backend=backend, fp8=fp8))
    print_report(compiled, as_json)
    for note in trial_notes(compiled, profile_of(cluster)):
        say(f"note: {note}")
    if out:
        say(f"plan written to {write_output(out, compiled.plan.to_yaml(), force)}")
    if code:
        say(f"program written to {compiled.save(code)}")
    write_timeline(compiled, timeline, force)
    write_page(compiled, html, None, force)
