"""The named schedules.

p pipeline ranks, m micro-batches, v chunks (stages per pipeline rank), pipeline rank i.

gpipe        Y. Huang et al., "GPipe" (NeurIPS 2019): all forwards, then all backwards.
1f1b         D. Narayanan et al., "PipeDream" (SOSP 2019) with a flush, as in "Memory-efficient pipeline-parallel DNN
             training" (ICML 2021): min(m, p - i - 1) forwards, then a forward and a backward in turn, then the rest.
interleaved  D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM"
             (SC 2021), section 2.2: stage s on pipeline rank s mod p; micro-batches go in groups of p, chunk after
             chunk within a group (backwards: last chunk first); min(m v, 2 (p - i - 1) + (v - 1) p) forwards, then as
             1f1b. It is stated for m a multiple of p; see `_interleaved` for the rest.
zero-bubble, zero-bubble-v
             see ``zero_bubble``.

`SCHEDULES` has their records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from cost_models.schedules import closed_forms, zero_bubble
from cost_models.schedules.actions import Action, Kind, Lines, StageTimes, interned
from cost_models.schedules.list_scheduler import Queue, Worker, list_schedule
from cost_models.schedules.record import Schedule, folded, round_robin


def num_chunks(schedule: str, chunks: int | None = None) -> int:
    """Return stages per pipeline rank: `chunks`, or the schedule's default.

    Raises ValueError for an unknown schedule, or a number that it does not support.
    """
    record = schedule_named(schedule)
    if chunks is None:
        return record.default_chunks
    if not record.allows(chunks):
        legal = "at least 1" if record.chooses_chunks else str(record.default_chunks)
        raise ValueError(f"{schedule} has {legal} chunks per pipeline rank, not {chunks}")
    return chunks


def placement(schedule: str, num_pipeline_ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """Return the pipeline rank of each stage.

    Raises ValueError as `num_chunks`, and for fewer than one pipeline rank.
    """
    chunks = num_chunks(schedule, chunks)
    if num_pipeline_ranks < 1:
        raise ValueError(f"a pipeline has at least one pipeline rank, not {num_pipeline_ranks}")
    return schedule_named(schedule).place(num_pipeline_ranks, chunks)


def make_schedule(
    schedule: str,
    num_pipeline_ranks: int,
    num_micro_batches: int,
    chunks: int | None = None,
) -> Lines:
    """Return the actions of each pipeline rank, in order, independent of the stages' times.

    chunks: see `num_chunks`. Raises ValueError as `placement`, and for fewer than one micro-batch.
    """
    pipeline_ranks = placement(schedule, num_pipeline_ranks, chunks)
    if num_micro_batches < 1:
        raise ValueError(f"a step has at least one micro-batch, not {num_micro_batches}")
    return _by_rule(schedule, num_pipeline_ranks, num_micro_batches, len(pipeline_ranks) // num_pipeline_ranks)


@lru_cache(maxsize=128)
def _by_rule(schedule: str, num_pipeline_ranks: int, num_micro_batches: int, chunks: int) -> Lines:
    """Run `make_schedule` for checked arguments."""
    return schedule_named(schedule).make_lines(num_pipeline_ranks, num_micro_batches, chunks)


def _gpipe(p: int, m: int, v: int) -> Lines:
    return _one_stage_each(p, m, [m] * p)


def _1f1b(p: int, m: int, v: int) -> Lines:
    return _one_stage_each(p, m, [p - rank - 1 for rank in range(p)])


def _one_stage_each(p: int, m: int, warmups: Sequence[int]) -> Lines:
    """warmups: forwards of each pipeline rank before its first backward."""
    return tuple(
        _one_forward_one_backward(
            [interned("F", rank, micro) for micro in range(m)],
            [interned("B", rank, micro) for micro in range(m)],
            num_warmup,
        )
        for rank, num_warmup in enumerate(warmups)
    )


def _one_forward_one_backward(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> tuple[Action, ...]:
    """Return `num_warmup` forwards, forward and backward in turn, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    steady = [action for pair in zip(forwards[num_warmup:], backwards, strict=False) for action in pair]
    return (*forwards[:num_warmup], *steady, *backwards[len(forwards) - num_warmup :])


def _interleaved(p: int, m: int, v: int) -> Lines:
    """Return the published order, or, where p does not divide m, the order its rule gives with a smaller last group.

    With a smaller group a pipeline rank cannot always alternate: the next forward's input may arrive after the next
    backward's. So pipeline ranks are list-scheduled with the same two sequences, the same limit on activations, and
    forwards first. Where p divides m, this takes as long as the published order and differs only in the order of two
    actions that are both ready.
    """
    if v == 1:
        return _1f1b(p, m, v)
    tables = [(list(_table("F", i, p, m, v)), list(_table("B", i, p, m, v))) for i in range(p)]
    warmups = [2 * (p - i - 1) + (v - 1) * p for i in range(p)]
    if m % p == 0:
        return tuple(
            _one_forward_one_backward(forwards, backwards, num_warmup)
            for (forwards, backwards), num_warmup in zip(tables, warmups, strict=True)
        )
    workers = [
        Worker((Queue(forwards, limit=num_warmup + 1), Queue(backwards)))
        for (forwards, backwards), num_warmup in zip(tables, warmups, strict=True)
    ]
    pipeline_ranks = round_robin(p, v)
    result = list_schedule(workers, pipeline_ranks, [StageTimes(1.0, 1.0)] * len(pipeline_ranks), m)
    assert result is not None, "the limits leave room for a whole group of every chunk"
    return result


def _table(kind: Kind, rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    for first in range(0, m, p):
        for chunk in range(v) if kind == "F" else reversed(range(v)):
            for micro in range(first, min(first + p, m)):
                yield interned(kind, chunk * p + rank, micro)


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(
        make_lines=_gpipe,
        holds_all=True,
        is_tried=False,
        closed_form=closed_forms.ALL_FORWARD_ALL_BACKWARD,
    ),
    "1f1b": Schedule(
        make_lines=_1f1b,
        closed_form=closed_forms.ONE_FORWARD_ONE_BACKWARD,
    ),
    "interleaved": Schedule(
        make_lines=_interleaved,
        default_chunks=2,
        chooses_chunks=True,
        in_groups=True,
    ),
    "zero-bubble": Schedule(
        make_lines=lambda p, m, v: zero_bubble.h1(p, m),
        defers_weights=True,
        closed_form=closed_forms.ZERO_BUBBLE,
    ),
    "zero-bubble-v": Schedule(
        make_lines=lambda p, m, v: zero_bubble.v_shaped(p, m),
        default_chunks=2,
        place=folded,
        defers_weights=True,
    ),
}
"""Every schedule by its name."""

PLAIN = "1f1b"
"""The schedule of a pipeline for which none is named: with one pipeline rank it is a forward and a backward in turn."""


def schedule_named(name: str) -> Schedule:
    """Return the schedule with this name, of "" the plain one. Raises ValueError for an unknown schedule."""
    if name and name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name or PLAIN]
