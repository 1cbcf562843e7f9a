"""The model that strategies are predicted for: its graph, and the facts that follow from the graph alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.costs.framework_kernels import Key, Part
from autopar.costs.layer_costs import LayerCost
from autopar.costs.price import Pricer
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import find_cuts, trace
from autopar.ir.chain import chain, homes_of
from autopar.ir.graph import Graph, LayerClass, LayerRun, Node, base_name, has_dropout, layer_names
from autopar.operators.traits import ATTENTION
from autopar.planning.request import Request
from autopar.planning.solved_layers import SolvedLayers
from autopar.sharding.scopes import scopes_of
from autopar.strategies.fusion import fused_parts
from autopar.strategies.matrices import matrices_of


@dataclass
class ScoredLayers(SolvedLayers):
    """Layers solved under a profile's prices. priced: the planner's prices -> the profile's."""

    priced: Callable[[Pricer], Pricer] = field(kw_only=True)

    def pricer(self, mesh: Any) -> Pricer:
        """The profile's prices on a solved layer's mesh."""
        return self.priced(super().pricer(mesh))

    def priced_for(self, request: Request) -> ScoredLayers:
        """The same decisions on other nodes, those that are not made yet among them."""
        return ScoredLayers(request, priced=self.priced, prices_all_ranks=True, _assignments=self._assignments)


@dataclass
class Setting:
    """The request and layers that strategies share on one cluster, under one profile, with the same pins."""

    request: Request
    solved_layers: ScoredLayers
    costs: dict[Any, Mapping[str, LayerCost]] = field(default_factory=dict)


def drops_attention(graph: Graph) -> bool:
    """Whether attention of the graph drops probabilities."""
    nodes = (node for scope in scopes_of(graph) for node in scope.nodes)
    return any(base_name(node.op) in ATTENTION and has_dropout(node) for node in nodes)


def without_attention_dropout(graph: Graph) -> Graph:
    """Return the graph with attention that has no dropout.

    A framework's kernels drop attention probabilities while they compute. autopar has no such kernel for keys of
    several ranks, so the planner has no option for such a call.
    """

    def without(node: Node) -> Node:
        if base_name(node.op) not in ATTENTION or not has_dropout(node):
            return node
        kwargs = tuple((name, value) for name, value in node.kwargs if name != "dropout_p")
        return replace(node, args=(*node.args[:4], *(0.0,)[: len(node.args[4:])], *node.args[5:]), kwargs=kwargs)

    @functools.cache
    def in_layer(layer: LayerClass) -> LayerClass:
        return replace(layer, nodes=tuple(map(without, layer.nodes)))

    body = (replace(p, layer=in_layer(p.layer)) if isinstance(p, LayerRun) else without(p) for p in graph.body)
    return replace(graph, body=tuple(body))


class ScoredModel:
    """A model's graph for any number of rows, and the caches that strategies share."""

    def __init__(self, traced: BatchedTrace) -> None:
        self.traced = traced
        self.rows = 2
        graph = traced(self.rows)
        traced(2 * self.rows)
        self.graph = graph
        self.units, self.layers = chain(graph), layer_names(graph)
        self.homes, self.scopes = homes_of(graph), scopes_of(graph)
        self.matrices = matrices_of(graph)
        self.settings: dict[Any, Setting] = {}
        self._parts: dict[str, Mapping[Key, Part]] = {}

    def parts(self, fusion: str) -> Mapping[Key, Part]:
        """The fused calls under `fusion`."""
        if fusion not in self._parts:
            self._parts[fusion] = fused_parts(self.graph, fusion)
        return self._parts[fusion]


def traced_model(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None,
    dtype: torch.dtype | None,
) -> BatchedTrace:
    """Trace `model`, for any number of rows. batch: by name."""
    cuts = find_cuts(model, batch, loss_fn, dtype)
    return BatchedTrace(lambda rows: trace(model, batch, loss_fn, batch_size=rows, param_dtype=dtype, cuts=cuts))
