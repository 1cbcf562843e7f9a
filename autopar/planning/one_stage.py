"""The search without pipelines: meshes and micro-batch counts around the exact inner problem under a memory budget.

For every way to write the number of devices as dp x tp (pinned degrees kept), and for micro-batch counts from few to
many, the inner problem is solved to optimality: every call, tensor, parameter and ZeRO stage at once. Meshes and counts
that could not win even with free memory are skipped.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costs.cost_table import block_costs
from autopar.costs.price import Pricer
from autopar.costs.stored_costs import unread_bytes
from autopar.errors import ConstraintError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.options.choices import Candidate, Choices, compress
from autopar.options.strategies import Operator, operators_of
from autopar.plan import Plan
from autopar.planning.bases import named_mesh
from autopar.planning.predict import predict, transient_bytes
from autopar.planning.request import Request, decode, divisors, operators_at, pricer_for, usable_bytes
from autopar.planning.space import build_space
from search.intra_op import solve
from search.problem import InfeasibleError as NothingFits
from search.problem import Solution

MAX_TRANSIENT_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """A mesh and number of micro-batches on which even the leanest plan needs too much. kinds: its bytes by kind."""

    num_bytes: float
    mesh: Mesh
    num_micro_batches: int
    kinds: Mapping[str, float]

    @property
    def least_bytes(self) -> float:
        """What the leanest decisions keep: no others need less."""
        return self.num_bytes - self.kinds.get("transient", 0.0)

    @property
    def where(self) -> str:
        """What failed, in words such as `dp4, 2 micro-batches`."""
        return f"{self.mesh}, {self.num_micro_batches} micro-batch{'es' if self.num_micro_batches > 1 else ''}"


@dataclass(frozen=True, slots=True)
class OneStage:
    """What a search found, in the order of its bounds. skipped: (lower bound in seconds, mesh) that could not win."""

    candidates: tuple[Candidate, ...]
    skipped: tuple[tuple[float, Mesh], ...]
    failures: tuple[Failure, ...]


def search_one_stage(request: Request, limit_seconds: float = math.inf) -> OneStage:
    """The best plan of each mesh that can be faster than `limit_seconds` and than those found."""
    found: list[Candidate] = []
    failures: list[Failure] = []
    skipped: list[tuple[float, Mesh]] = []
    for bound, mesh in sorted(
        ((lower_bound(mesh, request), mesh) for mesh in meshes(request)), key=lambda pair: (pair[0], str(pair[1]))
    ):
        limit = min((c.plan.prediction.step_seconds for c in found), default=limit_seconds)
        if bound >= limit:
            skipped.append((bound, mesh))
            continue
        candidate = _best_on(mesh, request, failures, limit)
        if candidate is not None:
            found.append(candidate)
    return OneStage(tuple(found), tuple(skipped), tuple(failures))


def lower_bound(mesh: Mesh, request: Request) -> float:
    """Step time on `mesh` if memory were free and with the fewest micro-batches: no plan on it is faster."""
    return free_optimum(mesh, request, micro_batch_counts(request, mesh)[0])


def free_optimum(mesh: Mesh, request: Request, count: int) -> float:
    """Step time on `mesh` with `count` micro-batches if memory were free; it does not fall as the count grows."""
    graph = request.trace(request.global_batch_size // count)
    space = build_space(graph, operators_of(graph), pricer_for(request, mesh, count), request.constraints, None)
    return solve(space.problem).objective


def meshes(request: Request) -> list[Mesh]:
    """Every dp x tp of the cluster's devices that agrees with pinned degrees and the batch."""
    devices = request.cluster.num_devices
    degrees = {a: n for a, n in request.constraints.degrees.items() if a in ("dp", "tp")}
    pinned = math.prod(degrees.values())
    if devices % pinned or (len(degrees) == 2 and pinned != devices):
        raise ConstraintError(
            "the pinned degrees do not make the cluster's number of devices",
            values=" x ".join(f"{a}={n}" for a, n in degrees.items()) + f" for {devices} devices",
            alternatives=[f"dp={d} x tp={devices // d}" for d in divisors(devices)],
        )
    shapes = [(dp, devices // dp) for dp in divisors(devices)]
    shapes = [(dp, tp) for dp, tp in shapes if degrees.get("dp", dp) == dp and degrees.get("tp", tp) == tp]
    legal = [(dp, tp) for dp, tp in shapes if request.global_batch_size % dp == 0]
    if not legal:
        raise ConstraintError(
            "no mesh divides the global batch",
            values=f"batch {request.global_batch_size} on " + ", ".join(f"dp{dp} x tp{tp}" for dp, tp in shapes),
            alternatives=f"a batch that is a multiple of {min(dp for dp, _ in shapes)}",
        )
    count = request.constraints.micro_batches or 1
    dividing = [(dp, tp) for dp, tp in legal if request.global_batch_size // dp % count == 0]
    return [named_mesh(dp, tp) for dp, tp in dividing or legal]


def micro_batch_counts(request: Request, mesh: Mesh) -> list[int]:
    """Counts that cut the global batch into equal micro-batches of whole rows per rank, few first."""
    rows = request.global_batch_size // mesh.size("dp")
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
    """The fastest plan on `mesh` over all micro-batch counts, or None where none takes less than `limit_seconds`.

    More micro-batches need less memory, which can buy a faster plan (less ZeRO), so from the first count that fits the
    counts are tried until even free memory would not make the next one faster. That first count is found by bisection
    among those that are fast enough with free memory, if the last of them fits; only a single micro-batch, whose
    gradients are not summed, can need less than the next count.
    """
    tried: dict[int, Candidate | Failure] = {}

    def at(count: int) -> Candidate | Failure:
        if count not in tried:
            graph, operators = operators_at(request, request.global_batch_size // count)
            tried[count] = _solve(graph, operators, pricer_for(request, mesh, count), request, count)
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
        if best is not None and free_optimum(mesh, request, count) >= best.plan.prediction.step_seconds:
            break
        found = at(count)
        if isinstance(found, Candidate) and (
            best is None or found.plan.prediction.step_seconds < best.plan.prediction.step_seconds
        ):
            best = found
    failures += [failure for failure in tried.values() if isinstance(failure, Failure)]
    return best


def _solve(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, request: Request, count: int
) -> Candidate | Failure:
    """Solve; where the transients of the solution do not fit beside it, solve again with less."""
    limit, transient = usable_bytes(request) - unread_bytes(graph), 0.0
    for _ in range(MAX_TRANSIENT_ROUNDS):
        space = build_space(graph, operators, pricer, request.constraints, limit - transient)
        try:
            solution = solve(space.problem)
        except NothingFits:
            break
        choices = decode(space, solution.choices)
        needed = transient_bytes(graph, block_costs(graph, operators, pricer, choices))
        if solution.usage[0] + needed <= limit:
            return _candidate(graph, operators, pricer, request, count, choices, solution)
        transient = max(needed, transient * 1.1)
    return _leanest(graph, operators, pricer, request, count)


def _leanest(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, request: Request, count: int
) -> Candidate | Failure:
    """The plan that keeps the least, if it fits; else what it would need."""
    space = build_space(graph, operators, pricer, request.constraints, 0.0)
    try:
        choices = decode(space, solve(space.problem).choices)
    except NothingFits as error:
        if not error.choices:
            return Failure(math.inf, pricer.mesh, count, {})
        choices = decode(space, error.choices)
    candidate = _candidate(graph, operators, pricer, request, count, choices, None)
    needed = candidate.plan.prediction
    if needed.peak_bytes - needed.num_bytes.get("workspace", 0.0) <= usable_bytes(request):
        return candidate
    return Failure(needed.peak_bytes, pricer.mesh, count, needed.num_bytes)


def _candidate(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    request: Request,
    count: int,
    choices: Choices,
    solution: Solution | None,
) -> Candidate:
    prediction = predict(graph, operators, pricer, choices)
    plan = Plan(
        graph.name,
        str(request.cluster),
        pricer.mesh,
        request.global_batch_size,
        count,
        request.precision,
        compress(graph, operators, pricer.mesh, choices),
        prediction,
        compression=request.training.compression,
        fp8=request.fp8,
    )
    return Candidate(plan, graph, operators, choices, solution)


def at_budget(request: Request, failure: Failure, num_bytes: float) -> Plan | None:
    """The plan on a failure's mesh with its number of micro-batches that fits `num_bytes` per rank."""
    mesh, count = failure.mesh, failure.num_micro_batches
    limited = replace(request, constraints=replace(request.constraints, memory_bytes=int(num_bytes)))
    graph, operators = operators_at(request, request.global_batch_size // count)
    found = _solve(graph, operators, pricer_for(request, mesh, count), limited, count)
    return found.plan if isinstance(found, Candidate) else None
