"""A deterministic, event-driven list scheduler: a schedule from priorities, where no published order exists.

R. L. Graham, "Bounds on multiprocessing timing anomalies" (SIAM J. Appl. Math. 17, 1969), with fixed machines: a free
pipeline rank starts the first ready action of its priority list; if none is ready, it waits until one is. A forward is
not ready while the pipeline rank keeps its maximum of activations.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.schedules.actions import Action, StageTimes, interned


@dataclass(frozen=True, slots=True)
class Queue:
    """Actions of one pipeline rank in a fixed order. limit: a forward of the queue starts only below this number of
    kept activations."""

    actions: Sequence[Action]
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """One pipeline rank and its queues, in order of priority.

    Weight gradients need no queue: a W runs when no queue is ready, oldest I first.
    """

    queues: tuple[Queue, ...]


def list_schedule(
    workers: Sequence[Worker], placement: Sequence[int], times: Sequence[StageTimes], num_micro_batches: int
) -> tuple[tuple[Action, ...], ...] | None:
    """Return the schedules, by pipeline rank, for stages with these `times`; None if the limits allow no progress.

    Transfers cost nothing here. Activations are counted from the start of F to the end of B or W, one per stage and
    micro-batch. Ties go to the lower pipeline rank, so the result is the same on every machine.
    """
    ends = _Ends(len(placement), num_micro_batches)
    states = [_State(worker) for worker in workers]
    events = [(0.0, rank) for rank in range(len(workers))]
    while events:
        now, rank = heapq.heappop(events)
        state = states[rank]
        if now < state.free_at:
            continue  # busy; an event at its end follows
        action = state.next_action(ends, now)
        if action is None:
            continue  # an event follows when an input arrives
        end = state.free_at = now + _seconds(action, times[action.stage])
        heapq.heappush(events, (end, rank))
        ends.set(action, end)
        reader = action.stage + (1 if action.kind == "F" else -1)
        if action.kind != "W" and 0 <= reader < len(placement):
            heapq.heappush(events, (end, placement[reader]))
    return tuple(tuple(state.line) for state in states) if all(state.is_done for state in states) else None


class _Ends:
    """The ends of forwards and input gradients, by stage and micro-batch; infinity until they have started."""

    def __init__(self, num_stages: int, num_micro_batches: int) -> None:
        self._forward = [[math.inf] * num_micro_batches for _ in range(num_stages)]
        self._gradient = [[math.inf] * num_micro_batches for _ in range(num_stages)]

    def set(self, action: Action, end: float) -> None:
        """Record that an action ends at `end`."""
        if action.kind != "W":
            (self._forward if action.kind == "F" else self._gradient)[action.stage][action.micro] = end

    def ready(self, action: Action) -> float:
        """Return when the inputs of a forward or backward are available."""
        stage, micro = action.stage, action.micro
        if action.kind == "F":
            return self._forward[stage - 1][micro] if stage else 0.0
        forward_end = self._forward[stage][micro]
        return forward_end if stage == len(self._forward) - 1 else max(forward_end, self._gradient[stage + 1][micro])


class _State:
    """The progress of a worker. line: its actions so far; free_at: when the last one ends."""

    def __init__(self, worker: Worker) -> None:
        self.line: list[Action] = []
        self.free_at = 0.0
        self._queues = worker.queues
        self._heads = [0] * len(worker.queues)
        self._pending: deque[Action] = deque()
        self._num_held = 0

    @property
    def is_done(self) -> bool:
        """Whether the queues are empty."""
        return all(head == len(queue.actions) for head, queue in zip(self._heads, self._queues, strict=True))

    def next_action(self, ends: _Ends, now: float) -> Action | None:
        """Return the action to start by the worker's priorities; None if none is ready."""
        action = self._choose(ends, now)
        if action is not None:
            self.line.append(action)
            self._num_held += (action.kind == "F") - (action.kind in "BW")
            if action.kind == "I":
                self._pending.append(interned("W", action.stage, action.micro))
        return action

    def _choose(self, ends: _Ends, now: float) -> Action | None:
        for index, queue in enumerate(self._queues):
            head = self._heads[index]
            if head == len(queue.actions):
                continue
            action = queue.actions[head]
            if (action.kind != "F" or self._num_held < queue.limit) and ends.ready(action) <= now:
                self._heads[index] += 1
                return action
        return self._pending.popleft() if self._pending else None


def _seconds(action: Action, times: StageTimes) -> float:
    if action.kind == "F":
        return times.forward
    if action.kind == "B":
        return times.backward
    return times.split()[action.kind == "W"]
