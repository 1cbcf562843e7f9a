"""The same plan priced under changed conditions, and the fastest plans with less memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.costs.flops import model_flops, model_flops_utilisation
from autopar.errors import AutoparError, ConstraintError
from autopar.explain.conditions import faster_compute, faster_link, faster_memory
from autopar.plan import Plan
from autopar.planning.candidates import candidate_of
from autopar.planning.pipelines import EqualSearch
from autopar.planning.predict import predicted
from autopar.planning.request import Request, operators_at
from autopar.planning.solved_layers import SolvedLayers
from autopar.program import GeneratedProgram
from autopar.report.plan_words import full_words
from autopar.sharding.assignment import Candidate, expand
from cost_models.machine import Cluster

SECONDS = 10.0
"""Time limit of the search for leaner plans."""

FACTORS = (0.5, 2.0)

BUDGETS = (0.85, 0.7, 0.55, 0.4, 0.25)
"""Memory budgets of the leaner plans, as shares of the chosen plan's memory."""


MOST_DEVICES = 64
"""On more devices, leaner plans keep the chosen plan's pp and tp: a search of all takes minutes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The step under a condition. rows: of its batch. problem: why there is no prediction; then the numbers are 0."""

    words: str
    seconds: float = 0.0
    rows: int = 0
    mfu: float = 0.0
    peak_bytes: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LeanPlan:
    """The fastest plan within a memory budget per rank."""

    budget_bytes: float
    words: str
    seconds: float
    peak_bytes: float


def outcomes(compiled: GeneratedProgram) -> list[Outcome]:
    """Price the plan again under one change at a time. Its decisions stay."""
    request = compiled.request
    if request is None:
        return []
    return [_outcome(words, change) for words, change in _changes(request, compiled.best)]


def _changes(request: Request, best: Candidate) -> Iterator[tuple[str, _Change]]:
    count, rows = best.plan.num_micro_batches, request.global_batch_size
    shares = math.lcm(*(stage_mesh.mesh.num_data_ranks for stage_mesh in best.plan.stage_meshes))
    if request.splits(2 * count):
        yield "batch x2, micro-batches x2", _Batch(request, best, 2 * rows, 2 * count)
        if rows % (2 * count * shares) == 0:
            yield "micro-batches x2, same batch", _Batch(request, best, rows, 2 * count)
    if count % 2 == 0:
        yield "micro-batches x0.5, same batch", _Batch(request, best, rows, count // 2)
    if request.mixed is not None:
        return
    cluster = request.cluster
    if cluster.num_nodes > 1:
        for factor in FACTORS:
            link = faster_link(cluster.inter_node, factor)
            yield f"bandwidth between nodes x{factor:g}", _Machine(request, best, replace(cluster, inter_node=link))
    if cluster.devices_per_node > 1:
        for factor in FACTORS:
            link = faster_link(cluster.intra_node, factor)
            yield f"bandwidth inside a node x{factor:g}", _Machine(request, best, replace(cluster, intra_node=link))
    device = cluster.device
    yield "arithmetic rate x2", _Machine(request, best, replace(cluster, device=faster_compute(device)))
    yield "memory bandwidth x2", _Machine(request, best, replace(cluster, device=faster_memory(device)))


@dataclass(frozen=True, slots=True)
class _Machine:
    """The plan on another cluster with as many devices."""

    request: Request
    best: Candidate
    cluster: Cluster

    def priced(self) -> tuple[Request, Candidate]:
        request = replace(self.request, cluster=self.cluster)
        return request, predicted(request, self.best)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The plan's decisions for another batch, or other micro-batches."""

    request: Request
    best: Candidate
    rows: int
    count: int

    def priced(self) -> tuple[Request, Candidate]:
        request = replace(self.request, global_batch_size=self.rows)
        plan = replace(self.best.plan, global_batch_size=self.rows, num_micro_batches=self.count)
        graph, operators = operators_at(request, self.rows // self.count)
        candidate = Candidate(
            plan=plan, graph=graph, operators=operators, assignment=expand(graph, operators, plan), solution=None
        )
        return request, predicted(request, candidate)


_Change = _Machine | _Batch


def _outcome(words: str, change: _Change) -> Outcome:
    try:
        request, candidate = change.priced()
    except AutoparError as error:
        return Outcome(words, problem=error.constraint)
    plan, prediction = candidate.plan, candidate.plan.prediction
    flops = plan.num_micro_batches * model_flops(candidate.graph, candidate.operators)
    exceeds = prediction.peak_bytes > request.capacity_bytes(plan.fullest_group)
    return Outcome(
        words=words,
        seconds=prediction.step_seconds,
        rows=plan.global_batch_size,
        mfu=model_flops_utilisation(flops, prediction.step_seconds, request.whole, plan.precision),
        peak_bytes=prediction.peak_bytes,
        problem="does not fit the memory" if exceeds else "",
    )


def _kept_degrees(plan: Plan) -> dict[str, int]:
    if plan.num_ranks <= MOST_DEVICES:
        return {}
    return {"pp": plan.pipeline.num_pipeline_ranks, "tp": plan.mesh.size("tp")}


def limits_words(plan: Plan) -> str:
    """Return the restriction of the search of `lean_plans` in words, or ""."""
    kept = _kept_degrees(plan)
    return f"those of {' and '.join(f'{axis} = {size}' for axis, size in kept.items())}" if kept else ""


def lean_plans(compiled: GeneratedProgram) -> tuple[list[LeanPlan], bool]:
    """Find the fastest plans for shrinking memory budgets, until none fits or the time limit.

    Returns them with whether the time limit ended the search. A given plan, and a cluster of unlike nodes, have
    none."""
    request = compiled.request
    if request is None or compiled.result.is_given or request.mixed is not None:
        return [], False
    limit, peak = time.monotonic() + SECONDS, compiled.plan.prediction.peak_bytes
    limits, plan = request.constraints, compiled.plan
    limits = replace(limits, degrees=_kept_degrees(plan) | dict(limits.degrees))
    solved_layers: SolvedLayers | None = None
    leaner: list[LeanPlan] = []
    for share in BUDGETS:
        if time.monotonic() > limit:
            return leaner, True
        budget = share * peak
        if leaner and leaner[-1].peak_bytes <= budget:
            continue
        lean = replace(request, constraints=replace(limits, memory_bytes=int(budget)))
        try:
            search = EqualSearch(lean, solved_layers)
        except ConstraintError:  # only unequal stage meshes match the cluster's number of devices
            break
        solved_layers = search.solved_layers
        best = search.run().best
        if best is None:
            break
        plan = candidate_of(best, lean).plan
        prediction = plan.prediction
        leaner.append(LeanPlan(budget, full_words(plan), prediction.step_seconds, prediction.peak_bytes))
    return leaner, False
