"""Sums of input gradients over ranks that overlap weight gradients (codegen/passes/overlap.py).

The backward of a reshard to Rp sums over ranks. If only linear layers read its result, programs start that sum as soon
as they have the input's gradient, and compute the weights' gradients meanwhile. Let b be the seconds of the sum alone,
w those of all these weights' gradients, and h the share of w in which a sum is assumed to run (collectives take
multiprocessors from concurrent products). Then

    hidden = min(b, h w)

is subtracted from the reshard on the edges of the search, and in predictions if the program overlaps it (emitted.py).

A tensor that several layers read is resharded from its producer to its kept placement. There its readers are known, but
not their options. A reader of the kept placement, Rp on some axes, has its result cut on these. So w follows from the
placement alone: the least of all options that read the tensor so. A reader of another placement is not joined; the
search counts the sum as hidden even so, since an edge does not see it. Conversely, reshards from the kept placement to
one of several readers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from autopar.costs.price import Pricer
from autopar.costs.rates import num_local_dim
from autopar.ir.graph import Graph, LayerRun, Ref, TensorMeta, derived
from autopar.ir.placement import Placements, Rp
from autopar.sharding.call_options import Operator, num_local
from autopar.sharding.fusible_runs import unsharded, unsharded_call
from autopar.sharding.reshard import Step, steps
from autopar.sharding.scopes import scopes_of
from codegen.fusion.match import Flow
from codegen.passes.linear_calls import ADDMM, readers_of
from cost_models import compute

Site = tuple[str, Ref]
"""Name of a tensor: (scope, tensor)."""


class Overlaps:
    """Hidden seconds of a graph's reshards. Stores no decision."""

    def __init__(self, graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer) -> None:
        self._operators, self._pricer = operators, pricer
        self._layers = joined_layers(graph) if pricer.rates.overlap_share else {}
        self._metas = {scope.name: scope.metas for scope in scopes_of(graph)}
        self._seconds: dict[tuple[str, str, Placements], float] = {}

    def seconds(self, site: Site, source: Placements, target: Placements, is_kept: bool = False) -> float:
        """Return the hidden seconds of a tensor's reshard for its only reader, or (is_kept) from its producer to its
        kept placement."""
        if source == target or not self._is_priced(site, is_kept):
            return 0.0
        path, readers = steps(source, target, self._pricer.mesh.sizes), self._readers(site)
        return self.hidden(self._metas[site[0]][site[1]], target, path[-1], readers) if path and readers else 0.0

    def hidden(self, meta: TensorMeta, target: Placements, last: Step, readers: Iterable[Operator]) -> float:
        """Return the hidden seconds of a reshard to `target` if its last step's sum overlaps these layers'
        gradients."""
        covering = 0.0
        for reader in readers:
            key = reader.scope, reader.node.name, target
            if key not in self._seconds:
                self._seconds[key] = self._weight_seconds(reader, meta, target)
            covering += self._seconds[key]
        return self._pricer.rates.hidden_seconds(last, meta, covering)

    def reshard_matrix(
        self, site: Site, sources: tuple[Placements, ...], targets: tuple[Placements, ...], is_kept: bool = False
    ) -> np.ndarray:
        """Return the seconds of `Rates.reshard_matrix` less hidden ones."""
        matrix = self._pricer.rates.reshard_matrix(sources, targets, self._metas[site[0]][site[1]])
        if self._is_priced(site, is_kept):
            pairs = {(s, t): self.seconds(site, s, t, is_kept) for s in set(sources) for t in set(targets)}
            matrix = matrix - np.array([[pairs[s, t] for t in targets] for s in sources])
        return matrix

    def is_joined(self, site: Site, is_kept: bool = False) -> bool:
        """Return whether the tensor's readers are one call with the sum if this reshard has one."""
        return self._is_priced(site, is_kept) and bool(self._readers(site))

    def _is_priced(self, site: Site, is_kept: bool) -> bool:
        return site in self._layers and is_kept == (len(self._layers[site]) > 1)

    def _readers(self, site: Site) -> list[Operator]:
        """Return the layers if they are the only readers of a tensor; none if programs do not join them."""
        readers = [self._operators[site[0], name] for name in self._layers[site]]
        return readers if all(map(self._is_joined, readers)) else []

    def _is_joined(self, operator: Operator) -> bool:
        """Return whether torch's call computes the layer: calls in fp8 and in kernels are not joined."""
        if self._pricer.fusion(operator) is not None:
            return False
        return not (self._pricer.fp8 is not None and operator.scope)

    def _weight_seconds(self, operator: Operator, x: TensorMeta, placements: Placements) -> float:
        """Return the seconds of the gradients of a layer's weight and bias if x has `placements`; Rp means that the
        result is cut."""
        pricer, result = self._pricer, operator.node.outputs[0]
        mesh = pricer.mesh
        ways = math.prod(n for p, n in zip(placements, mesh.sizes, strict=True) if p == Rp)
        depth, columns = num_local_dim(x, placements, mesh), max(result.shape[-1] // ways, 1)
        rows = max(num_local(x, placements, mesh) // depth, 1)
        bias, weight = _bias_and_weight(operator)
        elements = rows * depth + depth * columns + rows * columns + (columns if bias is not None else 0)
        work = compute.Work(
            kind="matmul",
            flops=2.0 * rows * depth * columns,
            num_bytes=elements * result.dtype.itemsize,
            dtype=pricer.contractions.dtype_name(result),
            shape=(columns, depth, rows),
        )
        metas = dict(zip(operator.node.inputs, operator.inputs, strict=True))
        seconds = compute.seconds(work, pricer.cluster.device) if metas[weight].requires_grad else 0.0
        if bias is not None and metas[bias].requires_grad:
            seconds += pricer.rates.memory_seconds(rows * columns * result.dtype.itemsize)
        return seconds


def _bias_and_weight(operator: Operator) -> tuple[Ref | None, Ref]:
    args = operator.node.args
    if operator.node.op == ADDMM:
        return args[0], args[2]
    return (args[2] if len(args) > 2 else None), args[1]


# --- which layers are joined ------------------------------------------------------------------------------------------


@derived
def joined_layers(graph: Graph) -> Mapping[Site, tuple[str, ...]]:
    """Return tensor -> the linear layers that are its only readers. Programs make one call of them if the tensor is
    resharded to Rp, as codegen/passes/linear_calls.py finds them in unsharded code."""
    joined: dict[Site, tuple[str, ...]] = {}
    for scope in scopes_of(graph):
        stored = {p.name for p in (scope.layer.parameters if scope.layer else graph.parameters)}
        body = tuple(unsharded_call(node, scope.metas, stored) for node in scope.nodes)
        outputs = scope.layer.outputs if scope.layer else tuple(_read_beside(graph))
        flow = Flow.of(body, tuple(unsharded(ref, scope.metas[ref], stored) for ref in outputs))
        position_of = {Ref(*result.type.tensor): index for index, call in enumerate(body) for result in call.results}
        for ref, meta in scope.metas.items():
            readers = None if ref.node in stored else readers_of(unsharded(ref, meta), position_of.get(ref, -1), flow)
            if readers is not None:
                joined[scope.name, ref] = tuple(layer.call.results[0].type.tensor[0] for layer in readers.layers)
    return joined


def _read_beside(graph: Graph) -> Iterator[Ref]:
    """Yield the top-level tensors that layers read, and the loss."""
    yield graph.loss
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            yield from piece.args
