"""A plan's decisions as those of a miniature: each call's option, placements and ZeRO stages, by the same names.

An option is the factors that each axis shards, whose names do not depend on sizes; section counts do, and the
miniature's own are taken. What has no counterpart is derived as for a plan that a person wrote (`assignment.expand`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.chain import chain
from autopar.ir.graph import Ref, layer_names
from autopar.ir.mesh import zero_axes
from autopar.ir.placement import Placement, Placements, Stored
from autopar.ir.plan_data import ScopePlan, StagePlan
from autopar.options.assignment import Candidate, labels_of
from autopar.options.offers import Offers
from autopar.options.scopes import Scope, scopes_of
from autopar.options.strategies import Option, options_of
from autopar.options.validate import ref_name
from autopar.plan import Plan


@dataclass(frozen=True, slots=True)
class SmallPlan:
    """A plan of the miniature. kept: how many of its calls have the large plan's option, of `calls`."""

    plan: Plan
    kept: int
    calls: int


def small_plan(large: Candidate, small: Candidate) -> SmallPlan:
    """The miniature's own plan (degrees, stages, schedule) with the decisions of the large one."""
    mesh, axes = small.plan.mesh, large.plan.mesh.axes
    numbers = [axes.index(axis) if axis in axes else -1 for axis in mesh.axes]
    options = {key: options_of(operator, mesh) for key, operator in small.operators.items()}
    offers = Offers(small.graph, options, mesh)
    found: dict[str, ScopePlan] = {}
    kept = 0
    for scope in scopes_of(small.graph):
        calls: dict[str, tuple[str, ...]] = {}
        for node in scope.nodes:
            key = scope.name, node.name
            own = large.assignment.operators.get(key)
            if own is None or large.operators[key].node.op != node.op or -1 in numbers:
                continue
            index = _same_option(options[key], own, numbers)
            if index is not None:
                calls[node.name] = labels_of(options[key], index)
                kept += 1
        base = small.plan.scopes[scope.name]
        found[scope.name] = ScopePlan(
            parameters=_parameters(base, scope, large, offers, numbers),
            inputs=_inputs(base, scope, large, offers, numbers, small),
            calls=calls,
            tensors=_tensors(scope, large, offers, numbers, options),
        )
    plan = replace(small.plan, scopes=found)
    plan = replace(plan, pipeline=replace(plan.pipeline, stages=_stages(large, small)))
    return SmallPlan(plan, kept, sum(len(scope.nodes) for scope in scopes_of(small.graph)))


def _same_option(options: tuple[Option, ...], own: Option, numbers: list[int]) -> int | None:
    """The option that shards the same factors on the same axes, in sections where the large one does if it can."""

    def likeness(option: Option) -> int | None:
        score = 0
        for axis, number in zip(option.axes, numbers, strict=True):
            other = own.axes[number]
            places = zip((*axis.inputs, *axis.outputs), (*other.inputs, *other.outputs), strict=True)
            if _factor(axis.label) != _factor(other.label) or not all(_is_alike(a, b) for a, b in places):
                return None
            score += ("/" in axis.label) == ("/" in other.label)
        return score

    scored = [(score, -index) for index, option in enumerate(options) if (score := likeness(option)) is not None]
    return -max(scored)[1] if scored else None


def _factor(label: str) -> str:
    name, slash, count = label.rpartition("/")
    return name if slash and count.isdigit() else label


def _is_alike(one: Placement, other: Placement) -> bool:
    return (one.kind, one.dim) == (other.kind, other.dim)


def _nearest(offered: Iterable[Placements], own: Placements, numbers: list[int]) -> Placements | None:
    """Of what is offered, that which lies as the large plan's does, in sections where that is."""
    found = []
    for places in offered:
        pairs = [(place, own[number]) for place, number in zip(places, numbers, strict=True)]
        if all(_is_alike(a, b) for a, b in pairs):
            found.append((sum((a.sections > 1) == (b.sections > 1) for a, b in pairs), places))
    return max(found, key=lambda each: each[0])[1] if found else None


def _parameters(
    base: ScopePlan, scope: Scope, large: Candidate, offers: Offers, numbers: list[int]
) -> Mapping[str, Stored]:
    found = dict(base.parameters)
    for name in found:
        own = large.assignment.parameters.get((scope.name, name))
        if own is None or -1 in numbers:
            continue
        ref = Ref(name)
        places = _nearest(offers.parameter(scope, ref, scope.metas[ref]), own.placements, numbers)
        if places is not None:
            is_sharded = bool(zero_axes(offers.mesh.axes, places))
            found[name] = Stored(places, own.zero if is_sharded else 0)
    return found


def _inputs(
    base: ScopePlan, scope: Scope, large: Candidate, offers: Offers, numbers: list[int], small: Candidate
) -> Mapping[str, Placements]:
    batch = {each.name: each.batch_dim for each in small.graph.inputs}
    found = dict(base.inputs)
    for name in found:
        own = large.assignment.tensors.get((scope.name, Ref(name)))
        if own is None or -1 in numbers:
            continue
        meta = scope.metas[Ref(name)]
        offered = offers.tensor(scope, Ref(name)) if scope.name else offers.batch_input(name, meta, batch.get(name))
        found[name] = _nearest(offered, own, numbers) or found[name]
    return found


def _tensors(
    scope: Scope,
    large: Candidate,
    offers: Offers,
    numbers: list[int],
    options: Mapping[tuple[str, str], tuple[Option, ...]],
) -> Mapping[str, Placements]:
    """Tensors that several calls use, where the large plan keeps them."""
    found: dict[str, Placements] = {}
    for node in scope.nodes:
        for index in range(len(node.outputs)):
            ref = Ref(node.name, index)
            own = large.assignment.tensors.get((scope.name, ref))
            if own is None or -1 in numbers or len(offers.uses[scope.name].get(ref, ())) < 2:
                continue
            produced = tuple(option.outputs[index] for option in options[scope.name, node.name])
            places = _nearest(offers.tensor(scope, ref, produced), own, numbers)
            if places is not None:
                found[ref_name(ref)] = places
    return found


def _stages(large: Candidate, small: Candidate) -> tuple[StagePlan, ...]:
    """The miniature's stages, whose layers recompute in all the modes of the large plan's, in turn."""
    modes: dict[str, list[str]] = {}
    for stage in large.plan.pipeline.stages:
        for name, runs in stage.recompute.items():
            modes.setdefault(name, []).extend(mode for mode, _ in runs)
    counted: dict[str, int] = {}
    stages = []
    for stage in small.plan.pipeline.stages:
        recompute = {}
        for name, runs in stage.recompute.items() if stage.recompute else _layers_of(small, stage):
            wanted = list(dict.fromkeys(modes.get(name, [])))
            count = sum(number for _, number in runs)
            if wanted:
                first = counted.get(name, 0)
                recompute[name] = tuple((wanted[(first + i) % len(wanted)], 1) for i in range(count))
                counted[name] = first + count
        stages.append(replace(stage, recompute=recompute))
    return tuple(stages)


def _layers_of(small: Candidate, stage: StagePlan) -> list[tuple[str, tuple[tuple[str, int], ...]]]:
    units = chain(small.graph)[stage.first : stage.last]
    names = [name for name in dict.fromkeys(units) if name in layer_names(small.graph)]
    return [(name, (("none", units.count(name)),)) for name in names]
