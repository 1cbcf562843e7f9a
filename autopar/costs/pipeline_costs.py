"""Costs of a pipeline: its stages, messages, tied parameters and memory, and the prediction of its step.

Every caller that predicts or fits a pipeline builds it here: searched plans, explicit strategies, and the searches
when they fit a cut to the memory of its ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.costs.host import host_of
from autopar.costs.layer_costs import FIXED_KINDS, LayerCost
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.stage_boundaries import hop_seconds, second_copies, tied_costs, tied_parameters
from autopar.costs.stage_costs import SecondCopy, Simulated, StageCost, TiedParameter, rank_bytes, simulated, stage_cost
from autopar.ir.chain import chain
from autopar.ir.graph import Graph, layer_names
from autopar.ir.placement import Stored
from autopar.ir.plan_data import Pipeline, StagePlan
from autopar.ir.stage_mesh import StageMesh
from cost_models.mixed_cluster import AnyCluster
from cost_models.schedule import placement


@dataclass(frozen=True)
class ChainCosts:
    """Costs of every unit of a model's chain on one stage mesh.

    graph: of the model, with any number of rows. pricer: on the stage mesh, for the pipeline's micro-batches.
    parameters: as they are stored there. costs: of the units, by name. boundary_bytes: of one rank per micro-batch,
    at the boundary before each unit. group: the stage mesh's group of equal nodes in the cluster.
    """

    graph: Graph
    pricer: Pricer
    parameters: Mapping[tuple[str, str], Stored]
    costs: Mapping[str, LayerCost]
    boundary_bytes: tuple[float, ...]
    group: int = 0

    @property
    def stage_mesh(self) -> StageMesh:
        """Return the mesh, and its group of nodes."""
        return StageMesh(self.pricer.mesh, self.group)

    @cached_property
    def copies(self) -> tuple[SecondCopy, ...]:
        """Return the buffers of parameters that two units read, in the stage of the second."""
        return second_copies(self.graph, self.pricer, self.parameters)

    def tied(self, pp: int) -> Mapping[str, tuple[tuple[float, float, float], float]]:
        """Return `tied_costs` of the same parameters in a pipeline of `pp` ranks."""
        return tied_costs(self.graph, self.pricer, self.parameters, pp)

    @property
    def workspace_bytes(self) -> float:
        """Return the memory that a device reserves for itself."""
        return 0.0 if is_cpu(self.pricer.cluster) else float(self.pricer.cluster.device.reserved_bytes)

    def sent_bytes(self, stage: StagePlan) -> float:
        """Return the bytes of one rank of a stage per micro-batch to the next stage, 0 behind the last."""
        return self.boundary_bytes[stage.last] if stage.last < len(self.boundary_bytes) else 0.0

    def received_bytes(self, stage: StagePlan) -> float:
        """Return the bytes of one rank of a stage per micro-batch from the stage before it."""
        return self.boundary_bytes[stage.first] if stage.first else 0.0


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """The costs of a pipeline. ranks: the chain on the stage mesh of every pipeline rank. stages, home: in model
    order, and the pipeline rank that runs each. tied: parameters in two stages."""

    pipeline: Pipeline
    cluster: AnyCluster
    ranks: tuple[ChainCosts, ...]
    stages: tuple[StageCost, ...]
    home: tuple[int, ...]
    tied: tuple[TiedParameter, ...]

    @property
    def num_micro_batches(self) -> int:
        """Return the micro-batches of a step."""
        return self.ranks[0].pricer.training.num_micro_batches

    def num_bytes(self) -> list[dict[str, float]]:
        """Return the peak of one device of every pipeline rank by kind, without the device's workspace."""
        return rank_bytes(self.stages, self.pipeline, self.num_micro_batches, self.tied)

    @property
    def peak_bytes(self) -> float:
        """Return the `num_bytes` of the fullest rank."""
        return max(sum(kinds.values()) for kinds in self.num_bytes())

    def transfers(self) -> dict[tuple[int, int], float]:
        """Return (source stage, target stage) -> seconds of one micro-batch's message."""
        seconds_of, plans = {}, self.pipeline.stages
        for number in range(len(plans) - 1):
            source, target = (self.ranks[self.home[index]] for index in (number, number + 1))
            size = max(source.sent_bytes(plans[number]), target.received_bytes(plans[number + 1]))
            is_near = self.home[number] == self.home[number + 1]
            seconds = 0.0 if is_near else hop_seconds(self.cluster, source.stage_mesh, target.stage_mesh, size)
            seconds_of[number, number + 1] = seconds
        return seconds_of

    def simulated(self, capacities: Sequence[float] = ()) -> Simulated:
        """Simulate the step event by event and predict it. capacities: usable bytes of a device of every pipeline
        rank; equal ones by default."""
        return simulated(
            self.stages,
            self.pipeline,
            self.num_micro_batches,
            self.transfers(),
            self.tied,
            [rank.workspace_bytes for rank in self.ranks],
            capacities,
            host_of(self.ranks[0].pricer.cluster),
        )


