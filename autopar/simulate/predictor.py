"""The prediction of a strategy that a person wrote: priced by the code that prices searched plans, without a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from autopar.cluster import as_cluster
from autopar.constraints import Constraints
from autopar.costs.block_costs import BlockCost, chain, combined, homes_of, segments, stored_costs
from autopar.costs.borders import border_bytes, second_copies, shared_parameters, tie_costs, transfer_seconds
from autopar.costs.price import ATTENTION, FREE, MATMULS, Pricer, Training, is_cpu
from autopar.costs.stage_costs import shared_costs, simulated, stage_cost
from autopar.errors import ConstraintError
from autopar.graph import VIEWS, Graph, base_name
from autopar.mesh import Mesh
from autopar.placement import R, S
from autopar.plan import Pipeline, Prediction, StagePlan
from autopar.planning.bases import Base, Bases
from autopar.planning.request import Request, pricer_for
from autopar.sharding.strategies import scopes_of
from autopar.simulate.fusion import fused_parts
from autopar.simulate.pricing import PRECISIONS, ProfiledPricer
from autopar.simulate.stages import cut, profiled
from autopar.simulate.strategy import Strategy, parse_strategy
from autopar.tracing.rebatch import BatchedTrace
from autopar.tracing.trace import common_batch, find_cuts, name_inputs, trace
from cost_models.frameworks import Framework, framework
from cost_models.machine import Cluster
from cost_models.memory import workspace_bytes
from cost_models.mixed import AnyCluster
from cost_models.schedule import placement

NAMED = 0.0
"""The price of a byte in the decisions inside a layer: seconds alone."""


def predict(
    model: nn.Module,
    cluster_spec: AnyCluster | str,
    strategy: Mapping[str, Any],
    *,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None = None,
    global_batch_size: int | None = None,
    precision: str = "bf16",
    framework: str | Framework = "autopar",
) -> Prediction:
    """Seconds and bytes of training `model` on `cluster_spec` by a strategy that a person wrote; nothing is searched.

    strategy: as `compile(constraints=...)` takes it, with every degree, zero and micro_batches fixed (pp, tp, ddp and
    chunks are 1, recompute and offload none, and the schedule 1f1b, unless it says otherwise), and also

        "sp": False             no sequence parallelism beside tensor parallelism
        "attention": "unfused"  or "flash", instead of the framework's kernel

    framework: a profile of cost_models/machines/frameworks.toml, or one of your own; "autopar" is what generated
    programs do, and gives a searched plan's strategy the plan's prediction. precision: fp32, tf32, bf16, fp16 or fp8.
    Other arguments as in `compile`. To score many strategies of one model, keep a `Predictor`.
    """
    predictor = Predictor(model, example_inputs=example_inputs, loss_fn=loss_fn, precision=precision)
    return predictor.predict(cluster_spec, strategy, global_batch_size=global_batch_size, framework=framework)


@dataclass
class _Shared:
    """What strategies have in common that run on one cluster under one profile with the same pins."""

    request: Request
    bases: Bases
    costs: dict[Any, Mapping[str, BlockCost]] = field(default_factory=dict)
    borders: dict[Any, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What seconds depend on beside the cluster and the strategy."""

    framework: Framework
    attention: str
    matmul_dtype: str


PLANNERS = _Terms(framework("autopar"), framework("autopar").attention, "bf16")


