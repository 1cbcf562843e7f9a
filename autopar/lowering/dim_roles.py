"""What dims of tensors are, as far as the graph proves it: rows of the batch, positions, heads, a head's features.

Dims over which one loop runs are one class. The operators' rules join them, call by call, and so do the borders of
layers: a dim that is a factor alone is that loop. A dim of several factors, `B * S` of `x.view(-1, D)`, is composed of
their loops, and dims of one class that are composed of factors of equal sizes have them in common. A class has the role
of what stands in it: the batch's dim of an input, or a dim of attention's q, k and v. Equal sizes prove nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping

from autopar.ir.batch_names import batch_key
from autopar.ir.graph import Graph, Ref, base_name, derived, layer_borders
from autopar.operators.traits import ATTENTION
from autopar.options.scopes import scopes_of
from autopar.options.strategies import rule_or_blank
from codegen.runtime.names import argument

Place = tuple[str, Ref, int]
"""A dim: (scope, tensor, number)."""

_ATTENTION = (("HEADS", "SEQUENCE", "HEAD_DIM"), *(("KV_HEADS", "SEQUENCE", "HEAD_DIM"),) * 2)
"""Roles of the last three dims of q, k and v."""


class _Classes:
    """Disjoint sets of dims and factors."""

    def __init__(self) -> None:
        self.parents: dict[Hashable, Hashable] = {}

    def find(self, one: Hashable) -> Hashable:
        """The representative of its class; what lies on the way to it is brought closer."""
        parents = self.parents
        while one in parents:
            above = parents[one]
            parents[one] = parents.get(above, above)
            one = parents[one]
        return one

    def join(self, one: Hashable, other: Hashable) -> bool:
        """Whether they were apart."""
        first, second = self.find(one), self.find(other)
        if first != second:
            self.parents[second] = first
        return first != second


@derived
def dim_roles(graph: Graph) -> Mapping[tuple[str, str, int], tuple[str, ...]]:
    """(scope, node, output) of a tensor -> a role for each dim, "" where it is unknown; see `Program.dims`.

    A role is BATCH, SEQUENCE, HEADS, KV_HEADS (where they are not HEADS) or HEAD_DIM and has one size in the whole
    model. Of sequences of several lengths each is called after the input that has it, as LABELS_LENGTH, or not at all.
    """
    classes = _joined(graph)
    scopes = scopes_of(graph)
    sizes = {(s.name, ref, dim): size for s in scopes for ref, m in s.metas.items() for dim, size in enumerate(m.shape)}
    roles = _names(graph, _roles(graph, classes), {classes.find(place): size for place, size in sizes.items()}, classes)
    found = {}
    for scope in scopes:
        for ref, meta in scope.metas.items():
            dims = tuple(roles.get(classes.find((scope.name, ref, dim)), "") for dim in range(len(meta.shape)))
            if any(dims):
                found[scope.name, ref.node, ref.index] = dims
    return found


def _joined(graph: Graph) -> _Classes:
    classes = _Classes()
    composed: list[tuple[Place, tuple[int, ...], tuple[Hashable, ...]]] = []
    for scope in scopes_of(graph):
        for node in scope.nodes:
            rule, _ = rule_or_blank(node, scope.metas)
            results = tuple(Ref(node.name, index) for index in range(len(node.outputs)))
            tensors = [*zip(node.inputs, rule.inputs, strict=True), *zip(results, rule.outputs, strict=True)]
            if base_name(node.op).startswith("new_"):
                tensors = tensors[len(node.inputs) :]  # what lends its dtype can have the result's shape by chance
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
        known: dict[Hashable, tuple[Hashable, ...]] = {}
        is_open = False
        for place, sizes, loops in composed:
            for one, other in zip(known.setdefault((classes.find(place), sizes), loops), loops, strict=True):
                is_open |= classes.join(one, other)
    return classes


def _roles(graph: Graph, classes: _Classes) -> dict[Hashable, str]:
    """Class -> its only role."""
    found: dict[Hashable, set[str]] = {}
    for item in graph.inputs:
        if item.batch_dim is not None:
            found.setdefault(classes.find(("", Ref(item.name), item.batch_dim)), set()).add("BATCH")
    for scope in scopes_of(graph):
        for node in scope.nodes:
            ranks = {len(scope.metas[ref].shape) for ref in node.inputs[:3]}
            if base_name(node.op) not in ATTENTION or ranks != {4}:
                continue
            for ref, roles in zip(node.inputs, _ATTENTION, strict=False):
                for dim, role in enumerate(roles, start=1):
                    found.setdefault(classes.find((scope.name, ref, dim)), set()).add(role)
    alone = {one: roles - {"KV_HEADS"} if "HEADS" in roles else roles for one, roles in found.items()}
    return {one: next(iter(roles)) for one, roles in alone.items() if len(roles) == 1}


def _names(
    graph: Graph, roles: Mapping[Hashable, str], sizes: Mapping[Hashable, int], classes: _Classes
) -> dict[Hashable, str]:
    """The roles that have one size; sequences of several lengths are called after inputs, each after one of its own."""
    lengths: dict[str, set[int]] = {}
    for one, role in roles.items():
        lengths.setdefault(role, set()).add(sizes[one])
    inputs: dict[Hashable, str] = {}
    for item in graph.inputs:
        for dim in range(len(item.meta.shape)):
            inputs.setdefault(
                classes.find(("", Ref(item.name), dim)), f"{argument(batch_key(item.name))}_length".upper()
            )
    named = dict(roles)
    for one, role in roles.items():
        if len(lengths[role]) > 1:
            named[one] = inputs.get(one, "") if role == "SEQUENCE" else ""
    shared = Counter(named[one] for one, role in roles.items() if len(lengths[role]) > 1)
    return {o: name for o, name in named.items() if shared[name] < 2 and re.fullmatch(r"[A-Z][A-Z0-9_]*", name)}
