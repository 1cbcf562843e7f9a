"""The search over pipelines: parallel configs, best bound first, each cut into stages to optimality.

A config's bound is what its blocks take with memory to spare and evenly cut (bounds.py); configs are solved
(stage_problem.py) in the order of their bounds until the next bound is no better than the best solution. The objective
is the closed form of `search.inter_op`; the plan that wins is then simulated event by event, which is what its
prediction says.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from autopar.ir.chain import chain
from autopar.ir.mesh import Mesh
from autopar.planning.bases import Bases
from autopar.planning.bounds import bound, bound_without_parameters, tightened
from autopar.planning.config_costs import ConfigCosts, Solved
from autopar.planning.equal_configs import equal_configs
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request
from autopar.planning.shared_decisions import SharedDecisions
from autopar.planning.stage_points import HOLDING, SEARCHED_SCHEDULES
from autopar.planning.stage_problem import Found, StageProblem
from autopar.planning.unequal_configs import unequal_configs, variants, without_parameters
from search.inter_op import NothingBelowCutoffError
from search.pipeline_problem import PipelineInfeasibleError

EXACT_BASES = 16
"""Number of (tp, rows) up to which every base is solved for its own rows; beyond, for TYPICAL_ROWS and reused."""

TYPICAL_ROWS = 2

FEW_DEVICES = 16
GAP = 0.03
"""Share of the step by which a better pipeline of unlike stage meshes may be missed on more than FEW_DEVICES."""

MOST_SOLVED = 300
"""Problems of unlike stage meshes, most promising first, that are solved on more than FEW_DEVICES once a pipeline is
known."""


class Bound(IntEnum):
    """How much of a config its bound knows of: the next one takes longer to find, and is no less."""

    WITHOUT_PARAMETERS = 0
    WITH_MEMORY_FREE = 1
    TIGHT = 2


Bounded = tuple[float, ParallelConfig, Bound]
"""Seconds that no pipeline under the config can undercut."""


@dataclass(frozen=True, slots=True)
class Pipelines:
    """What a search found: the best of each (pipeline ranks, stage meshes) that was solved, fastest first.

    skipped: (lower bound in seconds, pipeline ranks, mesh) of the others.
    """

    found: tuple[Found, ...]
    skipped: tuple[tuple[float, int, Mesh], ...]

    @property
    def best(self) -> Found | None:
        """The fastest, if there is any."""
        return self.found[0] if self.found else None


class PipelineSearch(ABC):
    """A search for one request over the configs of a kind."""

    gap = 0.0
    most_solved = math.inf

    def __init__(self, request: Request, solved: Solved) -> None:
        self.request, self.solved = request, solved
        self.costs = ConfigCosts(request, solved)

    @abstractmethod
    def configs(self) -> Iterator[ParallelConfig]:
        """All of them whose closed form is minimised."""

    @abstractmethod
    def bounded(self) -> Iterable[Bounded]:
        """Where the search begins."""

    def closer(self, config: ParallelConfig, known: Bound) -> Iterator[Bounded]:
        """The config with the next bound; where its bound knows nothing of parameters, every variant of it."""
        if known == Bound.WITHOUT_PARAMETERS:
            for each in variants(self.request, config):
                yield bound(self.costs, each), each, Bound.WITH_MEMORY_FREE
        else:
            yield tightened(self.costs, config), config, Bound.TIGHT

    def run(self, cutoff: float = math.inf) -> Pipelines:
        """Configs by their bounds, until none can take less than `cutoff` seconds and than the best.

        A bound is tightened before its config is solved, and the config put back where another then comes first. Until
        one fits, the schedules take turns: where memory is scarce, those with the least bounds may all not fit.
        """
        queues: dict[str, list[tuple[float, int, ParallelConfig, Bound]]] = {}
        numbers = itertools.count()
        for seconds, config, known in self.bounded():
            queues.setdefault(config.schedule, []).append((seconds, next(numbers), config, known))
        for queue in queues.values():
            heapq.heapify(queue)
        found: dict[tuple[object, ...], Found] = {}
        best, turn, num_solved = cutoff, 0, 0
        while heads := [queue for queue in queues.values() if queue and queue[0][0] < best * (1 - self.gap)]:
            queue = heads[turn % len(heads)] if best == math.inf else min(heads, key=lambda head: head[0][:2])
            _, number, config, known = heapq.heappop(queue)
            if known < Bound.TIGHT:
                for seconds, each, now in self.closer(config, known):
                    if seconds < best * (1 - self.gap):
                        heapq.heappush(queue, (seconds, number if each is config else next(numbers), each, now))
                continue
            turn, num_solved = turn + 1, num_solved + 1
            if found and num_solved > self.most_solved:
                break
            try:
                solved = StageProblem.of(self.costs, config).solve(best * (1 - self.gap))
            except (PipelineInfeasibleError, NothingBelowCutoffError):
                continue
            best, key = min(best, solved.objective), _layout(config)
            if key not in found or solved.objective < found[key].objective:
                found[key] = solved
        left = sorted(itertools.chain(*queues.values()), key=lambda each: each[:2])
        missing = {_layout(config): (seconds, config) for seconds, _, config, _ in reversed(left)}
        return Pipelines(
            tuple(sorted(found.values(), key=lambda each: (each.objective, each.config.key))),
            tuple(
                (seconds, config.pp, config.stage_meshes[0].mesh)
                for key, (seconds, config) in missing.items()
                if key not in found
            ),
        )


def _layout(config: ParallelConfig) -> tuple[object, ...]:
    return config.pp, *map(str, config.stage_meshes)


class EqualSearch(PipelineSearch):
    """The search over pipelines of which all ranks have equal stage meshes.

    solved: decisions of another request that differs only in what they do not depend on (see bases.py).
    """

    def __init__(self, request: Request, solved: Bases | None = None) -> None:
        num_blocks = len(chain(request.trace(request.global_batch_size)))
        self.unscheduled = tuple(equal_configs(request, num_blocks))
        kinds = {(each.tp, each.rows_on(each.stage_meshes[0])) for each in self.unscheduled}
        self.bases = solved or Bases(request, None if len(kinds) <= EXACT_BASES else TYPICAL_ROWS)
        super().__init__(request, self.bases)

    def configs(self) -> Iterator[ParallelConfig]:
        """All of them whose closed form is minimised."""
        for config in self.unscheduled:
            if not self.bases.repeats(config):
                yield from self.scheduled(config)

    def scheduled(self, config: ParallelConfig) -> Iterator[ParallelConfig]:
        """The config under every schedule that it may have. Zero bubble needs a second micro-batch to fill the bubble
        with."""
        pinned = self.request.constraints.schedule
        schedules = SEARCHED_SCHEDULES if pinned is None else (pinned,) if pinned in HOLDING else ()
        if config.pp == 1:
            schedules = () if pinned else ("1f1b",)
        elif pinned is None and config.num_micro_batches == 1:
            schedules = ("1f1b",)
        return (config.under(schedule) for schedule in schedules)

    def promising(self) -> list[ParallelConfig]:
        """Configs of several pipeline ranks by their bounds, whatever their schedule."""
        several = (each for each in self.unscheduled if each.pp > 1)
        costed = (each.under("1f1b") for each in several if self.bases.base_of(each, each.stage_meshes[0]))
        return sorted(costed, key=lambda config: (bound(self.costs, config), config.key))

    def bounded(self) -> Iterable[Bounded]:
        """Where the search begins."""
        return ((bound(self.costs, each), each, Bound.WITH_MEMORY_FREE) for each in self.configs())


class UnequalSearch(PipelineSearch):
    """The search over pipelines with unlike stage meshes: of several sizes, or in groups of unlike nodes.

    solved: decisions of another request, as for `EqualSearch`. On many devices what is found is the best to GAP, or
    that of the MOST_SOLVED most promising problems.
    """

    def __init__(self, request: Request, solved: SharedDecisions | None = None) -> None:
        self.decisions = solved or SharedDecisions(request)
        super().__init__(request, self.decisions)
        if request.whole.num_devices > FEW_DEVICES:
            self.gap, self.most_solved = GAP, MOST_SOLVED

    def configs(self) -> Iterator[ParallelConfig]:
        """All of them."""
        return unequal_configs(self.request, self.decisions, len(self.costs.blocks))

    def bounded(self) -> Iterable[Bounded]:
        """Where the search begins: what bears on parameters only is left open."""
        configs = without_parameters(self.request, self.decisions, len(self.costs.blocks))
        return ((bound_without_parameters(self.costs, each), each, Bound.WITHOUT_PARAMETERS) for each in configs)
