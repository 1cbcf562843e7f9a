"""The contents of a report as data, for the terminal's tables, the page and `--json`.

Numbers are in seconds and bytes; words come from `sharding.py` and `traffic.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costs.layer_costs import FIXED_KINDS
from autopar.costs.rates import is_cpu
from autopar.costs.stage_costs import Simulated
from autopar.costs.updates import training_of
from autopar.program import GeneratedProgram
from autopar.report.costs import RunnerUp, TimeRow, runner_ups, time_rows
from autopar.report.dims import DimNames, name_dims
from autopar.report.figures import Figures, figures_of
from autopar.report.notes import notes_of
from autopar.report.plan_words import axes_words, batch_words, full_words, plan_words, precision_words
from autopar.report.sharding import Row, activation_rows, parameter_rows
from autopar.report.stages import StageRow, stage_rows
from autopar.report.timeline import simulation_of
from autopar.report.traffic import Transfer, context_rows, parameter_traffic, reshard_rows
from autopar.sharding.scopes import Scope, scopes_of
from codegen.program import ModuleClass, PipelineProgram, Program
from codegen.runtime.optimizers import parameters_of


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A kind of bytes on one rank."""

    kind: str
    num_bytes: float


@dataclass(frozen=True, slots=True)
class ScopeFacts:
    """One layer class, or the operators outside layers (name ""). parameters, results: their placements. transfers:
    their communication."""

    name: str
    title: str
    count: int
    parameters: tuple[Row, ...]
    results: tuple[Row, ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """A pipeline's schedule. makespan: seconds of all micro-batches. bubbles: the idle share of each pipeline rank."""

    name: str
    num_chunks: int
    num_micro_batches: int
    makespan: float
    bubbles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of a program's report. plan: the whole plan in a line. seconds: of a step, by kind. memory: of the
    fullest rank, largest kind first. pipeline_ranks: the memory of each pipeline rank, if there are several. stages,
    schedule: of a pipeline or of a plan that recomputes or offloads. others: plans that lost."""

    model: str
    mesh: str
    plan: str
    cluster: str
    axes: str
    batch: str
    precision: str
    compression: str
    offload: str
    is_given: bool
    is_on_cpu: bool
    figures: Figures
    seconds: tuple[TimeRow, ...]
    memory: tuple[MemoryRow, ...]
    pipeline_ranks: tuple[tuple[MemoryRow, ...], ...]
    schedule: ScheduleFacts | None
    stages: tuple[StageRow, ...]
    scopes: tuple[ScopeFacts, ...]
    others: tuple[RunnerUp, ...]
    notes: tuple[str, ...]

    @property
    def device_word(self) -> str:
        """The word for the device of a rank: `GPU`, or `process` on a CPU."""
        return "process" if self.is_on_cpu else "GPU"

    @property
    def device_words(self) -> str:
        """The plural of `device_word`."""
        return "processes" if self.is_on_cpu else "GPUs"

    @property
    def title(self) -> str:
        """`LlamaForCausalLM on dp2 x tp2`."""
        return f"{self.model} on {self.mesh}"


def facts_of(compiled: GeneratedProgram) -> Facts:
    """Return the facts of a program. Facts of a pipeline need the request that the program was planned for."""
    plan, graph = compiled.plan, compiled.best.graph
    names = name_dims(graph, compiled.best.operators)
    has_stages = not plan.pipeline.is_plain and compiled.request is not None
    simulated = simulation_of(compiled) if has_stages else None
    scopes = sorted(scopes_of(graph), key=lambda scope: bool(scope.layer))
    return Facts(
        model=plan.model,
        mesh=plan.mesh_text,
        plan=full_words(plan),
        cluster=str(compiled.cluster),
        axes=axes_words(compiled),
        batch=batch_words(compiled),
        precision=precision_words(compiled),
        compression=str(plan.compression) if plan.compression else "",
        offload=plan.pipeline.offload,
        is_given=compiled.result.is_given,
        is_on_cpu=is_cpu(compiled.cluster.groups[0]),
        figures=figures_of(compiled),
        seconds=tuple(time_rows(plan.prediction.seconds)),
        memory=_memory_rows(plan.prediction.num_bytes),
        pipeline_ranks=tuple(map(_memory_rows, plan.prediction.pipeline_ranks)),
        schedule=_schedule(compiled, simulated) if simulated and plan.pipeline.num_pipeline_ranks > 1 else None,
        stages=tuple(stage_rows(plan, graph, simulated)) if simulated else (),
        scopes=tuple(_scope_facts(compiled, scope, names) for scope in scopes),
        others=tuple(runner_ups(compiled.result)),
        notes=notes_of(compiled),
    )


def chosen_words(compiled: GeneratedProgram) -> str:
    """Return the chosen plan as the rows of other plans name theirs."""
    return plan_words(compiled.plan)


def memory_order(kind: str) -> tuple[int, str]:
    """Return a sort key: persistent kinds of memory in the order of `FIXED_KINDS`, then the rest by name."""
    return (FIXED_KINDS.index(kind) if kind in FIXED_KINDS else len(FIXED_KINDS), kind)


def modules_of(program: Program | PipelineProgram, scope: Scope) -> list[ModuleClass]:
    """Return the generated classes of a scope: one per layer class, and one per stage for the top level."""
    if scope.layer:
        return [m for p in program.programs for m in p.layers if m.name == scope.name][:1]
    return [p.root for p in program.programs]


def _memory_rows(num_bytes: Mapping[str, float]) -> tuple[MemoryRow, ...]:
    return tuple(MemoryRow(kind, size) for kind, size in sorted(num_bytes.items(), key=lambda pair: -pair[1]))


def _schedule(compiled: GeneratedProgram, simulated: Simulated) -> ScheduleFacts:
    plan, timeline = compiled.plan, simulated.timeline
    return ScheduleFacts(
        name=plan.pipeline.schedule,
        num_chunks=plan.pipeline.num_chunks,
        num_micro_batches=plan.num_micro_batches,
        makespan=timeline.makespan,
        bubbles=timeline.bubble_fractions,
    )


def _scope_facts(compiled: GeneratedProgram, scope: Scope, names: DimNames) -> ScopeFacts:
    mesh, assignment = compiled.plan.mesh, compiled.best.assignment
    return ScopeFacts(
        name=scope.name,
        title=_scope_title(scope),
        count=scope.count,
        parameters=tuple(parameter_rows(scope, assignment, mesh, names)),
        results=tuple(activation_rows(scope, assignment, mesh, names)),
        transfers=tuple(_transfers(compiled, scope, names)),
    )


def _scope_title(scope: Scope) -> str:
    if not scope.layer:
        return "Outside the layers"
    first, last = scope.instances[0], scope.instances[-1]
    paths = first if first == last else f"{first} ... {last}"
    return f"{scope.name} x {scope.count} ({paths})"


def _transfers(compiled: GeneratedProgram, scope: Scope, names: DimNames) -> list[Transfer]:
    program, plan, best = compiled.program, compiled.plan, compiled.best
    rows: list[Transfer] = []
    for module in modules_of(program, scope):
        rows += reshard_rows(scope, module, names, plan.num_micro_batches)
    on_cpu = is_cpu(compiled.cluster.groups[0])
    rows += context_rows(scope, best.operators, best.assignment, plan.mesh, on_cpu, plan.num_micro_batches)
    training = replace(
        training_of(compiled.optimizer, plan.precision, parameters=parameters_of(compiled.model)),
        compression=plan.compression,
    )
    is_shared = not (compiled.needs.is_coupled or plan.pipeline.offload)
    unsharded_updates = compiled.needs.whole if is_shared else frozenset[str]()
    return rows + parameter_traffic(
        scope, best.assignment, plan.mesh, training, plan.num_micro_batches, unsharded_updates
    )
