"""Which call of a plan's model each call of a miniature is: names do not say, as casts and versions of an operator
number them anew (a model in bf16 has casts that one in fp32 lacks).

The calls of a layer class are compared in their order, by operator and module, and those that follow one another alike
are the same; a call has a counterpart only if it takes and gives as many tensors.
"""

from __future__ import annotations

from difflib import SequenceMatcher

from autopar.ir.graph import Graph, Node
from autopar.options.scopes import scopes_of

Key = tuple[str, str]
"""(layer class or "", call)"""


def counterparts(large: Graph, small: Graph) -> dict[Key, Key]:
    """Calls of the small graph -> those of the large one that they stand for."""
    of_large = {scope.name: scope.nodes for scope in scopes_of(large)}
    found: dict[Key, Key] = {}
    for scope in scopes_of(small):
        own, other = scope.nodes, of_large.get(scope.name, ())
        matcher = SequenceMatcher(None, [_kind(n) for n in own], [_kind(n) for n in other], autojunk=False)
        for at, to, count in matcher.get_matching_blocks():
            pairs = zip(own[at : at + count], other[to : to + count], strict=True)
            found |= {(scope.name, one.name): (scope.name, two.name) for one, two in pairs}
    return found


def _kind(node: Node) -> tuple[str, str, int, int]:
    return node.op, node.module, len(node.inputs), len(node.outputs)
