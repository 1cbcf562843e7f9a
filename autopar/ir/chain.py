"""A model as a chain of units: what runs between layers, and each layer, in execution order.

A unit is a run of top-level calls between layers ("top 0", "top 1", ...) or one layer of a class (the class' name).
The calls of a model without layers (a perceptron, a network whose one layer is called again and again) are several
units, which begin at calls with trained parameters where few tensors cross.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.graph import UPDATE_BUFFER, Graph, LayerRun, Node, Ref, derived, repeated_calls

MOST_UNITS = 16
"""Into so many at most the calls of a model without layers are divided."""


@derived
def segments(graph: Graph) -> dict[str, str]:
    """Top-level call -> its unit: "top 0" before the first layers, and so on."""
    found: dict[str, str] = {}
    number, is_open = -1, False
    begins = _beginnings(graph)
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            is_open = False
            continue
        if not is_open or piece.name in begins:
            number, is_open = number + 1, True
        found[piece.name] = f"top {number}"
    return found


def _beginnings(graph: Graph) -> frozenset[str]:
    """Calls of a model without layers at which a unit begins: where the fewest tensors cross, spread evenly.

    All batch sizes have the same ones: nothing of it depends on sizes.
    """
    if any(isinstance(piece, LayerRun) for piece in graph.body):
        return frozenset()
    places = list(_crossings(graph))
    most = max(sorted(count for _, count in places)[: MOST_UNITS - 1], default=0)
    narrow = [name for name, count in places if count <= most]
    step = max(1.0, len(narrow) / (MOST_UNITS - 1))
    return frozenset(narrow[int(index * step)] for index in range(min(len(narrow), MOST_UNITS - 1)))


def _crossings(graph: Graph) -> Iterator[tuple[str, int]]:
    """Calls that read a trained parameter, with the number of tensors that earlier calls make for it and later ones.

    Left out are those ahead of which there is nothing but what every stage computes itself, and those that a tensor
    without a gradient crosses, a buffer that is read and updated on both sides among them.
    """
    repeats, trained = repeated_calls(graph), {p.name for p in graph.parameters if p.meta.requires_grad}
    first = {ref: index for index, piece in reversed([*enumerate(graph.body)]) for ref in piece.inputs}
    last = {ref: index for index, piece in enumerate(graph.body) for ref in piece.inputs}
    last[graph.loss] = len(graph.body)
    updated = {Ref(name) for name in updated_buffers(graph)}
    made: dict[Ref, bool] = {}
    for index, piece in enumerate(graph.body):
        crossing = [has_gradient for ref, has_gradient in made.items() if last.get(ref, -1) >= index]
        crossing += [False for ref in updated if first[ref] < index <= last[ref]]
        if crossing and all(crossing) and any(ref.node in trained for ref in piece.inputs):
            yield piece.name, len(crossing)
        if piece.name not in repeats:
            made |= {Ref(piece.name, i): meta.requires_grad for i, meta in enumerate(piece.outputs)}


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


@derived
def uncut(graph: Graph) -> tuple[int, ...]:
    """Units ahead of which no stage begins: a unit that does nothing but what every stage makes itself (masks, tables,
    padding of the batch), and updates buffers by it, is in the stage of the next one: it has nothing to send."""
    units, repeats = chain(graph), repeated_calls(graph)
    updates = {piece.name for piece in graph.body if isinstance(piece, Node) and piece.op == UPDATE_BUFFER}
    busy = {unit for name, unit in segments(graph).items() if name not in repeats | updates}
    busy |= {piece.layer.name for piece in graph.body if isinstance(piece, LayerRun)}
    found = {index + 1 if index + 1 < len(units) else index for index, name in enumerate(units) if name not in busy}
    return tuple(sorted(found))


def most_stages(graph: Graph) -> int:
    """Into so many stages at most the chain can be cut."""
    return len(chain(graph)) - len(uncut(graph))


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


def updated_buffers(graph: Graph) -> tuple[str, ...]:
    """Top-level buffers that top-level calls update."""
    return tuple(p.inputs[0].node for p in graph.body if isinstance(p, Node) and p.op == UPDATE_BUFFER)


@derived
def buffer_across_units(graph: Graph) -> str:
    """A buffer that one unit reads and another one updates, which a pipeline could divide; "" without such."""
    updated = set(updated_buffers(graph))
    found: dict[str, set[str]] = {}
    own, layers = segments(graph), 0
    for piece in graph.body:
        layers += isinstance(piece, LayerRun)
        unit = f"layers {layers}" if isinstance(piece, LayerRun) else own[piece.name]
        for ref in piece.inputs:
            if ref.node in updated:
                found.setdefault(ref.node, set()).add(unit)
    return next((name for name, units in found.items() if len(units) > 1), "")
