"""A model as a chain of units: what runs between layers, and each layer, in execution order.

A unit is a run of top-level calls between layers ("top 0", "top 1", ...) or one layer of a class (the class' name).
"""

from __future__ import annotations

from autopar.ir.graph import Graph, LayerRun, Node, derived


@derived
def segments(graph: Graph) -> dict[str, str]:
    """Top-level call -> its unit: "top 0" before the first layers, and so on."""
    found: dict[str, str] = {}
    number, is_open = -1, False
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            is_open = False
            continue
        if not is_open:
            number, is_open = number + 1, True
        found[piece.name] = f"top {number}"
    return found


@derived
def chain(graph: Graph) -> tuple[str, ...]:
    """The name of every unit in execution order: "top 0", then each layer's class, and so on."""
    top, units = segments(graph), list[str]()
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            units += [piece.layer.name] * len(piece.instances)
        elif not units or units[-1] != top[piece.name]:
            units.append(top[piece.name])
    return tuple(units)


def homes_of(graph: Graph) -> dict[str, str]:
    """Top-level parameter -> the unit that uses it first (layers that get it passed in count for the top)."""
    own, found = segments(graph), dict[str, str]()
    nearest = next(iter(own.values()), "")
    for piece in graph.body:
        nearest = own.get(piece.name, nearest)
        for ref in piece.inputs:
            found.setdefault(ref.node, nearest)
    return found


def home_of_unread(graph: Graph) -> str:
    """The unit whose stage holds what no call reads: the first that is there once."""
    return next(iter(segments(graph).values()), chain(graph)[0])


@derived
def last_readers(graph: Graph) -> dict[str, str]:
    """What the body's pieces read -> the unit that reads it last."""
    own = segments(graph)
    return {
        ref.node: piece.layer.name if isinstance(piece, LayerRun) else own[piece.name]
        for piece in graph.body
        for ref in piece.inputs
    }


def nodes_of(graph: Graph, unit: str) -> tuple[Node, ...]:
    """The calls of a top-level unit."""
    own = segments(graph)
    return tuple(p for p in graph.body if isinstance(p, Node) and own[p.name] == unit)
