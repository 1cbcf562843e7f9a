"""What each block of the model costs under one set of choices: the table that predictions and pipelines are made of.

A block is a run of top-level calls between layers ("top 0", "top 1", ...) or one layer of a class (the class' name).
Every price of space.py falls into exactly one block: a call's into its own, a reshard's into its reader's (into its
maker's where several read what was made once), a parameter's into that of its first use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from autopar.costs.liveness import Liveness, Walk, is_free
from autopar.costs.peak import Slot, slot_of
from autopar.costs.price import ATTENTION, MATMULS, Pricer
from autopar.costs.saved import saved_tensors
from autopar.graph import Graph, LayerRun, Node, Ref, TensorMeta, base_name, derived
from autopar.placement import Placements, R, Stored
from autopar.sharding.choices import Choices
from autopar.sharding.reshard import steps
from autopar.sharding.strategies import Operator, Scope, num_local, scopes_of

SYNCHRONISATION = "gradient and parameter synchronisation"
HIDDEN = "hidden communication"
RECOMPUTATION = "recomputation"
FETCHING = "activations to and from the host"
FIXED_KINDS = ("parameters", "gradients", "optimizer state")
MODES = ("none", "offload", "selective", "full")
"""What a layer keeps for its backward: everything; everything, but with the host; the results of its matmuls and
attention; only its inputs."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A layer under one recompute mode. seconds: more per micro-batch, in the backward. kept_bytes: per micro-batch in
    flight. transient_bytes: while the layer runs, beside what is kept. live: the same step by step."""

    seconds: float
    kept_bytes: float
    transient_bytes: float
    live: Liveness = Liveness()


@dataclass(slots=True)
class BlockCost:
    """Seconds by kind and bytes of one rank for one block.

    forward, backward: per micro-batch. step: once per step. fixed: bytes that stay, by kind. activation_bytes: kept
    per micro-batch without recomputation, as the search of sharding counts them; live.kept with copies of resharded
    tensors that several calls keep. live: what is alive while it runs; gathered_bytes: whole parameters and
    gradients while they are gathered; slots: of each trained parameter. weight_seconds: the part of backward that only
    makes weight gradients of linear layers and can be put off. modes: for layers.
    """

    forward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    step: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    fixed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    activation_bytes: float = 0.0
    live: Liveness = Liveness()
    gathered_bytes: float = 0.0
    slots: tuple[Slot, ...] = ()
    weight_seconds: float = 0.0
    modes: dict[str, Mode] = field(default_factory=dict)

    @property
    def forward_seconds(self) -> float:
        return exposed(self.forward)

    @property
    def backward_seconds(self) -> float:
        return exposed(self.backward)

    @property
    def step_seconds(self) -> float:
        return exposed(self.step)

    @property
    def fixed_bytes(self) -> float:
        return sum(self.fixed.values())

    @property
    def transient_bytes(self) -> float:
        """The most that is alive for a moment beside what is kept, and what is gathered."""
        return max(self.live.forward, self.live.waiting) - self.live.kept + self.gathered_bytes


def exposed(seconds: Mapping[str, float]) -> float:
    """Seconds in which nothing else runs."""
    return sum(value for kind, value in seconds.items() if kind != HIDDEN)


@derived
def segments(graph: Graph) -> dict[str, str]:
    """Top-level call -> its block: "top 0" before the first layers, and so on."""
    found: dict[str, str] = {}
    number, is_open = -1, False
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            is_open = False
            continue
        if not is_open:
            number, is_open = number + 1, True
        found[piece.name] = f"top {number}"
    return found


@derived
def chain(graph: Graph) -> tuple[str, ...]:
    """The block of every link in execution order: "top 0", then each layer's class, and so on."""
    top, blocks = segments(graph), list[str]()
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            blocks += [piece.layer.name] * len(piece.instances)
        elif not blocks or blocks[-1] != top[piece.name]:
            blocks.append(top[piece.name])
    return tuple(blocks)


