"""The simulated step of a plan, for the report's tables and as a trace for Chrome and Perfetto."""

from __future__ import annotations

from pathlib import Path

from autopar.costs.stage_costs import Simulated
from autopar.errors import PlanError
from autopar.planning.predict import simulate_plan
from autopar.program import GeneratedProgram
from autopar.strategies.trace_file import write_trace


def simulation_of(compiled: GeneratedProgram) -> Simulated:
    """Return the plan's schedule, event by event. Raises PlanError for a program without its request."""
    if compiled.request is None:
        raise PlanError(
            "a program of another process has no timeline",
            alternatives="call it in the process that called autopar.compile",
        )
    return simulate_plan(compiled.request, compiled.best)


def write_timeline(compiled: GeneratedProgram, path: str | Path, force: bool = False) -> Path:
    """Write the trace as JSON; returns the path. Raises OutputError if the file cannot be written.

    force: replace a file that autopar did not write.
    """
    return write_trace(simulation_of(compiled), path, force)
