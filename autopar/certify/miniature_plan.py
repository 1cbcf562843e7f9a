"""Translate a plan's decisions to a miniature: each call's option, placements and ZeRO stages.

An option names the factors that each axis shards. These names do not depend on sizes; section counts do, so the
miniature's own are taken. Decisions without a counterpart are derived as for a hand-written plan (`assignment.expand`).

Calls of a miniature and of the plan's model are matched by their order (`counterparts`). Names cannot decide, because
casts and versions of an operator change their numbers (a model in bf16 has casts that one in fp32 lacks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from autopar.ir.chain import chain
from autopar.ir.graph import Graph, Node, Ref, layer_names
from autopar.ir.mesh import zero_axes
from autopar.ir.placement import Placement, Placements, Stored
from autopar.ir.plan_data import ScopePlan, StagePlan
from autopar.plan import Plan
from autopar.sharding.assignment import Candidate, labels_of
from autopar.sharding.call_options import Option, options_of
from autopar.sharding.legal_placements import LegalPlacements
from autopar.sharding.scopes import Scope, scopes_of
from autopar.sharding.validate_plan import ref_name


@dataclass(frozen=True, slots=True)
class SmallPlan:
    """A plan of the miniature. kept: the number of calls with the large plan's option. changed: names of decisions that
    differ from the large plan. lacks: operators of the large plan's calls without a counterpart, and their number."""

    plan: Plan
    kept: int
    changed: tuple[str, ...]
    lacks: Mapping[str, int]


def small_plan(large: Candidate, small: Candidate) -> SmallPlan:
    """Return the miniature's plan (degrees, stages, schedule) with the decisions of the large plan."""
    translation = _Translation(large, small)
    scopes = {scope.name: translation.scope(scope) for scope in scopes_of(small.graph)}
    pipeline = replace(small.plan.pipeline, stages=_stages(large, small))
    return SmallPlan(
        plan=replace(small.plan, scopes=scopes, pipeline=pipeline),
        kept=translation.kept,
        changed=tuple(translation.changed),
        lacks=translation.lacks,
    )


@dataclass
class _Translation:
    """The translation, scope by scope. numbers: for each axis of the miniature, its index in the plan's mesh."""

    large: Candidate
    small: Candidate
    kept: int = 0
    changed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        mesh, axes = self.small.plan.mesh, self.large.plan.mesh.axes
        self.numbers = [axes.index(axis) for axis in mesh.axes]
        self.options = {key: options_of(operator, mesh) for key, operator in self.small.operators.items()}
        self.offers = LegalPlacements(self.small.graph, self.options, mesh)
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
        labels = {}
        for node in scope.nodes:
            key = scope.name, node.name
            other = self.same.get(key)
            option = None if other is None else self.large.assignment.operators.get(other)
            index = None if option is None else _same_option(self.options[key], option, self.numbers)
            if index is None:
                self.changed.append(f"{_text(scope)}{node.name}")
            else:
                labels[node.name] = labels_of(self.options[key], index)
                self.kept += 1
        return labels

    def parameters(self, base: ScopePlan, scope: Scope) -> Mapping[str, Stored]:
        stored = dict(base.parameters)
        for name in stored:
            decided, ref = self.large.assignment.parameters.get((scope.name, name)), Ref(name)
            offered = self.offers.parameter(scope, ref, scope.metas[ref])
            places = None if decided is None else _nearest(offered, decided.placements, self.numbers)
            if decided is None or places is None:
                self.changed.append(f"{_text(scope)}{name}")
                continue
            is_sharded = bool(zero_axes(self.offers.mesh.axes, places))
            stored[name] = Stored(places, decided.zero if is_sharded else 0)
        return stored

    def inputs(self, base: ScopePlan, scope: Scope) -> Mapping[str, Placements]:
        batch = {entry.name: entry.batch_dim for entry in self.small.graph.inputs}
        placements, others = dict(base.inputs), self.names_of_inputs(scope)
        for name in placements:
            decided, ref = self.large.assignment.tensors.get((scope.name, Ref(others.get(name, name)))), Ref(name)
            offered = (
                self.offers.tensor(scope, ref)
                if scope.name
                else self.offers.batch_input(name, scope.metas[ref], batch.get(name))
            )
            places = None if decided is None else _nearest(offered, decided, self.numbers)
            if places is None:
                self.changed.append(f"{_text(scope)}{name}")
            else:
                placements[name] = places
        return placements

    def names_of_inputs(self, scope: Scope) -> dict[str, str]:
        """Return the plan's name of each layer input, matched by position, because another call may produce it."""
        other = next(
            (large_scope for large_scope in scopes_of(self.large.graph) if large_scope.name == scope.name), scope
        )
        pairs = zip(scope.layer.inputs, other.layer.inputs, strict=False) if scope.layer and other.layer else ()
        return {
            small_name: large_name
            for (small_name, meta), (large_name, large) in pairs
            if len(meta.shape) == len(large.shape)
        }

    def tensors(self, scope: Scope) -> Mapping[str, Placements]:
        """Return the placements, from the large plan, of tensors that several calls use."""
        placements: dict[str, Placements] = {}
        for node in scope.nodes:
            owner, name = self.same.get((scope.name, node.name), ("", ""))
            for index in range(len(node.outputs)):
                decided, ref = self.large.assignment.tensors.get((owner, Ref(name, index))), Ref(node.name, index)
                if decided is None or len(self.offers.uses[scope.name].get(ref, ())) < 2:
                    continue
                produced = tuple(option.outputs[index] for option in self.options[scope.name, node.name])
                places = _nearest(self.offers.tensor(scope, ref, produced), decided, self.numbers)
                if places is None:
                    self.changed.append(f"{_text(scope)}{ref_name(ref)}")
                else:
                    placements[ref_name(ref)] = places
        return placements


