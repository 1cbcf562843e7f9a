"""Sums over the batch that are complete before they are read, although a step has several micro-batches.

Calls that are not linear in a sum need the complete sum. There are two ways to compute it:

    before   sums that depend only on the batch and on buffers (numbers of valid targets, sums of masks) are computed
             before the step (`Accumulation.whole`), unless they need such a sum themselves
    summed   all others in a first pass of the step, the forwards of all micro-batches without gradients. Where such a
             sum is produced, the second pass replaces the micro-batch's part by it (`Accumulation.summed`)

With the sum S of the micro-batches' parts s_i, the second pass continues with S + m (s_i - detach(s_i)). Its value is
that of the whole batch, and the mean of its gradients over the m micro-batches is S's gradient. The first pass does not
have such a sum, so no sum may need another one. If one does, its own partial sums are summed instead: exp(a + exp(b))
with partial sums a and b needs both of these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from autopar.accumulation.batch_shares import Share, Site, WholeBatchError
from autopar.ir.graph import Graph, LayerRun, Ref, ancestors, repeated_calls
from autopar.ir.placement import R
from autopar.sharding.scopes import Scope

Key = tuple[str, Ref]
"""A tensor: the layer class that computes it ("": the top level), and its ref there."""


class OtherSumsError(Exception):
    """Restarts a proof with another set of complete sums."""

    def __init__(self, refs: frozenset[Key]) -> None:
        self.refs = refs


class CompleteSums:
    """The sums that one walk over a graph assumes to be complete. graph: of the whole batch."""

    def __init__(self, graph: Graph, refs: frozenset[Key]) -> None:
        self.graph, self.refs = graph, refs
        self._of_batch = repeated_calls(graph) | {i.name for i in graph.inputs}
        self._names = {ref.node for scope, ref in refs if not scope}
        self._is_before = {key: self._may_come_before(*key) for key in refs}

    @cached_property
    def _order(self) -> dict[Key, tuple[int, ...]]:
        """Return the positions of the sums in the graph."""
        positions: dict[tuple[str, str], tuple[int, ...]] = {}
        for number, piece in enumerate(self.graph.body):
            positions["", piece.name] = (number,)
            if isinstance(piece, LayerRun):
                for inner, node in enumerate(piece.layer.nodes):
                    positions.setdefault((piece.layer.name, node.name), (number, inner))
        return {key: (*positions[key[0], key[1].node], key[1].index) for key in self.refs}

    @property
    def before(self) -> tuple[Ref, ...]:
        """Return the sums computed before the step, in graph order."""
        return tuple(key[1] for key in sorted(self.refs, key=self._order.__getitem__) if self._is_before[key])

    @property
    def summed(self) -> tuple[Key, ...]:
        """Return the sums computed by the first pass, in graph order."""
        return tuple(key for key in sorted(self.refs, key=self._order.__getitem__) if not self._is_before[key])

    def needs_batch_only(self, ref: Ref) -> bool:
        """Whether a top-level tensor depends only on the batch and on buffers."""
        return ref.node in self._of_batch

    def _may_come_before(self, scope: str, ref: Ref) -> bool:
        return not scope and self.needs_batch_only(ref) and not (ancestors(self.graph, ref) & self._names) - {ref.node}

    def check_counted(self, targets: Collection[Ref]) -> None:
        """Raise WholeBatchError if targets, which are counted before the step, need a sum over the batch."""
        for ref in targets:
            inner = ancestors(self.graph, ref) & self._names
            if inner:
                raise WholeBatchError(
                    f"{ref.node}, whose targets are counted, depends on a sum over the batch, {min(inner)}"
                )

    def key(self, scope: Scope, ref: Ref) -> Key | None:
        """Return the key of a tensor computed in this scope; None for an input of a layer."""
        is_made = scope.layer is None or any(node.name == ref.node for node in scope.layer.nodes)
        return (scope.name, ref) if is_made else None

    def and_inputs(self, site: Site, indices: Sequence[int]) -> OtherSumsError:
        """Return the error that adds these inputs of a call. Raises WholeBatchError if one is an input of its layer."""
        keys = [self.key(site.scope, site.node.inputs[i]) for i in indices]
        if None in keys:
            raise site.error(
                "is not linear in a sum over the batch that its layer is given, which is not complete then"
            )
        return OtherSumsError(self.refs | {key for key in keys if key is not None})

    def after(self, key: Key, share: Share, has_gradient: bool, parts: Sequence[Key | None] = ()) -> Share:
        """Return the share of a result for later reads. parts: keys of its partial sums."""
        if key not in self.refs:
            return share
        if not share.is_sum:
            raise OtherSumsError(self.refs - {key})
        if self._is_before[key]:
            return Share(R, share.scale)
        if share.is_late:
            if not parts or None in parts:
                raise WholeBatchError(f"{key[1].node}, a sum over the batch, depends on another one")
            raise OtherSumsError(self.refs - {key} | {part for part in parts if part is not None})
        return Share(R, share.scale, is_late=True, has_own_gradient=has_gradient)
