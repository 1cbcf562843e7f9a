"""The outer search: meshes and micro-batch counts around the exact inner one.

For every way to write the number of devices as dp x tp (pinned degrees kept), and for micro-batch counts from few to
many until one fits, the inner problem is solved to optimality; the fastest predicted plan wins and the others are kept as
runner-ups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.constraints import Constraints
from autopar.errors import ConstraintError, InfeasibleError
from autopar.graph import Graph, Ref
from autopar.lower import bytes_text
from autopar.mesh import Mesh
from autopar.plan import Choices, Plan, compress
from autopar.predict import predict, transient_bytes
from autopar.price import Pricer, Training
from autopar.space import Space, build_space
from autopar.strategies import Operator, operators_of
from cost_models.machine import Cluster
from cost_models.memory import FRAGMENTATION, workspace_bytes
from search.intra_op import solve
from search.problem import InfeasibleError as NothingFits
from search.problem import Solution

MAX_TRANSIENT_ROUNDS = 4

HIDDEN_FRACTION = 0.5
"""Share of gradient traffic taken to run behind backward on a GPU: an assumption until it is calibrated."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned. trace: micro-batch rows -> Graph (cached by the caller)."""

    trace: Callable[[int], Graph]
    cluster: Cluster
    global_batch_size: int
    precision: str
    training: Training
    constraints: Constraints


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan and everything needed to lower it; without a solution if a person wrote the plan."""

    plan: Plan
    graph: Graph
    operators: Mapping[tuple[str, str], Operator]
    choices: Choices
    solution: Solution | None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """candidates: feasible plans, fastest first. skipped: (lower bound in seconds, mesh) that could not win.

    infeasible: what did not fit, in words.
    """

    candidates: tuple[Candidate, ...]
    skipped: tuple[tuple[float, Mesh], ...]
    infeasible: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


def search_plans(request: Request) -> SearchResult:
    """The best plan of each mesh that can still win, fastest first. Raises InfeasibleError with what the smallest plan needs."""
    found: list[Candidate] = []
    failures: list[tuple[float, str]] = []
    skipped: list[tuple[float, Mesh]] = []
    for bound, mesh in sorted(((lower_bound(mesh, request), mesh) for mesh in meshes(request)), key=lambda pair: (pair[0], str(pair[1]))):
        if found and bound >= min(c.plan.prediction.step_seconds for c in found):
            skipped.append((bound, mesh))
            continue
        candidate = _best_on(mesh, request, failures)
        if candidate is not None:
            found.append(candidate)
    if not found:
        raise _nothing_fits(request, failures)
    found.sort(key=lambda c: (c.plan.prediction.step_seconds, str(c.plan.mesh)))
    return SearchResult(tuple(found), tuple(skipped), tuple(text for _, text in failures))


def lower_bound(mesh: Mesh, request: Request) -> float:
    """Step time on `mesh` if memory were free and with the fewest micro-batches: no plan on it is faster."""
    count = micro_batch_counts(request, mesh)[0]
    graph = request.trace(request.global_batch_size // count)
    space = build_space(graph, operators_of(graph), pricer_for(request, mesh, count), request.constraints, None)
    return solve(space.problem).objective


def meshes(request: Request) -> list[Mesh]:
    """Every dp x tp of the cluster's devices that agrees with pinned degrees and the batch."""
    devices, degrees = request.cluster.num_devices, request.constraints.degrees
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
    return [_mesh(dp, tp) for dp, tp in legal]


def _mesh(dp: int, tp: int) -> Mesh:
    named = [(a, n) for a, n in (("dp", dp), ("tp", tp)) if n > 1]
    return Mesh(tuple(a for a, _ in named), tuple(n for _, n in named))


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


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
    return [n for n in divisors(rows) if n & (n - 1) == 0]


