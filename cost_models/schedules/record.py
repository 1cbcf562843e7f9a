"""A pipeline schedule as one record: everything that differs from one schedule to the next.

p pipeline ranks, m micro-batches, v chunks (stages per pipeline rank), pipeline rank i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cost_models.schedules.actions import Lines


def round_robin(p: int, v: int) -> tuple[int, ...]:
    """Place stage s on pipeline rank s mod p."""
    return tuple(range(p)) * v


def folded(p: int, v: int = 2) -> tuple[int, ...]:
    """Place stages down the pipeline ranks and up again: stage s on s for s < p, else on 2p - 1 - s."""
    return (*range(p), *reversed(range(p)))


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """Numbers of a schedule that follow from p and m alone, by which the search cuts a pipeline into stages.

    in_flight(m, p, i): micro-batches whose activations pipeline rank i holds at its fullest.
    num_deferred(m, p, i): micro-batches whose weight gradients it has deferred then; None where there are none.
    least_seconds(work, busy, p, m): a lower bound on the seconds of all micro-batches. work: seconds of all stages per
    micro-batch; busy: of the busiest stage. None where the bound needs more than these, because backwards are in halves
    (`autopar/planning/bounds.py: zero_bubble`).
    slack(p, m): the factor by which S + (m - 1) T is at most more than the simulated seconds. S: seconds of all stages;
    T: of the busiest.
    """

    in_flight: Callable[[int, int, int], float]
    least_seconds: Callable[[float, float, int, int], float] | None = None
    num_deferred: Callable[[int, int, int], float] | None = None
    slack: Callable[[int, int], float] = lambda p, m: 1.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule.

    make_lines(p, m, v): the actions of each pipeline rank.
    default_chunks: v where none is asked for. chooses_chunks: whether v may be any other number.
    place(p, v): the pipeline rank of each stage.
    defers_weights: a backward computes the gradients of inputs alone (I); those of weights come later (W).
    holds_all: a pipeline rank holds all micro-batches at once. in_groups: micro-batches go in groups of p, and a last
    group that is smaller has an order of its own.
    is_tried: whether the search tries it where no schedule is pinned.
    closed_form: None for a schedule that is only simulated.
    """

    make_lines: Callable[[int, int, int], Lines]
    default_chunks: int = 1
    chooses_chunks: bool = False
    place: Callable[[int, int], tuple[int, ...]] = round_robin
    defers_weights: bool = False
    holds_all: bool = False
    in_groups: bool = False
    is_tried: bool = True
    closed_form: ClosedForm | None = None

    def allows(self, chunks: int) -> bool:
        """Return whether pipeline ranks may have this number of chunks."""
        return chunks == self.default_chunks or (self.chooses_chunks and chunks > 0)

    def representative_micro_batches(self, p: int, m: int) -> int:
        """Return a number of micro-batches that shows all that pipeline ranks hold with m of them.

        Two groups of p and the rest show everything: more groups repeat what those hold.
        """
        repeats = not self.holds_all and (not self.in_groups or m % p == 0)
        return 2 * p + m % p if repeats and m > 3 * p else m
