"""The outer search: one stage with everything decided at once, and pipelines with recomputation and offload.

`one_stage.py` is exact over the decisions of a mesh and knows neither stages nor recomputation. `pipelines.py` knows
both, and takes the decisions of a mesh from a few points of its frontier. Both price alike; the faster plan wins,
and the others are kept as runners-up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.costs.layer_costs import defers_weights
from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError, InfeasibleError
from autopar.frontend.garbage_collection import collection_paused
from autopar.ir.graph import Graph
from autopar.ir.mesh import PIPELINE_AXIS, SHARDING_AXES, Mesh
from autopar.ir.plan_data import whole_mesh_text
from autopar.plan import Plan
from autopar.planning.best_first import Searched
from autopar.planning.candidates import candidate_of
from autopar.planning.chunked_schedules import refined
from autopar.planning.config_costs import Solved
from autopar.planning.layer_pool import LayerPool, kind_of
from autopar.planning.one_stage import OneStageSearch
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.pipelines import EqualSearch, UnequalSearch
from autopar.planning.predict import chosen, predicted
from autopar.planning.request import Request, divisors
from autopar.planning.shared_assignments import SharedAssignments
from autopar.planning.shared_costs import KnownCosts
from autopar.planning.smallest_memory import nothing_fits
from autopar.planning.solved_layers import SolvedLayers
from autopar.planning.stage_points import CLOSED_FORMS, SEARCHED_SCHEDULES
from autopar.planning.stage_problem import PipelineCut
from autopar.sharding.assignment import Assignment, Candidate
from autopar.sharding.call_options import Operator
from autopar.units import bytes_text
from codegen.axis_records import AXES

ONE_STAGE_DEVICES = 8
"""Devices up to which one stage is searched exactly; on larger clusters that search only polishes the best mesh of
pipelines.py."""
POLISH_ONLY = 0
"""The same number if one stage need not be searched exactly on every mesh, which takes ten times as long."""
UNEQUAL_DEVICES = 16
"""On more devices, and on a power of two of them, all ranks of a pipeline over equal nodes have equal stage meshes."""
NEVER_UNLIKE = tuple(axis for axis in SHARDING_AXES if not AXES[axis].is_basic)
"""Axes that pipelines with unlike stage meshes do not have."""
MOST_CANDIDATES = 4
"""Parallel configs, best first, that are reported as runners-up."""
MOST_CHUNKED = 2
"""The same under schedules with several stages per pipeline rank."""
MOST_ALIKE = 3
"""Kinds of configs under which a plan fitted that are tried first if any plan will do."""
TIE = 1e-9
"""Plans are equally fast if their times differ by at most this share. The plan of the exact search is preferred; unlike
stage meshes come last."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    candidates: feasible plans, fastest first. skipped: (lower bound in seconds, parallel config) that could not win.
    infeasible: configs that did not fit, in words. is_given: nothing was searched because the user gave the plan.
    solved: the layers that the search solved, with their cached costs. Further searches for the request begin with
    them.
    """

    candidates: tuple[Candidate, ...]
    skipped: tuple[tuple[float, str], ...]
    infeasible: tuple[str, ...]
    is_given: bool = False
    solved: Solved | None = field(default=None, repr=False, compare=False)

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


@dataclass(frozen=True, slots=True)
class Planned:
    """A request with its chosen plan, and the search behind it."""

    request: Request
    best: Candidate
    result: SearchResult


def is_only_polished(request: Request) -> bool:
    """Return whether `search_plans` does the same without the exact search (exact_devices=0)."""
    devices = request.whole.num_devices
    is_equal = devices > UNEQUAL_DEVICES or (devices > ONE_STAGE_DEVICES and math.log2(devices).is_integer())
    return request.mixed is not None or is_equal


@collection_paused()
def search_plans(
    request: Request, shared: Solved | LayerPool | None = None, exact_devices: int = ONE_STAGE_DEVICES
) -> SearchResult:
    """Return the best plan of each parallel config that can still win, fastest first.

    shared: solved layers of another request. The requests may differ only in facts that the layers do not depend on
    (see solved_layers.py). exact_devices: on larger clusters the exact search only polishes. With 0, all pipeline ranks
    have equal stage meshes too. Raises InfeasibleError with the needs of the smallest plan.
    """
    if request.mixed is not None:
        return _search_mixed(UnequalSearch(request, shared if isinstance(shared, SharedAssignments) else None))
    try:
        search = EqualSearch(request, shared if isinstance(shared, (SolvedLayers, LayerPool)) else None)
    except ConstraintError:
        # No equal stage meshes fill the cluster.
        unlike = _unequal(request) if exact_devices else None
        uneven = unlike.run().best if unlike is not None else None
        if uneven is None:
            raise
        assert unlike is not None
        return SearchResult((candidate_of(uneven, request),), (), (), solved=unlike.solved)
    _refuse_undivided(search)
    pipelines = search.run()
    deferring = list(_deferring(search, pipelines.best))
    chunked = sorted(refined(search, pipelines.solutions), key=lambda cut: cut.objective)
    known_costs = search.costs.cached
    candidates = [candidate_of(bounded, request, known_costs) for bounded in pipelines.solutions[:MOST_CANDIDATES]]
    if isinstance(shared, LayerPool) and candidates:
        shared.fitted(pipelines.solutions[0].config)
    candidates += deferring
    candidates += itertools.islice(_fitting(chunked, request, known_costs), MOST_CHUNKED)
    fastest = min((chosen(c.plan) for c in candidates), default=math.inf)
    exact = _one_stage(request, candidates, exact_devices)
    failures = exact.failures if exact is not None else []
    one: Searched[Mesh, Candidate] = Searched()
    try:
        one = exact.run(fastest * (1 + TIE)) if exact is not None else one
    except ConstraintError:
        if not candidates:
            raise
    candidates += one.solutions
    times = [chosen(c.plan) for c in candidates]
    unlike = _unequal(request) if exact_devices else None
    better = unlike.run(min(times, default=math.inf) * (1 - TIE)).best if unlike is not None else None
    candidates += [candidate_of(better, request)] if better is not None else []
    if not candidates:
        raise nothing_fits(request, failures, [search] if unlike is None else [search, unlike])
    candidates.sort(key=lambda c: (float(f"{chosen(c.plan):.9g}"), c.solution is None, c.plan.mesh_text))
    candidates = _distinct(candidates)
    names = {c.plan.mesh_text for c in candidates}
    skipped = {whole_mesh_text(bounded.pp, bounded.stage_meshes[0].mesh): bound for bound, bounded in pipelines.skipped}
    skipped |= {str(mesh): bound for bound, mesh in one.skipped}
    missing = tuple(sorted((bound, name) for name, bound in skipped.items() if name not in names))
    return SearchResult(tuple(candidates), missing, tuple(failure.where for failure in failures), solved=search.solved)


def padded_search(
    request: Request, pool: LayerPool | None = None, exact_devices: int = ONE_STAGE_DEVICES
) -> SearchResult:
    """Run `search_plans` with padded heads and without, and return the faster result, for the request's basis."""
    results: list[SearchResult] = []
    failures: list[InfeasibleError | ConstraintError] = []
    unpadded = [] if request.unpadded is None else [replace(request, trace=request.unpadded)]
    for variant in (request, *unpadded):
        try:
            results.append(search_plans(variant, pool, exact_devices))
        except (InfeasibleError, ConstraintError) as error:
            failures.append(error)
    if not results:
        raise failures[0]
    fastest = min(results, key=lambda result: result.best.plan.prediction.step_seconds)
    best = replace(fastest.best, plan=replace(fastest.best.plan, basis=request.basis))
    return replace(fastest, candidates=(best, *fastest.candidates[1:]))