def pipeline_costs(
    ranks: Sequence[ChainCosts],
    pipeline: Pipeline,
    cluster: AnyCluster,
    cache: dict[Hashable, StageCost] | None = None,
) -> PipelineCosts:
    """Price a pipeline; one without stages has the whole chain as its only stage.

    ranks: of every pipeline rank; equal ones are best the same object. cluster: all devices. known: cached stages of
    other pipelines of the same ranks; those of this one are added.
    """
    graph = ranks[0].graph
    stages = pipeline.stages or (StagePlan(0, len(chain(graph))),)
    pipeline = replace(pipeline, stages=stages)
    home = placement(pipeline.schedule, pipeline.num_pipeline_ranks, pipeline.num_chunks)
    of_stage = [ranks[rank] for rank in home]
    tied = _tied(of_stage, stages, pipeline.num_pipeline_ranks)
    return PipelineCosts(
        pipeline=pipeline,
        cluster=cluster,
        ranks=tuple(ranks),
        stages=_stage_costs(of_stage, stages, {} if cache is None else cache),
        home=home,
        tied=tied,
    )


def _stage_costs(
    of_stage: Sequence[ChainCosts], stages: Sequence[StagePlan], cache: dict[Hashable, StageCost]
) -> tuple[StageCost, ...]:
    """Return the costs of all stages, computed once for equal stages."""
    graph = of_stage[0].graph
    names, layers = chain(graph), layer_names(graph)
    result = []
    for here, stage in zip(of_stage, stages, strict=True):
        copies = tuple(c for c in here.copies if c.first < stage.first <= c.last < stage.last)
        units_of_stage, sent = names[stage.first : stage.last], here.sent_bytes(stage)
        at, is_alone = stage.first if copies else -1, len(stages) == 1
        key = (id(here), units_of_stage, tuple(stage.recompute.items()), sent, stage.first > 0, at, is_alone)
        if key not in cache:
            rates = here.pricer.rates
            cache[key] = stage_cost(
                here.costs,
                names,
                layers,
                stage,
                sent,
                copies,
                rates.host_call_seconds,
                is_alone,
                rates.is_captured,
            )
        result.append(cache[key])
    return tuple(result)


def _tied(of_stage: Sequence[ChainCosts], stages: Sequence[StagePlan], pp: int) -> tuple[TiedParameter, ...]:
    """Return the parameters that two units read, as the second one's stage stores them."""
    holder = [number for number, stage in enumerate(stages) for _ in range(stage.first, stage.last)]
    parameters = []
    for name, (first, last) in tied_parameters(of_stage[0].graph).items():
        pair = of_stage[holder[last]].tied(pp).get(name)
        if pair is not None:
            sizes, seconds = pair
            fixed = dict(zip(FIXED_KINDS, sizes, strict=True))
            parameters.append(TiedParameter(holder[first], holder[last], fixed, seconds))
    return tuple(parameters)
