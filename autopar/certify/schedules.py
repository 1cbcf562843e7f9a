"""Check a pipeline's schedule, action by action: every action once, every message received by its reader, and an end.

`codegen/runtime/actions.py` checks the lines before a program trains. Here they are also executed. Each pipeline rank
runs its line, sends enter the channel between two pipeline ranks in the order in which they end, and an action takes
its inputs from the channel. No message may stay in a channel, and no rank may wait forever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from autopar.certify.certificate import Findings
from codegen.program import PipelineProgram
from codegen.runtime.actions import Action, Lines, Link, check_lines, parse_lines

Message = tuple[int, int, int, bool]
"""(sending stage, receiving stage, micro-batch, whether it is a gradient)"""


def check_schedule(program: PipelineProgram) -> Findings:
    """Check the lines for the real number of pipeline ranks and micro-batches."""
    num_micro_batches = program.any.num_micro_batches
    ranks = tuple(stage.pipeline_rank for stage in program.stages)
    links = links_of(program)
    counts: Counter[str] = Counter()
    failures: list[str] = []
    try:
        lines = parse_lines(program.schedule)
        counts.update(action.kind for line in lines for action in line)
        check_lines(lines, ranks, num_micro_batches, links)
        failures += [] if not (fault := complete(lines, ranks, num_micro_batches)) else [fault]
        num_messages, num_channels, num_kept = play(lines, ranks, links)
    except ValueError as error:
        failures.append(f"schedule {program.schedule_name}: {error}")
        num_messages = num_channels = num_kept = 0
    names = {"F": "forwards", "B": "whole backwards", "I": "gradients of inputs", "W": "gradients of weights"}
    return Findings(
        subject="schedule",
        counts={
            "pipeline ranks": len(program.schedule),
            "stages": len(program.stages),
            "micro-batches": num_micro_batches,
            **{names[kind]: counts[kind] for kind in "FBIW" if counts[kind]},
            "messages sent and taken": num_messages,
            "channels": num_channels,
            "messages that wait behind a later one": num_kept,
        },
        failures=tuple(failures),
    )


def links_of(program: PipelineProgram) -> tuple[Link, ...]:
    """Return which stage sends to which, and whether a gradient comes back."""
    has_gradient_of: dict[tuple[int, int], bool] = {}
    for number, stage in enumerate(program.stages):
        for name, sent in stage.program.sends.items():
            for reader in program.readers(number, name):
                has_gradient_of[number, reader] = (
                    has_gradient_of.get((number, reader), False) or sent.spec.requires_grad
                )
    return tuple(Link(source, target, has_gradient) for (source, target), has_gradient in has_gradient_of.items())


def complete(lines: Lines, ranks: Sequence[int], num_micro_batches: int) -> str:
    """Return the missing or surplus actions, "" if none: each stage's F and B, or F, I and W, of each micro-batch."""
    present = Counter(action for line in lines for action in line)
    deferred = {action.stage for action in present if action.kind == "I"}
    expected = Counter(
        Action(kind, stage, index)
        for stage in range(len(ranks))
        for index in range(num_micro_batches)
        for kind in ("FIW" if stage in deferred and Action("I", stage, index) in present else "FB")
    )
    wrong = [str(action) for action in (present - expected) + (expected - present)]
    return f"actions that are missing or too many: {', '.join(wrong[:8])}" if wrong else ""


def play(lines: Lines, ranks: Sequence[int], links: Sequence[Link]) -> tuple[int, int, int]:
    """Execute the lines; return (messages, channels, messages received after a later one). Raises ValueError."""
    channels: dict[tuple[int, int], deque[Message]] = {}
    places = [0] * len(lines)
    num_messages = num_kept = 0
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, line in enumerate(lines):
            while places[rank] < len(line):
                action = line[places[rank]]
                needed = takes(action, links)
                keys = [(ranks[message[0]], rank) for message in needed]
                if not all(m in channels.get(key, ()) for m, key in zip(needed, keys, strict=True)):
                    break
                for message, key in zip(needed, keys, strict=True):
                    num_kept += channels[key][0] != message
                    channels[key].remove(message)
                for message in sends(action, links):
                    channels.setdefault((rank, ranks[message[1]]), deque()).append(message)
                    num_messages += 1
                places[rank] += 1
                is_moving = True
    for rank, (line, place) in enumerate(zip(lines, places, strict=True)):
        if place < len(line):
            raise ValueError(f"line {rank} never gets past {line[place]}, which waits for a message that no rank sends")
    left = [(key, queue[0]) for key, queue in channels.items() if queue]
    if left:
        (source, target), message = left[0]
        raise ValueError(f"pipeline rank {target} never takes {message} that pipeline rank {source} sends")
    return num_messages, len(channels), num_kept


def takes(action: Action, links: Sequence[Link]) -> list[Message]:
    """Return the messages that an action needs before it starts."""
    stage, index = action.stage, action.micro_batch
    if action.kind == "F":
        return [(link.source, stage, index, False) for link in links if link.target == stage]
    if action.kind in "BI":
        return [(link.target, stage, index, True) for link in links if link.source == stage and link.has_gradient]
    return []


def sends(action: Action, links: Sequence[Link]) -> list[Message]:
    """Return the messages that an action sends when it ends."""
    stage, index = action.stage, action.micro_batch
    if action.kind == "F":
        return [(stage, link.target, index, False) for link in links if link.source == stage]
    if action.kind in "BI":
        return [(stage, link.source, index, True) for link in links if link.target == stage and link.has_gradient]
    return []
