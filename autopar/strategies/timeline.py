"""The simulated step as records: the events of every pipeline rank, with their times.

A strategy that a person wrote (`autopar.predict`) and a searched plan both end in a `Simulated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.costs.layer_costs import HIDDEN
from autopar.costs.stage_costs import Simulated
from cost_models.schedule import Event

ACTIONS: Mapping[str, str] = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
"""Letter of a schedule's action -> kind of the event. B is the whole backward, I and W its two halves."""

TRANSFERS: Mapping[str, str] = {"F": "p2p forward", "B": "p2p backward", "I": "p2p backward"}
"""Letter of the action that produced a message -> kind of the event: activations, or their gradients."""

Stream = Literal["compute", "send", "communication"]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """An event on one rank of a pipeline rank, from `start` to `end`, in seconds after the step begins.

    kind: of ACTIONS, TRANSFERS, or a kind of seconds of the prediction ("optimizer", ...). stream: "compute" for events
    that occupy the pipeline rank, one after the other, exposed traffic included. "send" for messages to pipeline rank
    `target`, which overlap them. "communication" for hidden traffic. stage, micro_batch: None for events once per step.
    """

    kind: str
    pipeline_rank: int
    stream: Stream
    start: float
    end: float
    stage: int | None = None
    micro_batch: int | None = None
    target: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def events_of(simulated: Simulated) -> tuple[StepEvent, ...]:
    """Return all events, pipeline rank by pipeline rank, in the order of their start in each stream.

    Events once per step begin when the last pipeline rank is done, as the prediction counts them. The last event ends
    with the predicted step. Hidden traffic of a micro-batch is drawn to end with its backward, hidden traffic of a step
    with the last backward. The sum of its seconds is predicted; its place is an assumption.
    """
    actions: dict[int, list[Event]] = {pipeline_rank: [] for pipeline_rank in range(len(simulated.timeline.schedule))}
    for event in simulated.timeline.events():
        actions[event.pipeline_rank].append(event)
    events: list[StepEvent] = []
    for pipeline_rank, line in actions.items():
        events += [
            StepEvent(
                kind=ACTIONS[e.action.kind],
                pipeline_rank=pipeline_rank,
                stream="compute",
                start=e.start,
                end=e.end,
                stage=e.action.stage,
                micro_batch=e.action.micro,
            )
            for e in line
        ]
        events += _once(simulated, pipeline_rank)
        events += _sends(simulated, line)
        events += _hidden(simulated, line, pipeline_rank)
    return tuple(events)


def _once(simulated: Simulated, pipeline_rank: int) -> Iterator[StepEvent]:
    start = simulated.timeline.makespan
    for kind, seconds in simulated.once[pipeline_rank].items():
        if kind != HIDDEN and seconds > 0:
            yield StepEvent(kind=kind, pipeline_rank=pipeline_rank, stream="compute", start=start, end=start + seconds)
            start += seconds


def _sends(simulated: Simulated, line: list[Event]) -> Iterator[StepEvent]:
    """Return the messages of one pipeline rank by the rule of `cost_models.schedules.sweep`. A link carries one message
    at a time, in the order of production. Messages of one action follow the order of the edges."""
    free: dict[int, float] = {}
    for event in line:
        stage, kind = event.action.stage, event.action.kind
        for (first, last), seconds in simulated.transfers.items():
            source, other = (first, last) if kind == "F" else (last, first)
            target = simulated.home[other]
            if kind == "W" or source != stage or target == event.pipeline_rank or not seconds:
                continue
            start = max(free.get(target, 0.0), event.end)
            free[target] = start + seconds
            name, micro = TRANSFERS[kind], event.action.micro
            yield StepEvent(
                kind=name,
                pipeline_rank=event.pipeline_rank,
                stream="send",
                start=start,
                end=free[target],
                stage=stage,
                micro_batch=micro,
                target=target,
            )


def _hidden(simulated: Simulated, line: list[Event], pipeline_rank: int) -> Iterator[StepEvent]:
    free = 0.0
    for event in line:
        seconds = simulated.stages[event.action.stage].micro.get(HIDDEN, 0.0)
        if event.action.kind in "BI" and seconds > 0:
            start = max(free, event.end - seconds)
            free = start + seconds
            yield StepEvent(
                kind=HIDDEN,
                pipeline_rank=pipeline_rank,
                stream="communication",
                start=start,
                end=free,
                stage=event.action.stage,
                micro_batch=event.action.micro,
            )
    seconds = simulated.once[pipeline_rank].get(HIDDEN, 0.0)
    if seconds > 0 and line:
        start = max(free, line[-1].end - seconds)
        yield StepEvent(
            kind=HIDDEN, pipeline_rank=pipeline_rank, stream="communication", start=start, end=start + seconds
        )
