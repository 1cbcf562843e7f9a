"""Zero-bubble schedules: backwards in two halves, so that weight gradients fill what would be bubbles.

P. Qi, X. Wan, G. Huang, M. Lin, "Zero bubble pipeline parallelism" (arXiv:2401.10241; ICLR 2024). Only I (the paper's
B) is on the way of the next position, W may come at any time after it. Activations are held until W.

zero-bubble    ZB-H1 (section 2): no position holds more than min(m, p) micro-batches, which is what 1F1B's first
               position holds. Equal stages take m (f + i + w) + (p - 1) (f + i - w) if f = i = w and m >= p.
zero-bubble-v  ZB-V (section 6): two chunks per position, going down the positions and up again, so that the first
               position also has the last stage. No position holds more than 2 p chunks' activations, which is 1F1B's p
               micro-batches. With f = i = w and m >= 2 p - 1, position i works without a pause from i f to
               (6 m + i) f.

Each has a rule, which is exact for equal times and enough micro-batches, and a list scheduler under the same limit (the
paper's automatic scheduling, section 3, in its greedy form without its local search). For stage times that are given,
or few micro-batches, the orders with the least simulated makespan win, the rule's if equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from cost_models.schedules.actions import Action, Kind, interned
from cost_models.schedules.list_scheduler import Queue, Worker, list_schedule
from cost_models.schedules.stage_times import StageTimes
from cost_models.schedules.timeline import simulate

Lines = tuple[tuple[Action, ...], ...]

EQUAL = StageTimes(1.0, 2.0, 1.0, 1.0)


def h1(p: int, m: int, costs: Sequence[StageTimes] | None) -> Lines:
    """ZB-H1's orders for p positions and m micro-batches; costs: seconds of each stage."""
    rule = tuple(_h1_line(position, p, m) for position in range(p))
    if costs is None:
        return rule
    limit = min(m, p)
    workers = [Worker((Queue(_all("I", position, m)), Queue(_all("F", position, m), limit))) for position in range(p)]
    return _fastest(rule, [workers], range(p), costs or [EQUAL] * p, m)


def _h1_line(position: int, p: int, m: int) -> tuple[Action, ...]:
    """1F1B with I for B, and the W of each micro-batch `position` backwards later.

    So p - position micro-batches wait for their I and `position` for their W: p in all, on every position.
    """
    num_warmup = min(m, p - position - 1)
    line = list(_all("F", position, num_warmup))
    for micro in range(m):
        if micro + num_warmup < m:
            line.append(interned("F", position, micro + num_warmup))
        line.append(interned("I", position, micro))
        if micro >= position:
            line.append(interned("W", position, micro - position))
    line += [interned("W", position, micro) for micro in range(max(0, m - position), m)]
    return tuple(line)


def v_shaped(p: int, m: int, costs: Sequence[StageTimes] | None) -> Lines:
    """ZB-V's orders for p positions and m micro-batches; costs: seconds of each of the 2 p stages."""
    rule = tuple(_v_line(position, p, m) for position in range(p))
    if costs is None and m >= 2 * p - 1:
        return rule
    placement = (*range(p), *reversed(range(p)))
    limit = 2 * min(m, p)
    candidates = [[Worker(tuple(queues(position))) for position in range(p)] for queues in _v_priorities(p, m, limit)]
    return _fastest(rule, candidates, placement, costs or [EQUAL] * (2 * p), m)


def _v_priorities(p: int, m: int, limit: int) -> Iterable[Callable[[int], Iterable[Queue]]]:
    """Ways to fill a position's list, each a function of the position.

    A forward of the first chunk leaves room for one of the second: else first chunks could fill the memory, and nothing
    could ever be finished.
    """

    def late_first(position: int) -> Iterable[Queue]:
        up = 2 * p - 1 - position
        yield Queue(_all("I", up, m))
        yield Queue(_all("I", position, m))
        yield Queue(_all("F", up, m), limit)
        yield Queue(_all("F", position, m), limit - 1)

    def early_first(position: int) -> Iterable[Queue]:
        up = 2 * p - 1 - position
        yield Queue(_all("I", position, m))
        yield Queue(_all("I", up, m))
        yield Queue(_all("F", up, m), limit)
        yield Queue(_all("F", position, m), limit - 1)

    return late_first, early_first


def _v_line(position: int, p: int, m: int) -> tuple[Action, ...]:
    """The V's rule at one position, as in the ZBV schedule of torch.distributed.pipelining.

    Stated for at least 2 p - 1 micro-batches; with fewer, those that do not exist are left out.
    """
    num = max(m, 2 * p - 1)
    down, up = position, 2 * p - 1 - position
    line: list[Action] = []
    done: dict[tuple[Kind, int], int] = defaultdict(int)

    def add(stage: int, *kinds: Kind, times: int = 1) -> None:
        for _ in range(times):
            for kind in kinds:
                micro = done[kind, stage]
                done[kind, stage] += 1
                if micro < m:
                    line.append(interned(kind, stage, micro))

    add(down, "F", times=2 * (p - position) - 1)
    for _ in range(position):
        add(up, "F")
        add(down, "F")
    add(up, "F", "I", "W", times=p - position)
    while done["F", up] < num:
        if done["F", down] < num:
            add(down, "F")
        add(down, "I", "W")
        add(up, "F", "I", "W")
    for _ in range(position):
        add(down, "I")
        add(up, "I")
    add(down, "I", "W", times=p - position)
    add(up, "W", times=num - done["W", up])
    add(down, "W", times=num - done["W", down])
    return tuple(line)


def _all(kind: Kind, stage: int, num_micro_batches: int) -> tuple[Action, ...]:
    return tuple(interned(kind, stage, micro) for micro in range(num_micro_batches))


def _fastest(
    rule: Lines,
    candidates: Iterable[Sequence[Worker]],
    placement: Sequence[int],
    times: Sequence[StageTimes],
    num_micro_batches: int,
) -> Lines:
    """The orders of least makespan: the rule's, or what a list scheduler makes of one of `candidates`."""
    best, best_seconds = rule, simulate(rule, times).makespan
    for workers in candidates:
        orders = list_schedule(workers, placement, times, num_micro_batches)
        # Rounding must not decide: the rule's orders stay unless others are faster by more.
        if orders is not None and (seconds := simulate(orders, times).makespan) < best_seconds * (1 - 1e-9):
            best, best_seconds = orders, seconds
    return best