def block_costs(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, choices: Choices
) -> dict[str, BlockCost]:
    """The cost of every block, by name."""
    activity = activity_costs(graph, operators, pricer, choices)
    return combined(activity, stored_costs(graph, pricer, choices.parameters))


def activity_costs(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, choices: Choices
) -> dict[str, BlockCost]:
    """What forward and backward do and keep, without parameters: it depends on the shape of one data-parallel rank's
    micro-batch, and not on how many such ranks there are."""
    return _Meter(graph, operators, pricer, choices).measure()


def activity_seconds(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, choices: Choices
) -> dict[str, tuple[float, float]]:
    """Block -> (forward and backward, weight gradients) of `activity_costs`, without counting any bytes."""
    costs = _Meter(graph, operators, pricer, choices).measure(with_bytes=False)
    return {name: (cost.forward_seconds + cost.backward_seconds, cost.weight_seconds) for name, cost in costs.items()}


@dataclass
class StoredCost:
    """The parameters of one block: seconds per micro-batch and per step, bytes that stay and that are gathered, and the
    buffers of each trained one, found when they are asked for: bounds ask for seconds only."""

    per_micro: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    per_step: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    fixed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gathered_bytes: float = 0.0
    make_slots: Callable[[], list[Slot]] = list

    @cached_property
    def slots(self) -> list[Slot]:
        """The buffers of each trained parameter."""
        return self.make_slots()


def stored_costs(
    graph: Graph,
    pricer: Pricer,
    chosen: Mapping[tuple[str, str], Stored],
    homes: Mapping[str, str] | None = None,
    scopes: tuple[Scope, ...] | None = None,
) -> dict[str, StoredCost]:
    """Synchronisation, updates and storage of every block's parameters; they do not depend on the batch.

    homes: block of each top-level parameter, by default that of its first use. scopes: of the graph, if they are known.
    """
    home, hidden = homes or homes_of(graph), pricer.hidden_fraction
    metas = {scope.name: scope.metas for scope in scopes or scopes_of(graph)}
    found: dict[str, StoredCost] = defaultdict(StoredCost)
    trained: dict[str, list[Trained]] = defaultdict(list)
    alike: dict[tuple[str, str, Stored, torch.dtype, bool], int] = defaultdict(int)
    units: dict[str, int] = defaultdict(int)
    for (scope, name), stored in chosen.items():
        meta, where = metas[scope][Ref(name)], scope or home[name]
        if meta.requires_grad:
            units[scope] += meta.num_bytes
            trained[where].append(("" if scope else name, meta, stored))
        alike[scope, where, stored, meta.dtype, meta.requires_grad] += meta.numel
    # All prices are linear in the elements of parameters that share buffers: those stored alike are priced as one.
    for (scope, where, stored, dtype, requires_grad), elements in alike.items():
        block, meta = found[where], TensorMeta((elements,), dtype, requires_grad)
        per_micro, per_step = pricer.sync_parts(meta, stored, units[scope])
        for table, exposed in ((block.per_micro, per_micro), (block.per_step, per_step)):
            table[SYNCHRONISATION] += exposed
            table[HIDDEN] += exposed * hidden / (1.0 - hidden)
        block.per_step["optimizer"] += pricer.optimizer_seconds(meta, stored)
        for kind, size in zip(FIXED_KINDS, pricer.parameter_bytes(meta, stored), strict=True):
            block.fixed[kind] += size
        block.gathered_bytes += pricer.gathered_bytes(meta, stored)
    for where, parameters in trained.items():
        found[where].make_slots = partial(_slots, graph, pricer, parameters)
    return found


Trained = tuple[str, TensorMeta, Stored]
"""A trained parameter: its name if it is a top-level one, what it is, how it is stored."""


def _slots(graph: Graph, pricer: Pricer, parameters: list[Trained]) -> list[Slot]:
    last = last_readers(graph)
    return [slot_of(pricer, meta, stored, last.get(name, "")) for name, meta, stored in parameters]


