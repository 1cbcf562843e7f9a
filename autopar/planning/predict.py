"""The prediction of a plan, by kind: the same prices that the search added up, told apart.

`test_predict` holds that the seconds add up to the search's objective.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from autopar.costs.block_costs import BlockCost
from autopar.costs.borders import border_bytes
from autopar.costs.cost_table import block_costs
from autopar.costs.peak import Life, peaks
from autopar.costs.pipeline_costs import ChainCosts, pipeline_costs
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.stage_costs import Simulated
from autopar.ir.chain import chain
from autopar.ir.graph import Graph, layer_names
from autopar.ir.plan_data import Prediction
from autopar.ir.seats import Seat
from autopar.options.choices import Candidate, Choices, on_axes
from autopar.options.strategies import Operator
from autopar.planning.request import Request, pricer_for
from cost_models.memory import workspace_bytes


def predicted(request: Request, candidate: Candidate) -> Candidate:
    """The candidate with a fresh prediction of its plan."""
    plan = candidate.plan
    if plan.pipeline.is_plain:
        pricer = pricer_for(request, plan.mesh, plan.num_micro_batches)
        prediction = predict(candidate.graph, candidate.operators, pricer, candidate.choices)
    else:
        prediction = simulate_plan(request, candidate).prediction
    return replace(candidate, plan=replace(plan, prediction=prediction))


def predict(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, choices: Choices
) -> Prediction:
    """Seconds per step and bytes per rank, by kind, of a plan that is one stage and keeps everything. pricer: on the
    plan's mesh."""
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


def simulate_plan(request: Request, candidate: Candidate) -> Simulated:
    """The plan's timeline and what it predicts; a plan without stages is one stage. Every stage is priced on the mesh
    of its pipeline rank."""
    plan, graph, operators = candidate.plan, candidate.graph, candidate.operators
    chains: dict[Seat, ChainCosts] = {}
    for seat in dict.fromkeys(plan.seats):
        group, mesh = request.of_group(seat.group), seat.mesh.compact
        pricer = pricer_for(group, mesh, plan.num_micro_batches, plan.pipeline.offload)
        choices = on_axes(candidate.choices, plan.mesh.axes, mesh.axes)
        chains[seat] = ChainCosts(
            graph=graph,
            pricer=pricer,
            parameters=choices.parameters,
            costs=block_costs(graph, operators, pricer, choices),
            border_bytes=border_bytes(graph, mesh, choices),
            group=seat.group,
        )
    capacities = [float(request.capacity_bytes(seat.group)) for seat in plan.seats]
    return pipeline_costs([chains[seat] for seat in plan.seats], plan.pipeline, request.whole).simulated(capacities)


def transient_bytes(graph: Graph, costs: Mapping[str, BlockCost]) -> float:
    """What is alive at the peak beside the activations of the whole model as one stage."""
    names, layers = chain(graph), layer_names(graph)
    lives = [Life(name, costs[name].live.kept, costs[name].live, costs[name].slots, name in layers) for name in names]
    found = peaks(lives)
    return max(found.forward, found.backward, found.updated) - sum(costs[name].activation_bytes for name in names)
