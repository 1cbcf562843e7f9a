"""Pad experts to a number that a degree divides: no row chooses experts of padding.

Weights of E experts [E, ...] get matrices of zeros at their end. Ids of experts are below E, so no row is multiplied by
padding: its gradient is 0, and an elementwise update keeps it zero.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar.frontend.padding.vocabulary import lengthened
from autopar.ir.graph import Graph, LayerRun, Node, Parameter, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import SAME_VALUES
from autopar.rules.families.experts import EXPERT_LINEAR


def with_whole_shares(graph: Graph, multiple: int) -> Graph:
    """Return the graph with numbers of experts that `multiple` divides, wherever that is exact; itself if nowhere."""
    runs = [piece for piece in graph.body if isinstance(piece, LayerRun)]
    longer: dict[str, int] = {}
    layers = {run.layer.name: run.layer for run in runs}
    for name, layer in layers.items():
        padded_dims = _weights(layer.nodes, layer.parameters, set(layer.outputs), multiple)
        parameters = tuple(
            _padded(parameter, padded_dims.get(Ref(parameter.name), 0)) for parameter in layer.parameters
        )
        layers[name] = replace(layer, parameters=parameters, nodes=_rewritten(layer.nodes, padded_dims))
        paths = [path for run in runs if run.layer.name == name for path in run.instances]
        longer |= {f"{path}.{ref.node}": more for path in paths for ref, more in padded_dims.items()}
    nodes = tuple(piece for piece in graph.body if isinstance(piece, Node))
    parameters_left = [p for p in graph.parameters if p.name not in longer]
    padded_dims = _weights(nodes, parameters_left, {ref for run in runs for ref in run.args}, multiple)
    longer |= {p.name: padded_dims[Ref(p.name)] for p in parameters_left if Ref(p.name) in padded_dims}
    if not longer:
        return graph
    rewritten = iter(_rewritten(nodes, padded_dims))
    body = tuple(
        replace(piece, layer=layers[piece.layer.name]) if isinstance(piece, LayerRun) else next(rewritten)
        for piece in graph.body
    )
    parameters = tuple(_padded(parameter, longer.get(parameter.name, 0)) for parameter in graph.parameters)
    return replace(graph, parameters=parameters, body=body, experts_padded_to=multiple)


def _weights(
    nodes: Sequence[Node], parameters: Sequence[Parameter], leaving: Collection[Ref], multiple: int
) -> dict[Ref, int]:
    """Return weights of experts, and tensors that they come from, with the number of experts that each lacks.

    Return none for a scope in which another call reads one. leaving: names read outside the scope.
    """
    makers = {Ref(node.name): node for node in nodes if len(node.outputs) == 1}
    metas = {Ref(p.name): p.meta for p in parameters if not p.is_buffer}
    metas |= {ref: node.meta for ref, node in makers.items()}
    layers = [node for node in nodes if node.op == EXPERT_LINEAR]
    chains = [_chain(ref, makers, metas) for layer in layers for ref in (layer.inputs[1], *layer.inputs[3:])]
    refs = {ref for chain in chains for ref in chain}
    is_alone = refs.isdisjoint(leaving) and all(
        (node.op == EXPERT_LINEAR and position in (1, 3)) or Ref(node.name) in refs
        for node in nodes
        for position, ref in enumerate(node.inputs)
        if ref in refs
    )
    lacking = {ref: -metas[ref].shape[0] % multiple for ref in refs} if is_alone and all(chains) else {}
    return {ref: more for ref, more in lacking.items() if 0 < more < multiple <= metas[ref].shape[0]}


def _chain(ref: Ref, makers: dict[Ref, Node], metas: dict[Ref, TensorMeta]) -> list[Ref]:
    """Return a weight and its sources, back to a parameter; () if a call on the way may mix experts."""
    chain = [ref]
    while chain[-1] in makers:
        node = makers[chain[-1]]
        name, arguments, num_dims = base_name(node.op), arguments_of(node), len(node.meta.shape)
        is_same = name in SAME_VALUES and len(node.inputs) == 1
        is_turned = name == "transpose" and all(arguments[dim] % num_dims for dim in ("dim0", "dim1"))
        if not is_same and not is_turned:
            return []
        chain.append(node.inputs[0])
    return chain if chain[-1] in metas else []


def _rewritten(nodes: Sequence[Node], padded_dims: dict[Ref, int]) -> tuple[Node, ...]:
    return tuple(
        replace(node, outputs=(lengthened(node.meta, 0, padded_dims[Ref(node.name)]),))
        if Ref(node.name) in padded_dims
        else node
        for node in nodes
    )


def _padded(parameter: Parameter, more: int) -> Parameter:
    return replace(parameter, meta=lengthened(parameter.meta, 0, more), padding=more) if more else parameter
