"""The best plans measured: `autopar trial` runs the best plan of each of the best layouts for some steps, and keeps the
fastest.

A layout is a mesh with its pipeline ranks. The planner looks at layouts by their bounds and leaves out those that
cannot win; here they are planned too, best bound first, until no other can be among the best. Each plan is built and
run in processes of its own, so that one that fails or runs out of memory ends alone; plans take turns, in rounds, so
that what else the machine does is spread over all of them. What is measured is wall time, the median of all steps after
the first ones of every round.

Under torchrun, over several nodes, each rank plans along and starts one process of its own for every run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.cluster import as_cluster
from autopar.compile import compile_with
from autopar.compiled import CompiledProgram
from autopar.costs.rates import is_cpu
from autopar.errors import AutoparError, ConstraintError, PlanError
from autopar.files.outputs import require_writable
from autopar.frontend.inputs import NamedBatch, name_inputs
from autopar.launch import TIMEOUT_SECONDS, RankError, group_seconds, run_ranks
from autopar.plan import Plan
from autopar.planning.planner import search_plans
from autopar.profiling.machine import available_cores
from autopar.profiling.trials import add_trials, profile_of, trials_path
from autopar.report.plan_words import full_words
from autopar.running.process_group import under_launcher
from autopar.running.process_state import check_starting
from autopar.running.torchrun_rank import TorchrunRank
from autopar.settings.compile_options import CompileOptions, TrialOptions, with_options
from autopar.trial_report import (
    TrialReport,
    TriedPlan,
    degrees_of,
    digest_of,
    earlier,
    job_of,
    pins_of,
    records_of,
)
from cost_models.mixed import AnyCluster

MOST_PER_CORE = 4
"""Ranks that may share a core."""
WARM_STEPS = 2
"""First steps of every round that are not counted: torch allocates and makes the optimiser's state in them."""


@dataclass(frozen=True)
class TrialResult:
    """report: what was measured. program: that of the fastest plan."""

    report: TrialReport
    program: CompiledProgram

    @property
    def plan(self) -> Plan:
        return self.program.plan


@dataclass
class _Candidate:
    """A program on trial, and its steps so far, in seconds, round by round."""

    program: CompiledProgram
    pins: Mapping[str, int]
    rounds: list[list[float]] = field(default_factory=list)
    problem: str = ""


@with_options(TrialOptions)
def trial(model: nn.Module, cluster_spec: AnyCluster | str, options: TrialOptions) -> TrialResult:
    """Compile the best plan of each of the best layouts, run all for a few steps on this machine, and keep the fastest.

    The options are given by keyword: those of autopar.compile, and those of TrialOptions (both in
    autopar.settings.compile_options). The measurements are written down as `profiling/trials.py` says.
    Raises AutoparError as compile does, ConstraintError for a cluster that is not this machine, OutputError where the
    records cannot be written, RankError where no plan runs.
    """
    if options.profile is None and isinstance(cluster_spec, str):
        options = replace(options, profile=profile_of(cluster_spec))
    compiled = first_program(model, cluster_spec, options)
    return try_program(compiled, options)


def first_program(model: nn.Module, cluster_spec: AnyCluster | str, options: TrialOptions) -> CompiledProgram:
    """The program of the plan that is chosen by prediction. Raises ConstraintError where no trial can be made."""
    check_starting("trial")
    beside = TorchrunRank() if under_launcher() else None
    if options.plan is not None:
        raise PlanError("a trial chooses among plans", values="a given plan", alternatives="constraints, to pin a part")
    cluster = as_cluster(cluster_spec)
    _require_here(cluster, beside)
    return compile_with(model, cluster, compile_options(options))


def compile_options(options: TrialOptions, **changed: Any) -> CompileOptions:
    """What `compile` takes of a trial's options."""
    more = {name: getattr(options, name) for name in ("example_inputs", "loss_fn", "optimizer")}
    return CompileOptions(**{**options.common, **more, **changed})


