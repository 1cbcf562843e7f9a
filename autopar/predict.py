"""The prediction of one set of choices, by kind: the same prices that the search added up, told apart.

`test_predict` holds that the seconds add up to the search's objective.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from autopar.block_costs import BlockCost, block_costs, chain
from autopar.choices import Choices
from autopar.graph import Graph
from autopar.plan import Prediction
from autopar.price import Pricer
from autopar.strategies import Operator
from cost_models.memory import workspace_bytes


def predict(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, choices: Choices
) -> Prediction:
    """Seconds per step and bytes per rank, by kind, where every rank runs the whole model and keeps all activations."""
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
    num_bytes["transient"] = transient_bytes(costs, counts)
    if not pricer.cluster.device.name.startswith("cpu"):
        num_bytes["workspace"] = float(workspace_bytes(pricer.cluster.device))
    return Prediction(dict(seconds), dict(num_bytes))


def transient_bytes(costs: Mapping[str, BlockCost], blocks: Iterable[str]) -> float:
    """The most that is alive for a moment beside what is kept, among `blocks` of one stage.

    In one generated forward at a time, which holds its local variables until it returns: a layer's, or the stage's own
    (all of its top-level calls).
    """
    names = set(blocks)
    tops = [costs[name] for name in names if name.startswith("top ")]
    own = sum(cost.loose_bytes + cost.gathered_bytes for cost in tops) + 2 * max(
        (cost.largest_bytes for cost in tops), default=0.0
    )
    return max([own, *(costs[name].transient_bytes for name in names if not name.startswith("top "))])
