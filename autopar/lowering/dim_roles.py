"""Find the roles of dims as far as the graph proves them: rows of the batch, positions, heads, a head's features.

Dims with one common loop form one class. The operators' rules join dims, call by call, and so do the borders of layers:
a dim that is a single factor is that loop. A dim of several factors, `B * S` of `x.view(-1, D)`, is composed of their
loops; dims of one class with factors of equal sizes share these loops. A class has the role of its members: the batch
dim of an input, or a dim of attention's q, k and v. Equal sizes prove nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping

from autopar.ir.graph import Graph, Ref, base_name, batch_key, derived, layer_borders
from autopar.operators.traits import ATTENTION
from autopar.sharding.call_options import rule_or_blank
from autopar.sharding.scopes import scopes_of
from codegen.source.names import argument

Place = tuple[str, Ref, int]
"""A dim: (scope, tensor, dim index)."""

_ATTENTION = (("HEADS", "SEQUENCE", "HEAD_DIM"), *(("KV_HEADS", "SEQUENCE", "HEAD_DIM"),) * 2)
"""Roles of the last three dims of q, k and v."""


class _Classes:
    """Disjoint sets of dims and factors."""

    def __init__(self) -> None:
        self.parents: dict[Hashable, Hashable] = {}

    def find(self, member: Hashable) -> Hashable:
        """Return the representative of a member's class, and shorten the path to it."""
        parents = self.parents
        while member in parents:
            above = parents[member]
            parents[member] = parents.get(above, above)
            member = parents[member]
        return member

    def join(self, first_member: Hashable, second_member: Hashable) -> bool:
        """Join two classes; return whether they were separate."""
        first, second = self.find(first_member), self.find(second_member)
        if first != second:
            self.parents[second] = first
        return first != second


@derived
def dim_roles(graph: Graph) -> Mapping[tuple[str, str, int], tuple[str, ...]]:
    """Return the role of each dim by (scope, node, output), "" where it is unknown; see `Program.dims`.

    A role is BATCH, SEQUENCE, HEADS, KV_HEADS (where they differ from HEADS) or HEAD_DIM and has one size in the whole
    model. If sequences have several lengths, each is named after the input that has it, as LABELS_LENGTH, or not at
    all.
    """
    classes = _joined(graph)
    scopes = scopes_of(graph)
    sizes = {(s.name, ref, dim): size for s in scopes for ref, m in s.metas.items() for dim, size in enumerate(m.shape)}
    roles = _names(graph, _roles(graph, classes), {classes.find(place): size for place, size in sizes.items()}, classes)
    roles_of = {}
    for scope in scopes:
        for ref, meta in scope.metas.items():
            dims = tuple(roles.get(classes.find((scope.name, ref, dim)), "") for dim in range(len(meta.shape)))
            if any(dims):
                roles_of[scope.name, ref.node, ref.index] = dims
    return roles_of


def _joined(graph: Graph) -> _Classes:
    classes = _Classes()
    composed: list[tuple[Place, tuple[int, ...], tuple[Hashable, ...]]] = []
    for scope in scopes_of(graph):
        for node in scope.nodes:
            rule, _ = rule_or_blank(node, scope.metas)
            results = tuple(Ref(node.name, index) for index in range(len(node.outputs)))
            tensors = [*zip(node.inputs, rule.inputs, strict=True), *zip(results, rule.outputs, strict=True)]
            if base_name(node.op).startswith("new_"):
                tensors = tensors[len(node.inputs) :]  # the operand only provides its dtype; an equal shape is chance
            for ref, dims in tensors:
                for number, dim in enumerate(dims):
                    place, factors = (scope.name, ref, number), [f for f in dim if rule.sizes[f] > 1]
                    loops: tuple[Hashable, ...] = tuple((scope.name, node.name, factor) for factor in factors)
                    if len(factors) == 1:
                        classes.join(place, loops[0])
                    elif factors:
                        composed.append((place, tuple(rule.sizes[f] for f in factors), loops))
    metas = {scope.name: scope.metas for scope in scopes_of(graph)}
    for (layer, inner), (outside, outer) in layer_borders(graph):
        for number in range(len(metas[layer][inner].shape)):
            classes.join((layer, inner, number), (outside, outer, number))
    is_open = True
    while is_open:
        loops_of: dict[Hashable, tuple[Hashable, ...]] = {}
        is_open = False
        for place, sizes, loops in composed:
            for first, second in zip(loops_of.setdefault((classes.find(place), sizes), loops), loops, strict=True):
                is_open |= classes.join(first, second)
    return classes


def _roles(graph: Graph, classes: _Classes) -> dict[Hashable, str]:
    """Map each class to its only role."""
    roles_of: dict[Hashable, set[str]] = {}
    for item in graph.inputs:
        if item.batch_dim is not None:
            roles_of.setdefault(classes.find(("", Ref(item.name), item.batch_dim)), set()).add("BATCH")
    for scope in scopes_of(graph):
        for node in scope.nodes:
            ranks = {len(scope.metas[ref].shape) for ref in node.inputs[:3]}
            if base_name(node.op) not in ATTENTION or ranks != {4}:
                continue
            for ref, roles in zip(node.inputs, _ATTENTION, strict=False):
                for dim, role in enumerate(roles, start=1):
                    roles_of.setdefault(classes.find((scope.name, ref, dim)), set()).add(role)
    alone = {cls: roles - {"KV_HEADS"} if "HEADS" in roles else roles for cls, roles in roles_of.items()}
    return {cls: next(iter(roles)) for cls, roles in alone.items() if len(roles) == 1}


def _names(
    graph: Graph, roles: Mapping[Hashable, str], sizes: Mapping[Hashable, int], classes: _Classes
) -> dict[Hashable, str]:
    """Return the roles with one size; sequences of several lengths are named after an input with that length."""
    lengths: dict[str, set[int]] = {}
    for cls, role in roles.items():
        lengths.setdefault(role, set()).add(sizes[cls])
    inputs: dict[Hashable, str] = {}
    for item in graph.inputs:
        for dim in range(len(item.meta.shape)):
            inputs.setdefault(
                classes.find(("", Ref(item.name), dim)), f"{argument(batch_key(item.name))}_length".upper()
            )
    named = dict(roles)
    for cls, role in roles.items():
        if len(lengths[role]) > 1:
            named[cls] = inputs.get(cls, "") if role == "SEQUENCE" else ""
    shared = Counter(named[cls] for cls, role in roles.items() if len(lengths[role]) > 1)
    return {o: name for o, name in named.items() if shared[name] < 2 and re.fullmatch(r"[A-Z][A-Z0-9_]*", name)}
