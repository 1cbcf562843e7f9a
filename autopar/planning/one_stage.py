"""The search without pipelines: meshes and micro-batch counts around the exact inner problem under a memory budget.

The search covers every factorization of the devices as dp x ep x tp (pinned degrees kept), and micro-batch counts
from few to many. For each, the inner problem is solved to optimality: every call, tensor, parameter and ZeRO stage
at once. Meshes and counts that could not win even with free memory are skipped.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.costs.layer_costs import HOST, exposed
from autopar.costs.pipeline_costs import PipelineCosts
from autopar.costs.price import Pricer
from autopar.costs.stored_costs import unread_bytes
from autopar.errors import ConstraintError
from autopar.ir.chain import chain
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.best_first import BestFirst, Bound
from autopar.planning.equal_configs import expert_degrees, shapes
from autopar.planning.host_bound import Stretch, layers_of, with_host
from autopar.planning.predict import chosen, one_stage_costs
from autopar.planning.request import Request, decode, divisors, operators_at, pricer_for, usable_bytes
from autopar.planning.search_space import SearchSpace, build_search_space
from autopar.planning.solved_layers import named_mesh
from autopar.sharding.assignment import Assignment, Candidate, compress
from autopar.sharding.call_options import Operator, operators_of
from search.intra_op import solve
from search.problem import InfeasibleError as NothingFits
from search.problem import Solution, evaluate

MAX_TRANSIENT_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """A mesh and number of micro-batches for which even the leanest plan does not fit. kinds: its bytes by kind.
    least_bytes: the bytes of the leanest decisions, if known."""

    num_bytes: float
    mesh: Mesh
    num_micro_batches: int
    kinds: Mapping[str, float]
    least_bytes: float = 0.0

    @property
    def where(self) -> str:
        """Return the mesh and count in words such as `dp4, 2 micro-batches`."""
        return f"{self.mesh}, {self.num_micro_batches} micro-batch{'es' if self.num_micro_batches > 1 else ''}"


class OneStageSearch(BestFirst[Mesh, Candidate]):
    """The search for the best plan of one stage on every mesh. failures: tried meshes and counts that did not fit."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.failures: list[Failure] = []

    def starting_bounds(self) -> Iterator[tuple[float, Mesh, Bound]]:
        """Yield every mesh with its lower bound."""
        for mesh in sorted(meshes(self.request), key=str):
            yield lower_bound(mesh, self.request), mesh, Bound.TIGHT

    def solve(self, candidate: Mesh, cutoff: float) -> tuple[float, Candidate] | None:
        """Return the best plan on the mesh and its predicted seconds."""
        candidate_found = _best_on(candidate, self.request, self.failures, cutoff)
        return None if candidate_found is None else (chosen(candidate_found.plan), candidate_found)

    def layout(self, candidate: Mesh) -> str:
        """Return the mesh in words."""
        return str(candidate)


def lower_bound(mesh: Mesh, request: Request) -> float:
    """Return the step time on `mesh` if memory were free and with the fewest micro-batches: no plan on it is faster."""
    return free_optimum(mesh, request, micro_batch_counts(request, mesh)[0])


