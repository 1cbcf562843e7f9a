"""Measure the best plans: `autopar trial` runs the best plan of each of the best layouts, and keeps the fastest.

A layout is a mesh with its pipeline ranks. The planner bounds layouts and skips those that cannot win. A trial plans
these too, best bound first, until no other can be among the best. Each plan runs in new processes, so that a run that
fails or runs out of memory ends alone. Plans take turns, in rounds, so that other load on the machine affects all of
them alike. The result is wall time: the median of all steps after the first ones of every round.

Under torchrun, over several nodes, each rank plans along and starts one new process for every run.
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
    earlier_seconds,
    job_of,
    pins_of,
    records_of,
)
from cost_models.mixed_cluster import AnyCluster

MOST_PER_CORE = 4
"""Ranks that may share a core."""
WARM_STEPS = 2
"""First steps of every round, which are not counted: in them torch allocates and makes the optimizer's state."""


@dataclass(frozen=True)
class TrialResult:
    """report: the measurements. program: that of the fastest plan."""

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
    autopar.settings.compile_options). The measurements are recorded as `profiling/trials.py` says.
    Raises AutoparError as compile does, ConstraintError for a cluster that is not this machine, OutputError where the
    records cannot be written, RankError where no plan runs.
    """
    if options.profile is None and isinstance(cluster_spec, str):
        options = replace(options, profile=profile_of(cluster_spec))
    compiled = first_program(model, cluster_spec, options)
    return try_program(compiled, options)


def first_program(model: nn.Module, cluster_spec: AnyCluster | str, options: TrialOptions) -> CompiledProgram:
    """Return the program of the plan with the best prediction. Raises ConstraintError where a trial is impossible."""
    check_starting("trial")
    torchrun_rank = TorchrunRank() if under_launcher() else None
    if options.plan is not None:
        raise PlanError(
            "a trial chooses among plans", values="a given plan", alternatives="constraints, which pin decisions"
        )
    cluster = as_cluster(cluster_spec)
    _require_here(cluster, torchrun_rank)
    return compile_with(model, cluster, compile_options(options))


def compile_options(options: TrialOptions, **changed: Any) -> CompileOptions:
    """Return the options of `compile` among a trial's."""
    inputs = {name: getattr(options, name) for name in ("example_inputs", "loss_fn", "optimizer")}
    return CompileOptions(**{**options.common, **inputs, **changed})


