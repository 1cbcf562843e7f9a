"""The conductor: every pass in order, from a single-GPU model to a distributed program."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.accumulation.accumulating_trace import AccumulatingTrace
from autopar.cluster import as_cluster, is_on_cpu
from autopar.compiled import CompiledProgram
from autopar.costs.rates import Training, is_cpu
from autopar.costs.updates import adamw, training_of
from autopar.errors import ConstraintError, InfeasibleError, PlanError, TraceError
from autopar.explain.rescue import advised
from autopar.frontend.admission import check_loss, check_model, traits_of, warn_of_gradients
from autopar.frontend.evaluation import why_no_evaluation
from autopar.frontend.inputs import NamedBatch, common_batch, name_inputs
from autopar.frontend.padding.experts import with_whole_shares
from autopar.frontend.padding.heads import with_whole_heads
from autopar.frontend.padding.vocabulary import padded
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.state.forward_numbers import ForwardOf
from autopar.frontend.state.model_state import ModelState
from autopar.frontend.state.reads import Reads
from autopar.frontend.trace import find_cuts, trace
from autopar.frontend.trace_modes.batch_values import Specialization
from autopar.frontend.trace_modes.specialization import specializing
from autopar.ir.chain import buffer_across_units
from autopar.ir.compression import NOTHING_COMPRESSED, Compression
from autopar.ir.graph import Graph
from autopar.ir.mesh import PIPELINE_AXIS
from autopar.ir.plan_file import PADDINGS
from autopar.lowering.assembly import files_of, program_of
from autopar.lowering.passes import passes
from autopar.plan import Plan
from autopar.planning.layer_pool import LayerPool
from autopar.planning.planner import ONE_STAGE_DEVICES, Planned, SearchResult, search_plans
from autopar.planning.ranks import neighbors_of, planned_together
from autopar.planning.request import Request
from autopar.planning.user_plans import check_agreement, reprice
from autopar.program import GeneratedProgram
from autopar.running.batch import with_inputs_of
from autopar.running.process_group import join_launched
from autopar.running.process_state import check_autocast, kept_random_states
from autopar.settings.arguments import check_module, whole
from autopar.settings.backend import NOTHING_ASYNCHRONOUS, check_layers_compile, with_backend
from autopar.settings.compile_options import CompileOptions, with_options
from autopar.settings.constraints import Constraints
from autopar.settings.fp8 import NOTHING_IN_FP8, check_fp8
from autopar.settings.optimizers import check_plan, examine, keeps_zeros, limited
from codegen.logits import without_logits
from codegen.passes.async_tp import has_async_tp
from codegen.passes.fp8 import count_calls
from codegen.runtime.optimizer_probe import Needs
from codegen.runtime.optimizers import parameters_of
from cost_models.mixed import AnyCluster, MixedCluster


@with_options(CompileOptions)
def compile(model: nn.Module, cluster_spec: AnyCluster | str, options: CompileOptions) -> CompiledProgram:  # noqa: A001
    """Plan and generate the distributed program of `model` on `cluster_spec`.

    Args:
        model: an ordinary module on one device or on meta; it is not changed. A model in evaluation mode as a whole is
            trained in training mode; modules in evaluation mode inside another (frozen batch norm) stay so.
        cluster_spec: a cluster, or text such as "4x8 h100-sxm", or the path of a TOML file.

    The options, among them the required `example_inputs`, are given by keyword; CompileOptions and PlanOptions (in
    autopar.settings.compile_options) explain each.

    Under torchrun every rank calls this. The call starts the process group where the script did not; rank 0 plans and
    broadcasts the plan.
    Raises subclasses of AutoparError for models, clusters, constraints and plans that autopar cannot honor.
    """
    return compile_with(model, cluster_spec, options)


def compile_with(
    model: nn.Module, cluster_spec: AnyCluster | str, options: CompileOptions, before: Graph | None = None
) -> CompiledProgram:
    """Compile as `compile`, with the options as one value. before: as `reprice` takes it."""
    check_layers_compile(options.backend, Constraints.parse(options.constraints).recompute)
    join_launched(is_on_cpu(cluster_spec))
    backend = options.backend
    request, result = _planned(request_of(model, cluster_spec, options), options, before)
    best, traits = result.best, traits_of(model)
    best = replace(best, plan=replace(best.plan, basis=request.basis))
    check_plan(best.plan, request.needs, best.graph)
    if best.plan.compression and not best.plan.compresses:
        warnings.warn(NOTHING_COMPRESSED, stacklevel=4)
    if best.repeated_work:
        warnings.warn(best.repeated_work, stacklevel=4)
    asynchronous = backend == "async-tp"
    ordered = passes(
        fused=request.kernels,
        fp8=best.plan.fp8,
        asynchronous=asynchronous,
        overlapped=request.overlaps,
        neighbors=neighbors_of(request, best),
    )
    lowered = program_of(best, ordered)
    inputs = name_inputs(model, options.example_inputs, options.loss_fn)
    specialization = Specialization() if request.reads is None else request.reads.specialization
    guards = tuple(specialization.guards.values())
    program = with_inputs_of(with_backend(lowered, backend), inputs, guards)
    program = program.map(lambda stage: replace(stage, no_evaluation=request.no_evaluation))
    if not request.gives_logits:
        program = program.map(without_logits)
    if asynchronous and not has_async_tp(program):
        warnings.warn(NOTHING_ASYNCHRONOUS, stacklevel=4)
    if best.plan.fp8 and not count_calls(program):
        warnings.warn(NOTHING_IN_FP8, stacklevel=4)
    files = files_of(program)
    return CompiledProgram(
        model=model,
        cluster=request.whole,
        optimizer=options.optimizer or adamw,
        best=best,
        result=result,
        program=program,
        files=files,
        traits=traits,
        form=inputs.form,
        loss_fn=options.loss_fn,
        request=request,
        needs=request.needs,
        state=ModelState(model, options.loss_fn, request.reads),
        remake=Remake(options, inputs, specialization),
    )


def _planned(request: Request, options: CompileOptions, before: Graph | None) -> tuple[Request, SearchResult]:
    """Return the user's plan priced again, or the plan that a search chooses, with the request that it answers."""
    plan = options.given_plan
    if plan is None:
        result = planned_together(request, functools.partial(advised_search, request))
        return request.of(result.best.graph), result
    if options.compression is not None:
        plan = replace(plan, compression=request.training.compression)
    if options.fp8 is not None:
        plan = replace(plan, fp8=options.fp8)
    request = replace(request.compressed(plan.compression), fp8=plan.fp8)
    check_agreement(plan, request.constraints, options.global_batch_size)
    return request, planned_together(request, functools.partial(reprice, request, plan, before))


