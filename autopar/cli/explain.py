"""`autopar explain`: explain a plan's bottleneck, decisions and hardware."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.options import (
    Flags,
    Force,
    GivenCluster,
    GivenModel,
    Json,
    Source,
    Timeline,
    is_plan_file,
    plan_of_model,
    program_of_source,
    require_outputs,
)
from autopar.cli.output import print_json, show, working, write_timeline
from autopar.compiled import CompiledProgram
from autopar.explain.processes import spare_processes
from autopar.explain.questions import explain as ask
from autopar.explain.terminal import explanation_panels
from autopar.planning.planner import Planned
from autopar.report.json_facts import record_json


def explain(
    source: Source,
    flags: Flags,
    model: GivenModel = None,
    cluster: GivenCluster = None,
    timeline: Timeline = None,
    seconds: Annotated[float, typer.Option(help="time limit; the answers so far are printed after it")] = 60.0,
    as_json: Json = False,
    force: Force = False,
) -> None:
    """Explain a plan: its bottleneck, the cost of other decisions, and the gain from more hardware."""
    require_outputs(None, [timeline], force)
    source_of_facts: CompiledProgram | Planned
    if is_plan_file(source) or timeline is not None:
        source_of_facts = compiled = program_of_source(source, model, cluster, flags)
    else:  # the program is not needed
        compiled, source_of_facts = None, plan_of_model(source, cluster, flags)
    with working("planning under changed conditions") as tell:
        explanation = ask(source_of_facts, seconds=seconds, tell=tell, processes=spare_processes())
    if as_json:
        print_json(record_json("explanation", explanation))
    else:
        show(*explanation_panels(explanation))
    if compiled is not None:
        write_timeline(compiled, timeline, force)
