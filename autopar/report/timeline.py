"""The simulated step of a plan, for the report's tables and as a trace that Chrome and Perfetto show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.costs.block_costs import HIDDEN
from autopar.costs.stage_costs import Simulated
from autopar.errors import PlanError
from autopar.planning.predict import simulate_plan
from autopar.planning.request import pricer_for, unequal_of
from cost_models.schedule import chrome_trace

if TYPE_CHECKING:
    from autopar.compiled import CompiledProgram


def simulation_of(compiled: CompiledProgram) -> Simulated:
    """The plan's schedule, event by event. Raises PlanError on a program without its request."""
    if compiled.request is None:
        raise PlanError("the program came from another process, without what it was planned for")
    plan, best = compiled.plan, compiled.best
    pricer = pricer_for(compiled.request, plan.mesh, plan.num_micro_batches, plan.pipeline.offload)
    unequal = unequal_of(compiled.request, plan)
    return simulate_plan(best.graph, best.operators, pricer, best.choices, plan.pipeline, unequal)


def trace_of(simulated: Simulated) -> dict[str, Any]:
    """The trace: every forward and backward on its position, then what is done once per step.

    As the prediction counts it, that begins when the last position is through; of every position, its own.
    """
    trace: dict[str, Any] = chrome_trace(simulated.timeline)
    trace["traceEvents"] = [*trace["traceEvents"], *_once(simulated)]
    return trace


def _once(simulated: Simulated) -> Iterator[dict[str, Any]]:
    for position, kinds in enumerate(simulated.once):
        start = simulated.timeline.makespan * 1e6
        for kind, seconds in kinds.items():
            if kind != HIDDEN and seconds > 0:
                yield {
                    "ph": "X",
                    "name": kind,
                    "cat": "once per step",
                    "pid": 0,
                    "tid": position,
                    "ts": start,
                    "dur": seconds * 1e6,
                    "args": {},
                }
                start += seconds * 1e6


def write_timeline(compiled: CompiledProgram, path: str | Path) -> Path:
    """Write the trace as JSON; returns the path. Raises PlanError where it cannot be written."""
    try:
        Path(path).write_text(json.dumps(trace_of(simulation_of(compiled))), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write the timeline {path}", values=str(error)) from None
    return Path(path)
