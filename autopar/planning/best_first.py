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

    gap: share of the time by which a better one may be missed. most_solved: how many candidates, most promising
    first, are solved once one fits.
    """

    gap = 0.0
    most_solved = math.inf

    @abstractmethod
    def bounded(self) -> Iterable[tuple[float, Tried, Bound]]:
        """Return the start of the search: candidates with lower bounds in seconds."""

    def closer(self, candidate: Tried, tightness: Bound) -> Iterable[tuple[float, Tried, Bound]]:
        """Return the candidate with the next bound, or all candidates that it stands for; called while its bound is
        not TIGHT."""
        return ()

    @abstractmethod
    def solve(self, candidate: Tried, cutoff: float) -> tuple[float, Solution] | None:
        """Return its best solution and the seconds of that; None if it has none, or none below `cutoff` seconds. A
        slower one may be returned."""

    @abstractmethod
    def layout(self, candidate: Tried) -> Hashable:
        """Return the layout; of candidates of one layout the best is kept."""

    def key(self, candidate: Tried) -> tuple[object, ...]:
        """Return a key that orders equally good candidates."""
        return (self.layout(candidate),)

    def turn(self, candidate: Tried) -> str:
        """Return its kind; until one fits, kinds take turns."""
        return ""

    def run(self, cutoff: float = math.inf) -> Searched[Tried, Solution]:
        """Solve candidates by their bounds, until none can undercut `cutoff` seconds and the best.

        Until one fits, kinds take turns: where memory is scarce, those with the least bounds may all not fit.
        """
        queues: dict[str, list[tuple[float, int, Tried, Bound]]] = {}
        numbers = itertools.count()
        for seconds, candidate, tightness in self.bounded():
            queues.setdefault(self.turn(candidate), []).append((seconds, next(numbers), candidate, tightness))
        for queue in queues.values():
            heapq.heapify(queue)
        best_of_layout: dict[Hashable, tuple[float, Tried, Solution]] = {}
        slower: list[tuple[float, int, Tried, Bound]] = []
        best, turn, num_solved = cutoff, 0, 0
        while heads := [queue for queue in queues.values() if queue and queue[0][0] < best * (1 - self.gap)]:
            queue = heads[turn % len(heads)] if best == math.inf else min(heads, key=lambda head: head[0][:2])
            least, number, candidate, tightness = heapq.heappop(queue)
            if tightness < Bound.TIGHT:
                for seconds, closer_candidate, tighter in self.closer(candidate, tightness):
                    entry = (
                        seconds,
                        number if closer_candidate is candidate else next(numbers),
                        closer_candidate,
                        tighter,
                    )
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
        missing = {
            self.layout(closer_candidate): (seconds, closer_candidate)
            for seconds, _, closer_candidate, _ in reversed(left)
        }
        return Searched(
            tuple(
                closer_candidate
                for *_, closer_candidate in sorted(
                    best_of_layout.values(), key=lambda entry: (entry[0], self.key(entry[1]))
                )
            ),
            tuple(closer_candidate for layout, closer_candidate in missing.items() if layout not in best_of_layout),
        )
