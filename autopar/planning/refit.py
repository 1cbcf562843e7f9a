"""A plan refitted to a model whose numbers or flags were changed: calls may be others, layers of other classes.

A factor of 1.0 leaves its product out, and layers that had one class have two where one of them has another number.
Parameters lie as before, for the refitted program shares them; buffers that were not read before are whole on every
rank. `expand` checks the result as it checks a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from autopar.errors import PlanError
from autopar.ir.chain import chain
from autopar.ir.graph import Graph, LayerClass
from autopar.ir.placement import R, Stored
from autopar.ir.plan_data import ScopePlan, StagePlan
from autopar.options.scopes import Scope, scopes_of
from autopar.plan import Plan


def refit(plan: Plan, before: Graph, graph: Graph) -> Plan:
    """The decisions of a plan for `before` that `graph` asks for, and no others."""
    old = {scope.name: scope for scope in scopes_of(before)}
    stored = {
        name: plan.scopes[scope.name].parameters[own]
        for scope in old.values()
        for name, own in _parameters(scope, before)
        if own in plan.scopes[scope.name].parameters
    }
    whole = Stored((R,) * len(plan.mesh.axes))
    buffers = {p.name for p in graph.parameters if p.is_buffer}
    for scope in scopes_of(graph):
        buffers |= {name for name, own in _parameters(scope, graph) if scope.layer and _is_buffer(scope.layer, own)}
    stored = {**dict.fromkeys(sorted(buffers), whole), **stored}
    read = {name for scope in scopes_of(graph) for name, _ in _parameters(scope, graph)}
    if new := sorted(read - stored.keys()):
        raise PlanError(
            "forward reads parameters that it did not read when it was compiled",
            values=", ".join(new[:5]),
            alternatives="compile the model with that part on, and switch it off before the first step",
        )
    scopes = {scope.name: _refitted(scope, graph, plan, old, stored) for scope in scopes_of(graph)}
    stages = plan.pipeline.stages
    units, found = chain(before), chain(graph)
    if len(stages) == 1:
        same = units if len(units) == len(found) else found
        stages = (_refitted_stage(replace(stages[0], first=0, last=len(found)), same, found, set(scopes)),)
    elif len(units) == len(found):
        stages = tuple(_refitted_stage(stage, units, found, set(scopes)) for stage in stages)
    return replace(plan, scopes=scopes, pipeline=replace(plan.pipeline, stages=stages))


def _is_buffer(layer: LayerClass, name: str) -> bool:
    return any(p.is_buffer for p in layer.parameters if p.name == name)


def _parameters(scope: Scope, graph: Graph) -> Iterator[tuple[str, str]]:
    """The parameters of a scope by their names in the model, and their names in the scope."""
    if scope.layer is None:
        read = {ref.node for piece in graph.body for ref in piece.inputs}
        yield from ((p.name, p.name) for p in graph.parameters if p.name in read)
    else:
        yield from ((f"{path}.{p.name}", p.name) for path in scope.instances for p in scope.layer.parameters)


def _refitted(
    scope: Scope, graph: Graph, plan: Plan, old: Mapping[str, Scope], stored: Mapping[str, Stored]
) -> ScopePlan:
    parameters = {own: stored[name] for name, own in _parameters(scope, graph) if name in stored}
    source = _source(scope, old)
    usual = next(iter(plan.scopes[""].inputs.values()), None)
    if source is None:
        names = [name for name, _ in scope.layer.inputs] if scope.layer is not None else []
        return ScopePlan(parameters, {} if usual is None else dict.fromkeys(names, usual), {}, {})
    decided = plan.scopes[source.name]
    operators = {node.name: node.op for node in source.nodes}
    same = {node.name for node in scope.nodes if operators.get(node.name) == node.op}
    inputs = dict(decided.inputs)
    if scope.layer is not None and len(scope.layer.inputs) == len(inputs):
        inputs = dict(zip((name for name, _ in scope.layer.inputs), inputs.values(), strict=True))
    elif scope.layer is not None and inputs:
        first = next(iter(inputs.values()))
        inputs = {name: inputs.get(name, first) for name, _ in scope.layer.inputs}
    return ScopePlan(
        parameters,
        inputs,
        calls={name: labels for name, labels in decided.calls.items() if name in same},
        tensors={name: kept for name, kept in decided.tensors.items() if name.partition("[")[0] in same},
    )


def _source(scope: Scope, old: Mapping[str, Scope]) -> Scope | None:
    """The scope that a scope's layers were in, or the class of layers with the same parameters; None without one."""
    if scope.layer is None:
        return old[""]
    layers = [each for each in old.values() if each.layer is not None]
    own = (each for each in layers if set(each.instances) & set(scope.instances))
    names = {p.name for p in scope.layer.parameters}
    alike = (each for each in layers if each.layer and {p.name for p in each.layer.parameters} == names)
    return next(own, None) or next(alike, None)


def _refitted_stage(stage: StagePlan, before: tuple[str, ...], units: tuple[str, ...], classes: set[str]) -> StagePlan:
    """The stage whose layers recompute as they did, under the names of their classes now."""
    left = {name: _modes(runs) for name, runs in stage.recompute.items()}
    found: dict[str, list[str]] = {}
    for old, unit in zip(before[stage.first : stage.last], units[stage.first : stage.last], strict=True):
        mode = next(left.get(old, iter(())), "none")
        if unit in classes:
            found.setdefault(unit, []).append(mode)
    runs = {name: tuple((mode, len([*same])) for mode, same in groupby(modes)) for name, modes in found.items()}
    return replace(stage, recompute={name: each for name, each in runs.items() if each[0][0] != "none" or each[1:]})


def _modes(runs: tuple[tuple[str, int], ...]) -> Iterator[str]:
    return (mode for mode, count in runs for _ in range(count))
