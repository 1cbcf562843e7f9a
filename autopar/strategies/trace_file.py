"""A simulated step as a trace that Chrome and Perfetto show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.costs.stage_costs import Simulated
from autopar.files.outputs import write_output
from autopar.strategies.timeline import StepEvent, events_of
from cost_models.schedule import chrome_trace


def trace_of(simulated: Simulated) -> dict[str, Any]:
    """Return the trace: every forward and backward on its pipeline rank, then the events once per step.

    Messages between pipeline ranks and hidden traffic are asynchronous events. Events once per step begin when the last
    pipeline rank is done, as the prediction counts them; every pipeline rank has its events. Format: "Trace Event
    Format", Google, sections "Complete Events" and "Async Events".
    """
    trace: dict[str, Any] = chrome_trace(simulated.timeline)
    rows = [row for number, event in enumerate(events_of(simulated)) for row in _rows(event, number)]
    trace["traceEvents"] = [*trace["traceEvents"], *rows]
    return trace


def _rows(event: StepEvent, number: int) -> Iterator[dict[str, Any]]:
    """The rows of one event in `chrome_trace`'s form. number: of the event, for a pair of asynchronous rows."""
    common = {"name": event.kind, "pid": 0, "tid": event.pipeline_rank}
    if event.stream == "compute":
        if event.stage is None:
            times = {"ts": event.start * 1e6, "dur": event.seconds * 1e6}
            yield {"ph": "X", **common, "cat": "once per step", **times, "args": {}}
        return
    fields_of_event = {"stage": event.stage, "micro": event.micro_batch, "target": event.target}
    args = {key: value for key, value in fields_of_event.items() if value is not None}
    for phase, moment in (("b", event.start), ("e", event.end)):
        yield {"ph": phase, **common, "cat": event.stream, "id": number, "ts": moment * 1e6, "args": args}


def write_trace(simulated: Simulated, path: str | Path, force: bool = False) -> Path:
    """Writes a simulated step as `write_timeline` does."""
    return write_output(path, json.dumps(trace_of(simulated)), force)