def fits_soon(request: Request, pool: LayerPool) -> bool:
    """Return whether a pipeline fits, and `search_plans` has no other reason to refuse. Tries the configs that
    fitted other requests and those that look leanest. If none of these fits, another one may."""
    if request.mixed is not None or request.needs.whole or request.unpadded is not None:
        return False
    try:
        search = EqualSearch(request, pool)
        _refuse_undivided(search)
    except ConstraintError:
        return False
    like_others = itertools.chain.from_iterable(_alike(search, fitting) for fitting in pool.fitting[:MOST_ALIKE])
    tried = set[ParallelConfig]()
    for config in itertools.chain(like_others, _lean(search)):
        is_solved = search.solved_layers.of(config, config.stage_meshes[0]) is not None
        if config not in tried and is_solved and _fits_under(search, config):
            pool.fitted(config)
            return True
        tried.add(config)
    return False


def _fits_under(search: EqualSearch, config: ParallelConfig) -> bool:
    """Return whether a pipeline fits under a config."""
    return search.solve(config, math.inf) is not None


def _alike(search: EqualSearch, fitting: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yield two configs like another request's: with as many rows of a micro-batch, and with the fewest."""
    scheduled = (scheduled_config for config in search.unscheduled for scheduled_config in search.scheduled(config))
    alike_configs = [
        scheduled_config for scheduled_config in scheduled if kind_of(scheduled_config) == kind_of(fitting)
    ]
    yield from sorted(alike_configs, key=lambda config: (config.rows != fitting.rows, config.rows))[:2]


def _lean(search: EqualSearch) -> Iterator[ParallelConfig]:
    """Yield the leanest-looking config with only rows shared out, and the leanest-looking of all. These have the most
    sharded or on the host, and the fewest rows."""
    order = ("parameters", "optimizer", "")
    lean = sorted(
        search.unscheduled, key=lambda c: (-c.zero, order.index(c.offload), c.pp, c.rows, -c.multiplier, c.key)
    )
    of_rows = (
        plain_config
        for plain_config in lean
        if all(stage_mesh.mesh.num_data_ranks == stage_mesh.mesh.num_ranks for stage_mesh in plain_config.stage_meshes)
    )
    for config in itertools.chain(itertools.islice(of_rows, 1), lean[:1]):
        yield from itertools.islice(search.scheduled(config), 1)


def _deferring(search: EqualSearch, best: PipelineCut | None) -> Iterator[Candidate]:
    """Return the best config under the schedules that defer weight gradients, with layers solved for them. Layers
    that schedules share assume that sums over tensor-parallel ranks overlap weight gradients."""
    request = search.request
    config = best.config if best is not None else None
    if config is None or config.pp == 1 or request.constraints.schedule is not None:
        return
    layer = search.costs.solved_layer(config, config.stage_meshes[0])
    if not any(cost.overlapped_seconds for cost in layer.costs.values()):
        return
    for schedule in filter(defers_weights, SEARCHED_SCHEDULES):
        deferring = replace(request, constraints=replace(request.constraints, schedule=schedule))
        deferring_search = EqualSearch(deferring, search.solved_layers.deferring(deferring))
        solved = deferring_search.solve(config.under(schedule), math.inf)
        if solved is not None:
            yield candidate_of(solved[1], deferring, deferring_search.costs.cached)


def _fitting(solved: Iterable[PipelineCut], request: Request, known_costs: KnownCosts) -> Iterator[Candidate]:
    """Return the plans of solved configs, except those that need more on the graph of their micro-batch than they
    were priced for."""
    candidates = (candidate_of(cut, request, known_costs) for cut in solved)
    return (c for c in candidates if c.plan.prediction.peak_bytes <= request.capacity_bytes())


def _search_mixed(search: UnequalSearch) -> SearchResult:
    """Return the best pipeline over groups of unlike nodes. Raises InfeasibleError, and ConstraintError for a pinned
    axis that their stage meshes do not have."""
    request = search.request
    pinned = {axis: request.constraints.degrees.get(axis, 1) for axis in NEVER_UNLIKE}
    if max(pinned.values()) > 1:
        raise ConstraintError(
            "stages on groups of unlike nodes support only dp and tp",
            values=", ".join(f"{axis}={size}" for axis, size in pinned.items() if size > 1),
            alternatives="pp, dp and tp, or nodes that are alike",
        )
    cut = search.run().best
    if cut is not None:
        return SearchResult((candidate_of(cut, request, search.costs.cached),), (), (), solved=search.solved)
    error = nothing_fits(request, [], [search])
    if error.needed_bytes is not None:
        raise error
    raise InfeasibleError(
        "no pipeline uses all devices of all groups of nodes",
        values={
            "groups": ", ".join(map(str, request.whole.groups)),
            "blocks of the model": len(search.costs.units),
            "global batch": request.global_batch_size,
        },
        alternatives=[
            "a batch that more numbers of data-parallel ranks divide",
            "fewer pinned degrees",
            "as many blocks in the model as there are groups, or more",
        ],
    )


def _unequal(request: Request) -> UnequalSearch | None:
    """Return the search over unlike stage meshes, if there may be such; on few GPUs only."""
    limits = request.constraints
    is_plain = all(limits.degrees.get(axis, 1) == 1 for axis in NEVER_UNLIKE)
    is_open = is_plain and limits.schedule in (None, *CLOSED_FORMS)
    devices = request.cluster.num_devices
    is_small = not is_cpu(request.cluster) and devices <= UNEQUAL_DEVICES and not math.log2(devices).is_integer()
    if not is_open or not is_small or limits.degrees.get("pp") == 1:
        return None
    return UnequalSearch(request)


def _one_stage(request: Request, candidates: list[Candidate], exact_devices: int) -> OneStageSearch | None:
    """Return the exact search, if the constraints and the size of the cluster allow it."""
    limits = request.constraints
    one_stage = limits.degrees.get("pp", 1) == limits.degrees.get("ddp", 1) == 1
    is_open = one_stage and limits.recompute in (None, "none") and not limits.offload
    if not is_open or limits.schedule is not None:
        return None
    if request.cluster.num_devices > exact_devices:
        plain = [c.plan for c in candidates if c.plan.pipeline.is_plain and c.plan.mesh.size("ddp") == 1]
        if not plain:
            return None
        best = min(plain, key=chosen)
        pinned = {PIPELINE_AXIS: 1, **best.mesh.degrees}
        limits = replace(limits, degrees=pinned, micro_batches=best.num_micro_batches)
    return OneStageSearch(replace(request, constraints=limits))


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Return the fastest of each parallel config."""
    first: dict[str, Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.plan.mesh_text, candidate)
    return list(first.values())


def price_plan(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], request: Request, plan: Plan, assignment: Assignment
) -> Candidate:
    """Return the plan with a new prediction. Raises InfeasibleError if it does not fit."""
    priced = predicted(
        request,
        Candidate(
            plan=replace(plan, runner_ups=()), graph=graph, operators=operators, assignment=assignment, solution=None
        ),
    )
    prediction, capacity = priced.plan.prediction, request.capacity_bytes(priced.plan.fullest_group)
    if prediction.peak_bytes > capacity:
        raise InfeasibleError(
            "the plan does not fit the memory of one rank",
            values={kind: bytes_text(value) for kind, value in prediction.num_bytes.items()}
            | {"capacity": bytes_text(capacity)},
            alternatives="a higher ZeRO stage, more micro-batches, or a new plan",
        )
    return priced


def _refuse_undivided(search: EqualSearch) -> None:
    """Refuse a pinned tp that divides no dim of any call but its batch: each of its ranks would do all of the work."""
    request = search.request
    tp = request.constraints.degrees.get("tp", 1)
    if tp == 1:
        return
    operators = search.solved_layers.operators(request.global_batch_size).values()
    rules = [(operator.rule, operator.batch[0] if operator.batch else "") for operator in operators]
    sizes = {rule.sizes[factor] for rule, batch in rules for factor in rule.shardable if factor != batch}
    if any(size % tp == 0 for size in sizes):
        return
    legal = [n for n in divisors(request.cluster.num_devices)[1:] if any(size % n == 0 for size in sizes)]
    nearest = sorted(legal, key=lambda n: abs(n - tp))[:2]
    raise ConstraintError(
        "tp divides no dim of the model that may be cut: every tp rank would repeat all of the work",
        values=f"tp={tp}, sizes {', '.join(map(str, sorted(sizes, reverse=True)[:8]))}",
        alternatives=[*(f"tp={n}" for n in nearest), "tp left out"],
    )
