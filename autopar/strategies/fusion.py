"""Memory-bound calls that run as one kernel, with the tensors that each kernel reads and writes."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.costs.framework_kernels import Key, Part
from autopar.costs.price import FREE
from autopar.ir.graph import Graph, LayerRun, Node, Ref, base_name, view_root
from autopar.operators.traits import ATTENTION, MATMULS, VIEWS
from autopar.sharding.scopes import Scope, scopes_of

ALONE = MATMULS | ATTENTION | {"embedding", "cross_entropy_loss", "layer_norm", "rms_norm"}
"""Calls that are kernels of their own however much is fused."""

REDUCTIONS = frozenset({"mean", "sum", "var", "softmax"})


def fused_parts(graph: Graph, fusion: str) -> Mapping[Key, Part]:
    """(scope, call) -> its part, for calls that are fused with others. fusion: see cost_models.framework_profiles."""
    if fusion == "calls":
        return {}
    read_elsewhere = {ref for piece in graph.body if isinstance(piece, LayerRun) for ref in piece.args} | {graph.loss}
    fused: dict[Key, Part] = {}
    for scope in scopes_of(graph):
        leaving = set(scope.layer.outputs) if scope.layer else read_elsewhere
        fused |= {(scope.name, name): part for name, part in _parts(scope, fusion, leaving).items()}
    return fused


def _parts(scope: Scope, fusion: str, leaving: set[Ref]) -> dict[str, Part]:
    nodes = {node.name: node for node in scope.nodes}
    roots = _groups(scope, nodes, fusion)
    groups: dict[str, list[Node]] = {}
    for node in scope.nodes:
        if node.name in roots:
            groups.setdefault(roots[node.name], []).append(node)
    readers: dict[Ref, set[str]] = {}
    for node in scope.nodes:
        for ref in node.inputs:
            if base_name(node.op) not in VIEWS:
                readers.setdefault(view_root(ref, nodes), set()).add(roots.get(node.name, node.name))
    gone = {view_root(ref, nodes) for ref in leaving}
    parts = {}
    for root, members in groups.items():
        if len(members) < 2:
            continue
        names, seen = {node.name for node in members}, set[Ref]()
        for index, node in enumerate(members):
            reads = []
            for ref in node.inputs:
                base = view_root(ref, nodes)
                reads.append(base.node not in names and base not in seen)
                seen.add(base)
            outputs = [Ref(node.name, i) for i in range(len(node.outputs))]
            writes = tuple(ref in gone or bool(readers.get(ref, set()) - {root}) for ref in outputs)
            parts[node.name] = Part(tuple(reads), writes, index == 0)
    return parts


def _groups(scope: Scope, nodes: Mapping[str, Node], fusion: str) -> dict[str, str]:
    """Pointwise call -> the first call of its kernel."""
    norms = {node.module for node in scope.nodes if base_name(node.op) in REDUCTIONS}
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    for node in scope.nodes:
        if base_name(node.op) in ALONE | VIEWS or (base_name(node.op) in FREE - {"to"}):
            continue
        parent[node.name] = node.name
        for ref in node.inputs:
            other = nodes.get(view_root(ref, nodes).node)
            if other is None or other.name not in parent:
                continue
            is_chain = fusion == "chains" and node.module not in norms and other.module not in norms
            if node.module == other.module or is_chain:
                first, second = root(other.name), root(node.name)
                parent[second] = first
    return {name: root(name) for name in parent}
