"""A plan refitted to the graph of a model whose numbers were changed: calls may be gone, layers may be of other classes.

A factor of 1.0 leaves its product out, and layers that had one class have two where one of them has another number.
Parameters lie as before, for the refitted program shares them. `expand` checks the result as it checks a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from autopar.ir.chain import chain
from autopar.ir.graph import Graph
from autopar.ir.plan_data import ScopePlan, StagePlan
from autopar.options.scopes import Scope, scopes_of
from autopar.plan import Plan


def refit(plan: Plan, graph: Graph) -> Plan:
    """The plan with the decisions that the graph asks for, and no others."""
    sources = {scope.name: _source(plan, scope) for scope in scopes_of(graph)}
    scopes = {scope.name: _fitting(plan.scopes[sources[scope.name]], scope) for scope in scopes_of(graph)}
    units = chain(graph)
    stages = tuple(_refitted_stage(stage, units, sources) for stage in plan.pipeline.stages)
    return replace(plan, scopes=scopes, pipeline=replace(plan.pipeline, stages=stages))


def _source(plan: Plan, scope: Scope) -> str:
    """The class of layers whose decisions hold for a scope: its own, or one that has the same parameters and inputs."""
    if not scope.layer:
        return ""
    wanted = {p.name for p in scope.layer.parameters}, {name for name, _ in scope.layer.inputs}
    alike = [
        name for name, has in plan.scopes.items() if name and (set(has.parameters), set(has.inputs)) == wanted
    ]
    return scope.name if scope.name in alike else next(iter(alike), scope.name)


def _fitting(decided: ScopePlan, scope: Scope) -> ScopePlan:
    calls = {node.name for node in scope.nodes}
    return replace(
        decided,
        calls={name: labels for name, labels in decided.calls.items() if name in calls},
        tensors={name: kept for name, kept in decided.tensors.items() if name.partition("[")[0] in calls},
    )


def _refitted_stage(stage: StagePlan, units: tuple[str, ...], sources: Mapping[str, str]) -> StagePlan:
    """The stage whose layers recompute as they did, in order, under the names of their classes now."""
    left = {name: _modes(runs) for name, runs in stage.recompute.items()}
    found: dict[str, list[str]] = {}
    for unit in units[stage.first : stage.last]:
        if unit in sources:
            modes = (mode for name in (sources[unit], *left) if name in left for mode in left[name])
            found.setdefault(unit, []).append(next(modes, "none"))
    runs = {name: tuple((mode, len([*same])) for mode, same in groupby(modes)) for name, modes in found.items()}
    return replace(stage, recompute={name: each for name, each in runs.items() if each[0][0] != "none" or each[1:]})


def _modes(runs: tuple[tuple[str, int], ...]) -> Iterator[str]:
    return (mode for mode, count in runs for _ in range(count))
