"""Best-first search by lower bounds: solve candidates until no remaining one can win.

A bound is cheap, a solution is not. When a candidate comes first, its bound is tightened if possible. If another
candidate then comes before it, it is put back.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar


class Bound(IntEnum):
    """Tightness of a candidate's bound: each further level takes longer to compute, and is no less."""

    OF_MANY_ROWS = 0
    WITHOUT_PARAMETERS = 1
    WITH_MEMORY_FREE = 2
    TIGHT = 3


Tried = TypeVar("Tried")
Solution = TypeVar("Solution")


@dataclass(frozen=True, slots=True)
class Searched(Generic[Tried, Solution]):
    """Results of a search: the best of each solved layout, fastest first.

    skipped: (lower bound in seconds, candidate) of the other layouts.
    """

    solutions: tuple[Solution, ...] = ()
    skipped: tuple[tuple[float, Tried], ...] = ()

    @property
    def best(self) -> Solution | None:
        """Return the fastest, if there is any."""
        return self.solutions[0] if self.solutions else None


class BestFirst(ABC, Generic[Tried, Solution]):
    """A search over candidates of one kind.

    gap: the share of the time by which the search may miss a better candidate. most_solved: the number of candidates
    that are solved once one fits, most promising first.
    """

    gap = 0.0
    most_solved = math.inf

    @abstractmethod
    def starting_bounds(self) -> Iterable[tuple[float, Tried, Bound]]:
        """Return the first candidates with their lower bounds in seconds."""

    def tighten(self, candidate: Tried, tightness: Bound) -> Iterable[tuple[float, Tried, Bound]]:
        """Return the candidate with its next bound, or all candidates that it stands for. Called until the bound is
        TIGHT."""
        return ()

    @abstractmethod
    def solve(self, candidate: Tried, cutoff: float) -> tuple[float, Solution] | None:
        """Return the seconds of the best solution, and the solution. Return None if there is none below `cutoff`
        seconds; a slower solution may also be returned."""

    @abstractmethod
    def layout(self, candidate: Tried) -> Hashable:
        """Return the layout. The search keeps the best candidate of every layout."""

    def key(self, candidate: Tried) -> tuple[object, ...]:
        """Return a key that orders equally good candidates."""
        return (self.layout(candidate),)

    def queue_name(self, candidate: Tried) -> str:
        """Return the name of the candidate's queue. Queues take turns until a candidate fits."""
        return ""

    def run(self, cutoff: float = math.inf) -> Searched[Tried, Solution]:
        """Solve candidates in the order of their bounds, until none can beat the best solution or `cutoff` seconds.

        Queues take turns until a candidate fits: if memory is scarce, none of the least bounds may fit.
        """
        queues: dict[str, list[tuple[float, int, Tried, Bound]]] = {}
        numbers = itertools.count()
        for seconds, candidate, tightness in self.starting_bounds():
            queues.setdefault(self.queue_name(candidate), []).append((seconds, next(numbers), candidate, tightness))
        for queue in queues.values():
            heapq.heapify(queue)
        best_of_layout: dict[Hashable, tuple[float, Tried, Solution]] = {}
        slower: list[tuple[float, int, Tried, Bound]] = []
        best, turn, num_solved = cutoff, 0, 0
        while heads := [queue for queue in queues.values() if queue and queue[0][0] < best * (1 - self.gap)]:
            queue = heads[turn % len(heads)] if best == math.inf else min(heads, key=lambda head: head[0][:2])
            least, number, candidate, tightness = heapq.heappop(queue)
            if tightness < Bound.TIGHT:
                for seconds, successor, tighter in self.tighten(candidate, tightness):
                    order = number if successor is candidate else next(numbers)
                    entry = seconds, order, successor, tighter
                    if seconds < best * (1 - self.gap):
                        heapq.heappush(queue, entry)
                    elif seconds < math.inf:
                        slower.append(entry)
                continue
            turn, num_solved = turn + 1, num_solved + 1
            if best_of_layout and num_solved > self.most_solved:
                break
            cutoff = best * (1 - self.gap)
            solution = self.solve(candidate, cutoff)
            if solution is None:
                slower += [(max(least, cutoff), number, candidate, tightness)] if cutoff < math.inf else []
                continue
            seconds, layout = solution[0], self.layout(candidate)
            best = min(best, seconds)
            if layout not in best_of_layout or seconds < best_of_layout[layout][0]:
                best_of_layout[layout] = seconds, candidate, solution[1]
        left = sorted(itertools.chain(slower, *queues.values()), key=lambda entry: entry[:2])
        skipped = {self.layout(candidate): (seconds, candidate) for seconds, _, candidate, _ in reversed(left)}
        solved = sorted(best_of_layout.values(), key=lambda entry: (entry[0], self.key(entry[1])))
        return Searched(
            tuple(solution for *_, solution in solved),
            tuple(entry for layout, entry in skipped.items() if layout not in best_of_layout),
        )
