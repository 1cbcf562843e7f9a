"""Refit a plan to a model with other numbers or flags: calls may differ, and layers may have other classes.

A factor of 1.0 leaves its product out. Layers of one class split into two if one of them has another number.
Parameters keep their placement, because the refitted program shares them. A parameter that only the new forward
reads, or gives a gradient, is replicated on every rank, as are newly read buffers. `expand` checks the result as it
checks a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from autopar.ir.chain import chain
from autopar.ir.graph import Graph, Input, Ref, TensorMeta
from autopar.ir.mesh import DATA_AXES
from autopar.ir.placement import Placements, R, Rp, Stored
from autopar.ir.plan_data import ScopePlan, StagePlan
from autopar.plan import Plan
from autopar.sharding.legal_placements import LegalPlacements
from autopar.sharding.scopes import Scope, scopes_of


def refit(plan: Plan, before: Graph, graph: Graph, offers: LegalPlacements) -> Plan:
    """Return the decisions of a plan for `before` that `graph`, with its `offers`, needs, and no others."""
    old = {scope.name: scope for scope in scopes_of(before)}
    stored = {
        name: plan.scopes[scope.name].parameters[parameter]
        for scope in old.values()
        for name, parameter in _parameters(scope, before)
        if parameter in plan.scopes[scope.name].parameters
    }
    scopes = {scope.name: _refitted(scope, graph, plan, old, stored, offers) for scope in scopes_of(graph)}
    stages = plan.pipeline.stages
    units, new_units = chain(before), chain(graph)
    if len(stages) == 1:
        same = units if len(units) == len(new_units) else new_units
        stages = (_refitted_stage(replace(stages[0], first=0, last=len(new_units)), same, new_units, set(scopes)),)
    elif len(units) == len(new_units):
        stages = tuple(_refitted_stage(stage, units, new_units, set(scopes)) for stage in stages)
    return replace(plan, scopes=scopes, pipeline=replace(plan.pipeline, stages=stages))


def _parameters(scope: Scope, graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a scope by their names in the model, with their names in the scope."""
    if scope.layer is None:
        read = {ref.node for piece in graph.body for ref in piece.inputs}
        yield from ((p.name, p.name) for p in graph.parameters if p.name in read)
    else:
        yield from ((f"{path}.{p.name}", p.name) for path in scope.instances for p in scope.layer.parameters)


def _stored(scope: Scope, parameter: str, meta: TensorMeta, before: Stored | None, offers: LegalPlacements) -> Stored:
    """Return a parameter's placement: as before, if it has a gradient only where it had one; else replicated on
    every rank."""
    legal = offers.parameter(scope, Ref(parameter), meta)
    if before is not None and not meta.requires_grad:
        before = Stored(tuple(R if option.kind == "Rp" else option for option in before.placements), 0)
    if before is not None and (before.placements in legal or any(option.is_shard for option in before.placements)):
        return before
    axes = offers.mesh.axes
    whole = [option for option in legal if not any(placement.is_shard for placement in option)]
    usual = tuple(Rp if meta.requires_grad and axis in DATA_AXES else R for axis in axes)
    return Stored(usual if usual in whole or not whole else whole[0])


def _cut(batch_input: Input, offers: LegalPlacements) -> Placements:
    """Return the placement of a newly read input of the batch: its rows are sharded if ranks take different rows."""
    legal = offers.batch_input(batch_input.name, batch_input.meta, batch_input.batch_dim)
    axes = offers.mesh.axes

    def rows(placements: Placements) -> int:
        return sum(p.is_shard == (axis in DATA_AXES) for p, axis in zip(placements, axes, strict=True))

    return max(legal, key=rows)


def _refitted(
    scope: Scope,
    graph: Graph,
    plan: Plan,
    old: Mapping[str, Scope],
    stored: Mapping[str, Stored],
    offers: LegalPlacements,
) -> ScopePlan:
    metas = {p.name: p.meta for p in (scope.layer.parameters if scope.layer else graph.parameters)}
    parameters = {
        parameter: _stored(scope, parameter, metas[parameter], stored.get(name), offers)
        for name, parameter in _parameters(scope, graph)
    }
    source = _source(scope, old)
    usual = next(iter(plan.scopes[""].inputs.values()), None)
    if source is None:
        names = [name for name, _ in scope.layer.inputs] if scope.layer is not None else []
        return ScopePlan(parameters, {} if usual is None else dict.fromkeys(names, usual), {}, {})
    decided = plan.scopes[source.name]
    operators = {node.name: node.op for node in source.nodes}
    same = {node.name for node in scope.nodes if operators.get(node.name) == node.op}
    inputs = dict(decided.inputs)
    if scope.layer is None:
        read = [batch_input for batch_input in graph.inputs if Ref(batch_input.name) in offers.uses[""]]
        inputs |= {
            batch_input.name: _cut(batch_input, offers) for batch_input in read if batch_input.name not in inputs
        }
    elif len(scope.layer.inputs) == len(inputs):
        inputs = dict(zip((name for name, _ in scope.layer.inputs), inputs.values(), strict=True))
    elif inputs:
        first = next(iter(inputs.values()))
        inputs = {name: inputs.get(name, first) for name, _ in scope.layer.inputs}
    return ScopePlan(
        parameters,
        inputs,
        calls={name: labels for name, labels in decided.calls.items() if name in same},
        tensors={name: kept for name, kept in decided.tensors.items() if name.partition("[")[0] in same},
    )


def _source(scope: Scope, old: Mapping[str, Scope]) -> Scope | None:
    """Return the former scope of a scope's layers, or the class of layers with the same parameters; None without
    one."""
    if scope.layer is None:
        return old[""]
    layers = [scope_plan for scope_plan in old.values() if scope_plan.layer is not None]
    same_instances = (scope_plan for scope_plan in layers if set(scope_plan.instances) & set(scope.instances))
    names = {p.name for p in scope.layer.parameters}
    alike = (
        scope_plan
        for scope_plan in layers
        if scope_plan.layer and {p.name for p in scope_plan.layer.parameters} == names
    )
    return next(same_instances, None) or next(alike, None)


def _refitted_stage(stage: StagePlan, before: tuple[str, ...], units: tuple[str, ...], classes: set[str]) -> StagePlan:
    """Return the stage with its layers' recompute modes, under the current names of their classes."""
    left = {name: _modes(runs) for name, runs in stage.recompute.items()}
    modes_of: dict[str, list[str]] = {}
    for old, unit in zip(before[stage.first : stage.last], units[stage.first : stage.last], strict=True):
        mode = next(left.get(old, iter(())), "none")
        if unit in classes:
            modes_of.setdefault(unit, []).append(mode)
    runs = {name: tuple((mode, len([*same])) for mode, same in groupby(modes)) for name, modes in modes_of.items()}
    return replace(
        stage,
        recompute={
            name: runs_of_unit
            for name, runs_of_unit in runs.items()
            if runs_of_unit[0][0] != "none" or runs_of_unit[1:]
        },
    )


def _modes(runs: tuple[tuple[str, int], ...]) -> Iterator[str]:
    return (mode for mode, count in runs for _ in range(count))
