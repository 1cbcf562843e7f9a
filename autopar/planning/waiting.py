"""The options of one mesh where a device waits for its host: what is minimised is a maximum, which is no sum.

Of every stretch (the forward or the backward of a unit, see costs/host_calls.py) D seconds of the device and H of its
host count

    (1 - W) D + W max(D, H),    W = WAITED,

to a choice. Both are sums over options and reshards, so for any share 0 <= mu <= W of each scope

    (1 - mu) D + mu H

is no more than that, and the integer program minimises it. What it finds is as good as can be where mu is W in scopes
whose host is behind and 0 in those whose host is ahead. Shares of 0 are the search by the device alone. Where hosts are
behind in what that finds, W is tried everywhere, then the shares that this finding asks for, then those that the found
ones ask for, MOST_TRIED in all, and the best is taken. A scope whose host is behind in one direction alone has a share
between: its optimum is not proven. Where no host is behind, nothing but the device's problem is solved.

Options differ in their host's calls by reshards here, by the function that joins a sum with the layers that read its
tensor, and by gathers of ZeRO-3. Which calls a kernel joins is not known before there is a program (emitted.py), of
which D and H of what was found are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.costs import host_calls
from autopar.costs.layer_costs import WAITED
from autopar.costs.price import Pricer
from autopar.ir.graph import Graph
from autopar.ir.placement import Placements
from autopar.options.reshard import steps
from autopar.options.scopes import scopes_of
from autopar.planning.search_space import Reshards, SearchSpace
from search.intra_op import solve
from search.problem import Edge, Problem, Solution, evaluate

MOST_TRIED = 4
"""Problems that are solved at most after the device's own."""
NEGLIGIBLE = 0.01
"""Share of a mesh's seconds that waiting may take without a second look at its options."""

Shares = Mapping[str, float]
"""By scope, how much of the price is the host's."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One direction of a unit. scope: "" of the top level. device, host: seconds. count: how often it is in the
    model."""

    scope: str
    device: float
    host: float
    count: int = 1

    @property
    def seconds(self) -> float:
        """As choices count them."""
        return self.count * (self.device + WAITED * max(self.host - self.device, 0.0))


Measure = Callable[[Solution], tuple[Stretch, ...]]
"""What a solution's program takes per micro-batch."""


def total(stretches: tuple[Stretch, ...]) -> float:
    """Of a micro-batch, as choices count it."""
    return sum(each.seconds for each in stretches)


def waits(stretches: tuple[Stretch, ...]) -> bool:
    """Whether devices wait for their hosts for more than is worth mentioning."""
    late = sum(each.count * max(each.host - each.device, 0.0) for each in stretches)
    return late > NEGLIGIBLE * total(stretches)


def layers_of(graph: Graph) -> frozenset[str]:
    """The units that are scopes of their own; the others are of the top level."""
    return frozenset(scope.name for scope in scopes_of(graph) if scope.layer)


def with_host(search_space: SearchSpace, pricer: Pricer, fastest: Solution, measure: Measure) -> list[Solution]:
    """What is found beside the solution that is fastest on the device alone, best first; empty where no host is
    behind."""
    found: list[tuple[float, int, Solution]] = []
    last = measure(fastest)
    least, seen = total(last), {fastest.assignment}
    if not waits(last):
        return []
    tried = [dict.fromkeys({each.scope for each in last}, WAITED), shares_of(last)]
    for shares in tried:
        chosen = solve(priced(search_space, pricer, shares)).assignment
        if chosen in seen:
            continue
        seen.add(chosen)
        solution = Solution(chosen, *evaluate(search_space.problem, chosen))
        last = measure(solution)
        found.append((total(last), len(found), solution))
        wanted = shares_of(last)
        if waits(last) and wanted not in tried and len(tried) < MOST_TRIED:
            tried.append(wanted)
    return [solution for seconds, _, solution in sorted(found, key=lambda each: each[:2]) if seconds < least]


def shares_of(stretches: tuple[Stretch, ...]) -> Shares:
    """By scope: WAITED where the host is behind in both directions of all units, as much of it as they take else."""
    whole, behind = dict[str, float](), dict[str, float]()
    for each in stretches:
        whole[each.scope] = whole.get(each.scope, 0.0) + each.seconds
        behind[each.scope] = behind.get(each.scope, 0.0) + (each.seconds if each.host > each.device else 0.0)
    return {scope: round(WAITED * behind[scope] / seconds, 3) if seconds else 0.0 for scope, seconds in whole.items()}


def priced(search_space: SearchSpace, pricer: Pricer, shares: Shares) -> Problem:
    """The problem with a share of every scope's seconds the host's."""
    problem, scopes = search_space.problem, [variable.key[1] for variable in search_space.variables]
    own = [shares.get(scope, 0.0) for scope in scopes]
    costs = [v.costs * (1.0 - share) for v, share in zip(problem.variables, own, strict=True)]
    edges = {(edge.a, edge.b): edge.costs * (1.0 - own[edge.b]) for edge in problem.edges}
    one = pricer.host_call_seconds
    for each in search_space.reshards:
        calls = one * own[each.target] * each.count * _matrix(each, pricer)
        if each.source == each.target:
            costs[each.target] = costs[each.target] + calls[:, 0]
        else:
            edges[each.source, each.target] = edges[each.source, each.target] + calls
    for index, count in search_space.gathers.items():
        stages = [sum(host_calls.GATHERED) * (stage == 3) for stage in search_space.variables[index].options]
        costs[index] = costs[index] + one * own[index] * count * np.array(stages)
    variables = tuple(replace(v, costs=c) for v, c in zip(problem.variables, costs, strict=True))
    return Problem(variables, tuple(Edge(a, b, c) for (a, b), c in edges.items()), problem.limit)


def _matrix(reshards: Reshards, pricer: Pricer) -> np.ndarray:
    """[len(made), len(wanted)] calls of forward and backward."""
    rest = pricer.mesh.sizes, reshards.has_gradient, pricer.num_forwards, reshards.is_joined
    return np.array([[_calls(made, wanted, *rest) for wanted in reshards.wanted] for made in reshards.made])


@lru_cache(maxsize=100_000)
def _calls(
    source: Placements,
    target: Placements,
    sizes: tuple[int, ...],
    has_gradient: bool,
    num_forwards: int,
    is_joined: bool,
) -> float:
    """Of one reshard; 0 where there is no way, which is forbidden anyway."""
    path = steps(source, target, sizes) or ()
    is_summed = is_joined and has_gradient and path and path[-1].target.kind == "Rp" and path[-1].backward
    found = (num_forwards + 1) * host_calls.FUNCTION if is_summed else 0.0
    for step in path:
        forward, backward = host_calls.reshard_calls(bool(step.forward), bool(step.backward), has_gradient)
        found += num_forwards * forward + backward
    return found