def _require_here(cluster: AnyCluster, beside: TorchrunRank | None) -> None:
    """Raises ConstraintError for a cluster of other nodes or ranks than there are, of GPUs that this machine lacks, or
    of more ranks than its cores could run in turns."""
    first, num_nodes = cluster.groups[0], sum(group.num_nodes for group in cluster.groups)
    num_ranks, num_here = (
        (cluster.num_devices, cluster.num_devices) if beside is None else (beside.size, beside.local_size)
    )
    found, cores = torch.cuda.device_count(), available_cores()
    has_ranks = (cluster.num_devices, num_nodes) == (num_ranks, num_ranks // num_here)
    if not has_ranks or (not is_cpu(first) and found < num_here) or (is_cpu(first) and found):
        here = {"GPUs of this machine": found}
        raise ConstraintError(
            "a trial runs on the machines that it is for",
            values={"cluster": str(cluster), **here, **({} if beside is None else {"ranks": num_ranks})},
            alternatives=[
                '--cluster detect, or one of this machine alone, such as "4 cpu" on one without GPUs',
                f"over several nodes torchrun, with a rank per device: torchrun --nnodes {num_nodes} "
                f"--nproc-per-node {cluster.num_devices // num_nodes} ... -m autopar trial",
            ],
        )
    if is_cpu(first) and num_here > MOST_PER_CORE * cores:
        raise ConstraintError(
            "so many ranks would take turns on this machine's cores, and no step would take what it takes elsewhere",
            values={"ranks": num_here, "cores": f"{cores:g}"},
            alternatives=[f"at most {MOST_PER_CORE * cores:.0f} ranks", "`autopar simulate` for larger clusters"],
        )


def shared_cores(cluster: AnyCluster) -> str:
    """What is to be said of ranks that share the cores of a machine, in a sentence; "" where each has its own."""
    num_here = cluster.num_devices // sum(group.num_nodes for group in cluster.groups)
    cores = available_cores()
    if not is_cpu(cluster.groups[0]) or num_here <= cores:
        return ""
    return f"{num_here} ranks share {cores:g} cores: what is measured includes their waiting for one another's turns"


def try_program(compiled: CompiledProgram, options: TrialOptions) -> TrialResult:
    """Plans the other layouts of a program that was planned, and tries all. Under torchrun every rank calls this, and
    rank 0 writes the records."""
    assert compiled.request is not None
    path, job = trials_path(options.profile), job_of(compiled.request)
    require_writable(path, instead="another profile, or the file moved elsewhere")
    candidates = [_Candidate(compiled, pins_of(compiled.plan))]
    for plan, pins in _agreed(lambda: list(other_plans(compiled, options.plans - 1))):
        given = compile_options(options, plan=plan, global_batch_size=None)
        candidates.append(_Candidate(compile_with(compiled.model, compiled.cluster, given), pins))
    beside = _left_group() if under_launcher() else None
    batch = name_inputs(compiled.model, options.example_inputs, compiled.loss_fn)
    for _ in range(options.rounds):
        for candidate in candidates:
            _run_round(candidate, batch, options.steps, beside)
    report = report_of(candidates, earlier(path, job), str(path))
    report = replace(report, note=shared_cores(compiled.cluster))
    if beside is None or beside.rank == 0:
        add_trials(path, records_of(report, job))
    return TrialResult(report, candidates[report.chosen].program)


def _agreed(find: Callable[[], Any]) -> Any:
    """What rank 0 of a group finds, or this process where there is none."""
    if not dist.is_initialized():
        return find()
    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _left_group() -> TorchrunRank:
    """This rank among torchrun's, after the group in which they planned, which processes must not inherit."""
    dist.barrier()
    dist.destroy_process_group()
    return TorchrunRank()


# Plans ----------------------------------------------------------------------------------------------------------------


def other_plans(compiled: CompiledProgram, count: int) -> Iterator[tuple[Plan, Mapping[str, int]]]:
    """The best plans of the `count` best layouts beside the chosen one, fastest first, with what pins them.

    Layouts that the search left out are planned in the order of their bounds until `count` plans are no slower than the
    next bound.
    """
    request, result = compiled.request, compiled.result
    assert request is not None
    found = [each.plan for each in result.candidates if each is not result.best]
    for bound, text in result.skipped:
        found.sort(key=lambda plan: plan.prediction.step_seconds)
        if count < 1 or (len(found) >= count and found[count - 1].prediction.step_seconds <= bound):
            break
        if (degrees := degrees_of(text)) is None:
            continue
        limits = replace(request.constraints, degrees={**request.constraints.degrees, **degrees})
        try:
            found.append(search_plans(replace(request, constraints=limits)).best.plan)
        except AutoparError:  # nothing of this layout fits
            continue
    found.sort(key=lambda plan: plan.prediction.step_seconds)
    for plan in found[: max(count, 0)]:
        yield plan, pins_of(plan)


# Runs -----------------------------------------------------------------------------------------------------------------


def _run_round(candidate: _Candidate, batch: NamedBatch, steps: int, beside: TorchrunRank | None = None) -> None:
    """Some steps of a plan, unless it failed before."""
    if candidate.problem:
        return
    program = candidate.program
    patience = group_seconds(program)
    task, limit = (program, batch, steps), max(TIMEOUT_SECONDS, patience)
    try:
        by_rank = run_ranks(step_times, task, program.plan.num_ranks, limit, patience, beside=beside)
    except (AutoparError, RankError, MemoryError) as error:
        lines = str(error).splitlines()
        candidate.problem = " ".join(dict.fromkeys([lines[0], lines[-1].strip()])) if lines else type(error).__name__
        return
    candidate.rounds.append([max(seconds) for seconds in zip(*by_rank, strict=True)])


def step_times(compiled: CompiledProgram, batch: Mapping[str, Any], steps: int) -> list[float]:
    """On every rank: seconds by the clock of each of so many steps, after WARM_STEPS."""
    step = compiled.build(first_step_check=False)
    local = step.local_batch(batch)
    found = []
    for _ in range(WARM_STEPS + steps):
        started = time.perf_counter()
        float(step(local))  # waits for a GPU
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return found[WARM_STEPS:]


def report_of(candidates: Sequence[_Candidate], before: Mapping[str, float], records: str) -> TrialReport:
    """What was measured. before: seconds of earlier trials by digest. Raises RankError where nothing ran."""
    plans = tuple(_tried(each, before) for each in candidates)
    ran = [number for number, each in enumerate(plans) if each.measured_seconds is not None]
    if not ran:
        raise RankError("no plan ran: " + "; ".join(f"{each.words}: {each.problem}" for each in plans))
    chosen = min(ran, key=lambda number: plans[number].measured_seconds or 0.0)
    pairs = zip(plans[chosen].round_seconds, plans[0].round_seconds, strict=False)
    plan = candidates[0].program.plan
    return TrialReport(
        model=plan.model,
        cluster=plan.cluster,
        plans=plans,
        chosen=chosen,
        is_clear=all(own < other for own, other in pairs),
        records=records,
    )


def _tried(candidate: _Candidate, before: Mapping[str, float]) -> TriedPlan:
    plan, digest = candidate.program.plan, digest_of(candidate.program.plan)
    own = TriedPlan(
        plan=plan,
        words=full_words(plan),
        digest=digest,
        pins=candidate.pins,
        predicted_seconds=plan.prediction.step_seconds,
        problem=candidate.problem,
        earlier_seconds=before.get(digest),
    )
    seconds = [each for steps in candidate.rounds for each in steps]
    if candidate.problem or not seconds:
        return own
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return replace(
        own,
        measured_seconds=statistics.median(seconds),
        low_seconds=low,
        high_seconds=high,
        round_seconds=tuple(map(statistics.median, candidate.rounds)),
        num_steps=len(seconds),
    )
