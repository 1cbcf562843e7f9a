"""Simulate a schedule: each pipeline rank runs its actions in order, each as soon as its inputs have arrived.

With end(a) the end of action a, prev(a) the action before it on its pipeline rank and d(a) its seconds,

    start(a) = max(end(prev(a)), arrival of each input of a),      end(a) = start(a) + d(a)

A forward's inputs are the forwards of the stages that send to it. A B's or I's inputs are the B or I of the stages that
it sent to. W has no input except the I before it. A message from one pipeline rank to another leaves when its producer
has ended and the link is free. A link is one direction between two pipeline ranks. It carries one message at a time in
the order of production (messages of one action in the order of `edges`), concurrently with computation. Only its source
feeds a link, in the order of its line, so these equations have one solution however the pipeline ranks are visited. If
they have no solution, pipeline ranks wait for one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cost_models.schedules.actions import Action, Lines

Edges: TypeAlias = Sequence[tuple[int, int]]
"""(source stage, target stage) of tensors that are sent forward, and whose gradients are sent back."""

UNKNOWN = -1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a schedule. pipeline_ranks: the pipeline rank of each stage."""

    num_micro_batches: int
    pipeline_ranks: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.pipeline_ranks)


class _Edge:
    """The messages of one edge in one direction: when they arrive, and the pipeline rank that waits for each."""

    __slots__ = ("arrival", "free", "link", "peer", "seconds", "waiting")

    def __init__(self, peer: int, link: int, seconds: float, free: list[float], num_micro_batches: int) -> None:
        self.peer = peer  # the stage that produces
        self.link = link  # index into free; -1 within a pipeline rank
        self.seconds = seconds
        self.free = free
        self.arrival = [UNKNOWN] * num_micro_batches
        self.waiting: dict[int, int] = {}

    def send(self, micro: int, end: float) -> None:
        if self.link >= 0:
            begin = self.free[self.link]
            end = (begin if begin > end else end) + self.seconds
            self.free[self.link] = end
        self.arrival[micro] = end


@dataclass(frozen=True, slots=True)
class _Wiring:
    """The messages between stages: for each stage, the inputs and outputs of forward and backward."""

    forward_inputs: list[list[_Edge]]
    forward_outputs: list[list[_Edge]]
    backward_inputs: list[list[_Edge]]
    backward_outputs: list[list[_Edge]]


def _wire(shape: Shape, edges: Edges, transfers: Sequence[float]) -> _Wiring:
    num_stages = shape.num_stages
    wiring = _Wiring(_lists(num_stages), _lists(num_stages), _lists(num_stages), _lists(num_stages))
    links: dict[tuple[int, int], int] = {}
    free: list[float] = []

    def edge(source: int, target: int, seconds: float) -> _Edge:
        pair = shape.pipeline_ranks[source], shape.pipeline_ranks[target]
        link = -1
        if pair[0] != pair[1]:
            link = links.setdefault(pair, len(links))
            if link == len(free):
                free.append(0.0)
        return _Edge(source, link, seconds, free, shape.num_micro_batches)

    for (source, target), seconds in zip(edges, transfers, strict=True):
        forward = edge(source, target, seconds)
        wiring.forward_outputs[source].append(forward)
        wiring.forward_inputs[target].append(forward)
        backward = edge(target, source, seconds)
        wiring.backward_outputs[target].append(backward)
        wiring.backward_inputs[source].append(backward)
    return wiring


def _lists(num_stages: int) -> list[list[_Edge]]:
    return [[] for _ in range(num_stages)]


def sweep(
    schedule: Lines, shape: Shape, edges: Edges, seconds: Mapping[str, Sequence[float]], transfers: Sequence[float]
) -> tuple[list[list[float]], list[list[float]]]:
    """Return start and end of each action, per pipeline rank.

    seconds: per kind, of each stage. transfers: seconds of each edge, ignored within a pipeline rank. Every stage must
    run every micro-batch once, on one pipeline rank. Raises ValueError that names the actions if pipeline ranks wait
    for one another.
    """
    wiring = _wire(shape, edges, transfers)
    nothing = _lists(shape.num_stages)
    per_kind = {
        "F": (seconds["F"], wiring.forward_inputs, wiring.forward_outputs),
        "B": (seconds["B"], wiring.backward_inputs, wiring.backward_outputs),
        "I": (seconds["I"], wiring.backward_inputs, wiring.backward_outputs),
        "W": (seconds["W"], nothing, nothing),
    }
    starts: list[list[float]] = [[] for _ in schedule]
    ends: list[list[float]] = [[] for _ in schedule]
    runnable = list(range(len(schedule)))
    while runnable:
        rank = runnable.pop()
        line, line_starts, line_ends = schedule[rank], starts[rank], ends[rank]
        clock = line_ends[-1] if line_ends else 0.0
        for index in range(len(line_ends), len(line)):
            action = line[index]
            stage, micro = action.stage, action.micro
            durations, inputs, outputs = per_kind[action.kind]
            missing = None
            for edge in inputs[stage]:
                arrival = edge.arrival[micro]
                if arrival > clock:
                    clock = arrival
                elif arrival < 0:
                    missing = edge
                    break
            if missing is not None:
                # The clock may have advanced to another input's arrival, so it is read again from line_ends.
                missing.waiting[micro] = rank
                break
            line_starts.append(clock)
            clock += durations[stage]
            line_ends.append(clock)
            for edge in outputs[stage]:
                edge.send(micro, clock)
                if micro in edge.waiting:
                    runnable.append(edge.waiting.pop(micro))
    if any(len(line_ends) < len(line) for line_ends, line in zip(ends, schedule, strict=True)):
        raise ValueError(_deadlock(schedule, shape, wiring, [len(line_ends) for line_ends in ends]))
    return starts, ends


def _deadlock(schedule: Lines, shape: Shape, wiring: _Wiring, heads: list[int]) -> str:
    """Follow the pipeline ranks that wait for one another until one repeats; return the cycle as text."""
    rank = next(index for index, line in enumerate(schedule) if heads[index] < len(line))
    chain: list[tuple[int, str]] = []
    while all(rank != seen for seen, _ in chain):
        action = schedule[rank][heads[rank]]
        forward = action.kind == "F"
        inputs = wiring.forward_inputs if forward else wiring.backward_inputs
        peer = next(edge.peer for edge in inputs[action.stage] if edge.arrival[action.micro] < 0)
        other = shape.pipeline_ranks[peer]
        wanted = _find(schedule[other][heads[other] :], "F" if forward else "BI", peer, action.micro)
        next_action = schedule[other][heads[other]]
        wait = f"pipeline rank {rank} waits at {action} for {wanted}, which pipeline rank {other} reaches only after"
        chain.append((rank, f"{wait} {next_action}"))
        rank = other
    first = next(index for index, (seen, _) in enumerate(chain) if seen == rank)
    return "deadlock: " + "; ".join(text for _, text in chain[first:])


def _find(line: Sequence[Action], kinds: str, stage: int, micro: int) -> Action:
    return next(item for item in line if item.kind in kinds and item.stage == stage and item.micro == micro)
