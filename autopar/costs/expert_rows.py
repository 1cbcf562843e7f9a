"""Seconds in which the rows of expert layers reach the ranks of their experts and return, and their loads.

expert_exchange.py prices one exchange; this module finds its sizes from an expert layer and its option.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.costs.expert_exchange import ID_BYTES, ONCE_PER_NODE, Mixture, Nodes, OncePerNode, nodes_of, pays
from autopar.costs.rates import Rates, num_local_dim
from autopar.ir.mesh import TENSOR_AXES, Mesh
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.sharding.call_options import Operator, Option, num_local, routed_axes
from cost_models import collective, routing
from cost_models.machine import Cluster

ALL_TO_ALL: collective.Kind = "all_to_all"


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The habits of a mixture: how tokens choose experts, and how programs move the rows of expert layers.

    by_node: (scope, call) of a program's expert layers whose rows cross between nodes once per node (emitted.py).
    None without a program: then rows cross so wherever their mixture may and it pays. from_tokens, to_tokens: (scope,
    call) of a program's expert layers whose mixture reads tokens, not copies of them for each choice, and sums rows by
    token in one call (codegen/passes/token_rows.py). None without a program: then all mixtures do. sorts_rows: whether
    the rows of experts are sorted and put back by separate copies, as in generated programs, or by the calls that
    repeat and sum them. skew, capacity_factor: how unevenly tokens choose experts, and the places of each expert by its
    even share of tokens, if tokens beyond them are dropped (cost_models/routing.py). dispatches: the kinds of exchange
    that a framework has for these rows, () for those of generated programs. splits_rows: whether tensor-parallel ranks
    that have the same rows send a part of them each.
    """

    by_node: frozenset[tuple[str, str]] | None = None
    from_tokens: frozenset[tuple[str, str]] | None = None
    to_tokens: frozenset[tuple[str, str]] | None = None
    sorts_rows: bool = True
    skew: float = routing.EXPERT_SKEW
    capacity_factor: float | None = None
    dispatches: tuple[str, ...] = ()
    splits_rows: bool = False

    @property
    def counted_skew(self) -> float:
        """Return the skew of experts whose rows are counted: none if each has equally many places."""
        return self.skew if self.capacity_factor is None else 0.0


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Seconds in which the rows of one expert layer reach the ranks of their experts and return.

    kind: of the exchange (cost_models/dispatch.py). axes: over which rows travel, () if all ranks have all experts.
    forward, backward: of the links. copies: of sorting rows and putting them back, in each direction. hidden: the share
    of the exchange that other computation can hide.
    """

    kind: str = ""
    axes: tuple[int, ...] = ()
    forward: float = 0.0
    backward: float = 0.0
    copies: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True, slots=True)
class RowPrices:
    """Prices of the rows of expert layers on a mesh. experts: how tokens choose experts, and how programs move rows.
    has_kernels: whether kernels sum rows by token (codegen/kernels/token_sums.py)."""

    rates: Rates
    experts: ExpertRows
    has_kernels: bool = False

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the rates."""
        return self.rates.mesh

    @property
    def cluster(self) -> Cluster:
        """Return the cluster of the rates."""
        return self.rates.cluster

    def sorted_bytes(self, operator: Operator, option: Option) -> float:
        """Return the bytes of the sorted rows that enter and leave the experts' products
        (codegen/runtime/experts.py)."""
        pairs = (operator.inputs[0], option.inputs[0]), (operator.node.outputs[0], option.outputs[0])
        return float(sum(num_local(meta, lies, self.mesh) * meta.dtype.itemsize for meta, lies in pairs))

    def load(self, operator: Operator, option: Option) -> float:
        """Return the rows of the fullest rank of an expert layer relative to the mean."""
        if self.experts.capacity_factor is not None:
            return self.experts.capacity_factor
        return fullest_load(operator, option, self.mesh, self.experts.skew)

    def exchange(self, operator: Operator, option: Option) -> RowExchange:
        """Return the seconds in which the rows of an expert layer reach their experts and return.

        Rows are sorted by expert and put back. Where ranks have different experts, rows travel there and back, and
        are sorted again there (codegen/runtime/experts.py). Their gradients do the same. expert_exchange.py prices
        rows that cross between nodes once per node, and the kinds of exchange of other frameworks.
        """
        parts = (operator.inputs[0], option.inputs[0]), (operator.node.outputs[0], option.outputs[0])
        ways = zip(parts, (operator.route.dispatches, operator.route.returns), strict=True)
        moved = [num_local(m, lies, self.mesh) * m.dtype.itemsize for (m, lies), goes in ways if goes]
        axes = routed_axes(option.axes)
        sorting = self.rates.memory_seconds(2 * sum(moved)) if self.experts.sorts_rows else 0.0
        if not axes:
            return RowExchange(copies=sorting)
        load = self.load(operator, option)
        if self.experts.dispatches:
            return self._dispatched(operator, option, moved, load, sorting)
        if self.crosses_once(operator, option):
            return self._once_per_node(operator, option, load)
        sent = sum(self.rates.joint_seconds(ALL_TO_ALL, axes, load * part) for part in moved)
        copies = self.rates.memory_seconds(2 * (1 + load) * sum(moved))
        return RowExchange(kind=ALL_TO_ALL, axes=axes, forward=sent, backward=sent, copies=copies)

    def _dispatched(
        self, operator: Operator, option: Option, moved: list[int], load: float, sorting: float
    ) -> RowExchange:
        """Price rows that travel by the fastest kind of exchange that a framework has. moved: bytes of a rank's rows,
        for each way on which this layer sends them."""
        axes, choices = routed_axes(option.axes), operator.route.choices or 1
        senders = self._senders(option) if self.experts.splits_rows else 1
        rows = num_local(operator.inputs[2], option.inputs[2], self.mesh)
        mixture = Mixture(
            self.rates.group(axes),
            num_experts=operator.inputs[1].shape[0],
            choices=choices,
            tokens=rows / choices / senders,
            load=load,
            skew=self.experts.counted_skew,
        )
        kind = mixture.fastest(self.experts.dispatches, self.cluster)
        sent = sum(replace(mixture, row_bytes=part / rows).seconds(kind, self.cluster) for part in moved)
        return RowExchange(kind=kind.name, axes=axes, forward=sent, backward=sent, copies=sorting, hidden=kind.hidden)

    def _senders(self, option: Option) -> int:
        """Return the number of tensor-parallel ranks that have the same rows of an expert layer."""
        named = zip(self.mesh.axes, self.mesh.sizes, option.inputs[0], strict=True)
        return math.prod(
            size for axis, size, lies in named if axis in TENSOR_AXES and not (lies.is_shard and lies.dim == 0)
        )

    def neighbors(self, num_experts: int, choices: int, axes: tuple[str, ...]) -> int:
        """Return how many consecutive ranks of these flattened axes share a node, if rows of such a mixture cross
        between nodes once per node; 0 if rows go straight."""
        nodes = None if self.experts.dispatches else self._nodes(tuple(map(self.mesh.axes.index, axes)))
        return nodes.neighbors if nodes is not None and pays(nodes, num_experts, choices, self.cluster) else 0

    def crosses_once(self, operator: Operator, option: Option) -> bool:
        """Return whether the rows of an expert layer cross between nodes once per node."""
        axes, choices = routed_axes(option.axes), operator.route.choices
        if self.experts.by_node is not None:
            return (operator.scope, operator.node.name) in self.experts.by_node
        names = tuple(self.mesh.axes[number] for number in axes)
        return bool(axes) and choices > 0 and self.neighbors(operator.inputs[1].shape[0], choices, names) > 0

    def _nodes(self, axes: tuple[int, ...]) -> Nodes | None:
        """Return the nodes of the ranks of these flattened axes, if they span several."""
        return nodes_of(self.rates.group(axes), self.cluster)

    def _once_per_node(self, operator: Operator, option: Option, load: float) -> RowExchange:
        """Price rows that travel there and back by way of the nodes.

        Forward, nodes also receive the choices of the tokens that they get. The gathers and sums of this way replace
        those of the calls that copy, weigh and sum rows, which are priced as separate calls. The sums on the way back
        move no less than these. The copies move N + T rows less than the two gathers on the way there, which move C
        and N.
        """
        way, route = self._way(operator, option), operator.route
        rows, sent, copies, choices = way.tokens * way.choices, 0.0, 0.0, 0.0
        if route.dispatches:
            size = num_local_dim(operator.inputs[0], option.inputs[0], self.mesh) * operator.inputs[0].dtype.itemsize
            sent += way.seconds(size, size, load, self.cluster)
            copies += self.rates.memory_seconds(size * ((2 * load + 1) * rows + 2 * way.copies - way.tokens))
            choices = way.seconds_across(way.choices * ID_BYTES, self.cluster)
        if route.returns:
            output = operator.node.outputs[0]
            width, size = num_local_dim(output, option.outputs[0], self.mesh), output.dtype.itemsize
            sent += way.seconds(width * size, width * route.summed_bytes, load, self.cluster)
            sent += way.seconds_across(way.choices * route.summed_bytes, self.cluster)  # weights, or their gradients
            copies += self.rates.memory_seconds(width * size * 2 * load * rows)
        axes = routed_axes(option.axes)
        return RowExchange(kind=ONCE_PER_NODE, axes=axes, forward=sent + choices, backward=sent, copies=copies)

    def sent_again_seconds(self, operator: Operator, option: Option) -> float:
        """Return the forward seconds of an expert layer that a second run repeats although its products are kept:
        rows travel and are sorted again. The sums that return from nodes are left out: no backward reads them."""
        if operator.node.op != EXPERT_LINEAR:
            return 0.0
        rows = self.exchange(operator, option)
        seconds = rows.forward + rows.copies
        if rows.kind == ONCE_PER_NODE and operator.route.returns and not self.experts.dispatches:
            width = num_local_dim(operator.node.outputs[0], option.outputs[0], self.mesh)
            copy_bytes = width * operator.route.summed_bytes
            seconds -= self._way(operator, option).seconds_across(copy_bytes, self.cluster)
        return seconds

    def copies_behind(self, operator: Operator, option: Option) -> float:
        """Return the seconds that copies by way of the nodes take in backward alone: sums and weights there move more
        rows than the calls that they replace. On the way there they move N + 2 C + T for 3 N + 2 C, on the way back
        8 N + 2 C for 5 N + 2 T."""
        if self.experts.dispatches or not routed_axes(option.axes) or not self.crosses_once(operator, option):
            return 0.0
        way, route, output, moved = self._way(operator, option), operator.route, operator.node.outputs[0], 0.0
        rows, copies = way.tokens * way.choices, way.copies
        if route.dispatches:
            size = num_local_dim(operator.inputs[0], option.inputs[0], self.mesh) * operator.inputs[0].dtype.itemsize
            moved += size * (way.tokens - 2 * rows)
        if route.returns:
            size = num_local_dim(output, option.outputs[0], self.mesh) * output.dtype.itemsize
            moved += size * (3 * rows + 2 * copies - 2 * way.tokens)
        device = self.cluster.device
        return moved / (device.memory_bytes_per_second * device.memory_efficiency)

    def spared_seconds(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Return the seconds (forward, backward) of copies that a program spares where a mixture reads tokens and sums
        by token, of those that `exchange` and the calls around the layer are priced with.

        With N rows of T tokens, tokens are read directly: their copies, N + T forward, are gone. Where kernels sum by
        token, the gradients of rows are not put back first, 2 N. On the way back, rows are neither put back nor
        weighted in memory, 4 N forward, and backward reads and writes 3 N less.
        """
        layer, route = (operator.scope, operator.node.name), operator.route
        if route.choices < 2 or not self.experts.sorts_rows or self.crosses_once(operator, option):
            return 0.0, 0.0
        parts = (operator.inputs[0], option.inputs[0]), (operator.node.outputs[0], option.outputs[0])
        sent, returned = (num_local(meta, lies, self.mesh) * meta.dtype.itemsize for meta, lies in parts)
        forward = backward = 0.0
        if route.dispatches and _has(self.experts.from_tokens, layer):
            forward += sent * (1 + 1 / route.choices)
            backward += 2 * sent if self.has_kernels else 0.0
        if route.returns and self.has_kernels and _has(self.experts.to_tokens, layer):
            forward += 4 * returned
            backward += 3 * returned
        rate = self.cluster.device.memory_bytes_per_second * self.cluster.device.memory_efficiency
        return forward / rate, backward / rate

    def _way(self, operator: Operator, option: Option) -> OncePerNode:
        nodes, choices = self._nodes(routed_axes(option.axes)), operator.route.choices
        assert nodes is not None, "rows cross once on meshes that span nodes"
        tokens = num_local(operator.inputs[2], option.inputs[2], self.mesh) / choices
        return OncePerNode(
            nodes=nodes,
            num_experts=operator.inputs[1].shape[0],
            choices=choices,
            tokens=tokens,
            skew=self.experts.counted_skew,
        )


def _has(layers: frozenset[tuple[str, str]] | None, layer: tuple[str, str]) -> bool:
    """Return whether a program's layers have this one; all are taken to without a program."""
    return layers is None or layer in layers


def fullest_load(operator: Operator, option: Option, mesh: Mesh, skew: float = routing.EXPERT_SKEW) -> float:
    """Return the rows of the fullest rank of an expert layer relative to the mean, if none are dropped. skew: of
    experts (cost_models/routing.py)."""
    axes = routed_axes(option.axes)
    size, choices = math.prod(mesh.sizes[axis] for axis in axes), operator.route.choices or 1
    tokens = num_local(operator.inputs[2], option.inputs[2], mesh) * size / choices
    return routing.fullest_load(size, operator.inputs[1].shape[0], choices, tokens, skew) if axes else 1.0