class Remake:
    """Makes a program again by the same plan, for the model's present state: `remake(program)`.

    It keeps the options that the program was made with, and of the batch the shapes, the dtypes and the values of
    guards.
    """

    def __init__(self, options: CompileOptions, inputs: NamedBatch, specialization: Specialization) -> None:
        self._specialization = specialization.copy()
        guarded = {name for guard in specialization.guards.values() for name in guard.inputs}
        kept = {name: value.detach().clone() for name, value in inputs.items() if name in guarded}
        outline = NamedBatch(inputs.map(_outline) | kept, inputs.containers)
        self._options = replace(options, example_inputs=outline)

    def __call__(self, program: GeneratedProgram) -> CompiledProgram:
        """Compile the program. Collective where ranks run. Raises AutoparError where the plan does not suit the
        model."""
        options = replace(self._options, plan=program.plan, constraints=None, compression=None, fp8=None)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            kept_random_states(),
            warnings.catch_warnings(action="ignore"),
        ):
            return compile_with(program.model, program.cluster, options, before=program.best.graph)

    def forward(self, program: GeneratedProgram) -> ForwardOf:
        """Return the forward that the program is made of."""
        return ForwardOf(
            model=program.model,
            example=self._options.example_inputs,
            loss_fn=program.loss_fn,
            param_dtype=self._options.dtype,
            specialization=self._specialization,
        )


