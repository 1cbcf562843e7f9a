"""Memory of one rank over a simulated step; the predicted peak is its maximum.

While an action runs, its peak stands for all of it: the time of the peak inside a forward or a backward is not
shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costs.stage_costs import Simulated

PASSING = ("activations", "transient")
"""Kinds of bytes that come and go within a step; all others stay."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory from `start` to `end`, in seconds after the step's begin. kept: bytes that micro-batches in flight
    keep. running: extra bytes while an action or the update runs."""

    start: float
    end: float
    kept: float
    running: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank of a pipeline rank. fixed: constant bytes. moments: without gaps, in order."""

    fixed: float
    moments: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> float:
        """Return the peak."""
        return self.fixed + max((moment.kept + moment.running for moment in self.moments), default=0.0)


def memory_over_time(simulated: Simulated) -> tuple[RankMemory, ...]:
    """Return the memory of a rank of each pipeline rank."""
    step_end = max(simulated.prediction.step_seconds, simulated.timeline.makespan)
    ranks = []
    for rank, sizes in enumerate(simulated.memory):
        fixed = sum(size for kind, size in sizes.items() if kind not in PASSING)
        ranks.append(RankMemory(fixed, tuple(_moments(simulated, rank, step_end))))
    return tuple(ranks)


def _moments(simulated: Simulated, rank: int, step_end: float) -> list[Moment]:
    peaks_of_stages = {
        index: simulated.stages[index].peaks for index, home in enumerate(simulated.home) if home == rank
    }
    in_flight = {stage: 0 for stage in peaks_of_stages}
    deferred = {stage: 0 for stage in peaks_of_stages}

    def kept() -> float:
        return sum(peaks.kept * in_flight[s] + peaks.deferred * deferred[s] for s, peaks in peaks_of_stages.items())

    moments, now = [], 0.0
    timeline = simulated.timeline
    columns = zip(timeline.schedule[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    for action, start, end in columns:
        if start > now:
            moments.append(Moment(now, start, kept(), 0.0))
        peaks, stage = peaks_of_stages[action.stage], action.stage
        in_flight[stage] -= action.kind in "BI"
        running = {"F": peaks.forward, "B": peaks.backward, "I": peaks.deferring, "W": 2 * peaks.weight}[action.kind]
        moments.append(Moment(start, end, kept(), running))
        in_flight[stage] += action.kind == "F"
        deferred[stage] += {"I": 1, "W": -1}.get(action.kind, 0)
        now = end
    updated = sum(peaks.updated for peaks in peaks_of_stages.values())
    return [*moments, Moment(now, max(step_end, now), kept(), updated)]