def _best_on(mesh: Mesh, request: Request, failures: list[tuple[float, str]]) -> Candidate | None:
    """The fastest plan on `mesh` with the fewest micro-batches that fit, or None."""
    for count in micro_batch_counts(request, mesh):
        graph = request.trace(request.global_batch_size // count)
        operators = operators_of(graph)
        pricer = pricer_for(request, mesh, count)
        try:
            return _solve(graph, operators, pricer, request, count)
        except NothingFits as error:
            failures.append((float(getattr(error, "smallest", math.inf)), f"{mesh}, {count} micro-batches"))
    return None


def pricer_for(request: Request, mesh: Mesh, num_micro_batches: int) -> Pricer:
    """Prices for a mesh. Gradient synchronisation hides behind backward on GPUs; CPU ranks share their cores with it."""
    on_cpu = is_cpu(request.cluster)
    training = replace(request.training, num_micro_batches=num_micro_batches)
    return Pricer(mesh, request.cluster, training, 0.0 if on_cpu else HIDDEN_FRACTION, 0.0 if on_cpu else FRAGMENTATION)


def _solve(graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, request: Request, count: int) -> Candidate:
    """Solve; where the transients of the solution do not fit beside it, solve again with less."""
    limit = usable_bytes(request)
    transient, space, solution = 0.0, None, None
    for _ in range(MAX_TRANSIENT_ROUNDS):
        space = build_space(graph, operators, pricer, request.constraints, limit - transient)
        solution = solve(space.problem)
        choices = decode(space, solution)
        needed = transient_bytes(graph, operators, pricer, choices)
        if solution.usage[0] + needed <= limit:
            return _candidate(graph, operators, pricer, request, count, choices, solution)
        transient = max(needed, transient * 1.1)
    raise NothingFits("the transients of every plan tried exceed the budget", "memory", limit, solution.usage[0] + transient, solution.choices)


def usable_bytes(request: Request) -> float:
    """What decisions and transients may take of one rank's memory: capacity less the device's own workspace."""
    capacity = request.constraints.memory_bytes or request.cluster.device.memory_bytes
    return float(capacity - (0 if is_cpu(request.cluster) else workspace_bytes(request.cluster.device)))


def is_cpu(cluster: Cluster) -> bool:
    """Whether ranks are processes on a CPU."""
    return cluster.device.name.startswith("cpu")


def decode(space: Space, solution: Solution) -> Choices:
    """Options by name."""
    picked = {d.key: d.options[i] for d, i in zip(space.decisions, solution.choices, strict=True)}
    return Choices(
        {key[1:3]: value for key, value in picked.items() if key[0] == "operator"},
        {(key[1], Ref(key[2], key[3])): value for key, value in picked.items() if key[0] == "tensor"},
        {key[1:3]: value for key, value in picked.items() if key[0] == "parameter"},
    )


def _candidate(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    request: Request,
    count: int,
    choices: Choices,
    solution: Solution,
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
    )
    return Candidate(plan, graph, operators, choices, solution)


def price_plan(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], request: Request, plan: Plan, choices: Choices
) -> Candidate:
    """A given plan with a fresh prediction. Raises InfeasibleError if it does not fit."""
    prediction = predict(graph, operators, pricer_for(request, plan.mesh, plan.num_micro_batches), choices)
    capacity = request.constraints.memory_bytes or request.cluster.device.memory_bytes
    if prediction.peak_bytes > capacity:
        raise InfeasibleError(
            "the plan does not fit the memory of one rank",
            values={kind: bytes_text(value) for kind, value in prediction.num_bytes.items()} | {"capacity": bytes_text(capacity)},
            alternatives="a higher ZeRO stage, more micro-batches, or a new plan",
        )
    return Candidate(replace(plan, prediction=prediction, runner_ups=()), graph, operators, choices, None)


def _nothing_fits(request: Request, failures: list[tuple[float, str]]) -> InfeasibleError:
    limit = usable_bytes(request)
    smallest, where = min(failures, default=(math.inf, "no mesh"))
    needed = f"{bytes_text(smallest)} on {where}" if smallest < math.inf else "unknown"
    return InfeasibleError(
        "no plan fits the memory of one rank",
        values={
            "usable per rank": bytes_text(limit),
            "smallest plan needs": needed,
            "tried": ", ".join(text for _, text in failures),
        },
        alternatives="devices with more memory, more devices, a smaller batch or sequence, or bf16 precision",
    )
