"""The simulated step of a plan, for the report's tables and as a trace that Chrome and Perfetto show."""

from __future__ import annotations

from pathlib import Path

from autopar.costs.stage_costs import Simulated
from autopar.errors import PlanError
from autopar.planning.predict import simulate_plan
from autopar.program import GeneratedProgram
from autopar.simulate.trace_file import write_trace


def simulation_of(compiled: GeneratedProgram) -> Simulated:
    """The plan's schedule, event by event. Raises PlanError on a program without its request."""
    if compiled.request is None:
        raise PlanError("the program came from another process, without what it was planned for")
    return simulate_plan(compiled.request, compiled.best)


def write_timeline(compiled: GeneratedProgram, path: str | Path, force: bool = False) -> Path:
    """Write the trace as JSON; returns the path. Raises OutputError where it cannot be written.

    force: also over a file that autopar did not write.
    """
    return write_trace(simulation_of(compiled), path, force)
