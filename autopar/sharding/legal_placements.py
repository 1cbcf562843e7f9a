"""The legal placements of tensors that no single call determines: parameters, batch inputs, layer inputs, and tensors
with several uses. The search chooses among them, and edited plans are checked against them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from autopar.ir.graph import Graph, LayerRun, Ref, TensorMeta
from autopar.ir.mesh import Mesh, zero_axes
from autopar.ir.placement import Placement, Placements, R, Rp, S, divides
from autopar.sharding.call_options import Option, expert_parameters, placement_choices
from autopar.sharding.scopes import Scope, scopes_of
from codegen.axis_records import AXES

Uses = dict[Ref, list[tuple[str, str, int]]]
"""(kind, user, position) of every use of every Ref; kind is operator, run, output or loss."""


class LegalPlacements:
    """The legal placements of one graph's tensors on one mesh. options: the available options of every call."""

    def __init__(self, graph: Graph, options: Mapping[tuple[str, str], tuple[Option, ...]], mesh: Mesh) -> None:
        self.graph, self.options, self.mesh = graph, options, mesh
        self.scopes = {scope.name: scope for scope in scopes_of(graph)}
        self.runs = [piece for piece in graph.body if isinstance(piece, LayerRun)]
        self.uses = {name: self._uses_in(scope) for name, scope in self.scopes.items()}
        self._layers = {run.name: run.layer for run in self.runs}
        self._wanted: dict[tuple[str, Ref], frozenset[Placements]] = {}

    def parameter(self, scope: Scope, ref: Ref, meta: TensorMeta) -> tuple[Placements, ...]:
        """Return the placements that consumers request; where one requests a partial sum (a bias), also R. Only expert
        weights are sharded on `cp`."""
        per_axis: list[list[Placement]] = []
        wanted = self.wanted(scope, ref)
        for axis, name in enumerate(self.mesh.axes):
            seen = {placements[axis] for placements in wanted}
            if AXES[name].cuts_sequence and (scope.name, ref) not in expert_parameters(self.graph):
                seen = {p for p in seen if not p.is_shard} or {Rp if meta.requires_grad else R}
            if any(p.kind == "P" for p in seen):
                seen.add(R)
            per_axis.append(sorted(p for p in seen if p.kind != "P") or [R])
        return tuple(c for c in itertools.product(*per_axis) if divides(meta.shape, c, self.mesh.sizes))

    def can_shard(self, meta: TensorMeta, placements: Placements) -> bool:
        """Whether ZeRO may shard a parameter: it is trained, and its gradient is partial over some axis of ZeRO."""
        return meta.requires_grad and bool(zero_axes(self.mesh.axes, placements))

    def batch_input(self, name: str, meta: TensorMeta, batch_dim: int | None) -> tuple[Placements, ...]:
        """Return the placements of a batch tensor, which can be sharded anywhere for free: data axes along the batch,
        `cp` as its users request, other axes along any other dim."""
        per_axis, wanted = [], self.wanted(self.scopes[""], Ref(name))
        for number, axis in enumerate(self.mesh.axes):
            kind = AXES[axis]
            dims = [batch_dim] if kind.cuts_batch else [d for d in range(len(meta.shape)) if d != batch_dim]
            shards = {p[number] for p in wanted} if kind.cuts_sequence else {S(d) for d in dims if d is not None}
            per_axis.append([R, *sorted(p for p in shards if p.is_shard)])
        return tuple(c for c in itertools.product(*per_axis) if divides(meta.shape, c, self.mesh.sizes))

    def tensor(self, scope: Scope, ref: Ref, produced: tuple[Placements, ...] = ()) -> tuple[Placements, ...]:
        """Return the placements of a layer's input or of a tensor with several uses. produced: by its own call."""
        offered = self.wanted(scope, ref) | set(produced)
        offered |= {(R,) * len(self.mesh.axes)} if not offered else set()
        return placement_choices(scope.metas[ref], sorted(offered), self.mesh)

    def wanted(self, scope: Scope, ref: Ref) -> frozenset[Placements]:
        """Return the input placements of all options of all users of `ref`, through layer borders."""
        if (scope.name, ref) not in self._wanted:
            uses = self.uses[scope.name].get(ref, ())
            placements = {
                option.inputs[position]
                for kind, name, position in uses
                if kind == "operator"
                for option in self.options[scope.name, name]
            }
            entered = [(self._layers[name], position) for kind, name, position in uses if kind == "run"]
            for layer, formal in {(layer.name, layer.inputs[position][0]) for layer, position in entered}:
                placements |= self.wanted(self.scopes[layer], Ref(formal))
            self._wanted[scope.name, ref] = frozenset(placements)
        return self._wanted[scope.name, ref]

    def _uses_in(self, scope: Scope) -> Uses:
        uses: Uses = {}
        for node in scope.nodes:
            for position, ref in enumerate(node.inputs):
                uses.setdefault(ref, []).append(("operator", node.name, position))
        if scope.layer:
            for position, ref in enumerate(scope.layer.outputs):
                uses.setdefault(ref, []).append(("output", scope.name, position))
            return uses
        for run in self.runs:
            for position, ref in enumerate(run.args):
                uses.setdefault(ref, []).append(("run", run.name, position))
        uses.setdefault(self.graph.loss, []).append(("loss", "", 0))
        return uses
