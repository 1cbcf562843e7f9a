"""The placement of every tensor of a graph under an assignment."""

from __future__ import annotations

from autopar.ir.graph import Graph, LayerRun, Ref
from autopar.ir.placement import Placements
from autopar.sharding.assignment import Assignment
from autopar.sharding.scopes import Scope, scopes_of


class Placer:
    """The placement of every tensor of a graph under an assignment."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.assignment = assignment
        self.scopes = {scope.name: scope for scope in scopes_of(graph)}
        self.runs = {piece.name: piece for piece in graph.body if isinstance(piece, LayerRun)}

    def where(self, scope: Scope, ref: Ref) -> Placements:
        """Return the placements of `ref` when it is read."""
        kept = self.assignment.tensors.get((scope.name, ref))
        if kept is not None:
            return kept
        stored = self.assignment.parameters.get((scope.name, ref.node))
        if stored is not None:
            return stored.placements
        option = self.assignment.operators.get((scope.name, ref.node))
        if option is not None:
            return option.outputs[ref.index]
        run = self.runs[ref.node]
        for position, output in run.carried:
            if output == ref.index:
                return self.assignment.tensors[run.layer.name, Ref(run.layer.inputs[position][0])]
        return self.where(self.scopes[run.layer.name], run.layer.outputs[ref.index])