def _text(scope: Scope) -> str:
    return f"{scope.name}." if scope.name else ""


def _same_option(options: tuple[Option, ...], large_option: Option, numbers: list[int]) -> int | None:
    """Return the option that shards the same factors on the same axes, preferably in the same sections."""

    def likeness(option: Option) -> int | None:
        score = 0
        for axis, number in zip(option.axes, numbers, strict=True):
            other = large_option.axes[number]
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


def _is_alike(first: Placement, second: Placement) -> bool:
    return (first.kind, first.dim) == (second.kind, second.dim)


def _nearest(offered: Iterable[Placements], large_places: Placements, numbers: list[int]) -> Placements | None:
    """Return the offered placements that match the large plan's, preferably in sections where it has them."""
    candidates = []
    for places in offered:
        pairs = [(place, large_places[number]) for place, number in zip(places, numbers, strict=True)]
        if all(_is_alike(a, b) for a, b in pairs):
            candidates.append((sum((a.sections > 1) == (b.sections > 1) for a, b in pairs), places))
    return max(candidates, key=lambda scored: scored[0])[1] if candidates else None


def modes_of(large: Candidate) -> dict[str, tuple[str, ...]]:
    """Return the recompute modes of each layer class in the plan; "none" where the plan has none."""
    units, modes_of_class = chain(large.graph), dict[str, list[str]]()
    stages = large.plan.pipeline.stages or (StagePlan(0, len(units)),)
    for stage in stages:
        for name in layer_names(large.graph) & set(units[stage.first : stage.last]):
            modes_of_class.setdefault(name, []).extend(mode for mode, _ in stage.recompute.get(name, (("none", 1),)))
    return {name: tuple(dict.fromkeys(modes)) for name, modes in modes_of_class.items()}


def _stages(large: Candidate, small: Candidate) -> tuple[StagePlan, ...]:
    """Return the miniature's stages. Their layers cycle through the recompute modes of the large plan."""
    modes, units = modes_of(large), chain(small.graph)
    if not any(stage.recompute for stage in large.plan.pipeline.stages):
        return tuple(replace(stage, recompute={}) for stage in small.plan.pipeline.stages)
    counted: Counter[str] = Counter()
    stages = []
    for stage in small.plan.pipeline.stages or (StagePlan(0, len(units)),):
        stage_units, recompute = units[stage.first : stage.last], {}
        for name in dict.fromkeys(unit for unit in stage_units if unit in modes):
            class_modes, first, count = modes[name], counted[name], stage_units.count(name)
            recompute[name] = tuple((class_modes[(first + i) % len(class_modes)], 1) for i in range(count))
            counted[name] += count
        stages.append(replace(stage, recompute=recompute))
    return tuple(stages)


def modes_left(large: Candidate, small: Plan) -> tuple[str, ...]:
    """List (layer class, recompute mode) pairs of the plan that the miniature does not have."""
    of_small = {
        (name, mode) for stage in small.pipeline.stages for name, runs in stage.recompute.items() for mode, _ in runs
    }
    if not any(stage.recompute for stage in large.plan.pipeline.stages):
        return ()
    every = {(name, mode) for name, modes in modes_of(large).items() for mode in modes}
    return tuple(f"{name} {mode}" for name, mode in sorted(every - of_small))


Key = tuple[str, str]
"""(layer class or "", call)"""


def counterparts(large: Graph, small: Graph) -> dict[Key, Key]:
    """Return the large graph's call for each matched call of the small graph."""
    of_large = {scope.name: scope.nodes for scope in scopes_of(large)}
    large_key_of: dict[Key, Key] = {}
    for scope in scopes_of(small):
        small_nodes, large_nodes = scope.nodes, of_large.get(scope.name, ())
        matcher = SequenceMatcher(
            None, [_kind(n) for n in small_nodes], [_kind(n) for n in large_nodes], autojunk=False
        )
        for at, to, count in matcher.get_matching_blocks():
            pairs = zip(small_nodes[at : at + count], large_nodes[to : to + count], strict=True)
            large_key_of |= {
                (scope.name, small_node.name): (scope.name, large_node.name) for small_node, large_node in pairs
            }
    return large_key_of


def _kind(node: Node) -> tuple[str, str, int, int]:
    return node.op, node.module, len(node.inputs), len(node.outputs)
