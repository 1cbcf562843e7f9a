"""The best pipeline under a parallel config: cut, stage meshes, recompute modes, as one problem of `search.inter_op`.

Host seconds outside units (host_calls.py) are added to the solution: they are the same for all cuts, except for the
share that stages can hide. Transfers between two stage meshes are priced at the boundary with the most bytes and
assumed linear in them. A parameter that two units read costs as much as on the stage mesh where a second copy costs
most.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.costs.layer_costs import WAITED
from autopar.costs.pipeline_costs import ChainCosts, PipelineCosts, pipeline_costs
from autopar.costs.stage_costs import StageCost, late_seconds
from autopar.ir.plan_data import Pipeline, StagePlan
from autopar.ir.stage_mesh import StageMesh
from autopar.planning.bounds import byte_seconds
from autopar.planning.config_costs import ConfigCosts
from autopar.planning.memory_fit import Fitting, solve_in_rounds
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.solved_layers import SolvedLayer
from autopar.planning.stage_points import CLOSED_FORMS, hidden_weights, holding_of, pipeline_of, point, stretch_of
from cost_models.schedule import placement
from search.pipeline_problem import PipelineProblem, PipelineSolution, Submesh, Tied, objective


@dataclass(frozen=True, slots=True)
class PipelineCut:
    """A solved parallel config. objective: seconds by the closed form. pipeline: with the stage mesh of every
    pipeline rank. solved_layer: on one of the stage meshes."""

    objective: float
    config: ParallelConfig
    pipeline: Pipeline
    solved_layer: SolvedLayer


@dataclass(frozen=True)
class StageProblem:
    """A parallel config to be cut into stages. chains: costs of every unit on each of the stage meshes."""

    costs: ConfigCosts
    config: ParallelConfig
    chains: Mapping[StageMesh, ChainCosts]
    _stage_costs: dict[Hashable, StageCost] = field(default_factory=dict)

    @classmethod
    def of(cls, costs: ConfigCosts, config: ParallelConfig) -> StageProblem:
        """Return the problem with all costs computed."""
        return cls(costs, config, {mesh: costs.chain_costs(config, mesh) for mesh in config.stage_meshes})

    def solve(self, cutoff: float = math.inf) -> PipelineCut:
        """Return the best pipeline. Raises PipelineInfeasibleError; with a cutoff NothingBelowCutoffError if none is
        faster."""
        return self.cut_of(solve_in_rounds(self.fitting(), cutoff))

    def cut_of(self, solution: PipelineSolution) -> PipelineCut:
        """Return a solution of the problem as a solved config."""
        solved_layer = self.costs.solved_layer(self.config, self.config.stage_meshes[0])
        pipeline, seconds = self.pipeline(solution), solution.objective
        beside = self._late(pipeline)
        if any(map(sum, beside)) and self.config.schedule in CLOSED_FORMS:  # others: see the simulation
            seconds = objective(self.problem(self.fitting().memory_bytes), solution.stages, beside)
        return PipelineCut(seconds, self.config, pipeline, solved_layer)

    def _late(self, pipeline: Pipeline) -> list[tuple[float, float]]:
        """Return for every stage the seconds per micro-batch and per step of host calls that belong to no unit, as
        plan choice counts them."""
        units, stages = self.costs.units, pipeline.stages or (StagePlan(0, len(self.costs.units)),)
        home, late_of_stages = placement(pipeline.schedule, pipeline.num_pipeline_ranks, pipeline.num_chunks), []
        for rank, stage in zip(home, stages, strict=True):
            chain = self.chains[pipeline.stage_meshes[rank]]
            unit_costs = [chain.costs[name] for name in units[stage.first : stage.last]]
            rates = chain.pricer.rates
            late = late_seconds(unit_costs, rates.host_call_seconds, len(stages) == 1, rates.is_captured)
            late_of_stages.append((WAITED * (late.forward + late.backward), WAITED * late.step))
        return late_of_stages

    def pipeline(self, solution: PipelineSolution) -> Pipeline:
        """Return a solution's stages, and the stage mesh of every pipeline rank."""
        meshes = {str(mesh): mesh for mesh in self.config.stage_meshes}
        num_ranks = len(solution.stages) // self.config.chunks
        pipeline = pipeline_of(solution, num_ranks, self.config.schedule, self.config.offload)
        return replace(pipeline, stage_meshes=tuple(meshes[stage.submesh] for stage in solution.stages[:num_ranks]))

    def assembled(self, pipeline: Pipeline) -> PipelineCosts:
        """Return a solution's pipeline, built as for the prediction."""
        ranks = [self.chains[mesh] for mesh in pipeline.stage_meshes]
        return pipeline_costs(ranks, pipeline, self.costs.request.whole, self._stage_costs)

    def fitting(self) -> Fitting:
        """Return the problem in the memory of the request's devices."""
        usable = {str(mesh): self.costs.usable_bytes[mesh.group] for mesh in self.chains}
        return Fitting(self.problem, self._held, usable)

    def _held(self, solution: PipelineSolution) -> dict[str, float]:
        """Return the bytes on the fullest rank of every stage mesh, by the prediction's count."""
        fullest: dict[str, float] = {}
        pipeline = self.pipeline(solution)
        for mesh, kinds in zip(pipeline.stage_meshes, self.assembled(pipeline).num_bytes(), strict=True):
            fullest[str(mesh)] = max(fullest.get(str(mesh), 0.0), sum(kinds.values()))
        return fullest

    def problem(self, memory_bytes: Mapping[str, float]) -> PipelineProblem:
        """Return the problem with so many bytes on a rank of every stage mesh, by its name."""
        costs, config = self.costs, self.config
        count, points, holding = config.num_micro_batches, {}, holding_of(config.schedule, config.num_micro_batches)
        for mesh, here in self.chains.items():
            stretch = stretch_of(here.costs, costs.counts, config.schedule, count)
            for unit, cost in here.costs.items():
                points[unit, str(mesh)] = tuple(
                    point(cost, label, mode, config.schedule, stretch, hidden_weights(count))
                    for label, mode in costs.modes(cost).items()
                )
        boundaries = [here.boundary_bytes for here in self.chains.values()]
        seconds = byte_seconds(costs, config, boundaries)
        return PipelineProblem(
            units=costs.units,
            submeshes=tuple(
                Submesh(str(mesh), str(mesh.group), mesh.mesh.num_ranks, memory_bytes[str(mesh)])
                for mesh in self.chains
            ),
            groups={str(number): group.num_devices for number, group in enumerate(costs.request.whole.groups)},
            points=points,
            in_flight=holding.in_flight,
            num_micro_batches=count,
            boundary_bytes=tuple(max(sizes) for sizes in zip(*boundaries, strict=True)),
            transfer_seconds={(str(a), str(b)): transfer for (a, b), transfer in seconds.items()},
            transfer_is_exposed=costs.is_on_cpu,
            tied=tuple(self._tied()),
            num_stages=config.pipeline_ranks,
            num_deferred=holding.num_deferred,
            uncut=costs.uncut,
        )

    def _tied(self) -> Iterator[Tied]:
        """Yield the parameters that two units read."""
        tied = [here.tied(self.config.pp) for here in self.chains.values()]
        for name, (first, last) in self.costs.shared.items():
            tied_sizes = [by_name[name] for by_name in tied if name in by_name]
            if tied_sizes:
                size, seconds = max(sum(sizes) for sizes, _ in tied_sizes), max(seconds for _, seconds in tied_sizes)
                yield Tied(first, last, size, seconds)
