"""The prediction of a strategy that a person wrote: priced by the code that prices searched plans, without a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from autopar.cluster import as_cluster
from autopar.costs.cost_table import combined
from autopar.costs.layer_costs import LayerCost
from autopar.costs.pipeline_costs import ChainCosts, pipeline_costs
from autopar.costs.price import Pricer
from autopar.costs.rates import Training, is_cpu
from autopar.costs.stage_costs import Simulated
from autopar.costs.stored_costs import StoredParameters, stored_costs
from autopar.costs.updates import adamw, training_of
from autopar.errors import ConstraintError
from autopar.frontend.inputs import common_batch, name_inputs
from autopar.frontend.rebatch import BatchedTrace
from autopar.ir.plan_data import Pipeline, StagePlan
from autopar.ir.stage_mesh import StageMesh
from autopar.planning.request import Request, pricer_for
from autopar.strategies.fits import require_fit
from autopar.strategies.matrices import pinned
from autopar.strategies.precisions import matmul_dtype, traced_as
from autopar.strategies.prediction import StrategyPrediction
from autopar.strategies.prediction_terms import Terms, has_kernels, priced_under
from autopar.strategies.scenario import Scenario
from autopar.strategies.scored_model import (
    ScoredLayers,
    ScoredModel,
    Setting,
    drops_attention,
    traced_model,
    without_attention_dropout,
)
from autopar.strategies.stage_meshes import stage_meshes_of
from autopar.strategies.stages import cut, profiled
from autopar.strategies.strategy import Strategy, parse_strategy, profile_of
from cost_models.framework_profiles import Framework
from cost_models.machine import Cluster
from cost_models.mixed_cluster import AnyCluster
from cost_models.schedule import placement

NAMED = 0.0
"""The multiplier that layers are solved under: seconds alone."""


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
    check: bool = False,
) -> StrategyPrediction:
    """Seconds and bytes of training `model` on `cluster_spec` by a strategy that a person wrote; nothing is searched.

    strategy: as `compile(constraints=...)` takes it, with every degree, zero and micro_batches fixed (pp, tp, ddp and
    chunks are 1, recompute and offload none, and the schedule 1f1b, unless it says otherwise), and also

        "sp": False             no sequence parallelism beside tensor parallelism
        "attention": "unfused"  or "flash", instead of the framework's kernel
        "kernels": "off"        of "autopar": no fused kernels, which programs have on GPUs ("on": on CPUs, too)
        "cp": 2                 context parallelism: rows cut along their tokens
        "cp_exchange": "ring"   or "all-gather", instead of the framework's way
        "ep": 8                 expert parallelism among neighboring ranks of dp x cp; etp: tp (default) or 1
        "capacity_factor": 1.25 places of every expert by its even share of tokens; without it none is dropped
        "expert_skew": 0.1      coefficient of variation of experts' shares of tokens, where none is dropped
        "groups": [1, 0]        of unlike nodes, the group of every pipeline rank (strategies/stage_meshes.py)

    framework: a profile of cost_models/machines/frameworks.toml, or one of your own; "autopar" is what generated
    programs do, and gives a searched plan's strategy the plan's prediction. precision: fp32, tf32, bf16, fp16, fp8, and
    mxfp8 or nvfp4 where the devices have them.
    check: raise InfeasibleError where the fullest rank exceeds the strategy's `memory`, or the device's; without it,
    `fits` of the prediction says so. Other arguments as in `compile`. To score many strategies of one model, keep a
    `Predictor`.
    """
    predictor = Predictor(model, example_inputs=example_inputs, loss_fn=loss_fn, precision=precision)
    return predictor.predict(
        cluster_spec, strategy, global_batch_size=global_batch_size, framework=framework, check=check
    )


class Predictor:
    """Scores strategies of one traced model, and caches everything that they share."""

    def __init__(
        self,
        model: nn.Module,
        *,
        example_inputs: tuple[Any, ...] | Mapping[str, Any],
        loss_fn: Callable[..., torch.Tensor] | None = None,
        precision: str = "bf16",
    ) -> None:
        self.traced_as = traced_as(precision)
        self.precision = precision
        batch = name_inputs(model, example_inputs, loss_fn)
        self.rows = common_batch({k: v for k, v in batch.items() if isinstance(v, torch.Tensor)})
        dtype = torch.bfloat16 if self.traced_as == "bf16" else None
        self._start(traced_model(model, batch, loss_fn, dtype))

    @classmethod
    def of_trace(cls, traced: BatchedTrace, rows: int, precision: str) -> Predictor:
        """The predictor of a graph at hand: traced in bf16 for 16-bit precisions and fp8, else in fp32."""
        self = cls.__new__(cls)
        self.traced_as, self.precision, self.rows = traced_as(precision), precision, rows
        self._start(traced)
        return self

    def _start(self, traced: BatchedTrace) -> None:
        self._dropping = ScoredModel(traced)
        self._without_dropout: ScoredModel | None = None

    def scored_model(self, drops_attention: bool = True) -> ScoredModel:
        """Return the model. drops_attention: False for a model whose attention has no dropout."""
        if drops_attention:
            return self._dropping
        if self._without_dropout is None:
            traced = self._dropping.traced
            self._without_dropout = ScoredModel(BatchedTrace(lambda rows: without_attention_dropout(traced(rows))))
        return self._without_dropout

    # --- one strategy -----------------------------------------------------------------------------------------

    def predict(
        self,
        cluster_spec: AnyCluster | str,
        strategy: Mapping[str, Any],
        *,
        global_batch_size: int | None = None,
        framework: str | Framework = "autopar",
        precision: str | None = None,
        check: bool = False,
    ) -> StrategyPrediction:
        """Predict as `autopar.predict` does. precision: another one that is traced alike (bf16, fp16, fp8, mxfp8,
        nvfp4; fp32, tf32)."""
        cluster = as_cluster(cluster_spec)
        profile = profile_of(framework)
        rows = global_batch_size or self.rows
        wanted = parse_strategy(strategy, cluster, rows)
        stage_meshes = stage_meshes_of(cluster, wanted.mesh, wanted.pp, wanted.groups)
        precision = precision or self.precision
        if traced_as(precision) != self.traced_as:
            raise ConstraintError(
                "the model was traced in another precision", values=f"{self.traced_as}, not {precision}"
            )
        terms = Terms(profile, wanted.attention or profile.attention, matmul_dtype(precision, cluster))
        capacities = [
            float(wanted.memory_bytes or cluster.groups[stage_mesh.group].device.memory_bytes)
            for stage_mesh in stage_meshes
        ]
        result = self._result(terms, wanted, cluster, stage_meshes, rows, capacities)
        plain = result.prediction
        prediction = StrategyPrediction(
            plain.seconds,
            plain.num_bytes,
            plain.pipeline_ranks,
            scenario=Scenario(
                predictor=self,
                cluster=cluster,
                strategy=strategy,
                global_batch_size=rows,
                framework=profile,
                precision=precision,
            ),
            simulated=result,
            capacity_bytes=max(
                zip(result.memory, capacities, strict=True), key=lambda pair: sum(pair[0].values()) / pair[1]
            )[1],
        )
        if check:
            require_fit(prediction)
        return prediction

    def _result(
        self,
        terms: Terms,
        wanted: Strategy,
        cluster: AnyCluster,
        stage_meshes: Sequence[StageMesh],
        rows: int,
        capacities: Sequence[float],
    ) -> Simulated:
        model = self.scored_model(wanted.cp == 1 or terms.framework.name == "autopar")
        terms = replace(terms, kernels=has_kernels(wanted, cluster, terms, model))
        settings = self._settings(model, cluster, terms, wanted, rows)
        return self._score(model, settings, terms, wanted, cluster, stage_meshes, capacities)

    def _score(
        self,
        model: ScoredModel,
        settings: Mapping[int, Setting],
        terms: Terms,
        wanted: Strategy,
        cluster: AnyCluster,
        stage_meshes: Sequence[StageMesh],
        capacities: Sequence[float],
    ) -> Simulated:
        groups = {number: _in_group(model, setting, number, terms, wanted) for number, setting in settings.items()}
        ranks = [groups[stage_mesh.group] for stage_mesh in stage_meshes]
        home = placement(wanted.schedule or "1f1b", wanted.pp, wanted.chunks)
        pipeline = _pipeline(model, wanted, terms.framework, [ranks[rank].costs for rank in home])
        pipeline_cost = pipeline_costs(ranks, pipeline, cluster)
        spans = wanted.pp > 1 and sum(group.num_nodes for group in cluster.groups) > 1
        stages = []
        for rank, stage, cost in zip(home, pipeline.stages, pipeline_cost.stages, strict=True):
            num_layers = sum(name in model.layers for name in model.units[stage.first : stage.last])
            stage_group, tp = cluster.groups[stage_meshes[rank].group], wanted.mesh.size("tp")
            held_bytes = ranks[rank].pricer.training.gradient_bytes + terms.framework.gradient_copy_bytes
            is_far = tp > stage_group.devices_per_node
            stages.append(
                profiled(cost, num_layers, terms.framework, stage_group.device, wanted, held_bytes, spans, is_far)
            )
        return replace(pipeline_cost, stages=tuple(stages)).simulated(capacities)

    # --- what strategies share --------------------------------------------------------------------------------

    def _settings(
        self, model: ScoredModel, cluster: AnyCluster, terms: Terms, wanted: Strategy, rows: int
    ) -> dict[int, Setting]:
        """Return the setting of each group of equal nodes. All share the decisions of the fastest group."""
        order = sorted(range(len(cluster.groups)), key=lambda number: -_rate(cluster.groups[number]))
        settings: dict[int, Setting] = {}
        for number in order:
            settings[number] = self._setting(model, cluster, number, terms, wanted, rows, settings.get(order[0]))
        return settings

    def _setting(
        self,
        model: ScoredModel,
        whole: AnyCluster,
        number: int,
        terms: Terms,
        wanted: Strategy,
        rows: int,
        decided: Setting | None,
    ) -> Setting:
        """Return the setting of one group of `whole`. decided: the setting with the decisions to use; None to solve
        them."""
        profile, cluster = terms.framework, whole.groups[number]
        tp = wanted.mesh.size("tp")
        sp = _is_sequence_parallel(profile, wanted)
        pins = (profile.shards_weights, sp) if tp > 1 else None
        key = (
            whole,
            cluster,
            terms.without_host,
            pins,
            tp if pins else 0,
            wanted.cp_has_experts,
            wanted.expert_skew,
            wanted.capacity_factor,
            rows,
            repr(wanted.limits),
        )
        if key not in model.settings:
            limits = pinned(model.matrices, wanted.limits, profile, sp, wanted.cp_has_experts)
            if profile.name == "autopar" and not wanted.limits.context and drops_attention(model.graph):
                limits = replace(limits, context=None)  # The program exchanges heads, as under plans.
            limits.check(model.graph)
            request = Request(
                trace=model.traced,
                cluster=cluster,
                global_batch_size=rows,
                precision=self.traced_as,
                training=self._training(profile, cluster),
                constraints=limits,
            )
            request = replace(request, kernels=terms.kernels, num_waiting=whole.num_devices)

            def priced(plain: Pricer) -> Pricer:
                return _priced(plain, terms, model, wanted)

            layers = ScoredLayers(request, priced=priced, prices_all_ranks=True)
            model.settings[key] = Setting(
                request, layers if decided is None else decided.solved_layers.priced_for(request)
            )
        return model.settings[key]

    def _training(self, profile: Framework, cluster: Cluster) -> Training:
        training = _usual_training(self.traced_as, not is_cpu(cluster))
        if profile.gradient_bytes and self.traced_as == "bf16":
            training = replace(training, gradient_bytes=profile.gradient_bytes)
        return training if profile.name == "autopar" else replace(training, update_bytes=0.0)


def _in_group(model: ScoredModel, setting: Setting, number: int, terms: Terms, wanted: Strategy) -> ChainCosts:
    """Return the costs of the strategy in a group of equal nodes, by its number. Raises ConstraintError where pinned
    placements leave nothing."""
    solved_layer = setting.solved_layers.solved_layer(wanted.mesh, wanted.rows, NAMED)
    if solved_layer is None:
        raise ConstraintError("the pinned placements leave no way to run the model", values=str(wanted.mesh))
    plain = pricer_for(setting.request, wanted.mesh, wanted.micro_batches, wanted.offload)
    pricer, parameters = _priced(plain, terms, model, wanted), solved_layer.parameters(wanted.zero)
    cost_key = (wanted.mesh, wanted.rows, wanted.zero, wanted.offload, wanted.micro_batches > 1)
    if cost_key not in setting.costs:
        stored = StoredParameters.of(parameters, model.homes, model.scopes, wanted.mesh.axes)
        setting.costs[cost_key] = combined(solved_layer.costs, stored_costs(model.graph, pricer, stored))
    return ChainCosts(
        graph=model.graph,
        pricer=pricer,
        parameters=parameters,
        costs=setting.costs[cost_key],
        boundary_bytes=solved_layer.call_costs.boundary_bytes,
        group=number,
    )


def _rate(cluster: Cluster) -> float:
    """The peak flops per second of all devices together."""
    return cluster.num_devices * max(cluster.device.peak_flops_per_second.values())


def _priced(plain: Pricer, terms: Terms, model: ScoredModel, wanted: Strategy) -> Pricer:
    """Return the prices under the profile, with the strategy's spread of tokens over experts."""
    profile, pricer = terms.framework, priced_under(plain, terms, model)
    is_generated = profile.cp_habits == "generated"
    experts = replace(
        pricer.experts,
        sorts_rows=is_generated,
        skew=wanted.expert_skew,
        capacity_factor=wanted.capacity_factor,
        dispatches=() if is_generated else profile.dispatches,
        splits_rows=_is_sequence_parallel(profile, wanted) and not is_generated,
    )
    return replace(pricer, experts=experts)


def _is_sequence_parallel(profile: Framework, wanted: Strategy) -> bool:
    return profile.sequence_parallel if wanted.sp is None else wanted.sp


def _pipeline(
    model: ScoredModel, wanted: Strategy, profile: Framework, costs: Sequence[Mapping[str, LayerCost]]
) -> Pipeline:
    """The framework's stages, every layer under the strategy's recompute mode. costs: of all units on every stage."""
    weights = {name: model.matrices.weights.get(name, 0.0) for name in model.units}
    firsts = cut(model.units, model.layers, costs, weights, profile.stages)
    stages = []
    for first, last in zip(firsts, firsts[1:], strict=False):
        units = model.units[first:last]
        layers = dict.fromkeys(name for name in units if name in model.layers)
        modes = {name: ((wanted.recompute, units.count(name)),) for name in layers if wanted.recompute != "none"}
        stages.append(StagePlan(first, last, modes))
    return Pipeline(wanted.pp, wanted.schedule, tuple(stages), wanted.offload)


@cache
def _usual_training(precision: str, on_gpu: bool) -> Training:
    """Return the settings of a step with the optimizer that stands where none is given."""
    return training_of(adamw, precision, on_gpu)
