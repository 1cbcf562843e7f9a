"""The search over pipelines: parallel configs, best bound first, each cut into stages to optimality.

A config's bound is the time of its units with unlimited memory and an even cut (bounds.py). Configs are solved
(stage_problem.py) in the order of their bounds until the next bound is no better than the best solution. A config's
cut is the best one by the closed form of `search.inter_op`. Its plan is then simulated event by event; configs are
compared by that prediction.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator

from autopar.costs.layer_costs import chosen_seconds
from autopar.ir.chain import most_stages
from autopar.planning.best_first import BestFirst, Bound
from autopar.planning.bounds import EXACT_DEVICES, bound, bound_of_many_rows, bound_without_parameters, tightened
from autopar.planning.candidates import candidate_of
from autopar.planning.config_costs import ConfigCosts, Solved
from autopar.planning.equal_configs import equal_configs
from autopar.planning.layer_pool import LayerPool
from autopar.planning.memory_fit import none_is_below
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.predict import chosen
from autopar.planning.request import Request
from autopar.planning.shared_assignments import SharedAssignments
from autopar.planning.solved_layers import MULTIPLIERS, SolvedLayer, SolvedLayers
from autopar.planning.stage_points import CLOSED_FORMS
from autopar.planning.stage_problem import PipelineCut, StageProblem
from autopar.planning.unequal_configs import schedules, unequal_configs, variants, without_parameters
from cost_models.schedule import PLAIN
from search.inter_op import NothingBelowCutoffError
from search.pipeline_problem import PipelineInfeasibleError

EXACT_SOLVED_LAYERS = 16
"""Number of (tp, rows) up to which every solved layer is solved for its exact rows; beyond, for TYPICAL_ROWS and
reused."""

TYPICAL_ROWS = 2

FEW_DEVICES = 16
GAP = 0.03
"""The share of the step by which the search may miss a better pipeline of unlike stage meshes, on more than
FEW_DEVICES."""

MOST_SOLVED = 300
"""Problems of unlike stage meshes, most promising first, that are solved on more than FEW_DEVICES once a pipeline
exists."""


Bounded = tuple[float, ParallelConfig, Bound]
"""Lower bound in seconds on every pipeline under the config."""


class PipelineSearch(BestFirst[ParallelConfig, PipelineCut]):
    """A search for one request over the configs of a kind."""

    def __init__(self, request: Request, solved: Solved) -> None:
        self.request, self.solved = request, solved
        self.costs = ConfigCosts(request, solved)

    @abstractmethod
    def configs(self) -> Iterator[ParallelConfig]:
        """Return all configs. The search minimizes the closed form of each."""

    def tighten(self, candidate: ParallelConfig, tightness: Bound) -> Iterator[Bounded]:
        """Yield the config with its next bound, or every variant if its bound ignores parameters."""
        if tightness == Bound.WITHOUT_PARAMETERS:
            for variant in variants(self.request, candidate):
                yield bound(self.costs, variant), variant, Bound.WITH_MEMORY_FREE
        else:
            yield tightened(self.costs, candidate), candidate, Bound.TIGHT

    def solve(self, candidate: ParallelConfig, cutoff: float) -> tuple[float, PipelineCut] | None:
        """Return the best cut by the closed form, and the seconds that its plan predicts, as plan choice counts
        them; None also if the plan needs more memory than it was priced for."""
        cut = self.cut(candidate, cutoff * self.slack(candidate))
        if cut is None:
            return None
        priced = StageProblem.of(self.costs, candidate).assembled(cut.pipeline).simulated().prediction
        if chosen_seconds(priced.seconds) >= cutoff:
            return None
        plan = candidate_of(cut, self.request, self.costs.cached).plan
        fits = plan.prediction.peak_bytes <= self.request.capacity_bytes(plan.fullest_group)
        return (chosen(plan), cut) if fits else None

    def slack(self, config: ParallelConfig) -> float:
        """Return the largest factor by which the closed form of a config's cut may exceed its plan's prediction; on
        more than EXACT_DEVICES they are assumed equal.

        The closed form has S + (m - 1) T. A step with that busiest stage takes m T at least, and S less the forwards
        with which the stage fills the first wait (see bounds.py): (w - 1) min(f, b) under 1F1B. On a CPU stages run
        faster while others wait, so all cuts are tried.
        """
        if self.request.whole.num_devices > EXACT_DEVICES:
            return 1.0
        p, count = config.pp, config.num_micro_batches
        if p == 1:
            return 1.0
        if self.costs.host.carries:
            return math.inf
        return CLOSED_FORMS[config.schedule].slack(p, count)

    def cut(self, config: ParallelConfig, cutoff: float = math.inf) -> PipelineCut | None:
        """Return the config's best cut by the closed form; None if none takes less than `cutoff` by it.

        The cut does not depend on the cutoff: of equally good cuts the solver may return another one below a cutoff.
        The simulation tells the two apart, and other modes fit them. On more than EXACT_DEVICES that difference is
        accepted.
        """
        solutions, key = self.costs.cached.solutions, (self.costs.limits, config)
        solution, tried = solutions.get(key, (None, -math.inf))
        if solution is None and tried < cutoff:
            if self.request.whole.num_devices > EXACT_DEVICES:
                solution = self._solved(config, cutoff)
            elif cutoff == math.inf or not none_is_below(StageProblem.of(self.costs, config).fitting(), cutoff):
                solution = self._solved(config, math.inf)
            solutions[key] = solution, cutoff
        return solution  # type: ignore[no-any-return]

    def _solved(self, candidate: ParallelConfig, cutoff: float) -> PipelineCut | None:
        try:
            return StageProblem.of(self.costs, candidate).solve(cutoff)
        except NothingBelowCutoffError:
            return None
        except PipelineInfeasibleError:
            # Below a cutoff the leanest pipeline is not tried.
            return self._solved(candidate, math.inf) if cutoff < math.inf else None

    def layout(self, candidate: ParallelConfig) -> Hashable:
        """Return its pipeline ranks and stage meshes."""
        return candidate.pp, *map(str, candidate.stage_meshes)

    def key(self, candidate: ParallelConfig) -> tuple[object, ...]:
        """See `ParallelConfig.key`."""
        return candidate.key

    def queue_name(self, candidate: ParallelConfig) -> str:
        """Return the schedule: every schedule has a queue."""
        return candidate.schedule


class EqualSearch(PipelineSearch):
    """The search over pipelines with equal stage meshes on all ranks.

    solved: layers of another request. The requests may differ only in facts that the layers do not depend on (see
    solved_layers.py).
    """

    def __init__(self, request: Request, solved: SolvedLayers | LayerPool | None = None) -> None:
        num_units = most_stages(request.trace(request.global_batch_size))
        self.unscheduled = tuple(equal_configs(request, num_units))
        # Without ttp, the first: additional grids make no other plan less exact.
        kinds = {(*c.sharing[1:], c.rows_on(c.stage_meshes[0])) for c in self.unscheduled}
        if not isinstance(solved, SolvedLayers):
            is_exact = len(kinds) <= EXACT_SOLVED_LAYERS or not request.trace.can_estimate(2 * TYPICAL_ROWS)
            solved = (solved or LayerPool()).of(request, None if is_exact else TYPICAL_ROWS)
        self.solved_layers = solved
        super().__init__(request, self.solved_layers)
        self._many: dict[tuple[int, ...], tuple[int, SolvedLayer | None]] = {}
        self._alike: dict[Hashable, list[ParallelConfig]] = {}

    def configs(self) -> Iterator[ParallelConfig]:
        """Yield all configs. The search minimizes the closed form of each."""
        for config in self.unscheduled:
            if not self.solved_layers.repeats(config):
                yield from self.scheduled(config)

    def scheduled(self, config: ParallelConfig) -> Iterator[ParallelConfig]:
        """Return the config under each of its possible schedules."""
        schedules_tried = schedules(self.request)
        if config.pp == 1:
            schedules_tried = () if self.request.constraints.schedule else (PLAIN,)
        return (config.under(schedule) for schedule in schedules_tried)

    def promising(self) -> Iterator[tuple[float, ParallelConfig]]:
        """Yield (seconds, config) of several pipeline ranks by their least seconds under 1F1B, with the
        recomputation that their memory requires. Configs that do not fit even so come last, with inf."""
        several = (pipeline_config.under(PLAIN) for pipeline_config in self.unscheduled if pipeline_config.pp > 1)
        costed = (
            pipeline_config
            for pipeline_config in several
            if self.solved_layers.of(pipeline_config, pipeline_config.stage_meshes[0])
        )
        queue = [
            (bound(self.costs, pipeline_config), pipeline_config.key, False, pipeline_config)
            for pipeline_config in costed
        ]
        heapq.heapify(queue)
        while queue:
            seconds, key, is_tight, config = heapq.heappop(queue)
            if is_tight:
                yield seconds, config
            else:
                heapq.heappush(queue, (tightened(self.costs, config), key, True, config))

    def starting_bounds(self) -> Iterable[Bounded]:
        """Yield all configs with a lower bound. In large requests one bound covers all configs with the same rows."""
        if self.solved_layers.typical_rows is None:
            yield from (
                (bound(self.costs, scheduled_config), scheduled_config, Bound.WITH_MEMORY_FREE)
                for scheduled_config in self.configs()
            )
            return
        for config in self.unscheduled:
            self._alike.setdefault(_of_rows(config), []).append(config)
        for first, *_ in self._alike.values():
            rows, many = self._most_rows(first)
            for scheduled_config in self.scheduled(first):
                least = bound_of_many_rows(self.costs, scheduled_config, many, rows) if many else 0.0
                yield least, scheduled_config, Bound.OF_MANY_ROWS

    def tighten(self, candidate: ParallelConfig, tightness: Bound) -> Iterator[Bounded]:
        """Yield the config with its next bound. A bound of rows is replaced by those of all configs with these rows,
        except configs whose assignment another config has."""
        if tightness > Bound.OF_MANY_ROWS:
            yield from super().tighten(candidate, tightness)
            return
        for config in self._alike[_of_rows(candidate)]:
            if not self.solved_layers.repeats(config):
                scheduled = config.under(candidate.schedule)
                yield bound(self.costs, scheduled), scheduled, Bound.WITH_MEMORY_FREE

    def _most_rows(self, config: ParallelConfig) -> tuple[int, SolvedLayer | None]:
        """Return the most rows of a rank under the config's degrees, with their solved layer."""
        if not self._many:
            rows = {
                config_of_sharing.sharing: (
                    config_of_sharing.rows_on(config_of_sharing.stage_meshes[0]),
                    config_of_sharing,
                )
                for config_of_sharing in sorted(self.unscheduled, key=lambda c: c.rows_on(c.stage_meshes[0]))
            }
            self._many = {
                sharing: (
                    most,
                    self.solved_layers.solved_layer(config_of_sharing.stage_meshes[0].mesh, most, MULTIPLIERS[0]),
                )
                for sharing, (most, config_of_sharing) in rows.items()
            }
        return self._many[config.sharing]


