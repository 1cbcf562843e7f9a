"""The simulated times of a schedule's actions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_models.schedules.actions import Action, Lines, StageTimes
from cost_models.schedules.sweep import Shape, sweep


@dataclass(frozen=True, slots=True)
class Event:
    """One action on one pipeline rank, from `start` to `end` in seconds after the step's start."""

    action: Action
    pipeline_rank: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step. schedule, starts, ends: per pipeline rank, in order; seconds after the step's start.

    makespan: seconds to the end of the last action. busy: seconds that each pipeline rank computes.
    """

    schedule: tuple[tuple[Action, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    busy: tuple[float, ...]

    def events(self) -> Iterator[Event]:
        """Yield all actions, pipeline rank by pipeline rank, in execution order."""
        for pipeline_rank, columns in enumerate(zip(self.schedule, self.starts, self.ends, strict=True)):
            for action, start, end in zip(*columns, strict=True):
                yield Event(action, pipeline_rank, start, end)

    def scaled(self, factor: float) -> Timeline:
        """Return the same step with all times multiplied by `factor`."""
        starts, ends = (tuple(tuple(factor * t for t in line) for line in times) for times in (self.starts, self.ends))
        return Timeline(
            schedule=self.schedule,
            starts=starts,
            ends=ends,
            makespan=factor * self.makespan,
            busy=tuple(factor * busy for busy in self.busy),
        )

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """Return each pipeline rank's idle share of the makespan; 0 for an empty makespan."""
        return tuple(1 - busy / self.makespan if self.makespan > 0 else 0.0 for busy in self.busy)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Return each stage's peak number of micro-batches between the start of F and the end of B (or W, if split)."""
        live: dict[int, int] = {}
        peaks: dict[int, int] = {}
        for line in self.schedule:
            for action in line:
                stage = action.stage
                if action.kind == "F":
                    live[stage] = live.get(stage, 0) + 1
                    peaks[stage] = max(peaks.get(stage, 0), live[stage])
                elif action.kind != "I":
                    live[stage] -= 1
        return tuple(peaks[stage] for stage in sorted(peaks))


def simulate(
    schedule: Lines, times: Sequence[StageTimes], transfer_seconds: Mapping[tuple[int, int], float], shape: Shape
) -> Timeline:
    """Simulate `schedule`, of this shape, with the `times` of each stage. The equations are in ``sweep``.

    transfer_seconds: (source stage, target stage) -> seconds of one micro-batch's message, and of its gradient on the
    way back; ignored within a pipeline rank. A link, one direction between two pipeline ranks, carries one message at a
    time, while both pipeline ranks compute. Raises ValueError for an unknown time, and where pipeline ranks wait for
    one another.
    """
    for edge, transfer in transfer_seconds.items():
        if not 0 <= transfer < math.inf:
            raise ValueError(f"transfer_seconds[{edge}] must be a finite number, zero or more, got {transfer}")
    halves = _halves(schedule, times)
    seconds = {
        "F": [stage.forward for stage in times],
        "B": [stage.backward for stage in times],
        "I": [both[0] for both in halves],
        "W": [both[1] for both in halves],
    }
    starts, ends = sweep(schedule, shape, tuple(transfer_seconds), seconds, tuple(transfer_seconds.values()))
    durations = [[seconds[action.kind][action.stage] for action in line] for line in schedule]
    return Timeline(
        schedule=tuple(map(tuple, schedule)),
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        makespan=max(line[-1] for line in ends if line),
        busy=tuple(math.fsum(line) for line in durations),
    )


def _halves(schedule: Lines, times: Sequence[StageTimes]) -> list[tuple[float, float]]:
    split = {action.stage for line in schedule for action in line if action.kind == "I"}
    return [stage.split() if index in split else (0.0, 0.0) for index, stage in enumerate(times)]


def chrome_trace(timeline: Timeline) -> dict[str, object]:
    """Return the timeline in the Trace Event Format of Chrome and Perfetto, ready for `json.dump`.

    One row per pipeline rank; complete events ("X") named after the action, `ts` and `dur` in microseconds, the
    category one of forward, backward, input, weight. Format: "Trace Event Format", Google, section "Complete Events".
    """
    categories = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    rows: list[dict[str, object]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "pipeline"}}]
    rows += [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 0,
            "tid": pipeline_rank,
            "args": {"name": f"pipeline rank {pipeline_rank}"},
        }
        for pipeline_rank in range(len(timeline.schedule))
    ]
    rows += [
        {
            "ph": "X",
            "name": str(event.action),
            "cat": categories[event.action.kind],
            "pid": 0,
            "tid": event.pipeline_rank,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {"stage": event.action.stage, "micro": event.action.micro},
        }
        for event in timeline.events()
    ]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}
