"""Sums over the batch that are complete before they are read, though a step has several micro-batches.

Calls that are not linear in a sum need it whole. There are two ways to have it:

    before   sums that depend on the batch and on buffers alone (numbers of valid targets, sums of masks) are computed
             ahead of the step (`Accumulation.whole`), unless they need such a sum themselves
    summed   all others by a first pass of the step, the forwards of all micro-batches without gradients. Where one is
             made, the second pass takes the sum in place of the micro-batch's own part (`Accumulation.summed`)

With the sum S of a micro-batch's own parts s_i, the second pass goes on with S + m (s_i - detach(s_i)): its value is
that of the whole batch, and the mean over the m micro-batches of its gradients is S's. The first pass knows no such
sum, so none may be needed to make another. Where one is, what it is a sum of is summed instead: exp(a + exp(b)) with
partial sums a and b needs both of these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from autopar.ir.graph import Graph, LayerRun, Ref, ancestors, repeated_calls
from autopar.ir.placement import R
from autopar.options.batch_shares import Share, Site, WholeBatchError
from autopar.options.scopes import Scope

Key = tuple[str, Ref]
"""A tensor: the layer class that makes it ("": the top level), and which it is there."""


class OthersKnownError(Exception):
    """Raised where a proof has to start again with other sums that are known."""

    def __init__(self, refs: frozenset[Key]) -> None:
        self.refs = refs


class KnownSums:
    """The sums that one walk over a graph takes to be known. graph: of the whole batch."""

    def __init__(self, graph: Graph, refs: frozenset[Key]) -> None:
        self.graph, self.refs = graph, refs
        self._of_batch = repeated_calls(graph) | {i.name for i in graph.inputs}
        self._names = {ref.node for scope, ref in refs if not scope}
        self._is_before = {key: self._may_come_before(*key) for key in refs}

    @cached_property
    def _order(self) -> dict[Key, tuple[int, ...]]:
        """Where the sums stand in the graph."""
        found: dict[tuple[str, str], tuple[int, ...]] = {}
        for number, piece in enumerate(self.graph.body):
            found["", piece.name] = (number,)
            if isinstance(piece, LayerRun):
                for inner, node in enumerate(piece.layer.nodes):
                    found.setdefault((piece.layer.name, node.name), (number, inner))
        return {key: (*found[key[0], key[1].node], key[1].index) for key in self.refs}

    @property
    def before(self) -> tuple[Ref, ...]:
        """Those that are computed ahead of the step, in the order of the graph."""
        return tuple(key[1] for key in sorted(self.refs, key=self._order.__getitem__) if self._is_before[key])

    @property
    def summed(self) -> tuple[Key, ...]:
        """Those that the first pass finds, in the order of the graph."""
        return tuple(key for key in sorted(self.refs, key=self._order.__getitem__) if not self._is_before[key])

    def needs_batch_only(self, ref: Ref) -> bool:
        """Whether a tensor of the top level depends on the batch and on buffers alone."""
        return ref.node in self._of_batch

    def _may_come_before(self, scope: str, ref: Ref) -> bool:
        return not scope and self.needs_batch_only(ref) and not (ancestors(self.graph, ref) & self._names) - {ref.node}

    def check_counted(self, targets: Collection[Ref]) -> None:
        """Raises WholeBatchError for targets, which are counted ahead of the step, that need a sum over the batch."""
        for ref in targets:
            inner = ancestors(self.graph, ref) & self._names
            if inner:
                raise WholeBatchError(
                    f"{ref.node}, whose targets are counted, depends on a sum over the batch, {min(inner)}"
                )

    def key(self, scope: Scope, ref: Ref) -> Key | None:
        """The key of a tensor that is made in this scope; None for one that a layer is given."""
        is_made = scope.layer is None or any(node.name == ref.node for node in scope.layer.nodes)
        return (scope.name, ref) if is_made else None

    def and_inputs(self, site: Site, indices: Sequence[int]) -> OthersKnownError:
        """The error that has these inputs of a call known, too. Raises WholeBatchError where a layer is given one."""
        keys = [self.key(site.scope, site.node.inputs[i]) for i in indices]
        if None in keys:
            raise site.error(
                "is not linear in a sum over the batch that its layer is given, which is not complete then"
            )
        return OthersKnownError(self.refs | {key for key in keys if key is not None})

    def after(self, key: Key, share: Share, has_gradient: bool, parts: Sequence[Key | None] = ()) -> Share:
        """What a result is from where it is made on. parts: the sums over the batch that it is made of."""
        if key not in self.refs:
            return share
        if not share.is_sum:
            raise OthersKnownError(self.refs - {key})
        if self._is_before[key]:
            return Share(R, share.scale)
        if share.is_late:
            if not parts or None in parts:
                raise WholeBatchError(f"{key[1].node}, a sum over the batch, depends on another one")
            raise OthersKnownError(self.refs - {key} | {part for part in parts if part is not None})
        return Share(R, share.scale, is_late=True, has_own_gradient=has_gradient)