def _of_rows(config: ParallelConfig) -> Hashable:
    """Return a key that is equal for configs of equal stage meshes that share out the rows alike."""
    return config.pp, config.stage_meshes[0].mesh, config.num_micro_batches


class UnequalSearch(PipelineSearch):
    """The search over pipelines with unlike stage meshes: of several sizes, or in groups of unlike nodes.

    solved: layers of another request, as for `EqualSearch`. On many devices the result is the best to GAP, or that
    of the MOST_SOLVED most promising problems.
    """

    def __init__(self, request: Request, solved: SharedAssignments | None = None) -> None:
        self.assignments = solved or SharedAssignments(request)
        super().__init__(request, self.assignments)
        if request.whole.num_devices > FEW_DEVICES:
            self.gap, self.most_solved = GAP, MOST_SOLVED

    def configs(self) -> Iterator[ParallelConfig]:
        """Return all configs."""
        return unequal_configs(self.request, self.assignments, self.costs.most_stages)

    def starting_bounds(self) -> Iterable[Bounded]:
        """Return all configs with lower bounds. Settings that affect only parameters are left open."""
        configs = without_parameters(self.request, self.assignments, self.costs.most_stages)
        return ((bound_without_parameters(self.costs, config), config, Bound.WITHOUT_PARAMETERS) for config in configs)
