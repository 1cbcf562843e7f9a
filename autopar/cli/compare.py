"""`autopar compare`: compare two plan files."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.options import (
    Flags,
    Json,
    Options,
    Processes,
    Seq,
    program_of_source,
)
from autopar.cli.output import print_json, show
from autopar.explain.compare import compare as compare_plans
from autopar.explain.compare import comparison_panels
from autopar.plan import Plan
from autopar.report.json_facts import record_json


def compare(
    first: Annotated[str, typer.Argument(help="a plan file", show_default=False)],
    second: Annotated[str, typer.Argument(help="another plan file", show_default=False)],
    model: Annotated[str | None, typer.Option(help="the model of both plans, to predict them again")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="as in plan, with --model \\[default: each plan's own cluster]")
    ] = None,
    processes: Processes = None,
    seq: Seq = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Compare two plans: decisions, stages, placements, time and memory."""
    plans = [Plan.from_file(path) for path in (first, second)]
    if model is not None:
        flags = Flags(processes=processes, seq=seq, option=option)
        programs = (program_of_source(path, model, cluster, flags) for path in (first, second))
        plans = [program.plan for program in programs]
    comparison = compare_plans(*plans)
    if as_json:
        print_json(record_json("comparison", comparison))
        return
    show(*comparison_panels(comparison, (first, second)))
