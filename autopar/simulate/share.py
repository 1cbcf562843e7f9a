"""What one rank has of the model: the graph of its tokens and experts, and what follows from that graph alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.costs.layer_costs import LayerCost
from autopar.costs.price import Pricer
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import find_cuts, trace
from autopar.ir.chain import chain, homes_of
from autopar.ir.graph import layer_names
from autopar.options.scopes import scopes_of
from autopar.options.strategies import Operator
from autopar.planning.request import Request
from autopar.planning.solved_layers import SolvedLayers
from autopar.simulate.context import check_context, shortened, with_whole_keys
from autopar.simulate.experts import experts_of, share_of_experts
from autopar.simulate.fusion import Key, Part, fused_parts
from autopar.simulate.matrices import matrices_of

ShareTrace = Callable[[int, int], BatchedTrace]
"""(cp, ep) -> the model with the cp-th part of a row's tokens and the ep-th part of its experts, for any number of
rows."""


@dataclass
class ScoredLayers(SolvedLayers):
    """Layers solved under a profile's prices. priced: the planner's prices -> the profile's. cp: ranks whose keys and
    values every attention call sees."""

    priced: Callable[[Pricer], Pricer] = field(kw_only=True)
    cp: int = field(default=1, kw_only=True)
    _whole: dict[int, dict[tuple[str, str], Operator]] = field(default_factory=dict)

    def pricer(self, mesh: Any) -> Pricer:
        """The profile's prices on a solved layer's mesh."""
        return self.priced(super().pricer(mesh))

    def priced_for(self, request: Request) -> ScoredLayers:
        """The same decisions on other nodes, those that are not made yet among them."""
        return ScoredLayers(request, priced=self.priced, cp=self.cp, _assignments=self._assignments)

    def operators(self, rows: int) -> dict[tuple[str, str], Operator]:
        """The calls of the graph at `rows` rows over all ranks, with the keys that attention sees."""
        if self.cp == 1:
            return super().operators(rows)
        if rows not in self._whole:
            self._whole[rows] = with_whole_keys(super().operators(rows), self.cp)
        return self._whole[rows]


@dataclass
class Setting:
    """What strategies have in common that run on one cluster under one profile with the same pins."""

    request: Request
    solved_layers: ScoredLayers
    costs: dict[Any, Mapping[str, LayerCost]] = field(default_factory=dict)


class Share:
    """One rank's share of the model. Raises ConstraintError where cp ranks cannot share the attention."""

    def __init__(self, traced: BatchedTrace, cp: int) -> None:
        self.traced = traced
        self.rows = 2
        graph = traced(self.rows)
        traced(2 * self.rows)
        if cp > 1:
            check_context(graph, cp)
        self.graph = graph
        self.units, self.layers = chain(graph), layer_names(graph)
        self.homes, self.scopes = homes_of(graph), scopes_of(graph)
        self.experts = experts_of(graph)
        self.matrices = matrices_of(graph, self.experts)
        self.settings: dict[Any, Setting] = {}
        self._parts: dict[str, Mapping[Key, Part]] = {}

    def parts(self, fusion: str) -> Mapping[Key, Part]:
        """The fused calls under `fusion`."""
        if fusion not in self._parts:
            self._parts[fusion] = fused_parts(self.graph, fusion)
        return self._parts[fusion]


def tracer_of(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None,
    dtype: torch.dtype | None,
) -> ShareTrace:
    """Traces `model` itself. batch: by name."""
    with share_of_experts(model, 1):
        cuts = find_cuts(model, batch, loss_fn)

    def at(cp: int, ep: int) -> BatchedTrace:
        part = shortened(batch, cp)

        def at_rows(rows: int) -> Any:
            with share_of_experts(model, ep):
                return trace(model, part, loss_fn, batch_size=rows, param_dtype=dtype, cuts=cuts)

        return BatchedTrace(at_rows)

    return at
