"""A plan's decisions as those of a miniature: each call's option, placements and ZeRO stages.

An option is the factors that each axis shards, whose names do not depend on sizes; section counts do, and the
miniature's own are taken. What has no counterpart is derived as for a plan that a person wrote (`assignment.expand`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.certify.counterparts import Key, counterparts
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
    """A plan of the miniature.

    kept: how many of its calls have the large plan's option. own: what it decides otherwise than the large plan, by
    name. lacks: operators of the large plan's calls that have no counterpart in it, and how many.
    """

    plan: Plan
    kept: int
    own: tuple[str, ...]
    lacks: Mapping[str, int]


def small_plan(large: Candidate, small: Candidate) -> SmallPlan:
    """The miniature's own plan (degrees, stages, schedule) with the decisions of the large one."""
    translation = _Translation(large, small)
    scopes = {scope.name: translation.scope(scope) for scope in scopes_of(small.graph)}
    pipeline = replace(small.plan.pipeline, stages=_stages(large, small))
    return SmallPlan(
        plan=replace(small.plan, scopes=scopes, pipeline=pipeline),
        kept=translation.kept,
        own=tuple(translation.own),
        lacks=translation.lacks,
    )


@dataclass
class _Translation:
    """What is found scope by scope. numbers: of each axis of the miniature, that of the plan's same axis."""

    large: Candidate
    small: Candidate
    kept: int = 0
    own: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        mesh, axes = self.small.plan.mesh, self.large.plan.mesh.axes
        self.numbers = [axes.index(axis) for axis in mesh.axes]
        self.options = {key: options_of(operator, mesh) for key, operator in self.small.operators.items()}
        self.offers = Offers(self.small.graph, self.options, mesh)
        self.same: dict[Key, Key] = counterparts(self.large.graph, self.small.graph)
        without = self.large.operators.keys() - set(self.same.values())
        self.lacks = Counter(self.large.operators[key].node.op for key in sorted(without))

    def scope(self, scope: Scope) -> ScopePlan:
        base = self.small.plan.scopes[scope.name]
        return ScopePlan(
            parameters=self.parameters(base, scope),
            inputs=self.inputs(base, scope),
            calls=self.calls(scope),
            tensors=self.tensors(scope),
        )

    def calls(self, scope: Scope) -> dict[str, tuple[str, ...]]:
        found = {}
        for node in scope.nodes:
            key = scope.name, node.name
            other = self.same.get(key)
            own = None if other is None else self.large.assignment.operators.get(other)
            index = None if own is None else _same_option(self.options[key], own, self.numbers)
            if index is None:
                self.own.append(f"{_text(scope)}{node.name}")
            else:
                found[node.name] = labels_of(self.options[key], index)
                self.kept += 1
        return found

    def parameters(self, base: ScopePlan, scope: Scope) -> Mapping[str, Stored]:
        found = dict(base.parameters)
        for name in found:
            own, ref = self.large.assignment.parameters.get((scope.name, name)), Ref(name)
            offered = self.offers.parameter(scope, ref, scope.metas[ref])
            places = None if own is None else _nearest(offered, own.placements, self.numbers)
            if own is None or places is None:
                self.own.append(f"{_text(scope)}{name}")
                continue
            is_sharded = bool(zero_axes(self.offers.mesh.axes, places))
            found[name] = Stored(places, own.zero if is_sharded else 0)
        return found

    def inputs(self, base: ScopePlan, scope: Scope) -> Mapping[str, Placements]:
        batch = {each.name: each.batch_dim for each in self.small.graph.inputs}
        found, others = dict(base.inputs), self.names_of_inputs(scope)
        for name in found:
            own, ref = self.large.assignment.tensors.get((scope.name, Ref(others.get(name, name)))), Ref(name)
            offered = (
                self.offers.tensor(scope, ref)
                if scope.name
                else self.offers.batch_input(name, scope.metas[ref], batch.get(name))
            )
            places = None if own is None else _nearest(offered, own, self.numbers)
            if places is None:
                self.own.append(f"{_text(scope)}{name}")
            else:
                found[name] = places
        return found

    def names_of_inputs(self, scope: Scope) -> dict[str, str]:
        """What enters a layer -> its name in the plan's layer, by its position: what makes it may be another call."""
        other = next((each for each in scopes_of(self.large.graph) if each.name == scope.name), scope)
        pairs = zip(scope.layer.inputs, other.layer.inputs, strict=False) if scope.layer and other.layer else ()
        return {one: two for (one, meta), (two, large) in pairs if len(meta.shape) == len(large.shape)}

    def tensors(self, scope: Scope) -> Mapping[str, Placements]:
        """Tensors that several calls use, where the large plan keeps them."""
        found: dict[str, Placements] = {}
        for node in scope.nodes:
            owner, name = self.same.get((scope.name, node.name), ("", ""))
            for index in range(len(node.outputs)):
                own, ref = self.large.assignment.tensors.get((owner, Ref(name, index))), Ref(node.name, index)
                if own is None or len(self.offers.uses[scope.name].get(ref, ())) < 2:
                    continue
                produced = tuple(option.outputs[index] for option in self.options[scope.name, node.name])
                places = _nearest(self.offers.tensor(scope, ref, produced), own, self.numbers)
                if places is None:
                    self.own.append(f"{_text(scope)}{ref_name(ref)}")
                else:
                    found[ref_name(ref)] = places
        return found


def _text(scope: Scope) -> str:
    return f"{scope.name}." if scope.name else ""


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


def modes_of(large: Candidate) -> dict[str, tuple[str, ...]]:
    """How layers of each class recompute in the plan; "none" where it does not say."""
    units, found = chain(large.graph), dict[str, list[str]]()
    stages = large.plan.pipeline.stages or (StagePlan(0, len(units)),)
    for stage in stages:
        for name in layer_names(large.graph) & set(units[stage.first : stage.last]):
            found.setdefault(name, []).extend(mode for mode, _ in stage.recompute.get(name, (("none", 1),)))
    return {name: tuple(dict.fromkeys(modes)) for name, modes in found.items()}


def _stages(large: Candidate, small: Candidate) -> tuple[StagePlan, ...]:
    """The miniature's stages, whose layers recompute in all the modes of the large plan's, in turn."""
    modes, units = modes_of(large), chain(small.graph)
    if not any(stage.recompute for stage in large.plan.pipeline.stages):
        return tuple(replace(stage, recompute={}) for stage in small.plan.pipeline.stages)
    counted: Counter[str] = Counter()
    stages = []
    for stage in small.plan.pipeline.stages or (StagePlan(0, len(units)),):
        own, recompute = units[stage.first : stage.last], {}
        for name in dict.fromkeys(unit for unit in own if unit in modes):
            wanted, first, count = modes[name], counted[name], own.count(name)
            recompute[name] = tuple((wanted[(first + i) % len(wanted)], 1) for i in range(count))
            counted[name] += count
        stages.append(replace(stage, recompute=recompute))
    return tuple(stages)


def modes_left(large: Candidate, small: Plan) -> tuple[str, ...]:
    """Ways to recompute that the plan has for a layer class, and the miniature does not."""
    of_small = {
        (name, mode) for stage in small.pipeline.stages for name, runs in stage.recompute.items() for mode, _ in runs
    }
    if not any(stage.recompute for stage in large.plan.pipeline.stages):
        return ()
    every = {(name, mode) for name, modes in modes_of(large).items() for mode in modes}
    return tuple(f"{name} {mode}" for name, mode in sorted(every - of_small))