class Predictor:
    """Scores strategies of one traced model. What they share is kept."""

    def __init__(
        self,
        model: nn.Module,
        *,
        example_inputs: tuple[Any, ...] | Mapping[str, Any],
        loss_fn: Callable[..., torch.Tensor] | None = None,
        precision: str = "bf16",
    ) -> None:
        self.traced_as = _traced_as(precision)
        self.precision = precision
        batch = name_inputs(model, example_inputs, loss_fn)
        self.rows = common_batch({k: v for k, v in batch.items() if isinstance(v, torch.Tensor)})
        dtype = torch.bfloat16 if self.traced_as == "bf16" else None
        cuts = find_cuts(model, batch, loss_fn)

        def trace_at(rows: int) -> Graph:
            return trace(model, batch, loss_fn, batch_size=rows, param_dtype=dtype, cuts=cuts)

        self._start(BatchedTrace(trace_at))

    @classmethod
    def of_trace(cls, traced: BatchedTrace, rows: int, precision: str) -> Predictor:
        """From a graph at hand: traced in bf16 for 16-bit precisions and fp8, else in fp32."""
        self = cls.__new__(cls)
        self.traced_as, self.precision, self.rows = _traced_as(precision), precision, rows
        self._start(traced)
        return self

    def _start(self, traced: BatchedTrace) -> None:
        self.traced = traced
        graph = traced(2)
        traced(4)
        self.graph = graph
        self.blocks = chain(graph)
        self.homes, self.scopes = homes_of(graph), scopes_of(graph)
        self.shared_parameters = shared_parameters(graph)
        self.matrices = _matrices(graph)
        self._parts = lru_cache(maxsize=None)(lambda fusion: fused_parts(graph, fusion))
        self._shared: dict[Any, _Shared] = {}

    # --- one strategy -----------------------------------------------------------------------------------------

    def predict(
        self,
        cluster_spec: AnyCluster | str,
        strategy: Mapping[str, Any],
        *,
        global_batch_size: int | None = None,
        framework: str | Framework = "autopar",
        precision: str | None = None,
    ) -> Prediction:
        """As `autopar.predict`. precision: another one that is traced alike (bf16, fp16, fp8; fp32, tf32)."""
        cluster = as_cluster(cluster_spec)
        if not isinstance(cluster, Cluster):
            raise ConstraintError("a strategy is scored on equal nodes only", values=str(cluster))
        profile = _profile(framework)
        rows = global_batch_size or self.rows
        wanted = parse_strategy(strategy, cluster, rows)
        precision = precision or self.precision
        if _traced_as(precision) != self.traced_as:
            raise ConstraintError(
                "the model was traced in another precision", values=f"{self.traced_as}, not {precision}"
            )
        terms = _Terms(
            profile,
            wanted.attention or profile.attention,
            PRECISIONS[precision][1],
        )
        return self._score(self._shared_for(cluster, terms, wanted, rows), terms, wanted)

    def _score(self, shared: _Shared, terms: _Terms, wanted: Strategy) -> Prediction:
        profile = terms.framework
        base = shared.bases.base(wanted.mesh, wanted.rows, NAMED)
        if base is None:
            raise ConstraintError("the pinned placements leave no way to run the model", values=str(wanted.mesh))
        request = shared.request
        pricer = self._priced(pricer_for(request, wanted.mesh, wanted.micro_batches, wanted.offload), terms)
        own = (wanted.mesh, wanted.rows, wanted.zero, wanted.offload, wanted.micro_batches > 1)
        if own not in shared.costs:
            stored = stored_costs(self.graph, pricer, base.parameters(wanted.zero), self.homes, self.scopes)
            shared.costs[own] = combined(base.costs, stored)
        costs = shared.costs[own]
        pipeline = self._pipeline(wanted, profile, costs)
        borders = (*self._borders(shared, base, wanted.rows), 0.0)
        stages = pipeline.stages
        copies = second_copies(self.graph, pricer, base.parameters(wanted.zero))
        staged = [stage_cost(costs, self.blocks, stage, borders[stage.last], copies) for stage in stages]
        staged = [
            profiled(
                cost,
                stage,
                self.blocks,
                profile,
                request.cluster.device,
                wanted.mesh.size("tp"),
                wanted.zero,
                pricer.training.gradient_bytes + profile.gradient_copy_bytes,
                wanted.pp > 1 and request.cluster.num_nodes > 1,
            )
            for cost, stage in zip(staged, stages, strict=True)
        ]
        home = placement(pipeline.schedule or "1f1b", wanted.pp, wanted.chunks)
        transfers = {
            (i, i + 1): transfer_seconds(pricer, wanted.pp, borders[stage.last]) if home[i] != home[i + 1] else 0.0
            for i, stage in enumerate(stages[:-1])
        }
        ties = tie_costs(self.graph, pricer, base.parameters(wanted.zero), wanted.pp)
        tied = shared_costs(stages, self.shared_parameters, ties)
        device = request.cluster.device
        workspace = 0.0 if is_cpu(request.cluster) else float(workspace_bytes(device))
        result = simulated(staged, pipeline, wanted.micro_batches, transfers, tied, (workspace,) * wanted.pp)
        return result.prediction

    def _pipeline(self, wanted: Strategy, profile: Framework, costs: Mapping[str, BlockCost]) -> Pipeline:
        """The framework's stages, every layer under the strategy's recompute mode."""
        weights = {name: self.matrices.weights.get(name, 0.0) for name in self.blocks}
        firsts = cut(self.blocks, costs, weights, wanted.pp * wanted.chunks, profile.stages)
        stages = []
        for first, last in zip(firsts, firsts[1:], strict=False):
            own = self.blocks[first:last]
            layers = dict.fromkeys(name for name in own if not name.startswith("top "))
            modes = {name: ((wanted.recompute, own.count(name)),) for name in layers if wanted.recompute != "none"}
            stages.append(StagePlan(first, last, modes))
        return Pipeline(wanted.pp, wanted.schedule, tuple(stages), wanted.offload)

    def _borders(self, shared: _Shared, base: Base, rows: int) -> tuple[float, ...]:
        key = (base.costed, rows)
        if key not in shared.borders:
            graph = self.traced.estimate(rows * base.costed.num_data_ranks)
            shared.borders[key] = border_bytes(graph, base.costed, base.costed_choices)
        return shared.borders[key]

    # --- what strategies share --------------------------------------------------------------------------------

    def _shared_for(self, cluster: Cluster, terms: _Terms, wanted: Strategy, rows: int) -> _Shared:
        profile = terms.framework
        tp = wanted.mesh.size("tp")
        sp = profile.sequence_parallel if wanted.sp is None else wanted.sp
        pins = (profile.shards_weights, sp) if tp > 1 else None
        key = (cluster, terms, pins, tp if pins else 0, rows, repr(wanted.limits))
        if key not in self._shared:
            limits = self._pinned(wanted.limits, profile, sp, tp)
            limits.check(self.graph)
            request = Request(self.traced, cluster, rows, self.traced_as, self._training(profile, cluster), limits)
            predictor = self

            class ProfiledBases(Bases):
                def pricer(self, mesh: Mesh) -> Pricer:
                    return predictor._priced(super().pricer(mesh), terms)

            self._shared[key] = _Shared(request, ProfiledBases(request))
        return self._shared[key]

    def _priced(self, plain: Pricer, terms: _Terms) -> Pricer:
        """Under the profile's prices; the planner's own where it is the profile of generated programs."""
        if terms == PLANNERS or terms == replace(PLANNERS, matmul_dtype="fp32"):
            return plain
        profile = terms.framework
        return ProfiledPricer(
            plain.mesh,
            plain.cluster,
            plain.training,
            plain.hidden_fraction if profile.hides_by_share else 0.0,
            plain.fragmentation if profile.name == "autopar" else 0.0,
            framework=profile,
            parts=self._parts(profile.fusion),
            matmul_dtype=terms.matmul_dtype,
            attention=terms.attention,
        )

    def _training(self, profile: Framework, cluster: Cluster) -> Training:
        from autopar.compile import training_of

        own = training_of(torch.optim.AdamW, self.traced_as, not is_cpu(cluster))
        if profile.gradient_bytes and self.traced_as == "bf16":
            own = replace(own, gradient_bytes=profile.gradient_bytes)
        return own if profile.name == "autopar" else replace(own, update_bytes=0.0)

    def _pinned(self, limits: Constraints, profile: Framework, sp: bool, tp: int) -> Constraints:
        """With the framework's ways of tensor parallelism forbidden that are not its own."""
        if tp == 1:
            return limits
        parameters, activations = limits.forbid_parameters, limits.forbid_activations
        if profile.shards_weights:
            names = self.matrices.names(tp)
            parameters += tuple((name, (("tp", R),)) for name in names)
        if not sp:
            activations += tuple((name, (("tp", S(1)),)) for name in self.matrices.sequences)
        elif profile.shards_weights:
            activations += tuple((name, (("tp", R),)) for name in self.matrices.residuals)
        return replace(limits, forbid_parameters=parameters, forbid_activations=activations)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """shapes: of every matrix that a matmul reads, and of embeddings, by pattern of its name. weights: multiply-adds
    per token of a block's matrices. sequences: calls whose result is [rows, tokens, width]; residuals: those between
    matrices, such as norms and additions to the residual stream."""

    shapes: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, float]
    sequences: tuple[str, ...]
    residuals: tuple[str, ...]

    def names(self, tp: int) -> tuple[str, ...]:
        """Those that can be cut into tp parts."""
        return tuple(n for n, shape in self.shapes.items() if all(size % tp == 0 for size in shape))


