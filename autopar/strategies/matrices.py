"""The matrices of a model and the calls between them: frameworks define tensor parallelism in these terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costs.price import FREE
from autopar.ir.chain import homes_of, segments
from autopar.ir.graph import Graph, Node, Parameter, base_name, view_root
from autopar.ir.placement import R, S
from autopar.operators.traits import ATTENTION, MATMULS, VIEWS
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.settings.constraints import Constraints
from autopar.sharding.scopes import scopes_of
from cost_models.framework_profiles import Framework


@dataclass(frozen=True, slots=True)
class Matrices:
    """shapes: of every matrix that a matmul reads, and of embeddings, by pattern of the name. experts: patterns of the
    matrices that a matmul by expert reads. weights: multiply-adds per token of a unit's matrices. sequences: calls with
    a result of [rows, tokens, width]. residuals: the sequences between matrices, such as norms and additions to the
    residual stream."""

    shapes: Mapping[str, tuple[int, ...]]
    experts: tuple[str, ...]
    weights: Mapping[str, float]
    sequences: tuple[str, ...]
    residuals: tuple[str, ...]

    def names(self, tp: int) -> tuple[str, ...]:
        """The names of the matrices that can be cut into tp parts; of experts, each of them."""
        return tuple(n for n, shape in self.shapes.items() if all(size % tp == 0 for size in shape[-2:]))


def matrices_of(graph: Graph) -> Matrices:
    """The matrices of a graph."""
    shapes: dict[str, tuple[int, ...]] = {}
    weights: dict[str, float] = {}
    sequences, residuals, of_experts = [], [], []
    homes = homes_of(graph)
    for scope in scopes_of(graph):
        by_name = {p.name: p for p in (scope.layer.parameters if scope.layer else graph.parameters)}
        nodes = {node.name: node for node in scope.nodes}
        modules = {node.module for node in scope.nodes if _multiplies_by_expert(node, nodes, by_name)}
        largest = max((p.meta.numel for p in by_name.values()), default=0)
        for node in scope.nodes:
            meta = node.outputs[0]
            is_expert = node.module in modules
            if len(meta.shape) == 3 and meta.requires_grad and not is_expert:
                sequences.append(node.name)
                width = scope.layer.inputs[0][1].shape[-1:] if scope.layer else ()
                if meta.shape[-1:] == width and base_name(node.op) not in MATMULS | ATTENTION | VIEWS | FREE:
                    residuals.append(node.name)
            for ref in node.inputs:
                ref = view_root(ref, nodes)
                if ref.node not in by_name or len(by_name[ref.node].meta.shape) != (3 if is_expert else 2):
                    continue
                shape, name = by_name[ref.node].meta.shape, base_name(node.op)
                if name in MATMULS:
                    where = scope.name or homes.get(node.name, "")
                    where = where or segments(graph)[node.name]
                    used = _rows_of_expert(node, shape[0]) / _num_tokens(graph) if is_expert else 1.0
                    weights[where] = weights.get(where, 0.0) + math.prod(shape) * used
                if name in MATMULS or (name == "embedding" and by_name[ref.node].meta.numel == largest):
                    pattern = f"*.{ref.node}" if scope.layer else ref.node
                    shapes[pattern] = shape
                    if node.op == EXPERT_LINEAR:
                        of_experts.append(pattern)
    return Matrices(
        shapes=shapes,
        experts=tuple(of_experts),
        weights=weights,
        sequences=tuple(sequences),
        residuals=tuple(residuals),
    )


def _multiplies_by_expert(node: Node, nodes: Mapping[str, Node], parameters: Mapping[str, Parameter]) -> bool:
    """Whether a matmul reads a parameter that has a matrix for each expert."""
    roots = [view_root(ref, nodes).node for ref in node.inputs] if base_name(node.op) in MATMULS else []
    return any(root in parameters and len(parameters[root].meta.shape) == 3 for root in roots)


def _num_tokens(graph: Graph) -> int:
    """Tokens of a graph's batch, by its first input of two dims or more."""
    return next((math.prod(i.meta.shape[:2]) for i in graph.inputs if len(i.meta.shape) > 1), graph.batch_size)


def _rows_of_expert(node: Node, num_experts: int) -> float:
    """Rows that a matmul by expert has for one expert, of equal numbers."""
    rows = node.outputs[0].shape
    return rows[0] / num_experts if node.op == EXPERT_LINEAR else rows[1]


def pinned(matrices: Matrices, limits: Constraints, profile: Framework, sp: bool, cp_has_experts: bool) -> Constraints:
    """Return the constraints that forbid all kinds of context and tensor parallelism except the framework's. Every tp
    rank has a shard of each expert. Ranks of cp have all experts, or different ones (cp_has_experts)."""
    cp, tp = (limits.degrees.get(axis, 1) for axis in ("cp", "tp"))
    parameters, activations = limits.forbid_parameters, limits.forbid_activations
    if cp > 1:
        limits = replace(limits, context=limits.context or profile.cp_exchange.replace("-", "_"))
        cut_by_expert = tuple((name, (("cp", S(0)),)) for name in matrices.experts)
        if cp_has_experts:
            limits = replace(limits, parameters=limits.parameters + cut_by_expert)
        else:
            parameters += cut_by_expert
    if tp > 1:
        limits = replace(limits, etp=(limits.etp or tp) if matrices.experts else None)
        if profile.shards_weights:
            parameters += tuple((name, (("tp", R),)) for name in matrices.names(tp))
        if not sp:
            activations += tuple((name, (("tp", S(1)),)) for name in matrices.sequences)
        elif profile.shards_weights:
            activations += tuple((name, (("tp", R),)) for name in matrices.residuals)
    return replace(limits, forbid_parameters=parameters, forbid_activations=activations)
