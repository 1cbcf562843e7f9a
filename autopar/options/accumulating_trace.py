"""Graphs of a model for every number of rows, with the proof of what micro-batches of so many must do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import torch

from autopar.errors import TraceError
from autopar.frontend.rebatch import LEAST_ROWS, BatchedTrace
from autopar.ir.graph import Graph, Node, Ref, TensorMeta
from autopar.options.batch_shares import WholeBatchError
from autopar.options.micro_batches import accumulation
from autopar.options.scopes import scopes_of
from autopar.rules.execute import call_op


class AccumulatingTrace(BatchedTrace):
    """A trace whose graphs of fewer rows than the batch know how micro-batches of them make it (`accumulation`).

    source: equal for traces that give the same graphs, but for that.
    """

    def __init__(self, trace: Callable[[int], Graph], global_batch_size: int, source: Hashable = None) -> None:
        super().__init__(trace)
        self.source = source
        self._batch_size = global_batch_size
        self._proven: dict[int, Graph | str] = {}

    def __call__(self, rows: int) -> Graph:
        """The graph of a micro-batch; without a proof (`whole_batch_reason`) it is good for prices only."""
        found = self._proof(rows)
        return found if isinstance(found, Graph) else self._graph(rows)

    def whole_batch_reason(self, count: int) -> str | None:
        """Why the batch cannot be cut into `count` equal micro-batches, or None."""
        if count == 1 or self._batch_size % count:
            return None
        found = self._proof(self._batch_size // count)
        return found if isinstance(found, str) else None

    def has_first_pass(self, count: int) -> bool:
        """Whether a step of `count` equal micro-batches runs their forwards twice; False without a proof."""
        if count == 1 or self._batch_size % count:
            return False
        found = self._proof(self._batch_size // count)
        return isinstance(found, Graph) and found.has_first_pass

    def _graph(self, rows: int) -> Graph:
        """What the whole batch's program does with `rows` of its rows.

        A model traced with one row may be another program (it expands nothing, and squeezes more): where the graphs of
        more rows tell what they do with one, that is taken.
        """
        if rows < LEAST_ROWS <= self._batch_size:
            for more in (self._batch_size, LEAST_ROWS, 2 * LEAST_ROWS):
                super().__call__(more)
            found = super().estimate(rows)
            if all(_makes_its_shapes(node, scope.metas) for scope in scopes_of(found) for node in scope.nodes):
                return found
        return super().__call__(rows)

    def _proof(self, rows: int) -> Graph | str:
        if rows not in self._proven:
            try:
                graph = self._graph(rows)
            except TraceError as error:  # as batch norm over a single row
                if rows == self._batch_size:
                    raise
                self._proven[rows] = f"the model cannot be run on {rows} of the rows: {error.constraint}"
                return self._proven[rows]
            self._proven[rows] = graph
            if rows < self._batch_size and self._batch_size % rows == 0:
                try:
                    made = accumulation(super().__call__(self._batch_size), graph)
                    self._proven[rows] = replace(graph, accumulation=made)
                except WholeBatchError as error:
                    self._proven[rows] = str(error)
        return self._proven[rows]


def _makes_its_shapes(node: Node, metas: Mapping[Ref, TensorMeta]) -> bool:
    """Whether a call makes the shapes that its graph says: at one row, `squeeze` would not.

    Found by calling it on tensors without memory; what is made from sizes alone has them.
    """
    if not node.inputs:
        return True
    empty = [torch.empty(metas[ref].shape, dtype=metas[ref].dtype, device="meta") for ref in node.inputs]
    try:
        made = call_op(node.op, node.args, node.kwargs, empty, device="meta")
    # Shapes that do not fit, a row that is not there, an operator that cannot do without memory, statistics of a single
    # value (batch norm): torch raises many kinds.
    except Exception:
        return False
    return [tuple(x.shape) for x in made if isinstance(x, torch.Tensor)] == [meta.shape for meta in node.outputs]