def _matrices(graph: Graph) -> _Matrices:
    shapes: dict[str, tuple[int, ...]] = {}
    weights: dict[str, float] = {}
    sequences, residuals = [], []
    homes = homes_of(graph)
    for scope in scopes_of(graph):
        own = {p.name: p for p in (scope.layer.parameters if scope.layer else graph.parameters)}
        nodes = {node.name: node for node in scope.nodes}
        largest = max((p.meta.numel for p in own.values()), default=0)
        for node in scope.nodes:
            meta = node.outputs[0]
            if len(meta.shape) == 3 and meta.requires_grad:
                sequences.append(node.name)
                width = scope.layer.inputs[0][1].shape[-1:] if scope.layer else ()
                if meta.shape[-1:] == width and base_name(node.op) not in MATMULS | ATTENTION | VIEWS | FREE:
                    residuals.append(node.name)
            for ref in node.inputs:
                while ref.node in nodes and base_name(nodes[ref.node].op) in VIEWS:
                    ref = nodes[ref.node].inputs[0]
                if ref.node not in own or len(own[ref.node].meta.shape) != 2:
                    continue
                shape, name = own[ref.node].meta.shape, base_name(node.op)
                if name in MATMULS:
                    where = scope.name or homes.get(node.name, "")
                    where = where or segments(graph)[node.name]
                    weights[where] = weights.get(where, 0.0) + shape[0] * shape[1]
                if name in MATMULS or (name == "embedding" and own[ref.node].meta.numel == largest):
                    pattern = f"*.{ref.node}" if scope.layer else ref.node
                    shapes[pattern] = shape
    return _Matrices(shapes, weights, tuple(sequences), tuple(residuals))


def _profile(given: str | Framework) -> Framework:
    if isinstance(given, Framework):
        return given
    try:
        return framework(given)
    except ValueError as error:
        raise ConstraintError(
            "the framework is not one that autopar has", values=repr(given), alternatives=str(error)
        ) from None


def _traced_as(precision: str) -> str:
    if precision not in PRECISIONS:
        raise ConstraintError("precision is not supported", values=repr(precision), alternatives=", ".join(PRECISIONS))
    return PRECISIONS[precision][0]
