"""Find where the rows of expert layers leave the order of the tokens, and where they return to it.

An expert layer takes its rows sorted by expert, on the rank that has the expert (codegen/runtime/experts.py). If
another one follows, with only row-wise calls between them, the return of the rows and the next sorting cancel: rows
return only after the last layer. Until then they are not moved between ranks, and the layers route them over the same
axes.

If these layers form a mixture, the rows are copies of tokens, one per choice. The returned rows are weighted by a
number each and summed by token:

    rows = repeat_interleave(tokens, k, 0)    ...    sum(view(result * weights, [T, k, B]), 1)

so that a token may cross between nodes once for several choices (codegen/passes/once_per_node.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Node, Ref, base_name
from autopar.ir.operators import arguments_of
from autopar.ir.placement import Placements
from autopar.operators.traits import PARTS
from autopar.rules.families.experts import EXPERT_LINEAR, row_factor
from autopar.rules.localize import REWRITES
from autopar.rules.rule import Rule


@dataclass(frozen=True, slots=True)
class Route:
    """The way of the rows of one expert layer, or of a call between two.

    arrives: they come sorted from an earlier layer. is_first: otherwise, no earlier call has sorted them. returns: they
    go back to token order afterwards. like: for a layer, the first layer with the same rows; layer: the same for a call
    between two. choices: per token, if the layer is part of a mixture whose rows are copies of tokens and whose results
    are summed by token; else 0. summed_bytes: bytes of an element of that sum.
    """

    arrives: bool = False
    is_first: bool = True
    returns: bool = True
    like: str = ""
    layer: str = ""
    choices: int = 0
    summed_bytes: int = 0

    @property
    def dispatches(self) -> bool:
        """Whether this layer sorts its rows."""
        return self.is_first and not self.arrives


def routes_of(
    nodes: tuple[Node, ...],
    rules: Mapping[str, Rule],
    batches: Mapping[str, tuple[str, int]],
    leaving: Collection[Ref],
) -> dict[str, Route]:
    """Return the route of every expert layer of a scope, and of the calls between them, by call name.

    batches: call -> the factor (and sections) over the batch. leaving: tensors read outside of the scope.
    """
    layers = [node for node in nodes if node.op == EXPERT_LINEAR]
    ids = {Ref(node.name): node.inputs[2] for node in layers}
    if not layers:
        return {}
    has_batch = any(node.name in batches for node in layers)  # A batch of one row has no factor.
    for node in nodes:
        sorted_by = {ids[ref] for ref in node.inputs if ref in ids}
        if node.op != EXPERT_LINEAR and len(sorted_by) == 1:
            # Sizes of parts are not those of rows, of which any number may arrive.
            is_sized = base_name(node.op) in set(REWRITES) - PARTS
            factor = "" if is_sized else row_factor(node, rules[node.name], [ref for ref in node.inputs if ref in ids])
            if factor and batches.get(node.name) == ((factor, 1) if has_batch else None):
                ids |= {Ref(node.name, index): next(iter(sorted_by)) for index in range(len(node.outputs))}
    stays = _staying(nodes, ids, leaving)
    between = {ref.node for ref in stays} - {node.name for node in layers}
    seen, first = set[tuple[Ref, Ref]](), {node.inputs[2]: node.name for node in reversed(layers)}
    routes = {
        node.name: Route(arrives=True, returns=False, layer=first[ids[Ref(node.name)]])
        for node in nodes
        if node.name in between
    }
    for node in layers:
        rows, experts = node.inputs[0], node.inputs[2]
        routes[node.name] = Route(
            arrives=rows in stays and ids[rows] == experts,
            is_first=(rows, experts) not in seen,
            returns=Ref(node.name) not in stays,
            like=first[experts],
        )
        seen.add((rows, experts))
    for experts in dict.fromkeys(node.inputs[2] for node in layers):
        mixture = [node for node in layers if node.inputs[2] == experts]
        choices, summed_bytes = _mixture(nodes, mixture, routes, leaving)
        for node in mixture:
            routes[node.name] = replace(routes[node.name], choices=choices, summed_bytes=summed_bytes)
    return routes


def keeps_rows(source: Placements, target: Placements) -> bool:
    """Whether a reshard leaves the rows of a tensor, its first dim, on their ranks."""
    return all(
        a == b or not any(p.is_shard and p.dim == 0 for p in (a, b)) for a, b in zip(source, target, strict=True)
    )


def _mixture(
    nodes: tuple[Node, ...], layers: list[Node], routes: Mapping[str, Route], leaving: Collection[Ref]
) -> tuple[int, int]:
    """Return (choices per token, bytes of an element of their sum) of all layers of one mixture.

    Both are 0 if it does not have the form in this file's docstring.
    """
    made_by, users = {node.name: node for node in nodes}, _users(nodes)
    firsts = [node for node in layers if not routes[node.name].arrives]
    ends = [node for node in layers if routes[node.name].returns]
    rows = {node.inputs[0] for node in firsts}
    if len(rows) != 1 or len(ends) != 1:
        return 0, 0
    (copied,), (node,) = rows, ends
    repeat = made_by.get(copied.node)
    if repeat is None or base_name(repeat.op) != "repeat_interleave" or len(repeat.inputs) != 1 or copied in leaving:
        return 0, 0
    if any(user not in firsts for user in users[copied]) or len(repeat.args) != 3 or repeat.args[2] != 0:
        return 0, 0
    num_rows, choices = node.meta.shape[0], repeat.args[1]
    for name in ("mul", "view", "sum"):
        readers = users.get(Ref(node.name), [])
        if len(readers) != 1 or base_name(readers[0].op) != name or Ref(node.name) in leaving:
            return 0, 0
        last, node = node, readers[0]
        if name == "mul":
            others = [ref for ref in node.inputs if ref != Ref(last.name)]
            is_weighed = [made_by[ref.node].outputs[ref.index].shape for ref in others if ref.node in made_by]
            if is_weighed != [(num_rows, 1)] or node.meta.shape[0] != num_rows:
                return 0, 0
    over, by_token = arguments_of(node), made_by[node.inputs[0].node].meta.shape
    is_over_choices = list(over["dim"] or ()) == [1] and not over["keepdim"] and over["dtype"] is None
    is_by_token = len(by_token) == 3 and by_token[1] == choices and by_token[0] * choices == num_rows
    return (choices, node.meta.dtype.itemsize) if is_over_choices and is_by_token else (0, 0)


def _users(nodes: tuple[Node, ...]) -> dict[Ref, list[Node]]:
    """Map each value to the calls that read it, once per read."""
    users: dict[Ref, list[Node]] = {}
    for node in nodes:
        for ref in node.inputs:
            users.setdefault(ref, []).append(node)
    return users


def _staying(nodes: tuple[Node, ...], ids: Mapping[Ref, Ref], leaving: Collection[Ref]) -> set[Ref]:
    """Return the values that stay sorted: nothing reads them in another order, and they do not come from returned rows.

    ids: the candidates, with the ids that sort them.
    """
    users = _users(nodes)
    stays = {ref for ref in ids if ref in users and ref not in leaving}

    def made_by(node: Node) -> list[Ref]:
        return [ref for ref in (Ref(node.name, index) for index in range(len(node.outputs))) if ref in users]

    def is_sorted_for(user: Node, ref: Ref) -> bool:
        if user.op == EXPERT_LINEAR:
            return user.inputs.index(ref) == 0 and user.inputs.count(ref) == 1 and user.inputs[2] == ids[ref]
        return all(result in stays for result in made_by(user))

    def can_stay(node: Node) -> bool:
        is_made = node.op == EXPERT_LINEAR or all(ref in stays for ref in node.inputs if ref in ids)
        return is_made and all(r in stays and all(is_sorted_for(u, r) for u in users[r]) for r in made_by(node))

    while wrong := [node for node in nodes if not stays.isdisjoint(made_by(node)) and not can_stay(node)]:
        stays -= {ref for node in wrong for ref in made_by(node)}
    return stays