def free_optimum(mesh: Mesh, request: Request, count: int) -> float:
    """Return the step time on `mesh` with `count` micro-batches if memory were free: a lower bound that does not
    fall as the count grows."""
    graph = request.trace(request.global_batch_size // count)
    pricer = pricer_for(request, mesh, count, has_first_pass=graph.has_first_pass)
    search_space = build_search_space(graph, operators_of(graph), pricer, request.constraints, is_bound=True)
    return solve(search_space.problem).objective


def meshes(request: Request) -> list[Mesh]:
    """Return every dp x cp x ep x ttp x tp of all devices that agrees with pinned degrees and the batch.

    Raises ConstraintError.
    """
    legal = sorted(shapes(request, num_units=1, most_tp=request.cluster.num_devices))
    count = request.constraints.micro_batches or 1
    dividing = [shape for shape in legal if request.global_batch_size // shape.dp % count == 0] or legal
    return [
        named_mesh(shape.dp // ep, shape.tp, ep=ep, cp=shape.cp, ttp=shape.ttp)
        for shape in dividing
        for ep in expert_degrees(request, shape.dp, shape.tensor)
    ]


def micro_batch_counts(request: Request, mesh: Mesh) -> list[int]:
    """Return counts that cut the global batch into equal micro-batches of whole rows per rank, few first."""
    rows = request.global_batch_size // mesh.num_data_ranks
    pinned = request.constraints.micro_batches
    if pinned is not None:
        if rows % pinned:
            raise ConstraintError(
                "micro_batches does not divide the batch of one data-parallel rank",
                values=f"{pinned} for {rows} rows",
                alternatives=", ".join(map(str, divisors(rows))),
            )
        return [pinned]
    return [n for n in divisors(rows) if n & (n - 1) == 0 and request.splits(n)]


def _best_on(mesh: Mesh, request: Request, failures: list[Failure], limit_seconds: float) -> Candidate | None:
    """Return the fastest plan on `mesh` over all micro-batch counts, or None if none takes less than `limit_seconds`.

    More micro-batches need less memory, which can buy a faster plan (less ZeRO). So counts are tried from the first
    that fits, until even free memory would not make the next one faster. That first count is found by bisection
    among those that are fast enough with free memory, if the last of them fits. Only a single micro-batch, whose
    gradients are not summed, can need less than the next count.
    """
    tried: dict[int, Candidate | Failure] = {}

    def at(count: int) -> Candidate | Failure:
        if count not in tried:
            tried[count] = _solve(mesh, request, count)
        return tried[count]

    counts = micro_batch_counts(request, mesh)
    if limit_seconds < math.inf:
        slow = bisect.bisect_left(counts, True, key=lambda count: free_optimum(mesh, request, count) >= limit_seconds)
        counts = counts[:slow]
    first = 0
    if counts and isinstance(at(counts[0]), Failure):
        first = len(counts)
        if isinstance(at(counts[-1]), Candidate):
            first = bisect.bisect_left(counts, True, lo=1, key=lambda count: isinstance(at(count), Candidate))
    best: Candidate | None = None
    for count in counts[first:]:
        if best is not None and free_optimum(mesh, request, count) >= chosen(best.plan):
            break
        outcome = at(count)
        if isinstance(outcome, Candidate) and (best is None or chosen(outcome.plan) < chosen(best.plan)):
            best = outcome
    failures += [failure for failure in tried.values() if isinstance(failure, Failure)]
    return best


def _solve(mesh: Mesh, request: Request, count: int) -> Candidate | Failure:
    """Solve; if the solution's transients do not fit in the rest of the memory, solve again with less."""
    graph, operators = operators_at(request, request.global_batch_size // count)
    pricer = pricer_for(request, mesh, count, has_first_pass=graph.has_first_pass)
    room, transient = _room_bytes(graph, request), 0.0
    for _ in range(MAX_TRANSIENT_ROUNDS):
        search_space = build_search_space(graph, operators, pricer, request.constraints, room - transient)
        try:
            solution = solve(search_space.problem)
        except NothingFits:
            break
        decided = _Decided(search_space, operators, pricer)
        costs = decided.costs(solution)
        if costs.peak_bytes <= usable_bytes(request):
            beside = (
                with_host(search_space, pricer, solution, decided.stretches) if pricer.rates.host_call_seconds else []
            )
            fitting = (
                assignment_tried
                for assignment_tried in beside
                if decided.costs(assignment_tried).peak_bytes <= usable_bytes(request)
            )
            best = next(fitting, solution)
            assignment = decode(search_space, best.assignment)
            return _candidate(graph, operators, request, decided.costs(best), assignment, best)
        transient = max(costs.peak_bytes - unread_bytes(graph) - solution.usage, transient * 1.1)
    return _leanest(graph, operators, pricer, request)


@dataclass
class _Decided:
    """Costs of solutions of a mesh's problem, each computed once."""

    search_space: SearchSpace
    operators: Mapping[tuple[str, str], Operator]
    pricer: Pricer
    _costs: dict[tuple[int, ...], PipelineCosts] = field(default_factory=dict)

    def costs(self, solution: Solution) -> PipelineCosts:
        """Return the costs of the plan."""
        chosen = solution.assignment
        if chosen not in self._costs:
            assignment = decode(self.search_space, chosen)
            self._costs[chosen] = one_stage_costs(self.search_space.graph, self.operators, self.pricer, assignment)
        return self._costs[chosen]

    def stretches(self, solution: Solution) -> tuple[Stretch, ...]:
        """Return the stretches of a micro-batch, with its share of the work once per step."""
        (rank,) = self.costs(solution).ranks
        layers, counts = layers_of(self.search_space.graph), Counter(chain(self.search_space.graph))
        stretches = []
        for name, cost in rank.costs.items():
            once = cost.step_seconds / self.pricer.training.num_micro_batches
            device = [exposed(table) - table.get(HOST, 0.0) for table in (cost.forward, cost.backward)]
            for seconds, host in ((device[0], cost.host[0]), (device[1], cost.host[1]), (once, 0.0)):
                stretches.append(Stretch(name if name in layers else "", seconds, host, counts[name]))
        return tuple(stretches)


def _room_bytes(graph: Graph, request: Request) -> float:
    """Return one rank's memory for decisions."""
    return usable_bytes(request) - unread_bytes(graph)


def _leanest(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, request: Request
) -> Candidate | Failure:
    """Return the plan that keeps the least, if it fits; else the bytes that it would need."""
    search_space, count = (
        build_search_space(graph, operators, pricer, request.constraints, 0.0),
        pricer.training.num_micro_batches,
    )
    try:
        chosen = solve(search_space.problem).assignment
    except NothingFits as error:
        if not error.assignment:
            return Failure(math.inf, pricer.mesh, count, {})
        chosen = error.assignment
    assignment = decode(search_space, chosen)
    costs = one_stage_costs(graph, operators, pricer, assignment)
    if costs.peak_bytes <= usable_bytes(request):
        return _candidate(graph, operators, request, costs, assignment, None)
    needed = costs.simulated().prediction
    _, kept_bytes = evaluate(search_space.problem, chosen)
    least_bytes = kept_bytes + request.capacity_bytes() - _room_bytes(graph, request)
    return Failure(
        num_bytes=needed.peak_bytes,
        mesh=pricer.mesh,
        num_micro_batches=count,
        kinds=needed.num_bytes,
        least_bytes=least_bytes,
    )


def _candidate(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    request: Request,
    costs: PipelineCosts,
    assignment: Assignment,
    solution: Solution | None,
) -> Candidate:
    (rank,) = costs.ranks
    plan = Plan(
        model=graph.name,
        cluster=str(request.cluster),
        mesh=rank.pricer.mesh,
        global_batch_size=request.global_batch_size,
        num_micro_batches=costs.num_micro_batches,
        precision=request.precision,
        scopes=compress(graph, operators, rank.pricer.mesh, assignment),
        prediction=costs.simulated().prediction,
        compression=request.training.compression,
        fp8=request.fp8,
        padded_to=graph.padded_to,
        experts_padded_to=graph.experts_padded_to,
        heads_padded_to=graph.heads_padded_to,
    )
    return Candidate(plan=plan, graph=graph, operators=operators, assignment=assignment, solution=solution)


def at_budget(request: Request, failure: Failure, num_bytes: float) -> Plan | None:
    """Return the plan on a failure's mesh with its number of micro-batches that fits `num_bytes` per rank."""
    limited = replace(request, constraints=replace(request.constraints, memory_bytes=int(num_bytes)))
    outcome = _solve(failure.mesh, limited, failure.num_micro_batches)
    return outcome.plan if isinstance(outcome, Candidate) else None
