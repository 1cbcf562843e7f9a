"""Options of one mesh if a device waits for its host: the objective is a maximum, not a sum.

In every stretch (the forward or the backward of a unit, see costs/host_calls.py), D seconds of the device and H of its
host weigh in a choice as

    (1 - W) D + W max(D, H),    W = WAITED,

Both are sums over options and reshards, so for any share 0 <= mu <= W of each scope

    (1 - mu) D + mu H

is a lower bound on that, which the integer program minimizes. Its solution is optimal if mu is W in scopes whose host
is behind and 0 in those whose host is ahead. Shares of 0 are the search by the device alone. If hosts are behind in its
solution, W is tried everywhere, then the shares that each solution calls for, MOST_TRIED in all, and the best is taken.
A scope whose host is behind in one direction alone has a share between: its optimum is not proven. If no host is
behind, only the device's problem is solved.

Here options differ in host calls by reshards, by the function that joins a sum with the layers that read its tensor,
and by gathers of ZeRO-3. The calls that a kernel joins are known only in a program (emitted.py): D and H of a solution
are read from its program.
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
from autopar.planning.search_space import Reshards, SearchSpace
from autopar.sharding.reshard import steps
from autopar.sharding.scopes import scopes_of
from search.intra_op import solve
from search.problem import Edge, Problem, Solution, evaluate

MOST_TRIED = 4
"""Limit of problems that are solved after the device's."""
NEGLIGIBLE = 0.01
"""Share of a mesh's seconds that waiting may take before its options are searched again."""

Shares = Mapping[str, float]
"""By scope, the host's share of the price."""


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
        """Return the seconds as plan choice counts them."""
        return self.count * (self.device + WAITED * max(self.host - self.device, 0.0))


Measure = Callable[[Solution], tuple[Stretch, ...]]
"""Seconds of a solution's program per micro-batch."""


def total(stretches: tuple[Stretch, ...]) -> float:
    """Return the seconds of a micro-batch as plan choice counts it."""
    return sum(stretch.seconds for stretch in stretches)


def waits(stretches: tuple[Stretch, ...]) -> bool:
    """Return whether devices wait for their hosts for a notable time."""
    late = sum(stretch.count * max(stretch.host - stretch.device, 0.0) for stretch in stretches)
    return late > NEGLIGIBLE * total(stretches)


def layers_of(graph: Graph) -> frozenset[str]:
    """Return the units that are separate scopes; the others are of the top level."""
    return frozenset(scope.name for scope in scopes_of(graph) if scope.layer)


def with_host(search_space: SearchSpace, pricer: Pricer, fastest: Solution, measure: Measure) -> list[Solution]:
    """Return alternatives to the solution that is fastest on the device alone, best first; empty if no host is
    behind."""
    solutions: list[tuple[float, int, Solution]] = []
    last = measure(fastest)
    least, seen = total(last), {fastest.assignment}
    if not waits(last):
        return []
    tried = [dict.fromkeys({stretch.scope for stretch in last}, WAITED), shares_of(last)]
    for shares in tried:
        chosen = solve(priced(search_space, pricer, shares)).assignment
        if chosen in seen:
            continue
        seen.add(chosen)
        solution = Solution(chosen, *evaluate(search_space.problem, chosen))
        last = measure(solution)
        solutions.append((total(last), len(solutions), solution))
        wanted = shares_of(last)
        if waits(last) and wanted not in tried and len(tried) < MOST_TRIED:
            tried.append(wanted)
    return [
        solution for seconds, _, solution in sorted(solutions, key=lambda solution: solution[:2]) if seconds < least
    ]


def shares_of(stretches: tuple[Stretch, ...]) -> Shares:
    """Return each scope's share: WAITED if the host is behind in both directions of all units. Otherwise return WAITED
    times the share of seconds in which the host is behind."""
    whole, behind = dict[str, float](), dict[str, float]()
    for stretch in stretches:
        whole[stretch.scope] = whole.get(stretch.scope, 0.0) + stretch.seconds
        behind[stretch.scope] = behind.get(stretch.scope, 0.0) + (
            stretch.seconds if stretch.host > stretch.device else 0.0
        )
    return {scope: round(WAITED * behind[scope] / seconds, 3) if seconds else 0.0 for scope, seconds in whole.items()}


def priced(search_space: SearchSpace, pricer: Pricer, shares: Shares) -> Problem:
    """Return the problem with a share of every scope's seconds weighed as the host's."""
    problem, scopes = search_space.problem, [variable.key[1] for variable in search_space.variables]
    shares_of_variables = [shares.get(scope, 0.0) for scope in scopes]
    costs = [v.costs * (1.0 - share) for v, share in zip(problem.variables, shares_of_variables, strict=True)]
    edges = {(edge.a, edge.b): edge.costs * (1.0 - shares_of_variables[edge.b]) for edge in problem.edges}
    one = pricer.rates.host_call_seconds
    for reshard in search_space.reshards:
        calls = one * shares_of_variables[reshard.target] * reshard.count * _matrix(reshard, pricer)
        if reshard.source == reshard.target:
            costs[reshard.target] = costs[reshard.target] + calls[:, 0]
        else:
            edges[reshard.source, reshard.target] = edges[reshard.source, reshard.target] + calls
    for index, count in search_space.gathers.items():
        stages = [sum(host_calls.GATHERED) * (stage == 3) for stage in search_space.variables[index].options]
        costs[index] = costs[index] + one * shares_of_variables[index] * count * np.array(stages)
    variables = tuple(replace(v, costs=c) for v, c in zip(problem.variables, costs, strict=True))
    return Problem(variables, tuple(Edge(a, b, c) for (a, b), c in edges.items()), problem.limit)


def _matrix(reshards: Reshards, pricer: Pricer) -> np.ndarray:
    """Return [len(made), len(wanted)] calls of forward and backward."""
    rest = pricer.mesh.sizes, reshards.has_gradient, pricer.rates.num_forwards, reshards.is_joined
    return np.array([[_calls(produced, wanted, *rest) for wanted in reshards.wanted] for produced in reshards.produced])


@lru_cache(maxsize=100_000)
def _calls(
    source: Placements,
    target: Placements,
    sizes: tuple[int, ...],
    has_gradient: bool,
    num_forwards: int,
    is_joined: bool,
) -> float:
    """Return the calls of one reshard; 0 if there is no path, which is forbidden anyway."""
    path = steps(source, target, sizes) or ()
    is_summed = is_joined and has_gradient and path and path[-1].target.kind == "Rp" and path[-1].backward
    seconds = (num_forwards + 1) * host_calls.FUNCTION if is_summed else 0.0
    for step in path:
        forward, backward = host_calls.reshard_calls(bool(step.forward), bool(step.backward), has_gradient)
        seconds += num_forwards * forward + backward
    return seconds
