"""A deterministic, event-driven list scheduler: orders from priorities, where no published order fits.

R. L. Graham, "Bounds on multiprocessing timing anomalies" (SIAM J. Appl. Math. 17, 1969), with fixed machines: whenever
a position is free it starts the first action of its priority list that is ready; if none is, it waits until one becomes
so. A forward is also not ready while the position holds as many activations as it may.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.schedules.actions import Action, interned
from cost_models.schedules.stage_times import StageTimes


@dataclass(frozen=True, slots=True)
class Queue:
    """Actions of one position that are done in this order. limit: activations held before a forward of it starts."""

    actions: Sequence[Action]
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """One position: its queues, the first one first where several could go on.

    Weight gradients need no queue: a W follows when nothing of the queues is ready, oldest I first.
    """

    queues: tuple[Queue, ...]


def list_schedule(
    workers: Sequence[Worker], placement: Sequence[int], times: Sequence[StageTimes], num_micro_batches: int
) -> tuple[tuple[Action, ...], ...] | None:
    """The orders, by position, that result for stages with these `times`; None if the limits leave no way on.

    Transfers are taken to cost nothing. Activations are counted from the start of F to the end of B or W, one per
    stage and micro-batch. Ties go to the lower position, so the result is the same on every machine.
    """
    last = len(placement) - 1
    unknown = float("inf")
    forward_end = [[unknown] * num_micro_batches for _ in placement]
    gradient_end = [[unknown] * num_micro_batches for _ in placement]
    heads = [[0] * len(worker.queues) for worker in workers]
    pending: list[deque[Action]] = [deque() for _ in workers]
    held = [0] * len(workers)
    clock = [0.0] * len(workers)
    lines: list[list[Action]] = [[] for _ in workers]

    def ready(action: Action) -> float:
        stage, micro = action.stage, action.micro
        if action.kind == "F":
            return forward_end[stage - 1][micro] if stage else 0.0
        own = forward_end[stage][micro]
        return own if stage == last else max(own, gradient_end[stage + 1][micro])

    def choose(position: int, now: float) -> Action | None:
        for index, queue in enumerate(workers[position].queues):
            head = heads[position][index]
            if head == len(queue.actions):
                continue
            action = queue.actions[head]
            if (action.kind != "F" or held[position] < queue.limit) and ready(action) <= now:
                heads[position][index] += 1
                return action
        return pending[position].popleft() if pending[position] else None

    events = [(0.0, position) for position in range(len(workers))]
    while events:
        now, position = heapq.heappop(events)
        if now < clock[position]:
            continue  # busy; an event at its end follows
        action = choose(position, now)
        if action is None:
            continue  # an event follows when an input arrives
        lines[position].append(action)
        stage, micro = action.stage, action.micro
        end = clock[position] = now + _seconds(action, times[stage])
        heapq.heappush(events, (end, position))
        held[position] += (action.kind == "F") - (action.kind in "BW")
        if action.kind == "F":
            forward_end[stage][micro] = end
            if stage < last:
                heapq.heappush(events, (end, placement[stage + 1]))
        elif action.kind != "W":
            gradient_end[stage][micro] = end
            if stage:
                heapq.heappush(events, (end, placement[stage - 1]))
            if action.kind == "I":
                pending[position].append(interned("W", stage, micro))
    finished = all(
        heads[position][index] == len(queue.actions)
        for position, worker in enumerate(workers)
        for index, queue in enumerate(worker.queues)
    )
    return tuple(map(tuple, lines)) if finished else None


def _seconds(action: Action, times: StageTimes) -> float:
    if action.kind == "F":
        return times.forward
    if action.kind == "B":
        return times.backward
    return times.split()[action.kind == "W"]
