"""A model as a chain of units in execution order: each layer, and the calls between layers.

A unit is a run of top-level calls between layers ("top 0", "top 1", ...) or one layer of a class (named after it). A
model without layers (a perceptron, or a network that calls its one layer repeatedly) is divided into several units.
These begin at calls with trained parameters where few tensors cross.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.graph import UPDATE_BUFFER, Graph, LayerRun, Node, Ref, derived, repeated_calls

MOST_UNITS = 16
"""The most units into which the calls of a model without layers are divided."""


@derived
def segments(graph: Graph) -> dict[str, str]:
    """Map each top-level call to its unit: "top 0" before the first layers, and so on."""
    unit_of: dict[str, str] = {}
    number, is_open = -1, False
    begins = _beginnings(graph)
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            is_open = False
            continue
        if not is_open or piece.name in begins:
            number, is_open = number + 1, True
        unit_of[piece.name] = f"top {number}"
    return unit_of


def _beginnings(graph: Graph) -> frozenset[str]:
    """Return the calls of a model without layers at which a unit begins: where the fewest tensors cross, spread evenly.

    They do not depend on sizes, so all batch sizes have the same ones.
    """
    if any(isinstance(piece, LayerRun) for piece in graph.body):
        return frozenset()
    places = list(_crossings(graph))
    most = max(sorted(count for _, count in places)[: MOST_UNITS - 1], default=0)
    narrow = [name for name, count in places if count <= most]
    step = max(1.0, len(narrow) / (MOST_UNITS - 1))
    return frozenset(narrow[int(index * step)] for index in range(min(len(narrow), MOST_UNITS - 1)))


def _crossings(graph: Graph) -> Iterator[tuple[str, int]]:
    """Yield calls that read a trained parameter, with the number of tensors that cross from earlier to later calls.

    Two kinds of calls are left out: those preceded only by calls that every stage repeats, and those crossed by a
    tensor without a gradient, such as a buffer that is read and updated on both sides.
    """
    repeats, trained = repeated_calls(graph), {p.name for p in graph.parameters if p.meta.requires_grad}
    first = {ref: index for index, piece in reversed([*enumerate(graph.body)]) for ref in piece.inputs}
    last = {ref: index for index, piece in enumerate(graph.body) for ref in piece.inputs}
    last[graph.loss] = len(graph.body)
    updated = {Ref(name) for name in updated_buffers(graph)}
    produced: dict[Ref, bool] = {}
    for index, piece in enumerate(graph.body):
        crossing = [has_gradient for ref, has_gradient in produced.items() if last.get(ref, -1) >= index]
        crossing += [False for ref in updated if first[ref] < index <= last[ref]]
        if crossing and all(crossing) and any(ref.node in trained for ref in piece.inputs):
            yield piece.name, len(crossing)
        if piece.name not in repeats:
            produced |= {Ref(piece.name, i): meta.requires_grad for i, meta in enumerate(piece.outputs)}


@derived
def chain(graph: Graph) -> tuple[str, ...]:
    """Return the name of every unit in execution order: "top 0", then each layer's class, and so on."""
    top, units = segments(graph), list[str]()
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            units += [piece.layer.name] * len(piece.instances)
        elif not units or units[-1] != top[piece.name]:
            units.append(top[piece.name])
    return tuple(units)


@derived
def uncut(graph: Graph) -> tuple[int, ...]:
    """Return units before which no stage begins.

    A unit that only computes what every stage repeats (masks, tables, padding of the batch), or updates buffers from
    it, has nothing to send. It shares a stage with the next unit.
    """
    units, repeats = chain(graph), repeated_calls(graph)
    updates = {piece.name for piece in graph.body if isinstance(piece, Node) and piece.op == UPDATE_BUFFER}
    busy = {unit for name, unit in segments(graph).items() if name not in repeats | updates}
    busy |= {piece.layer.name for piece in graph.body if isinstance(piece, LayerRun)}
    idle = [index for index, name in enumerate(units) if name not in busy]
    return tuple(sorted({index + 1 if index + 1 < len(units) else index for index in idle}))


def most_stages(graph: Graph) -> int:
    """Return the most stages into which the chain can be cut."""
    return len(chain(graph)) - len(uncut(graph))


def homes_of(graph: Graph) -> dict[str, str]:
    """Map each top-level parameter to the unit that uses it first; parameters passed into layers belong to the top."""
    unit_of, homes = segments(graph), dict[str, str]()
    nearest = next(iter(unit_of.values()), "")
    for piece in graph.body:
        nearest = unit_of.get(piece.name, nearest)
        for ref in piece.inputs:
            homes.setdefault(ref.node, nearest)
    return homes


def home_of_unread(graph: Graph) -> str:
    """Return the unit whose stage stores parameters that no call reads: the first unit that occurs once."""
    return next(iter(segments(graph).values()), chain(graph)[0])


@derived
def last_readers(graph: Graph) -> dict[str, str]:
    """Map each name that the body reads to the unit that reads it last."""
    unit_of = segments(graph)
    return {
        ref.node: piece.layer.name if isinstance(piece, LayerRun) else unit_of[piece.name]
        for piece in graph.body
        for ref in piece.inputs
    }


def nodes_of(graph: Graph, unit: str) -> tuple[Node, ...]:
    """Return the calls of a top-level unit."""
    unit_of = segments(graph)
    return tuple(p for p in graph.body if isinstance(p, Node) and unit_of[p.name] == unit)


def updated_buffers(graph: Graph) -> tuple[str, ...]:
    """Return the top-level buffers that top-level calls update."""
    return tuple(p.inputs[0].node for p in graph.body if isinstance(p, Node) and p.op == UPDATE_BUFFER)


@derived
def buffer_across_units(graph: Graph) -> str:
    """Return a buffer that one unit reads and another updates, which a pipeline could separate; "" if there is none."""
    updated = set(updated_buffers(graph))
    units_of: dict[str, set[str]] = {}
    unit_of, layers = segments(graph), 0
    for piece in graph.body:
        layers += isinstance(piece, LayerRun)
        unit = f"layers {layers}" if isinstance(piece, LayerRun) else unit_of[piece.name]
        for ref in piece.inputs:
            if ref.node in updated:
                units_of.setdefault(ref.node, set()).add(unit)
    return next((name for name, units in units_of.items() if len(units) > 1), "")
