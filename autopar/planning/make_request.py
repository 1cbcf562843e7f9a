"""The request that `compile` plans for: the model is traced, and the user's options are checked against it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from autopar.accumulation.accumulating_trace import AccumulatingTrace
from autopar.costs.updates import training_of
from autopar.errors import PlanError, TraceError
from autopar.frontend.admission import check_loss, check_model, warn_of_gradients
from autopar.frontend.inputs import common_batch
from autopar.frontend.padding.experts import with_whole_shares
from autopar.frontend.padding.heads import with_whole_heads
from autopar.frontend.padding.vocabulary import alignment_of, padded
from autopar.ir.compression import Compression
from autopar.ir.graph import Graph
from autopar.ir.plan_file import PADDINGS
from autopar.plan import Plan
from autopar.planning.request import Request
from autopar.planning.traced_model import TracedModel, traced_of
from autopar.settings.arguments import check_module, whole
from autopar.settings.compile_options import CompileOptions
from autopar.settings.constraints import Constraints, check_micro_batches, without_shared_buffers
from autopar.settings.fp8 import check_fp8
from autopar.settings.optimizers import keeps_zeros, limited
from codegen.runtime.optimizers import parameters_of
from cost_models.mixed_cluster import AnyCluster, MixedCluster


def request_of(
    model: nn.Module, cluster: AnyCluster, options: CompileOptions, traced_model: TracedModel | None = None
) -> Request:
    """Return the request that `compile` plans for: the traced model and all settings that affect a plan. Compression
    and fp8 come from the options, or else from a plan among the options."""
    check_module(model)
    if options.fp8:
        check_fp8(cluster, options.precision)
    check_model(model, options.dtype)
    check_loss(model, options.loss_fn)
    warn_of_gradients(model)
    traced_once = traced_model or traced_of(model, options)
    rows = options.global_batch_size or common_batch(traced_once.tensors)
    whole("rows of the batch", rows, 1, TraceError)
    limits, plan, optimizer, needs = options.limits, options.given_plan, options.factory, traced_once.needs
    is_on_cpu = cluster.groups[0].device.is_cpu
    is_half = not is_on_cpu and options.precision not in ("fp32", "tf32", "fp64")
    alignment = alignment_of(traced_once.trace(rows)) if is_half and plan is None else 1
    rows_of_tables, experts, heads = paddings_of(
        limits, plan, alignment, lambda: keeps_zeros(optimizer, model, needs, limits)
    )

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
    limits = without_shared_buffers(limited(limits, needs, traced(rows)), traced(rows))
    key = options.precision, not is_on_cpu
    if key not in traced_once.trainings:
        traced_once.trainings[key] = training_of(optimizer, *key, parameters_of(model), needs)
    compression, fp8 = Compression.parse(options.compression), bool(options.fp8)
    if plan is not None:
        compression = plan.compression if options.compression is None else compression
        fp8 = plan.fp8 if options.fp8 is None else fp8
    return Request(
        trace=traced,
        cluster=cluster.groups[0],
        global_batch_size=rows,
        precision=options.precision,
        training=replace(traced_once.trainings[key], compression=compression),
        constraints=limits,
        mixed=cluster if isinstance(cluster, MixedCluster) else None,
        kernels=options.kernels == "on" or (options.kernels == "auto" and not is_on_cpu),
        fp8=fp8,
        backend=options.backend,
        unpadded=AccumulatingTrace(trace_at, rows, source) if has_choice else None,
        traced=traced_once,
    )


def paddings_of(
    limits: Constraints, plan: Plan | None, alignment: int, are_exact: Callable[[], bool]
) -> tuple[int, int, int]:
    """Return the multiples to which vocabularies, experts and heads are padded.

    alignment: the multiple of vocabularies on this device, for all degrees; a plan has its own value. are_exact:
    whether updates keep the padding zero and unseen; otherwise there is no padding. Raises PlanError for a plan with
    padding that is impossible.
    """
    tp = limits.degrees.get("tp", 1)
    paddings = (math.lcm(tp, alignment), limits.expert_ranks, tp)
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
