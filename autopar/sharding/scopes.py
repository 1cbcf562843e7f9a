"""The top level of a graph and its layer classes as flat lists of calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, LayerClass, LayerRun, Node, Ref, TensorMeta, derived


@dataclass(frozen=True, slots=True)
class Scope:
    """A flat list of nodes with the metas of all refs in it; the layers at `instances` share it."""

    name: str
    nodes: tuple[Node, ...]
    metas: Mapping[Ref, TensorMeta]
    instances: tuple[str, ...] = ("",)
    layer: LayerClass | None = None

    @property
    def count(self) -> int:
        """Return the number of layers that share the scope; 1 for the top level."""
        return len(self.instances)

    def full_names(self, name: str) -> list[str]:
        """Return `name` in the user's model, once per layer."""
        return [f"{path}.{name}".strip(".") for path in self.instances]


@derived
def scopes_of(graph: Graph) -> tuple[Scope, ...]:
    """Return the top level, then each layer class once."""
    top_metas = {Ref(p.name): p.meta for p in graph.parameters} | {Ref(i.name): i.meta for i in graph.inputs}
    top_nodes: list[Node] = []
    classes: dict[str, tuple[LayerClass, tuple[str, ...]]] = {}
    for piece in graph.body:
        top_metas |= {Ref(piece.name, i): meta for i, meta in enumerate(piece.outputs)}
        if isinstance(piece, LayerRun):
            layer, paths = classes.get(piece.layer.name, (piece.layer, ()))
            classes[layer.name] = (layer, paths + piece.instances)
        else:
            top_nodes.append(piece)
    scopes = [Scope("", tuple(top_nodes), top_metas)]
    for layer, paths in classes.values():
        metas = {Ref(name): meta for name, meta in layer.inputs}
        metas |= {Ref(p.name): p.meta for p in layer.parameters}
        metas |= {Ref(n.name, i): meta for n in layer.nodes for i, meta in enumerate(n.outputs)}
        scopes.append(Scope(name=layer.name, nodes=layer.nodes, metas=metas, instances=paths, layer=layer))
    return tuple(scopes)
