"""Variable names for generated code, taken from the user's own modules where they say more than the operator's name.

The last call that a leaf module makes is called after the module (`q_proj`, `input_layernorm`); a call between keeps
its operator's name without torch's numbering where that is free.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from autopar.ir.batch_names import batch_key
from autopar.ir.graph import (
    SINK_ATTENTION,
    WINDOW_ATTENTION,
    Graph,
    LayerRun,
    Node,
    Ref,
    base_name,
    derived,
)
from autopar.operators.traits import PERMUTATIONS, RESHAPES, ROLES, SHORT_NAMES
from autopar.options.scopes import scopes_of
from autopar.rules.lookup import BAGS
from codegen.names import is_plain_name, shortened
from codegen.runtime.names import ARGUMENTS, argument

_RESHAPING = RESHAPES | PERMUTATIONS | {"contiguous", "to", "expand"}

RESERVED = ARGUMENTS | {"hidden"}
"""What generated code uses itself, and built-ins that a variable should not hide."""

_GATES = frozenset({"silu", "gelu", "sigmoid"})


@derived
def readable_names(graph: Graph, scope_name: str = "", results: tuple[Ref, ...] = ()) -> dict[Ref, str]:
    """A unique identifier per Ref that the scope defines (inputs, node outputs, run outputs).

    results: what the top level returns, the loss if nothing is given.
    """
    scope = next(each for each in scopes_of(graph) if each.name == scope_name)
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
            own = roles.get(Ref(piece.name, index), wish if len(piece.outputs) == 1 else f"{wish}_{index}")
            names[Ref(piece.name, index)] = _unique(own, taken)
    return names


def uses_of(pieces: Sequence[Node | LayerRun], results: tuple[Ref, ...]) -> dict[Ref, int]:
    """How often the pieces read each tensor, and the results have it."""
    return Counter((*(ref for piece in pieces for ref in piece.inputs), *results))


def _going_on(run: LayerRun, entering: Sequence[str], uses: dict[Ref, int]) -> dict[int, str]:
    """Output position -> name, for what enters a stage under the layers' own name and is theirs alone: it keeps it."""
    found = {}
    for position, output in run.carried:
        ref, formal = run.args[position], run.layer.inputs[position][0]
        if ref.node in entering and ref.node == formal and uses[ref] == 1:
            found[output] = formal
    return found


def _handed_on(
    run: LayerRun, pieces: Sequence[Node | LayerRun], names: Mapping[Ref, str], uses: dict[Ref, int]
) -> dict[int, str]:
    """Output position -> name, for what takes the place of another run's result that is its alone: it keeps the
    name."""
    runs, outputs = {piece.name: piece for piece in pieces if isinstance(piece, LayerRun)}, run.outputs
    alone = (ref for ref in run.args if uses[ref] == 1 and ref.node in runs and ref.index < len(outputs))
    return {ref.index: names[ref] for ref in alone if runs[ref.node].outputs[ref.index] == outputs[ref.index]}


def _followed(pieces: Sequence[Node | LayerRun], uses: dict[Ref, int]) -> dict[str, Ref]:
    """Calls that only reshape the result of one other call, whose only use they are: they take its name over."""
    made = {piece.name for piece in pieces if isinstance(piece, Node)}
    found = {}
    for piece in pieces:
        if isinstance(piece, Node) and len(piece.outputs) == 1 and base_name(piece.op) in _RESHAPING:
            source = piece.inputs[0]
            if source.node in made and uses[source] == 1 and len(piece.inputs) == 1:
                found[piece.name] = source
    return found


def _roles(
    nodes: Sequence[Node], entering: Sequence[str], followed: Mapping[str, Ref], uses: Mapping[Ref, int]
) -> dict[Ref, str]:
    """What tensors are to the calls that read them: queries, logits, the residual stream."""
    found: dict[Ref, str] = {}
    stream = {Ref(name) for name in entering[:1]}
    made = {node.name: base_name(node.op) for node in nodes}
    for node in nodes:
        op, result = base_name(node.op), Ref(node.name)
        for ref, role in zip(node.inputs, ROLES.get(op, ()), strict=False):
            while ref.node in followed:
                ref = followed[ref.node]
            found.setdefault(ref, role)
        if op in ("cos", "sin"):
            found[result] = op
        elif op == "mul" and any(made.get(ref.node) in _GATES for ref in node.inputs):
            found.setdefault(result, "gated")
        elif op == "add" and stream.intersection(node.inputs) and uses.get(result, 0) > 1:
            stream.add(result)
            found[result] = "residual"
    return found


def _plain(node: Node) -> str:
    if node.op in (WINDOW_ATTENTION, SINK_ATTENTION):  # in place of calls of other names
        return base_name(node.op)
    if node.op == BAGS:
        return "bags"
    return node.name.rstrip("0123456789").rstrip("_") or node.name


def _module_wishes(nodes: tuple[Node, ...], followed: Mapping[str, Ref]) -> dict[str, str]:
    """Node name -> module name, for the last node of a module that calls in one stretch only.

    Where that only reshapes what the module has computed, it is the call that has.
    """
    stretches: dict[str, list[Node]] = {}
    repeated: set[str] = set()
    for module, group in groupby(nodes, key=lambda node: node.module):
        if module in stretches:
            repeated.add(module)
        stretches[module] = list(group)
    parents = {module.rpartition(".")[0] for module in stretches}
    wishes = {}
    for module, stretch in stretches.items():
        leaf = module.rpartition(".")[2]
        if leaf and not leaf.isdigit() and module not in repeated and module not in parents:
            last, own = stretch[-1].name, {node.name for node in stretch}
            while last in followed and followed[last].node in own:
                last = followed[last].node
            wishes[last] = leaf
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
    """The wish, or with the first number that makes it a name that is not taken."""
    name, count = wish, 2
    while name in taken:
        name, count = f"{wish}_{count}", count + 1
    return name
