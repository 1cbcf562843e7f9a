"""The prediction of one set of choices, by kind: the same prices that the search added up, told apart.

`test_predict` holds that the seconds add up to the search's objective.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.chain import chain
from autopar.costs.block_costs import BlockCost
from autopar.costs.borders import (
    border_bytes,
    hop_seconds,
    last_holders,
    second_copies,
    shared_parameters,
    tie_costs,
    transfer_seconds,
)
from autopar.costs.cost_table import block_costs
from autopar.costs.host import host_of
from autopar.costs.peak import Life, peaks
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.stage_costs import Copy, Simulated, shared_costs, simulated, stage_cost, stage_costs
from autopar.graph import Graph
from autopar.mesh import Mesh
from autopar.plan import Pipeline, Prediction, StagePlan
from autopar.planning.request import Unequal
from autopar.seats import Seat
from autopar.sharding.choices import Choices, on_axes
from autopar.sharding.strategies import Operator
from cost_models.memory import workspace_bytes
from cost_models.schedule import placement

PLAIN = Pipeline()


def predict(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    choices: Choices,
    pipeline: Pipeline = PLAIN,
    unequal: Unequal | None = None,
) -> Prediction:
    """Seconds per step and bytes per rank, by kind. pricer: on the plan's mesh; unequal: for positions of their own."""
    if not pipeline.is_plain:
        return simulate_plan(graph, operators, pricer, choices, pipeline, unequal).prediction
    costs = block_costs(graph, operators, pricer, choices)
    counts = Counter(chain(graph))
    micro = pricer.training.num_micro_batches
    seconds: dict[str, float] = defaultdict(float)
    num_bytes: dict[str, float] = defaultdict(float)
    for name, count in counts.items():
        cost = costs[name]
        for table, times in ((cost.forward, micro), (cost.backward, micro), (cost.step, 1)):
            for kind, value in table.items():
                seconds[kind] += value * count * times
        for kind, value in cost.fixed.items():
            num_bytes[kind] += value * count
        num_bytes["activations"] += cost.activation_bytes * count
    num_bytes["transient"] = transient_bytes(costs, chain(graph))
    if not is_cpu(pricer.cluster):
        num_bytes["workspace"] = _workspace(pricer)
    return Prediction(dict(seconds), dict(num_bytes))


def simulate_plan(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    choices: Choices,
    pipeline: Pipeline,
    unequal: Unequal | None = None,
) -> Simulated:
    """The plan's timeline and what it predicts; a plan without stages is one stage."""
    blocks = chain(graph)
    pipeline = replace(pipeline, stages=pipeline.stages or (StagePlan(0, len(blocks)),))
    stages, micro = pipeline.stages, pricer.training.num_micro_batches
    if unequal is not None:
        return _simulate_unequal(graph, operators, pricer.mesh, choices, pipeline, unequal)
    costs = block_costs(graph, operators, pricer, choices)
    borders = (*border_bytes(graph, pricer.mesh, choices), 0.0)
    copies = second_copies(graph, pricer, choices.parameters)
    staged = stage_costs(costs, blocks, stages, borders, copies)
    transfers = {
        (i, i + 1): transfer_seconds(pricer, pipeline.num_positions, borders[stage.last])
        for i, stage in enumerate(stages[:-1])
    }
    ties = tie_costs(graph, pricer, choices.parameters, pipeline.num_positions)
    shared = shared_costs(stages, shared_parameters(graph), ties)
    workspace = (_workspace(pricer),) * pipeline.num_positions
    host = host_of(pricer.cluster)
    return simulated(staged, pipeline, micro, transfers, shared, workspace, host=host)


def _simulate_unequal(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    mesh: Mesh,
    choices: Choices,
    pipeline: Pipeline,
    unequal: Unequal,
) -> Simulated:
    """Every stage priced on the mesh of its position. mesh: whose axes the decisions are on."""
    blocks, stages, seats = chain(graph), pipeline.stages, pipeline.seats
    home = placement(pipeline.schedule, pipeline.num_positions, pipeline.num_chunks)
    costs: dict[Seat, dict[str, BlockCost]] = {}
    borders: dict[Seat, tuple[float, ...]] = {}
    copies: dict[Seat, tuple[Copy, ...]] = {}
    for seat, pricer in zip(seats, unequal.pricers, strict=True):
        if seat not in costs:
            own = on_axes(choices, mesh.axes, pricer.mesh.axes)
            costs[seat] = block_costs(graph, operators, pricer, own)
            borders[seat] = (*border_bytes(graph, pricer.mesh, own), 0.0)
            copies[seat] = second_copies(graph, pricer, own.parameters)
    of_stage = [seats[position] for position in home]
    staged = [
        stage_cost(costs[seat], blocks, stage, borders[seat][stage.last], copies[seat])
        for seat, stage in zip(of_stage, stages, strict=True)
    ]
    transfers = {}
    for i, stage in enumerate(stages[:-1]):
        source, target = of_stage[i], of_stage[i + 1]
        size = max(borders[source][stage.last], borders[target][stage.last])
        transfers[i, i + 1] = hop_seconds(unequal.cluster, source, target, size) if home[i] != home[i + 1] else 0.0
    ties = []
    for position in home:
        there = unequal.pricers[position]
        own = on_axes(choices, mesh.axes, there.mesh.axes)
        ties.append(tie_costs(graph, there, own.parameters, pipeline.num_positions))
    tied = shared_parameters(graph)
    shared = shared_costs(stages, tied, last_holders(tied, stages, ties))
    workspace = [_workspace(pricer) for pricer in unequal.pricers]
    micro = unequal.pricers[0].training.num_micro_batches
    host = host_of(unequal.pricers[0].cluster)
    return simulated(staged, pipeline, micro, transfers, shared, workspace, unequal.capacities, host)


def _workspace(pricer: Pricer) -> float:
    """What the device itself takes of its memory."""
    return 0.0 if is_cpu(pricer.cluster) else float(workspace_bytes(pricer.cluster.device))


def transient_bytes(costs: Mapping[str, BlockCost], blocks: Sequence[str]) -> float:
    """What is alive at the peak beside the activations of `blocks`, one stage of all of them in order."""
    found = peaks([Life(name, costs[name].live.kept, costs[name].live, costs[name].slots) for name in blocks])
    return max(found.forward, found.backward, found.updated) - sum(costs[name].activation_bytes for name in blocks)
