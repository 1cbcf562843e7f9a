"""Experts that a degree does not divide: the graph gets experts of padding, which no row chooses.

Weights of E experts [E, ...] get matrices of zeros at their end. Ids of experts are below E, so that no row is
multiplied by padding: its gradient is 0, and with an elementwise update it stays zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import Graph, LayerRun, Node, Parameter, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.rules.experts import EXPERT_LINEAR

_SAME = frozenset({"to", "contiguous", "clone", "alias"})


def with_whole_shares(graph: Graph, multiple: int) -> Graph:
    """The graph with numbers of experts that `multiple` divides, wherever that is exact; itself where none is so."""
    longer: dict[str, int] = {}
    layers = {piece.layer.name: piece.layer for piece in graph.body if isinstance(piece, LayerRun)}
    lengthened = {}
    for name, layer in layers.items():
        found = _weights(layer.nodes, layer.parameters, multiple)
        parameters = tuple(_padded(each, found.get(Ref(each.name), 0)) for each in layer.parameters)
        lengthened[name] = replace(layer, parameters=parameters, nodes=_rewritten(layer.nodes, found))
        paths = [path for p in graph.body if isinstance(p, LayerRun) and p.layer.name == name for path in p.instances]
        longer |= {f"{path}.{ref.node}": more for path in paths for ref, more in found.items()}
    nodes = tuple(piece for piece in graph.body if isinstance(piece, Node))
    own = {p.name for p in graph.parameters} - longer.keys()
    found = _weights(nodes, [p for p in graph.parameters if p.name in own], multiple)
    longer |= {ref.node: more for ref, more in found.items() if ref.node in own}
    if not longer:
        return graph
    body = tuple(
        replace(piece, layer=lengthened[piece.layer.name])
        if isinstance(piece, LayerRun)
        else next(iter(_rewritten((piece,), found)))
        for piece in graph.body
    )
    parameters = tuple(_padded(each, longer.get(each.name, 0)) for each in graph.parameters)
    return replace(graph, parameters=parameters, body=body, experts_padded_to=multiple)


def _weights(nodes: Sequence[Node], parameters: Sequence[Parameter], multiple: int) -> dict[Ref, int]:
    """Weights of experts, and what they are made of, with the experts that each lacks; none of those that something
    else reads."""
    makers = {Ref(node.name): node for node in nodes if len(node.outputs) == 1}
    metas = {Ref(p.name): p.meta for p in parameters if not p.is_buffer}
    metas |= {ref: node.meta for ref, node in makers.items()}
    users: dict[Ref, list[tuple[Node, int]]] = {}
    for node in nodes:
        for position, ref in enumerate(node.inputs):
            users.setdefault(ref, []).append((node, position))
    found: dict[Ref, int] = {}
    for layer in (node for node in nodes if node.op == EXPERT_LINEAR):
        chains = [_chain(ref, makers, metas) for ref in (layer.inputs[1], *layer.inputs[3:])]
        refs = {ref for chain in chains for ref in chain}
        is_alone = all(
            (user.op == EXPERT_LINEAR and position in (1, 3)) or Ref(user.name) in refs
            for ref in refs
            for user, position in users.get(ref, ())
        )
        if is_alone and all(chains):
            found |= {ref: -metas[ref].shape[0] % multiple for ref in refs}
    return {ref: more for ref, more in found.items() if 0 < more < multiple <= metas[ref].shape[0]}


def _chain(ref: Ref, makers: dict[Ref, Node], metas: dict[Ref, TensorMeta]) -> list[Ref]:
    """A weight and what it is made of, back to a parameter; () where some call on the way looks at the experts."""
    chain = [ref]
    while chain[-1] in makers:
        node = makers[chain[-1]]
        name, arguments, num_dims = base_name(node.op), arguments_of(node), len(node.meta.shape)
        is_same = name in _SAME and len(node.inputs) == 1
        is_turned = name == "transpose" and all(arguments[dim] % num_dims for dim in ("dim0", "dim1"))
        if not is_same and not is_turned:
            return []
        chain.append(node.inputs[0])
    return chain if chain[-1] in metas else []


def _rewritten(nodes: Sequence[Node], found: dict[Ref, int]) -> tuple[Node, ...]:
    return tuple(
        replace(node, outputs=(_longer(node.meta, found[Ref(node.name)]),)) if Ref(node.name) in found else node
        for node in nodes
    )


def _padded(parameter: Parameter, more: int) -> Parameter:
    return replace(parameter, meta=_longer(parameter.meta, more), padding=more) if more else parameter


def _longer(meta: TensorMeta, more: int) -> TensorMeta:
    return replace(meta, shape=(meta.shape[0] + more, *meta.shape[1:]))
