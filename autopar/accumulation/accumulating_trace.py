"""Trace a model for every number of rows, with the proof of what micro-batches of that size must do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import torch

from autopar.accumulation.batch_shares import WholeBatchError
from autopar.accumulation.micro_batches import accumulation
from autopar.errors import TraceError
from autopar.frontend.rebatch import LEAST_ROWS, BatchedTrace
from autopar.ir.graph import Graph, Node, Ref, TensorMeta
from autopar.ir.operators import call_operator
from autopar.sharding.scopes import scopes_of


class AccumulatingTrace(BatchedTrace):
    """A trace whose graphs of fewer rows know how such micro-batches add up to the batch (`accumulation`).

    source: equal for traces with equal graphs, apart from the accumulation.
    """

    def __init__(self, trace: Callable[[int], Graph], global_batch_size: int, source: Hashable = None) -> None:
        super().__init__(trace)
        self.source = source
        self._batch_size = global_batch_size
        self._proven: dict[int, Graph | str] = {}

    def __call__(self, rows: int) -> Graph:
        """Return the graph of a micro-batch; without a proof (`whole_batch_reason`) it serves only for prices."""
        proof = self._proof(rows)
        return proof if isinstance(proof, Graph) else self._graph(rows)

    def whole_batch_reason(self, count: int) -> str | None:
        """Return why the batch cannot be cut into `count` equal micro-batches, or None."""
        if count == 1 or self._batch_size % count:
            return None
        proof = self._proof(self._batch_size // count)
        return proof if isinstance(proof, str) else None

    def has_first_pass(self, count: int) -> bool:
        """Whether a step of `count` equal micro-batches runs their forwards twice; False without a proof."""
        if count == 1 or self._batch_size % count:
            return False
        proof = self._proof(self._batch_size // count)
        return isinstance(proof, Graph) and proof.has_first_pass

    def _graph(self, rows: int) -> Graph:
        """Return the graph of the whole batch's program for `rows` of its rows.

        A trace with one row can give another program (it does not expand, and squeezes more). If graphs of more rows
        determine the graph of one row, that graph is taken.
        """
        if rows < LEAST_ROWS <= self._batch_size:
            for more in (self._batch_size, LEAST_ROWS, 2 * LEAST_ROWS):
                super().__call__(more)
            estimate = super().estimate(rows)
            if all(_makes_its_shapes(node, scope.metas) for scope in scopes_of(estimate) for node in scope.nodes):
                return estimate
        return super().__call__(rows)

    def _proof(self, rows: int) -> Graph | str:
        if rows not in self._proven:
            try:
                graph = self._graph(rows)
            except TraceError as error:  # for example batch norm over a single row
                if rows == self._batch_size:
                    raise
                self._proven[rows] = f"the model cannot be run on {rows} of the rows: {error.constraint}"
                return self._proven[rows]
            self._proven[rows] = graph
            if rows < self._batch_size and self._batch_size % rows == 0:
                try:
                    proven = accumulation(super().__call__(self._batch_size), graph)
                    self._proven[rows] = replace(graph, accumulation=proven)
                except WholeBatchError as error:
                    self._proven[rows] = str(error)
        return self._proven[rows]


def _makes_its_shapes(node: Node, metas: Mapping[Ref, TensorMeta]) -> bool:
    """Whether a call returns the shapes in its graph; at one row, `squeeze` would not.

    The call runs on tensors without memory. Calls from sizes alone always return their shapes.
    """
    if not node.inputs:
        return True
    empty = [torch.empty(metas[ref].shape, dtype=metas[ref].dtype, device="meta") for ref in node.inputs]
    try:
        results = call_operator(node, empty, device="meta")
    # Shapes that do not fit, a missing row, an operator that needs memory, or statistics of a single value (batch
    # norm): torch raises many kinds of errors.
    except Exception:
        return False
    return [tuple(x.shape) for x in results if isinstance(x, torch.Tensor)] == [meta.shape for meta in node.outputs]