def combined(costs: Mapping[str, BlockCost], stored: Mapping[str, StoredCost]) -> dict[str, BlockCost]:
    """Blocks with their parameters."""
    found = {}
    for name, cost in costs.items():
        own = stored.get(name, StoredCost())
        backward = defaultdict(float, cost.backward)
        for kind, value in own.per_micro.items():
            backward[kind] += value
        modes = {n: replace(m, transient_bytes=m.transient_bytes + own.gathered_bytes) for n, m in cost.modes.items()}
        found[name] = replace(
            cost,
            backward=backward,
            step=own.per_step,
            fixed=own.fixed,
            gathered_bytes=own.gathered_bytes,
            slots=tuple(own.slots),
            modes=modes,
        )
    return found


def homes_of(graph: Graph) -> dict[str, str]:
    """Top-level parameter -> the block that uses it first (layers that get it passed in count for the top)."""
    own, found = segments(graph), dict[str, str]()
    nearest = next(iter(own.values()), "")
    for piece in graph.body:
        nearest = own.get(piece.name, nearest)
        for ref in piece.inputs:
            found.setdefault(ref.node, nearest)
    return found


@derived
def last_readers(graph: Graph) -> dict[str, str]:
    """What the body's pieces read -> the block that reads it last."""
    own = segments(graph)
    return {
        ref.node: piece.layer.name if isinstance(piece, LayerRun) else own[piece.name]
        for piece in graph.body
        for ref in piece.inputs
    }


class Placer:
    """Where every tensor of a graph lies under given choices."""

    def __init__(self, graph: Graph, choices: Choices) -> None:
        self.choices = choices
        self.scopes = {scope.name: scope for scope in scopes_of(graph)}
        self.runs = {piece.name: piece for piece in graph.body if isinstance(piece, LayerRun)}

    def where(self, scope: Scope, ref: Ref) -> Placements:
        """How `ref` lies when it is read."""
        kept = self.choices.tensors.get((scope.name, ref))
        if kept is not None:
            return kept
        stored = self.choices.parameters.get((scope.name, ref.node))
        if stored is not None:
            return stored.placements
        option = self.choices.operators.get((scope.name, ref.node))
        if option is not None:
            return option.outputs[ref.index]
        run = self.runs[ref.node]
        for position, output in run.carried:
            if output == ref.index:
                return self.choices.tensors[run.layer.name, Ref(run.layer.inputs[position][0])]
        return self.where(self.scopes[run.layer.name], run.layer.outputs[ref.index])