def _outline(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True, eq=False)
class Traced:
    """The part of a request that follows from the model, its example batch, its loss and its optimizer alone.

    evaluation: returns why the model cannot evaluate, with and without logits, apart from a graph's own reason.
    trainings: the optimizer's costs by precision and whether on GPUs, filled on demand. reads: what forward reads, as
    the trace shows.
    """

    needs: Needs
    trace: BatchedTrace
    reads: Reads
    evaluation: Callable[[], tuple[str, str]]
    trainings: dict[tuple[str, bool], Training] = field(default_factory=dict)


def traced_of(model: nn.Module, options: CompileOptions) -> Traced:
    """Trace the model, for all requests with these options, whatever the batch's rows and the constraints."""
    loss_fn, dtype = options.loss_fn, options.dtype
    check_model(model, dtype)  # before the optimizer is tried on its parameters
    needs = examine(options.optimizer or adamw, model)
    batch = name_inputs(model, options.example_inputs, loss_fn)
    cuts = find_cuts(model, batch, loss_fn, dtype)

    @functools.cache
    def evaluation() -> tuple[str, str]:
        with specializing(cuts.reads.specialization):
            no_logits = why_no_evaluation(model, batch, loss_fn, cuts, with_logits=True)
            return no_logits, no_logits and why_no_evaluation(model, batch, loss_fn, cuts)

    def trace_at(micro_rows: int) -> Graph:
        return trace(model, batch, loss_fn, batch_size=micro_rows, param_dtype=dtype, cuts=cuts)

    return Traced(needs, trace=BatchedTrace(trace_at), reads=cuts.reads, evaluation=evaluation)


def request_of(
    model: nn.Module, cluster_spec: AnyCluster | str, options: CompileOptions, traced_model: Traced | None = None
) -> Request:
    """Return the request that `compile` plans for: the traced model and all that bears on a plan but a given plan."""
    check_module(model)
    loss_fn, optimizer = options.loss_fn, options.optimizer or adamw
    check_autocast()
    check_model(model, options.dtype)
    check_loss(model, loss_fn)
    compression = Compression.parse(options.compression)
    cluster = as_cluster(cluster_spec)
    if options.fp8:
        check_fp8(cluster, options.precision)
    warn_of_gradients(model)
    batch = name_inputs(model, options.example_inputs, loss_fn)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    rows = options.global_batch_size or common_batch(tensors)
    whole("rows of the batch", rows, 1, TraceError)
    traced_once = traced_model or traced_of(model, options)
    needs = traced_once.needs
    limits, plan = Constraints.parse(options.constraints), options.given_plan
    rows_of_tables, experts, heads = paddings_of(limits, plan, lambda: keeps_zeros(optimizer, model, needs, limits))

    @functools.cache
    def trace_at(micro_rows: int) -> Graph:
        # A model with one request is traced at its sizes. For several, traces at two sizes give all others.
        graph = traced_once.trace(micro_rows) if traced_model is not None else traced_once.trace.traced(micro_rows)
        return with_whole_shares(padded(graph, rows_of_tables), experts)

    source = traced_once, rows_of_tables, experts
    traced = AccumulatingTrace(lambda micro_rows: with_whole_heads(trace_at(micro_rows), heads), rows, (*source, heads))
    has_choice = plan is None and traced(rows).heads_padded_to > 1
    limits.check(traced(rows))
    check_micro_batches(traced, limits)
    first, mixed = cluster.groups[0], cluster if isinstance(cluster, MixedCluster) else None
    limits = limited(limits, needs, traced(rows))
    limits = without_shared_buffers(limits, traced(rows))
    key = options.precision, not is_cpu(first)
    if key not in traced_once.trainings:
        traced_once.trainings[key] = training_of(optimizer, *key, parameters_of(model), needs)
    training = replace(traced_once.trainings[key], compression=compression)
    no_logits, no_evaluation = traced_once.evaluation()
    fused = options.kernels == "on" or (options.kernels == "auto" and not is_cpu(first))
    return Request(
        trace=traced,
        cluster=first,
        global_batch_size=rows,
        precision=options.precision,
        training=training,
        constraints=limits,
        mixed=mixed,
        kernels=fused,
        fp8=bool(options.fp8),
        needs=needs,
        no_evaluation=no_evaluation or traced(rows).no_evaluation,
        gives_logits=not (no_logits or traced(rows).no_evaluation),
        backend=options.backend,
        unpadded=AccumulatingTrace(trace_at, rows, source) if has_choice else None,
        reads=traced_once.reads,
    )


