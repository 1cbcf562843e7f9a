"""The simulated step as records: what every pipeline position computes, sends and synchronises, and when.

The same for a strategy that a person wrote (`autopar.predict`) and for a searched plan: both end in a `Simulated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.costs.block_costs import HIDDEN
from autopar.costs.stage_costs import Simulated
from cost_models.schedule import Event

ACTIONS: Mapping[str, str] = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
"""Letter of a schedule's action -> kind of the event. B is the whole backward, I and W its two halves."""

TRANSFERS: Mapping[str, str] = {"F": "p2p forward", "B": "p2p backward", "I": "p2p backward"}
"""Letter of the action that produced a message -> kind of the event: activations, or their gradients."""

Stream = Literal["compute", "send", "communication"]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Something that one rank of a pipeline position does from `start` to `end`, in seconds after the step's begin.

    kind: of ACTIONS, TRANSFERS, or the kind of seconds that the prediction has it under ("optimizer", ...). stream:
    "compute" for what holds up the position, one event after the other, exposed traffic among it; "send" for messages
    to position `target`, beside it; "communication" for other traffic that is hidden behind it. stage and micro_batch
    are None for what is done once per step.
    """

    kind: str
    position: int
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
    """All events, position by position, in the order of their start in each stream.

    What is done once per step begins, as the prediction counts it, when the last position is through. The last event
    ends with the predicted step. Hidden traffic of a micro-batch is drawn to end with its backward, hidden traffic of a
    step with the last backward; the sum of its seconds is the prediction's, the place an assumption.
    """
    actions: dict[int, list[Event]] = {position: [] for position in range(len(simulated.timeline.orders))}
    for event in simulated.timeline.events():
        actions[event.position].append(event)
    found: list[StepEvent] = []
    for position, line in actions.items():
        found += [
            StepEvent(
                kind=ACTIONS[e.action.kind],
                position=position,
                stream="compute",
                start=e.start,
                end=e.end,
                stage=e.action.stage,
                micro_batch=e.action.micro,
            )
            for e in line
        ]
        found += _once(simulated, position)
        found += _sends(simulated, line)
        found += _hidden(simulated, line, position)
    return tuple(found)


def _once(simulated: Simulated, position: int) -> Iterator[StepEvent]:
    start = simulated.timeline.makespan
    for kind, seconds in simulated.once[position].items():
        if kind != HIDDEN and seconds > 0:
            yield StepEvent(kind=kind, position=position, stream="compute", start=start, end=start + seconds)
            start += seconds


def _sends(simulated: Simulated, line: list[Event]) -> Iterator[StepEvent]:
    """Messages of one position by the rule of `cost_models.schedules.sweep`: a link carries one at a time, in the order
    of production, and what one action produces in the order of the edges."""
    free: dict[int, float] = {}
    for event in line:
        stage, kind = event.action.stage, event.action.kind
        for (first, last), seconds in simulated.transfers.items():
            source, other = (first, last) if kind == "F" else (last, first)
            target = simulated.home[other]
            if kind == "W" or source != stage or target == event.position or not seconds:
                continue
            start = max(free.get(target, 0.0), event.end)
            free[target] = start + seconds
            name, micro = TRANSFERS[kind], event.action.micro
            yield StepEvent(
                kind=name,
                position=event.position,
                stream="send",
                start=start,
                end=free[target],
                stage=stage,
                micro_batch=micro,
                target=target,
            )


def _hidden(simulated: Simulated, line: list[Event], position: int) -> Iterator[StepEvent]:
    free = 0.0
    for event in line:
        seconds = simulated.stages[event.action.stage].micro.get(HIDDEN, 0.0)
        if event.action.kind in "BI" and seconds > 0:
            start = max(free, event.end - seconds)
            free = start + seconds
            yield StepEvent(
                kind=HIDDEN,
                position=position,
                stream="communication",
                start=start,
                end=free,
                stage=event.action.stage,
                micro_batch=event.action.micro,
            )
    seconds = simulated.once[position].get(HIDDEN, 0.0)
    if seconds > 0 and line:
        start = max(free, line[-1].end - seconds)
        yield StepEvent(kind=HIDDEN, position=position, stream="communication", start=start, end=start + seconds)
