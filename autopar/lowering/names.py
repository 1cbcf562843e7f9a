"""Variable names for generated code, from the user's own modules where these are better than operator names.

The last call of a leaf module is named after the module (`q_proj`, `input_layernorm`). Another call keeps its
operator's name, without torch's numbering where that name is free.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from autopar.ir.graph import (
    SINK_ATTENTION,
    WINDOW_ATTENTION,
    Graph,
    LayerRun,
    Node,
    Ref,
    base_name,
    batch_key,
    derived,
)
from autopar.operators.traits import PERMUTATIONS, RESHAPES, ROLES, SHORT_NAMES
from autopar.rules.families.lookup import BAGS
from autopar.sharding.scopes import scopes_of
from codegen.source.names import GENERATED_NAMES, argument, is_plain_name, shortened

_RESHAPING = RESHAPES | PERMUTATIONS | {"contiguous", "to", "expand"}

RESERVED = GENERATED_NAMES | {"hidden"}
"""Names that generated code uses itself, and built-ins that a variable should not hide."""

_GATES = frozenset({"silu", "gelu", "sigmoid"})


@derived
def readable_names(graph: Graph, scope_name: str = "", results: tuple[Ref, ...] = ()) -> dict[Ref, str]:
    """Return a unique identifier for each Ref that the scope defines (inputs, node outputs, run outputs).

    results: of the top level; by default the loss.
    """
    scope = next(candidate for candidate in scopes_of(graph) if candidate.name == scope_name)
    entering = [name for name, _ in scope.layer.inputs] if scope.layer else [i.name for i in graph.inputs]
    taken = set(RESERVED) - {"hidden"} if scope.layer or "hidden" in entering else set(RESERVED)
    names: dict[Ref, str] = {}
    for name in entering:
        names[Ref(name)] = _unique(name if scope.layer else argument(batch_key(name)), taken)
    pieces = scope.nodes if scope.layer else graph.body
    uses = uses_of(pieces, scope.layer.outputs if scope.layer else results or (graph.loss,))
    followed = _followed(pieces, uses)
    nodes = [piece for piece in pieces if isinstance(piece, Node)]
    roles, wishes = _roles(nodes, entering, followed, uses), _module_wishes(scope.nodes, followed)
    for piece in pieces:
        if isinstance(piece, LayerRun):
            going_on = _handed_on(piece, pieces, names, uses) | _going_on(piece, entering, uses)
            for index in range(len(piece.outputs)):
                wish = "hidden_states" if index == 0 else f"{piece.name}_{index}"
                names[Ref(piece.name, index)] = going_on[index] if index in going_on else _unique(wish, taken)
            continue
        if piece.name in followed:
            names[Ref(piece.name)] = names[followed[piece.name]]
            continue
        wish = wishes.get(piece.name) or _plain(piece)
        wish = SHORT_NAMES.get(wish, wish)
        for index in range(len(piece.outputs)):
            readable = roles.get(Ref(piece.name, index), wish if len(piece.outputs) == 1 else f"{wish}_{index}")
            names[Ref(piece.name, index)] = _unique(readable, taken)
    return names


def uses_of(pieces: Sequence[Node | LayerRun], results: tuple[Ref, ...]) -> dict[Ref, int]:
    """Count the reads of each tensor by the pieces and the results."""
    return Counter((*(ref for piece in pieces for ref in piece.inputs), *results))


def _going_on(run: LayerRun, entering: Sequence[str], uses: dict[Ref, int]) -> dict[int, str]:
    """Map outputs to names for inputs of a stage that have the layers' own name and no other use: the name stays."""
    names = {}
    for position, output in run.carried:
        ref, formal = run.args[position], run.layer.inputs[position][0]
        if ref.node in entering and ref.node == formal and uses[ref] == 1:
            names[output] = formal
    return names


def _handed_on(
    run: LayerRun, pieces: Sequence[Node | LayerRun], names: Mapping[Ref, str], uses: dict[Ref, int]
) -> dict[int, str]:
    """Map outputs to names where a run consumes another run's result that has no other use: the result's name stays."""
    runs, outputs = {piece.name: piece for piece in pieces if isinstance(piece, LayerRun)}, run.outputs
    alone = (ref for ref in run.args if uses[ref] == 1 and ref.node in runs and ref.index < len(outputs))
    return {ref.index: names[ref] for ref in alone if runs[ref.node].outputs[ref.index] == outputs[ref.index]}


