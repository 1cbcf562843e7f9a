"""Find the factor of every call that a dim corresponds to: the batch or the sequence positions, and in which sections.

A dim is followed through the rules: its shard in one tensor determines a factor of the call, and the factor determines
the shards of the call's other tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping

from autopar.ir.draws import DRAW
from autopar.ir.graph import Graph, LayerRun, Node, Ref
from autopar.ir.placement import Placement, S
from autopar.rules.rule import Rule, find_factor
from autopar.sharding.scopes import Scope

Sections = dict[str, tuple[int, ...]]
Key = tuple[str, str]
Marks = dict[tuple[str, Ref], set[Placement]]
Rules = Mapping[Key, tuple[Rule, bool]]


def _spread(graph: Graph, scopes: tuple[Scope, ...], marks: Marks) -> None:
    """Copy marks across layer borders, both ways."""
    by_name = {scope.name: scope for scope in scopes}
    for piece in graph.body:
        if not isinstance(piece, LayerRun):
            continue
        scope = by_name[piece.layer.name]
        pairs = [
            ((scope.name, Ref(formal)), ("", arg))
            for (formal, _), arg in zip(piece.layer.inputs, piece.args, strict=True)
        ]
        pairs += [((scope.name, ref), ("", Ref(piece.name, i))) for i, ref in enumerate(piece.layer.outputs)]
        for inner, outer in pairs:
            both = marks.get(inner, set()) | marks.get(outer, set())
            if both:
                marks[inner] = set(both)
                marks[outer] = set(both)


def follow(
    graph: Graph,
    scopes: tuple[Scope, ...],
    rules: Rules,
    dims_of_inputs: Mapping[str, int | None],
    is_sequence: bool = False,
) -> dict[Key, tuple[str, int]]:
    """Return, for each node, the (factor, sections) of a dim of the inputs, found by following it forward.

    is_sequence: also follow calls that cannot be sharded along it, and go back to tensors that the model itself
    computes where the dim meets them (tables of positions, masks).
    """
    marks: Marks = {("", Ref(name)): {S(dim)} for name, dim in dims_of_inputs.items() if dim is not None}
    factors: dict[Key, tuple[str, int]] = {}
    for _ in range(len(scopes) + 1):
        _spread(graph, scopes, marks)
        before = len(factors)
        for scope in scopes:
            for node in scope.nodes:
                rule = rules[scope.name, node.name][0]
                for ref, dims in zip(node.inputs, rule.inputs, strict=True):
                    for mark in marks.get((scope.name, ref), ()):
                        factor = factor_of(rule, dims, mark)
                        if factor is not None and (is_sequence or factor[0] not in rule.blocked):
                            factors.setdefault((scope.name, node.name), factor)
                node_factor = factors.get((scope.name, node.name))
                if node_factor:
                    for index, dims in enumerate(rule.outputs):
                        placement = find_factor(rule, dims, *node_factor)
                        if placement:
                            marks[scope.name, Ref(node.name, index)] = {placement}
            if is_sequence:
                _follow_back(scope, rules, marks, factors)
        if len(factors) == before:
            break
    if not is_sequence:
        _follow_draws(graph, scopes, rules, marks, factors)
    return factors


def _follow_draws(
    graph: Graph, scopes: tuple[Scope, ...], rules: Rules, marks: Marks, factors: dict[Key, tuple[str, int]]
) -> None:
    """Mark random draws, and tensors computed from them, as having the batch where they meet it."""
    drawn: dict[Key, None] = {}
    for scope in scopes:
        random: set[str] = set()
        for node in scope.nodes:
            key = scope.name, node.name
            if key not in factors and (node.op == DRAW or any(ref.node in random for ref in node.inputs)):
                random.add(node.name)
                drawn[key] = None
    if not drawn:
        return
    for _ in range(len(scopes) + 1):
        for scope in scopes:
            _follow_back(scope, rules, marks, factors, drawn)
        _spread(graph, scopes, marks)


def _follow_back(
    scope: Scope,
    rules: Rules,
    marks: Marks,
    factors: dict[Key, tuple[str, int]],
    among: Container[Key] | None = None,
) -> None:
    """Mark the inputs of one scope's calls, and the calls that produce them, by the factors of the calls.

    among: the only calls that may be added, if they are not blocked.
    """
    for node in reversed(scope.nodes):
        key, rule = (scope.name, node.name), rules[scope.name, node.name][0]
        if among is not None and key not in factors and key not in among:
            continue
        for index, dims in enumerate(rule.outputs):
            for mark in marks.get((scope.name, Ref(node.name, index)), ()) if key not in factors else ():
                factor = factor_of(rule, dims, mark)
                if factor is not None and (among is None or factor[0] not in rule.blocked):
                    factors[key] = factor
        for ref, dims in zip(node.inputs, rule.inputs, strict=True) if key in factors else ():
            placement = find_factor(rule, dims, *factors[key])
            if placement:
                marks.setdefault((scope.name, ref), {placement})


def factor_of(rule: Rule, dims: tuple[tuple[str, ...], ...], mark: Placement) -> tuple[str, int] | None:
    """Return the factor and its sections that give a tensor with `dims` the shard `mark`."""
    if mark.dim >= len(dims):
        return None
    before = 1
    for factor in dims[mark.dim]:
        rest, remainder = divmod(mark.sections, before)
        if remainder == 0 and rest >= 1 and rule.sizes[factor] % rest == 0 and rest < rule.sizes[factor]:
            return factor, rest
        before *= rule.sizes[factor]
    return None


def follow_sections(graph: Graph, scopes: tuple[Scope, ...], rules: Rules) -> dict[Key, Sections]:
    """Return, for each node, the useful section counts per factor: those that a neighbor's shard needs."""
    marks: Marks = {}
    sections_of: dict[Key, dict[str, set[int]]] = {}
    seen: dict[Key, int] = {}
    for _ in range(8):
        before = sum(len(placements) for placements in marks.values())
        _spread(graph, scopes, marks)
        for scope in scopes:
            for node in itertools.chain(scope.nodes, reversed(scope.nodes)):
                refs = (*node.inputs, *(Ref(node.name, index) for index in range(len(node.outputs))))
                num_marks = sum(len(marks.get((scope.name, ref), ())) for ref in refs)
                if seen.get((scope.name, node.name)) != num_marks:  # marks are only added
                    seen[scope.name, node.name] = num_marks
                    _mark_sections(scope.name, node, rules[scope.name, node.name][0], marks, sections_of)
        if sum(len(placements) for placements in marks.values()) == before:
            break
    return {key: {f: tuple(sorted(counts)) for f, counts in value.items()} for key, value in sections_of.items()}


def _mark_sections(
    scope: str,
    node: Node,
    rule: Rule,
    marks: Marks,
    sections_of: dict[Key, dict[str, set[int]]],
) -> None:
    tensors: list[tuple[Ref, tuple[tuple[str, ...], ...]]] = [
        *zip(node.inputs, rule.inputs, strict=True),
        *((Ref(node.name, i), dims) for i, dims in enumerate(rule.outputs)),
    ]
    shardable = frozenset(rule.shardable)
    pairs: set[tuple[str, int]] = {(factor, 1) for factor in shardable}
    for ref, dims in tensors:
        for mark in marks.get((scope, ref), ()):
            pair = factor_of(rule, dims, mark)
            if pair and pair[0] in shardable:
                pairs.add(pair)
    counts = sections_of.setdefault((scope, node.name), {})
    for factor, sections in pairs:
        if sections > 1:
            counts.setdefault(factor, set()).add(sections)
        for ref, dims in tensors:
            placement = find_factor(rule, dims, factor, sections)
            if placement and placement.sections > 1:
                marks.setdefault((scope, ref), set()).add(placement)
