"""Zero-bubble schedules: backward runs in two halves, so that weight gradients fill what would be bubbles.

P. Qi, X. Wan, G. Huang, M. Lin, "Zero bubble pipeline parallelism" (arXiv:2401.10241; ICLR 2024). The next pipeline
rank waits only for I (the paper's B); W may come at any time after it. Activations are kept until W.

zero-bubble    ZB-H1 (section 2): no pipeline rank keeps more than min(m, p) micro-batches, as 1F1B's first pipeline
               rank does. Equal stages take m (f + i + w) + (p - 1) (f + i - w) if f = i = w and m >= p.
zero-bubble-v  ZB-V (section 6): two chunks per pipeline rank, going down the pipeline ranks and up again, so that the
               first pipeline rank also has the last stage. No pipeline rank keeps more than 2 p chunks' activations,
               which are 1F1B's p micro-batches. With f = i = w and m >= 2 p - 1, pipeline rank i works without a pause
               from i f to (6 m + i) f.

Each has a rule that is exact for equal times and enough micro-batches. For fewer micro-batches the V also has a list
scheduler under the same limit (the paper's automatic scheduling, section 3, in its greedy form without its local
search). The schedule with the least makespan on equal stages wins; on a tie, the rule's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from cost_models.schedules.actions import Action, Kind, Lines, StageTimes, interned
from cost_models.schedules.list_scheduler import Queue, Worker, list_schedule
from cost_models.schedules.record import folded
from cost_models.schedules.sweep import Shape
from cost_models.schedules.timeline import simulate

EQUAL = StageTimes(1.0, 2.0, 1.0, 1.0)


def h1(p: int, m: int) -> Lines:
    """Return ZB-H1's schedule for p pipeline ranks and m micro-batches."""
    return tuple(_h1_line(rank, p, m) for rank in range(p))


def _h1_line(rank: int, p: int, m: int) -> tuple[Action, ...]:
    """Return 1F1B with I for B, and the W of each micro-batch `rank` backwards later.

    So p - rank micro-batches wait for their I and `rank` for their W: p in all, on every pipeline rank.
    """
    num_warmup = min(m, p - rank - 1)
    line = list(_all("F", rank, num_warmup))
    for micro in range(m):
        if micro + num_warmup < m:
            line.append(interned("F", rank, micro + num_warmup))
        line.append(interned("I", rank, micro))
        if micro >= rank:
            line.append(interned("W", rank, micro - rank))
    line += [interned("W", rank, micro) for micro in range(max(0, m - rank), m)]
    return tuple(line)


def v_shaped(p: int, m: int) -> Lines:
    """Return ZB-V's schedule for p pipeline ranks and m micro-batches."""
    best = tuple(_v_line(rank, p, m) for rank in range(p))
    if m >= 2 * p - 1:
        return best
    shape, times = Shape(m, folded(p)), [EQUAL] * (2 * p)
    free = {(stage, stage + 1): 0.0 for stage in range(2 * p - 1)}
    best_seconds = simulate(best, times, free, shape).makespan
    for queues in _v_priorities(p, m, 2 * min(m, p)):
        workers = [Worker(tuple(queues(rank))) for rank in range(p)]
        lines = list_schedule(workers, shape.pipeline_ranks, times, m)
        # Rounding must not decide: the rule's schedule stays unless another is faster by more than that.
        if lines is not None and (seconds := simulate(lines, times, free, shape).makespan) < best_seconds * (1 - 1e-9):
            best, best_seconds = lines, seconds
    return best


def _v_priorities(p: int, m: int, limit: int) -> Iterable[Callable[[int], Iterable[Queue]]]:
    """Return ways to fill a pipeline rank's list, as functions of the pipeline rank.

    A forward of the first chunk leaves room for one of the second. Otherwise first chunks could fill the memory, and
    nothing could ever finish.
    """

    def late_first(rank: int) -> Iterable[Queue]:
        up = 2 * p - 1 - rank
        yield Queue(_all("I", up, m))
        yield Queue(_all("I", rank, m))
        yield Queue(_all("F", up, m), limit)
        yield Queue(_all("F", rank, m), limit - 1)

    def early_first(rank: int) -> Iterable[Queue]:
        up = 2 * p - 1 - rank
        yield Queue(_all("I", rank, m))
        yield Queue(_all("I", up, m))
        yield Queue(_all("F", up, m), limit)
        yield Queue(_all("F", rank, m), limit - 1)

    return late_first, early_first


def _v_line(rank: int, p: int, m: int) -> tuple[Action, ...]:
    """Return the line of one pipeline rank by the V's rule, as in the ZBV schedule of torch.distributed.pipelining.

    The rule is stated for at least 2 p - 1 micro-batches; with fewer, missing micro-batches are left out.
    """
    num = max(m, 2 * p - 1)
    down, up = rank, 2 * p - 1 - rank
    line: list[Action] = []
    done: dict[tuple[Kind, int], int] = defaultdict(int)

    def add(stage: int, *kinds: Kind, times: int = 1) -> None:
        for _ in range(times):
            for kind in kinds:
                micro = done[kind, stage]
                done[kind, stage] += 1
                if micro < m:
                    line.append(interned(kind, stage, micro))

    add(down, "F", times=2 * (p - rank) - 1)
    for _ in range(rank):
        add(up, "F")
        add(down, "F")
    add(up, "F", "I", "W", times=p - rank)
    while done["F", up] < num:
        if done["F", down] < num:
            add(down, "F")
        add(down, "I", "W")
        add(up, "F", "I", "W")
    for _ in range(rank):
        add(down, "I")
        add(up, "I")
    add(down, "I", "W", times=p - rank)
    add(up, "W", times=num - done["W", up])
    add(down, "W", times=num - done["W", down])
    return tuple(line)


def _all(kind: Kind, stage: int, num_micro_batches: int) -> tuple[Action, ...]:
    return tuple(interned(kind, stage, micro) for micro in range(num_micro_batches))