def check_micro_batches(traced: AccumulatingTrace, limits: Constraints) -> None:
    """Raise ConstraintError for a pinned number of micro-batches that cannot make the batch."""
    reason = traced.whole_batch_reason(limits.micro_batches or 1)
    if reason is not None:
        raise ConstraintError(
            "the model needs its whole batch at once, in one micro-batch",
            values=f"micro_batches={limits.micro_batches}, but {reason}",
            alternatives="micro_batches=1",
        )


def without_shared_buffers(limits: Constraints, graph: Graph) -> Constraints:
    """Return the constraints, without pipelines where one stage would read a buffer that another one updates.

    Raises ConstraintError for a pinned pipeline.
    """
    buffer = buffer_across_units(graph)
    if buffer and limits.degrees.get("pp", 1) > 1:
        raise ConstraintError(
            "a pipeline would read a buffer in one stage and update it in another",
            values=f"pp={limits.degrees['pp']}, buffer {buffer}",
            alternatives=["pp=1", "update the buffer in the module that reads it"],
        )
    return replace(limits, degrees={**limits.degrees, PIPELINE_AXIS: 1}) if buffer else limits


def paddings_of(limits: Constraints, plan: Plan | None, are_exact: Callable[[], bool]) -> tuple[int, int, int]:
    """Return the numbers to whose multiples vocabularies, experts and heads are padded.

    are_exact: whether updates keep the padding zero and unseen; otherwise there is none.
    Raises PlanError for a plan with padding where none is possible.
    """
    tp = limits.degrees.get("tp", 1)
    paddings = (tp, limits.expert_ranks, tp)
    if plan is not None:
        paddings = (plan.padded_to, plan.experts_padded_to, plan.heads_padded_to)
    if max(paddings) == 1 or are_exact():
        return paddings
    if plan is not None:
        raise PlanError(
            "the plan has padding, which must stay zeros, and this optimizer's update sees or moves it",
            values=", ".join(f"{name}: {n}" for name, n in zip(PADDINGS, paddings, strict=True) if n > 1),
            alternatives="a new plan for this optimizer",
        )
    return 1, 1, 1


def advised_search(request: Request) -> SearchResult:
    """Run `padded_search`. Where nothing fits, the error says what would."""
    try:
        return padded_search(request)
    except InfeasibleError as error:
        raise advised(request, error) from None


def padded_search(
    request: Request, pool: LayerPool | None = None, exact_devices: int = ONE_STAGE_DEVICES
) -> SearchResult:
    """Run `search_plans` with padded heads and without, and return the faster result."""
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
    return min(results, key=lambda result: result.best.plan.prediction.step_seconds)


def planned_alone(
    model: nn.Module,
    cluster: AnyCluster,
    options: CompileOptions,
    search: Callable[[Request], SearchResult] = advised_search,
    traced_model: Traced | None = None,
) -> Planned:
    """Return the plan that `compile` would choose, without its program. search: `padded_search` for no advice."""
    check_layers_compile(options.backend, Constraints.parse(options.constraints).recompute)
    request = request_of(model, cluster, options, traced_model)
    result = search(request)
    request = request.of(result.best.graph)
    best = replace(result.best, plan=replace(result.best.plan, basis=request.basis))
    check_plan(best.plan, request.needs, best.graph)
    if best.plan.compression and not best.plan.compresses:
        warnings.warn(NOTHING_COMPRESSED, stacklevel=4)
    return Planned(request, best, result)