def _require_here(cluster: AnyCluster, torchrun_rank: TorchrunRank | None) -> None:
    """Raise ConstraintError for a cluster with other nodes or ranks, with GPUs that this machine lacks, or with more
    ranks than its cores can run in turns."""
    first, num_nodes = cluster.groups[0], sum(group.num_nodes for group in cluster.groups)
    if torchrun_rank is None:
        num_ranks, num_here = cluster.num_devices, cluster.num_devices
    else:
        num_ranks, num_here = torchrun_rank.size, torchrun_rank.local_size
    num_gpus, cores = torch.cuda.device_count(), available_cores()
    has_ranks = (cluster.num_devices, num_nodes) == (num_ranks, num_ranks // num_here)
    if not has_ranks or (not is_cpu(first) and num_gpus < num_here) or (is_cpu(first) and num_gpus):
        here = {"GPUs of this machine": num_gpus}
        raise ConstraintError(
            "a trial runs on the machines that it is for",
            values={"cluster": str(cluster), **here, **({} if torchrun_rank is None else {"ranks": num_ranks})},
            alternatives=[
                '--cluster detect, or a cluster of this machine alone, such as "4 cpu" without GPUs',
                f"over several nodes torchrun, with a rank per device: torchrun --nnodes {num_nodes} "
                f"--nproc-per-node {cluster.num_devices // num_nodes} ... -m autopar trial",
            ],
        )
    if is_cpu(first) and num_here > MOST_PER_CORE * cores:
        raise ConstraintError(
            "so many ranks would share this machine's cores that no step would take the time that it takes elsewhere",
            values={"ranks": num_here, "cores": f"{cores:g}"},
            alternatives=[f"at most {MOST_PER_CORE * cores:.0f} ranks", "`autopar simulate` for larger clusters"],
        )


def shared_cores(cluster: AnyCluster) -> str:
    """Return a note, in a sentence, on ranks that share the cores of a machine; "" where each rank has its own."""
    num_here = cluster.num_devices // sum(group.num_nodes for group in cluster.groups)
    cores = available_cores()
    if not is_cpu(cluster.groups[0]) or num_here <= cores:
        return ""
    return f"{num_here} ranks share {cores:g} cores: times include their waiting for one another"


def try_program(compiled: CompiledProgram, options: TrialOptions) -> TrialResult:
    """Plan the other layouts of a planned program, and try all. Under torchrun every rank calls this, and rank 0 writes
    the records."""
    assert compiled.request is not None
    path, job = trials_path(options.profile), job_of(compiled.request)
    require_writable(path, instead="another profile, or the file moved elsewhere")
    candidates = [_Candidate(compiled, pins_of(compiled.plan))]
    for plan, pins in _agreed(lambda: list(other_plans(compiled, options.plans - 1))):
        variant = compile_options(options, plan=plan, global_batch_size=None)
        candidates.append(_Candidate(compile_with(compiled.model, compiled.cluster, variant), pins))
    torchrun_rank = _left_group() if under_launcher() else None
    batch = name_inputs(compiled.model, options.example_inputs, compiled.loss_fn)
    for _ in range(options.rounds):
        for candidate in candidates:
            _run_round(candidate, batch, options.steps, torchrun_rank)
    report = report_of(candidates, earlier_seconds(path, job), str(path))
    report = replace(report, note=shared_cores(compiled.cluster))
    if torchrun_rank is None or torchrun_rank.rank == 0:
        add_trials(path, records_of(report, job))
    return TrialResult(report, candidates[report.chosen].program)


def _agreed(compute: Callable[[], Any]) -> Any:
    """Return rank 0's result on every rank of the group; without a group, this process's."""
    if not dist.is_initialized():
        return compute()
    box = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _left_group() -> TorchrunRank:
    """Leave the group in which the ranks planned, which new processes must not inherit; return this torchrun rank."""
    dist.barrier()
    dist.destroy_process_group()
    return TorchrunRank()


# Plans ----------------------------------------------------------------------------------------------------------------


def other_plans(compiled: CompiledProgram, count: int) -> Iterator[tuple[Plan, Mapping[str, int]]]:
    """Yield the best plans of the `count` best layouts besides the chosen one, fastest first, with their pins.

    Plan layouts that the search skipped, in the order of their bounds, until `count` plans are no slower than the next
    bound.
    """
    request, result = compiled.request, compiled.result
    assert request is not None
    plans = [candidate.plan for candidate in result.candidates if candidate is not result.best]
    for bound, text in result.skipped:
        plans.sort(key=lambda plan: plan.prediction.step_seconds)
        if count < 1 or (len(plans) >= count and plans[count - 1].prediction.step_seconds <= bound):
            break
        if (degrees := degrees_of(text)) is None:
            continue
        limits = replace(request.constraints, degrees={**request.constraints.degrees, **degrees})
        try:
            plans.append(search_plans(replace(request, constraints=limits)).best.plan)
        except AutoparError:  # nothing of this layout fits
            continue
    plans.sort(key=lambda plan: plan.prediction.step_seconds)
    for plan in plans[: max(count, 0)]:
        yield plan, pins_of(plan)


# Runs -----------------------------------------------------------------------------------------------------------------


def _run_round(candidate: _Candidate, batch: NamedBatch, steps: int, torchrun_rank: TorchrunRank | None = None) -> None:
    """Run some steps of a plan, unless it failed before."""
    if candidate.problem:
        return
    program = candidate.program
    patience = group_seconds(program)
    task, limit = (program, batch, steps), max(TIMEOUT_SECONDS, patience)
    try:
        by_rank = run_ranks(step_times, task, program.plan.num_ranks, limit, patience, torchrun_rank=torchrun_rank)
    except (AutoparError, RankError, MemoryError) as error:
        lines = str(error).splitlines()
        candidate.problem = " ".join(dict.fromkeys([lines[0], lines[-1].strip()])) if lines else type(error).__name__
        return
    candidate.rounds.append([max(seconds) for seconds in zip(*by_rank, strict=True)])


def step_times(compiled: CompiledProgram, batch: Mapping[str, Any], steps: int) -> list[float]:
    """Return, on every rank, the wall seconds of each of `steps` steps after WARM_STEPS."""
    step = compiled.build(first_step_check=False)
    local = step.local_batch(batch)
    seconds = []
    for _ in range(WARM_STEPS + steps):
        started = time.perf_counter()
        float(step(local))  # waits for a GPU
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_STEPS:]


def report_of(candidates: Sequence[_Candidate], before: Mapping[str, float], records: str) -> TrialReport:
    """Return the report. before: seconds of earlier trials by digest. Raises RankError where nothing ran."""
    plans = tuple(_tried(candidate, before) for candidate in candidates)
    ran = [number for number, plan in enumerate(plans) if plan.measured_seconds is not None]
    if not ran:
        raise RankError("no plan ran: " + "; ".join(f"{plan.words}: {plan.problem}" for plan in plans))
    chosen = min(ran, key=lambda number: plans[number].measured_seconds or 0.0)
    pairs = zip(plans[chosen].round_seconds, plans[0].round_seconds, strict=False)
    predicted = candidates[0].program.plan
    return TrialReport(
        model=predicted.model,
        cluster=predicted.cluster,
        plans=plans,
        chosen=chosen,
        is_clear=all(chosen_seconds < first_seconds for chosen_seconds, first_seconds in pairs),
        records=records,
    )


def _tried(candidate: _Candidate, before: Mapping[str, float]) -> TriedPlan:
    plan, digest = candidate.program.plan, digest_of(candidate.program.plan)
    tried = TriedPlan(
        plan=plan,
        words=full_words(plan),
        digest=digest,
        pins=candidate.pins,
        predicted_seconds=plan.prediction.step_seconds,
        problem=candidate.problem,
        earlier_seconds=before.get(digest),
    )
    seconds = [step_seconds for steps in candidate.rounds for step_seconds in steps]
    if candidate.problem or not seconds:
        return tried
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return replace(
        tried,
        measured_seconds=statistics.median(seconds),
        low_seconds=low,
        high_seconds=high,
        round_seconds=tuple(map(statistics.median, candidate.rounds)),
        num_steps=len(seconds),
    )
