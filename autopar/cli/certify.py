"""`autopar certify`: prove a plan on this machine, without its cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from autopar.certify import certify_program
from autopar.certify.certificate import FILE
from autopar.certify.certify import cpu_seconds
from autopar.certify.miniature_run import Miniature
from autopar.cli.options import (
    Flags,
    Force,
    GivenCluster,
    GivenModel,
    Source,
    is_plan_file,
    program_of_source,
    require_outputs,
)
from autopar.cli.output import say, show
from autopar.errors import ModelError
from autopar.files.outputs import write_output
from autopar.models.job import load_job

MINIATURE_ROWS = 16


def certify(
    source: Source,
    flags: Flags,
    cluster: GivenCluster = None,
    model: GivenModel = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="write plan.yaml and certificate.yaml to this folder \\[default: certificate.yaml beside a plan file]",
            metavar="FOLDER",
        ),
    ] = None,
    miniature: Annotated[
        str | None,
        typer.Option(help="a small model of the same classes, where autopar cannot make one", metavar="MODEL"),
    ] = None,
    train: Annotated[bool, typer.Option("--train/--no-train", help="train miniatures on local processes")] = True,
    force: Force = False,
) -> None:
    """Prove a plan without its cluster: check operators, reshards, edges and schedule, and train a miniature."""
    folder = Path(out) if out else Path(source).parent if is_plan_file(source) else None
    plan_file = str(folder / "plan.yaml") if folder is not None and out is not None else None
    file = str(folder / FILE) if folder is not None else None
    require_outputs(None, [plan_file, file], force)
    small_model = _miniature(miniature)  # fails before the work of planning
    compiled = program_of_source(source, model, cluster, flags)
    certificate = certify_program(compiled, train=train, miniature=small_model, planning_seconds=cpu_seconds())
    for panel in certificate.panels():
        show(panel, Text(""))
    if plan_file is not None:
        say(f"plan written to {write_output(plan_file, compiled.plan.to_yaml(), force)}")
    if file is not None:
        say(f"certificate written to {certificate.write(file, force)}")
    if not certificate.ok:
        raise typer.Exit(1)


def _miniature(name: str | None) -> Miniature | None:
    """Load the miniature from its factory, with MINIATURE_ROWS rows if the factory takes a number. Raises
    ModelError."""
    if name is None:
        return None
    try:
        job = load_job(name, num_devices=1, batch=MINIATURE_ROWS, seq=None, options={}, meta=False)
    except ModelError:
        job = load_job(name, num_devices=1, batch=None, seq=None, options={}, meta=False)
    return job.model, job.inputs, job.loss_fn