class _Meter:
    def __init__(
        self, graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, choices: Choices
    ) -> None:
        self.graph, self.operators, self.pricer, self.choices = graph, operators, pricer, choices
        self.scopes = {scope.name: scope for scope in scopes_of(graph)}
        self.place = Placer(graph, choices)
        self.segment = segments(graph)
        self.costs: dict[str, BlockCost] = defaultdict(BlockCost)

    def measure(self, with_bytes: bool = True) -> dict[str, BlockCost]:
        """All blocks; without bytes there are only seconds, and no modes."""
        for block in chain(self.graph):
            self.costs[block] = BlockCost()
        for scope in self.scopes.values():
            self._compute(scope)
            if with_bytes:
                self._keep(scope)
        self._moves()
        for scope in self.scopes.values():
            if scope.layer and with_bytes:
                self._modes(scope)
        return dict(self.costs)

    def _block(self, scope: Scope, node: str) -> BlockCost:
        return self.costs[scope.name or self.segment[node]]

    def _compute(self, scope: Scope) -> None:
        for node in scope.nodes:
            operator, option = self.operators[scope.name, node.name], self.choices.operators[scope.name, node.name]
            block = self._block(scope, node.name)
            forward, backward = self.pricer.operator_seconds(operator, option)
            kinds = self.pricer.compute_kinds(operator)
            block.forward[kinds[0]] += forward
            block.backward[kinds[1]] += backward
            block.weight_seconds += self.pricer.weight_seconds(operator, option, forward + backward)

    def _keep(self, scope: Scope) -> None:
        """What the calls of a scope keep, and what is alive while they run."""
        names = (p.name for p in (scope.layer.parameters if scope.layer else ()))
        parameters = frozenset(p.name for p in self.graph.parameters) | frozenset(names)
        kept = saved_tensors(scope.nodes, scope.metas, parameters)
        for node in scope.nodes:
            operator, option = self.operators[scope.name, node.name], self.choices.operators[scope.name, node.name]
            saved = self.pricer.saved_bytes(operator, option, kept.get(node.name, ()))
            self._block(scope, node.name).activation_bytes += saved
        where = partial(self.place.where, scope)
        kept = saved_tensors(scope.nodes, scope.metas, parameters, partial(self._copied, scope))
        for name, (nodes, ends) in self._pieces(scope).items():
            own = scope, nodes, self.operators, self.choices, self.pricer, where, kept, parameters, ends
            self.costs[name].live = Walk(*own).measure()

    def _copied(self, scope: Scope, node: Node, ref: Ref) -> Placements | None:
        """How an input lies that is resharded for a call, where that copies it."""
        source = self.place.where(scope, ref)
        target = self.choices.operators[scope.name, node.name].inputs[node.inputs.index(ref)]
        path = steps(source, target, self.pricer.mesh.sizes) or ()
        return None if is_free(path) else target

    def _pieces(self, scope: Scope) -> dict[str, tuple[tuple[Node, ...], list[tuple[Ref, Placements]]]]:
        """The calls of every block of a scope, and its results as they lie when it ends."""
        if scope.layer:
            run = next(self._runs(scope))
            carried = {output: run.layer.inputs[position][0] for position, output in run.carried}
            ends = []
            for index, ref in enumerate(scope.layer.outputs):
                kept = self.choices.tensors.get((scope.name, Ref(carried.get(index, ""))))
                ends.append((ref, kept or self.place.where(scope, ref)))
            return {scope.name: (scope.nodes, ends)}
        found: dict[str, tuple[tuple[Node, ...], list[tuple[Ref, Placements]]]] = {}
        for name in dict.fromkeys(self.segment.values()):
            found[name] = (tuple(n for n in scope.nodes if self.segment[n.name] == name), [])
        leaving = {ref: self.segment[ref.node] for ref in (self.graph.loss,) if ref.node in self.segment}
        for piece in self.graph.body:
            for ref in piece.inputs:
                own = self.segment.get(ref.node)
                if own is not None and own != self.segment.get(piece.name):
                    leaving[ref] = own
        for ref, name in leaving.items():
            found[name][1].append((ref, self.place.where(scope, ref)))
        return found

    # --- reshards ---------------------------------------------------------------------------------------------

    def _moves(self) -> None:
        """Every reshard that the plan pays for, as in space.py."""
        for scope in self.scopes.values():
            for node in scope.nodes:
                option, block = self.choices.operators[scope.name, node.name], self._block(scope, node.name)
                for position, ref in enumerate(node.inputs):
                    self._move(block, self.place.where(scope, ref), option.inputs[position], scope.metas[ref])
                for index, placements in enumerate(option.outputs):
                    kept = self.choices.tensors.get((scope.name, Ref(node.name, index)))
                    if kept is not None:
                        self._move(block, placements, kept, node.outputs[index])
        nearest = next(iter(self.segment.values()), "")
        for piece in self.graph.body:
            nearest = self.segment.get(piece.name, nearest)
            if isinstance(piece, LayerRun):
                self._run_moves(piece, self.costs[nearest])
        loss, top = self.graph.loss, self.scopes[""]
        self._move(
            self._block(top, loss.node), self.place.where(top, loss), (R,) * len(self.pricer.mesh.axes), top.metas[loss]
        )

    def _run_moves(self, run: LayerRun, before: BlockCost) -> None:
        layer = self.scopes[run.layer.name]
        for position, ref in enumerate(run.args):
            target = self.choices.tensors[layer.name, Ref(run.layer.inputs[position][0])]
            self._move(before, self.place.where(self.scopes[""], ref), target, self.scopes[""].metas[ref])
        share = len(run.instances) / layer.count
        for position, output in run.carried:
            target = self.choices.tensors[layer.name, Ref(run.layer.inputs[position][0])]
            ref = run.layer.outputs[output]
            self._move(self.costs[layer.name], self.place.where(layer, ref), target, layer.metas[ref], share)

    def _move(
        self, block: BlockCost, source: Placements, target: Placements, meta: TensorMeta, share: float = 1.0
    ) -> None:
        for step in steps(source, target, self.pricer.mesh.sizes) or ():
            forward, backward = self.pricer.step_seconds(step, meta)
            axis = self.pricer.mesh.axes[step.axis]
            block.forward[f"{step.forward} {axis}" if step.forward else "local resharding"] += forward * share
            block.backward[f"{step.backward} {axis}" if step.backward else "local resharding"] += backward * share

    # --- recomputation ----------------------------------------------------------------------------------------

    def _modes(self, scope: Scope) -> None:
        block = self.costs[scope.name]
        carried = {position for run in self._runs(scope) for position, _ in run.carried}
        inputs = sum(
            self._local_bytes(meta, self.choices.tensors[scope.name, Ref(name)])
            for position, (name, meta) in enumerate(scope.layer.inputs if scope.layer else ())
            if position in carried
        )
        results, costly = 0.0, 0.0
        for node in scope.nodes:
            if base_name(node.op) in MATMULS | ATTENTION and any(meta.requires_grad for meta in node.outputs):
                option = self.choices.operators[scope.name, node.name]
                results += self._local_bytes(node.outputs[0], option.outputs[0])
                costly += self.pricer.operator_seconds(self.operators[scope.name, node.name], option)[0]
        live = block.live
        everything = live.kept
        block.modes["none"] = Mode(0.0, everything, block.transient_bytes, live)
        repeated = live.again + live.leaving
        again = replace(
            live,
            backward=max(live.backward, repeated),
            waiting=max(live.waiting, repeated),
            split=max(live.split, repeated),
        )
        # The host holds everything; while a layer runs backward, its own and the next one's are back.
        copied = everything / self.pricer.cluster.device.host_link_bytes_per_second
        late = max(copied - block.forward_seconds, 0.0) + max(copied - block.backward_seconds, 0.0)
        fetched = replace(
            again,
            backward=again.backward + everything,
            waiting=again.waiting + everything,
            split=again.split + everything,
        )
        transient = max(fetched.forward, fetched.waiting)
        block.modes["offload"] = Mode(late, 0.0, transient, fetched)
        for name, kept, seconds in (
            ("selective", inputs + results, block.forward_seconds - costly),
            ("full", inputs, block.forward_seconds),
        ):
            if kept < everything:
                transient = max(again.forward, again.waiting) - kept
                block.modes[name] = Mode(seconds, kept, transient, again)

    def _runs(self, scope: Scope) -> Iterator[LayerRun]:
        return (p for p in self.graph.body if isinstance(p, LayerRun) and p.layer.name == scope.name)

    def _local_bytes(self, meta: TensorMeta, placements: Placements) -> float:
        size = num_local(meta, placements, self.pricer.mesh) * meta.dtype.itemsize
        return size * (1.0 + self.pricer.fragmentation)


def nodes_of(graph: Graph, block: str) -> tuple[Node, ...]:
    """The calls of a top-level block."""
    own = segments(graph)
    return tuple(p for p in graph.body if isinstance(p, Node) and own[p.name] == block)
