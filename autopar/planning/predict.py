"""The prediction of one set of choices, by kind: the same prices that the search added up, told apart.

`test_predict` holds that the seconds add up to the search's objective.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from autopar.costs.block_costs import BlockCost, chain
from autopar.costs.borders import border_bytes
from autopar.costs.cost_table import block_costs
from autopar.costs.peak import Life, peaks
from autopar.costs.pipeline_costs import ChainCosts, pipeline_costs
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.stage_costs import Simulated
from autopar.graph import Graph, layer_names
from autopar.plan import Pipeline, Prediction
from autopar.planning.request import Unequal
from autopar.sharding.choices import Choices, on_axes
from autopar.sharding.strategies import Operator
from cost_models.memory import workspace_bytes

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
    num_bytes["transient"] = transient_bytes(graph, costs)
    if not is_cpu(pricer.cluster):
        num_bytes["workspace"] = float(workspace_bytes(pricer.cluster.device))
    return Prediction(dict(seconds), dict(num_bytes))


def simulate_plan(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    choices: Choices,
    pipeline: Pipeline,
    unequal: Unequal | None = None,
) -> Simulated:
    """The plan's timeline and what it predicts; a plan without stages is one stage. Every stage is priced on the mesh
    of its pipeline rank."""
    pricers = unequal.pricers if unequal is not None else (pricer,) * pipeline.num_positions
    groups = [seat.group for seat in pipeline.seats] or [0] * pipeline.num_positions
    found: dict[int, ChainCosts] = {}
    for own, group in zip(pricers, groups, strict=True):
        if id(own) not in found:
            here = on_axes(choices, pricer.mesh.axes, own.mesh.axes)
            costs, borders = block_costs(graph, operators, own, here), border_bytes(graph, own.mesh, here)
            found[id(own)] = ChainCosts(graph, own, here.parameters, costs, borders, group)
    ranks = [found[id(own)] for own in pricers]
    cluster, capacities = (unequal.cluster, unequal.capacities) if unequal is not None else (pricer.cluster, ())
    return pipeline_costs(ranks, pipeline, cluster).simulated(capacities)


def transient_bytes(graph: Graph, costs: Mapping[str, BlockCost]) -> float:
    """What is alive at the peak beside the activations of the whole model as one stage."""
    names, layers = chain(graph), layer_names(graph)
    lives = [Life(name, costs[name].live.kept, costs[name].live, costs[name].slots, name in layers) for name in names]
    found = peaks(lives)
    return max(found.forward, found.backward, found.updated) - sum(costs[name].activation_bytes for name in names)
