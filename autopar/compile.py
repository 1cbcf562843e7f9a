"""The conductor: every pass in order, from a single-GPU model to a distributed program."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.cluster import as_cluster
from autopar.compiled import CompiledProgram
from autopar.errors import InfeasibleError
from autopar.explain.rescue import advised
from autopar.frontend.admission import traits_of
from autopar.frontend.inputs import NamedBatch
from autopar.frontend.state.forward_numbers import ForwardOf
from autopar.frontend.state.model_state import ModelState
from autopar.frontend.trace_modes.batch_values import Specialization
from autopar.ir.compression import NOTHING_COMPRESSED
from autopar.ir.graph import Graph
from autopar.lowering.assembly import files_of, program_of
from autopar.lowering.completion import with_backend, with_evaluation, with_inputs_of
from autopar.lowering.passes import passes
from autopar.planning.make_request import request_of
from autopar.planning.planner import Planned, SearchResult, padded_search
from autopar.planning.ranks import neighbors_of, planned_together
from autopar.planning.request import Request
from autopar.planning.traced_model import TracedModel
from autopar.planning.user_plans import plan_of_user
from autopar.program import GeneratedProgram
from autopar.running.process_group import join_launched
from autopar.running.process_state import check_autocast, kept_random_states
from autopar.settings.backend import NOTHING_ASYNCHRONOUS, check_layers_compile
from autopar.settings.compile_options import CompileOptions, with_options
from autopar.settings.fp8 import NOTHING_IN_FP8
from autopar.settings.optimizers import check_plan
from autopar.sharding.assignment import Candidate
from codegen.passes.async_tp import has_async_tp
from codegen.passes.fp8 import count_calls
from codegen.program import PipelineProgram, Program
from cost_models.mixed_cluster import AnyCluster


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
    cluster = as_cluster(cluster_spec)
    check_layers_compile(options.backend, options.limits.recompute)
    join_launched(cluster.groups[0].device.is_cpu)
    check_autocast()
    request = request_of(model, cluster, options)
    planned = _planned(request, planned_together(request, functools.partial(_chosen, request, options, before)))
    best, traced = planned.best, request.traced
    assert traced is not None
    ordered = passes(
        fused=request.kernels,
        fp8=best.plan.fp8,
        asynchronous=options.backend == "async-tp",
        overlapped=request.overlaps,
        neighbors=neighbors_of(planned.request, best),
    )
    program = with_backend(program_of(best, ordered), options.backend)
    evaluation = traced.evaluation_of(request.trace(request.global_batch_size))  # It may add guards.
    program = with_inputs_of(program, traced.inputs, traced.reads.specialization.guards.values())
    program = with_evaluation(program, *evaluation)
    files = files_of(program)
    _warn_of_no_effect(program, best)
    return CompiledProgram(
        model=model,
        cluster=cluster,
        optimizer=options.factory,
        best=best,
        result=planned.result,
        program=program,
        files=files,
        traits=traits_of(model),
        form=traced.inputs.form,
        loss_fn=options.loss_fn,
        request=planned.request,
        needs=traced.needs,
        state=ModelState(model, options.loss_fn, traced.reads),
        remake=Remake(options, traced.inputs, traced.reads.specialization),
    )


def _chosen(request: Request, options: CompileOptions, before: Graph | None) -> SearchResult:
    """Return the user's plan priced again, or the plan that a search chooses."""
    plan = options.given_plan
    if plan is None:
        return advised_search(request)
    return plan_of_user(request, plan, options.global_batch_size, before)


def _planned(request: Request, result: SearchResult) -> Planned:
    """Return the request with its chosen plan, checked against the optimizer. Warns of compression without effect."""
    plan = result.best.plan
    check_plan(plan, request.needs, result.best.graph)
    if plan.compression and not plan.compresses:
        warnings.warn(NOTHING_COMPRESSED, stacklevel=5)
    return Planned(request.of(result.best.graph), result.best, result)


def _warn_of_no_effect(program: Program | PipelineProgram, best: Candidate) -> None:
    """Warn if no rank does less than all of the work, and of switches that change nothing."""
    if best.repeated_work:
        warnings.warn(best.repeated_work, stacklevel=5)
    if program.any.backend == "async-tp" and not has_async_tp(program):
        warnings.warn(NOTHING_ASYNCHRONOUS, stacklevel=5)
    if best.plan.fp8 and not count_calls(program):
        warnings.warn(NOTHING_IN_FP8, stacklevel=5)


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


def advised_search(request: Request) -> SearchResult:
    """Run `padded_search`. Where nothing fits, the error says what would."""
    try:
        return padded_search(request)
    except InfeasibleError as error:
        raise advised(request, error) from None


def planned_alone(
    model: nn.Module,
    cluster: AnyCluster,
    options: CompileOptions,
    search: Callable[[Request], SearchResult] = advised_search,
    traced_model: TracedModel | None = None,
) -> Planned:
    """Return the plan that `compile` would choose, without its program. search: `padded_search` for no advice."""
    check_layers_compile(options.backend, options.limits.recompute)
    check_autocast()
    request = request_of(model, cluster, options, traced_model)
    return _planned(request, search(request))