def _followed(pieces: Sequence[Node | LayerRun], uses: dict[Ref, int]) -> dict[str, Ref]:
    """Return calls that only reshape the result of one other call and are its only use: they take over its name."""
    calls = {piece.name for piece in pieces if isinstance(piece, Node)}
    followed = {}
    for piece in pieces:
        if isinstance(piece, Node) and len(piece.outputs) == 1 and base_name(piece.op) in _RESHAPING:
            source = piece.inputs[0]
            if source.node in calls and uses[source] == 1 and len(piece.inputs) == 1:
                followed[piece.name] = source
    return followed


def _roles(
    nodes: Sequence[Node], entering: Sequence[str], followed: Mapping[str, Ref], uses: Mapping[Ref, int]
) -> dict[Ref, str]:
    """Return the roles of tensors in the calls that read them: queries, logits, the residual stream."""
    roles: dict[Ref, str] = {}
    stream = {Ref(name) for name in entering[:1]}
    ops = {node.name: base_name(node.op) for node in nodes}
    for node in nodes:
        for ref, role in zip(node.inputs, ROLES.get(base_name(node.op), ()), strict=False):
            while ref.node in followed:
                ref = followed[ref.node]
            roles.setdefault(ref, role)
    for node in nodes:
        op, result = base_name(node.op), Ref(node.name)
        if op in ("cos", "sin"):
            roles[result] = op
        elif op == "cat" and roles.get(result) == "angles" and len(set(node.inputs)) == 1:
            roles.setdefault(node.inputs[0], "half_angles")
        elif op == "mul" and any(ops.get(ref.node) in _GATES for ref in node.inputs):
            roles.setdefault(result, "gated")
        elif op == "add" and stream.intersection(node.inputs) and uses.get(result, 0) > 1:
            stream.add(result)
            roles[result] = "residual"
    return roles


def _plain(node: Node) -> str:
    if node.op in (WINDOW_ATTENTION, SINK_ATTENTION):  # these replace calls with other names
        return base_name(node.op)
    if node.op == BAGS:
        return "bags"
    return node.name.rstrip("0123456789").rstrip("_") or node.name


def _module_wishes(nodes: tuple[Node, ...], followed: Mapping[str, Ref]) -> dict[str, str]:
    """Map the last node of each module that calls in one stretch only to the module's name.

    If that node only reshapes the module's result, the call that computes the result gets the name. Modules of one name
    get that of the module around them in front (`attn_c_proj`, `mlp_c_proj`), and those of a list their number
    (`linears_1`).
    """
    stretches: dict[str, list[Node]] = {}
    repeated: set[str] = set()
    for module, group in groupby(nodes, key=lambda node: node.module):
        if module in stretches:
            repeated.add(module)
        stretches[module] = list(group)
    parents = {module.rpartition(".")[0] for module in stretches}
    leaves = [m for m in stretches if m and not m.isdigit() and m not in repeated and m not in parents]
    counts = Counter(module.rpartition(".")[2] for module in leaves)
    wishes = {}
    for module in leaves:
        path, stretch = module.split("."), stretches[module]
        is_alone = counts[path[-1]] == 1 and not path[-1].isdigit()
        last, members = stretch[-1].name, {node.name for node in stretch}
        while last in followed and followed[last].node in members:
            last = followed[last].node
        wishes[last] = "_".join(path[-1:] if is_alone else path[-2:])
    return wishes


def _unique(wish: str, taken: set[str]) -> str:
    base = "".join(c if f"_{c}".isidentifier() else "_" for c in unicodedata.normalize("NFKC", wish))
    if base[:1].isdigit():
        base = f"n{base}"
    elif not is_plain_name(base) or base.startswith("__"):
        base = f"{base.lstrip('_')}_"
    name = free_name(shortened(base), taken)
    taken.add(name)
    return name


def free_name(wish: str, taken: Collection[str]) -> str:
    """Return the wish, or the wish with the first number that makes it free."""
    name, count = wish, 2
    while name in taken:
        name, count = f"{wish}_{count}", count + 1
    return name
