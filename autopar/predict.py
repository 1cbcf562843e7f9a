"""The prediction of one set of choices, by kind: the same prices that the search added up, told apart.

`test_predict` holds that the seconds add up to the search's objective.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.block_costs import BlockCost, block_costs, chain
from autopar.borders import border_bytes, shared_parameters, tie_costs, transfer_seconds
from autopar.choices import Choices
from autopar.graph import Graph
from autopar.peak import Life, peaks
from autopar.plan import Pipeline, Prediction, StagePlan
from autopar.price import Pricer, is_cpu
from autopar.stage_costs import Simulated, shared_costs, simulated, stage_cost
from autopar.strategies import Operator
from cost_models.memory import workspace_bytes

PLAIN = Pipeline()


def predict(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    choices: Choices,
    pipeline: Pipeline = PLAIN,
) -> Prediction:
    """Seconds per step and bytes per rank, by kind."""
    if not pipeline.is_plain:
        return simulate_plan(graph, operators, pricer, choices, pipeline).prediction
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
        num_bytes["workspace"] = float(workspace_bytes(pricer.cluster.device))
    return Prediction(dict(seconds), dict(num_bytes))


def simulate_plan(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    choices: Choices,
    pipeline: Pipeline,
) -> Simulated:
    """The plan's timeline and what it predicts; a plan without stages is one stage."""
    blocks = chain(graph)
    stages = pipeline.stages or (StagePlan(0, len(blocks)),)
    costs = block_costs(graph, operators, pricer, choices)
    borders = (*border_bytes(graph, pricer.mesh, choices), 0.0)
    staged = [stage_cost(costs, blocks, stage, borders[stage.last]) for stage in stages]
    transfers = {
        (i, i + 1): transfer_seconds(pricer, pipeline.num_positions, borders[stage.last])
        for i, stage in enumerate(stages[:-1])
    }
    ties = tie_costs(graph, pricer, choices.parameters, pipeline.num_positions)
    shared = shared_costs(stages, shared_parameters(graph), ties)
    workspace = 0.0 if is_cpu(pricer.cluster) else float(workspace_bytes(pricer.cluster.device))
    micro = pricer.training.num_micro_batches
    return simulated(staged, replace(pipeline, stages=stages), micro, transfers, shared, workspace)


def transient_bytes(costs: Mapping[str, BlockCost], blocks: Sequence[str]) -> float:
    """What is alive at the peak beside the activations of `blocks`, one stage of all of them in order."""
    found = peaks([Life(name, costs[name].live.kept, costs[name].live, costs[name].slots) for name in blocks])
    return max(found.forward, found.backward, found.updated) - sum(costs[name].activation_bytes for name in blocks)
