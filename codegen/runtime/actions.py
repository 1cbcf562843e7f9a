"""The actions of pipeline ranks, and the check that their lines fit together.

An action is a kind, a stage and a micro-batch: `F0.3` forward, `B0.3` whole backward, `I0.3` the part of a backward
that other stages wait for (gradients of what the stage received), `W0.3` the rest of it (gradients of weights).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

_FORM = re.compile(r"([FBIW])(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a stage on a micro-batch; `kind` is one of F, B, I and W."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Link:
    """Stage `source` sends something to stage `target`, and gets a gradient for it or not."""

    source: int
    target: int
    has_gradient: bool


Lines = tuple[tuple[Action, ...], ...]
"""The actions of every pipeline rank, in the order in which it runs them."""


def parse_lines(schedule: Sequence[str]) -> Lines:
    """One text of space-separated actions per pipeline rank. ValueError for what is not an action."""
    return tuple(tuple(_parse(word, rank) for word in line.split()) for rank, line in enumerate(schedule))


def _parse(word: str, rank: int) -> Action:
    match = _FORM.fullmatch(word)
    if match is None:
        raise ValueError(
            f"pipeline rank {rank}: {word!r} is not an action; write F, B, I or W, the stage, '.' and the "
            "micro-batch, as in F0.3"
        )
    return Action(match[1], int(match[2]), int(match[3]))


def digest(schedule: Sequence[str], program: str) -> str:
    """A text that is equal for equal schedules of equal programs."""
    return hashlib.sha256("\n".join((program, *(" ".join(line.split()) for line in schedule))).encode()).hexdigest()


def forward_only(lines: Lines) -> Lines:
    """The forwards, in the same order; what waited for nothing in a circle still does not."""
    return tuple(tuple(action for action in line if action.kind == "F") for line in lines)


def check_lines(lines: Lines, pipeline_ranks: Sequence[int], num_micro_batches: int, links: Sequence[Link]) -> None:
    """Every action there once, at its stage's pipeline rank and in a legal order, and no circle of waiting.

    pipeline_ranks: of each stage. Sends do not wait for whoever receives. Raises ValueError naming pipeline rank and
    action.
    """
    if len(lines) != max(pipeline_ranks) + 1:
        raise ValueError(f"the schedule has {len(lines)} lines, the pipeline {max(pipeline_ranks) + 1} pipeline ranks")
    done: dict[Action, int] = {}
    for rank, line in enumerate(lines):
        for action in line:
            _check_place(action, rank, pipeline_ranks, num_micro_batches)
            if action in done:
                raise ValueError(f"pipeline rank {rank}: {action} is there twice")
            done[action] = rank
    for stage, rank in enumerate(pipeline_ranks):
        for index in range(num_micro_batches):
            _check_complete(set(done), stage, index, rank)
    _check_waiting(lines, links)


def _check_place(action: Action, rank: int, pipeline_ranks: Sequence[int], num_micro_batches: int) -> None:
    if action.stage >= len(pipeline_ranks):
        raise ValueError(f"pipeline rank {rank}: {action} names stage {action.stage} of {len(pipeline_ranks)}")
    if pipeline_ranks[action.stage] != rank:
        raise ValueError(f"pipeline rank {rank}: {action} belongs to pipeline rank {pipeline_ranks[action.stage]}")
    if action.micro_batch >= num_micro_batches:
        raise ValueError(
            f"pipeline rank {rank}: {action} names micro-batch {action.micro_batch} of {num_micro_batches}"
        )


def _check_complete(there: set[Action], stage: int, micro_batch: int, rank: int) -> None:
    kinds = "".join(kind for kind in "FBIW" if Action(kind, stage, micro_batch) in there)
    if kinds not in ("FB", "FIW"):
        raise ValueError(
            f"pipeline rank {rank}: stage {stage} and micro-batch {micro_batch} need F and B, or F, I and W; the "
            f"schedule has {', '.join(f'{kind}{stage}.{micro_batch}' for kind in kinds) or 'none'}"
        )


def requirements(action: Action, links: Sequence[Link], are_deferred: set[tuple[int, int]]) -> list[Action]:
    """Return the actions that must end before. are_deferred: the (stage, micro-batch) whose backward is I and W."""
    stage, index = action.stage, action.micro_batch

    def backward(of: int) -> Action:
        return Action("I" if (of, index) in are_deferred else "B", of, index)

    if action.kind == "F":
        return [Action("F", link.source, index) for link in links if link.target == stage]
    if action.kind == "W":
        return [Action("I", stage, index)]
    consumers = [backward(link.target) for link in links if link.source == stage and link.has_gradient]
    return [Action("F", stage, index), *consumers]


def _check_waiting(lines: Lines, links: Sequence[Link]) -> None:
    """Run the lines without computing; what then still waits would wait for ever."""
    are_deferred = {(action.stage, action.micro_batch) for line in lines for action in line if action.kind == "I"}
    done: set[Action] = set()
    places = [0] * len(lines)
    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(lines):
            while places[rank] < len(line):
                action = line[places[rank]]
                if not done.issuperset(requirements(action, links, are_deferred)):
                    break
                done.add(action)
                places[rank] += 1
                moved = True
    stuck = [
        (rank, line[place]) for rank, (line, place) in enumerate(zip(lines, places, strict=True)) if place < len(line)
    ]
    if stuck:
        waits = []
        for rank, action in stuck:
            missing = [
                str(requirement) for requirement in requirements(action, links, are_deferred) if requirement not in done
            ]
            waits.append(f"pipeline rank {rank}: {action} waits for {', '.join(missing)}")
        raise ValueError(f"the schedule never ends: {'; '.join(waits)}")
