"""What forward and backward of every block do and keep, parameters left out: calls, reshards, recompute modes.

A block's seconds are the sum over its calls and over the steps of its reshards. Layers of one class may lie in several
runs and are one block: what differs from run to run is charged with a run's share of the layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

from autopar.costs.block_costs import BlockCost, BusySeconds
from autopar.costs.kernels import as_run
from autopar.costs.liveness import Walk, is_free
from autopar.costs.overlap import Overlaps, Site
from autopar.costs.passed import Known, passed
from autopar.costs.placer import Placer
from autopar.costs.price import Pricer
from autopar.costs.recompute_modes import recompute_modes
from autopar.costs.saved import saved_tensors
from autopar.ir.chain import chain, segments
from autopar.ir.graph import Graph, LayerRun, Node, Ref, TensorMeta
from autopar.ir.placement import Placements, R
from autopar.options.choices import Choices
from autopar.options.reshard import steps
from autopar.options.strategies import Operator, Scope, scopes_of


def activity_costs(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    choices: Choices,
    known: Known | None = None,
) -> dict[str, BlockCost]:
    """What forward and backward do and keep, without parameters: it depends on the shape of one data-parallel rank's
    micro-batch, and not on how many such ranks there are. known: programs of the model that were lowered already."""
    return _Meter(graph, operators, pricer, choices, known).measure()


def activity_seconds(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    choices: Choices,
    known: Known | None = None,
) -> dict[str, BusySeconds]:
    """The seconds of every block, as `activity_costs` has them, without counting any bytes."""
    costs = _Meter(graph, operators, pricer, choices, known).measure(with_bytes=False)
    return {
        name: BusySeconds(cost.forward_seconds + cost.backward_seconds, cost.weight_seconds, cost.beside_seconds)
        for name, cost in costs.items()
    }


class _Meter:
    """Fills in the blocks of a graph one kind of cost at a time."""

    def __init__(
        self,
        graph: Graph,
        operators: Mapping[tuple[str, str], Operator],
        pricer: Pricer,
        choices: Choices,
        known: Known | None,
    ) -> None:
        self.passed = passed(graph, operators, pricer, choices, {} if known is None else known)
        self.priced = graph, operators, self.passed.priced(pricer), choices
        self.graph, self.operators, self.pricer, self.choices = self.priced
        self.searched = pricer
        self.scopes = {scope.name: scope for scope in scopes_of(graph)}
        self.place = Placer(graph, choices)
        self.overlaps = Overlaps(graph, operators, pricer)
        self.segment = segments(graph)
        self.costs: dict[str, BlockCost] = defaultdict(BlockCost)

    def measure(self, with_bytes: bool = True) -> dict[str, BlockCost]:
        """All blocks; without bytes there are only seconds, and no modes."""
        self.costs |= {name: BlockCost() for name in chain(self.graph)}
        for scope in self.scopes.values():
            self._compute(scope)
            if with_bytes:
                self._keep(scope)
        self._moves()
        for scope in self.scopes.values():
            if scope.layer and with_bytes:
                own = self.costs[scope.name]
                own.modes = recompute_modes(*self.priced, scope, own)
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
            block.putting_off_seconds += self.pricer.putting_off_seconds(operator)

    def _keep(self, scope: Scope) -> None:
        """What the calls of a scope keep, and what is alive while they run."""
        names = (p.name for p in (scope.layer.parameters if scope.layer else ()))
        parameters = frozenset(p.name for p in self.graph.parameters) | frozenset(names)
        kept = saved_tensors(scope.nodes, scope.metas, parameters)
        for node in scope.nodes:
            operator, option = self.operators[scope.name, node.name], self.choices.operators[scope.name, node.name]
            saved = self.searched.saved_bytes(operator, option, kept.get(node.name, ()))
            self._block(scope, node.name).activation_bytes += saved
        where = partial(self.place.where, scope)
        scope, operators, choices = as_run(scope, self.operators, self.choices, self.passed.fusions)
        kept = saved_tensors(scope.nodes, scope.metas, parameters, partial(self._copied, scope, choices))
        unnamed = {call for name, call in self.passed.unnamed if name == scope.name}
        for name, (nodes, ends) in self._pieces(scope).items():
            own = scope, nodes, operators, choices, self.pricer, where, kept, parameters, ends
            self.costs[name].live = Walk(*own, unnamed).measure()

    def _copied(self, scope: Scope, choices: Choices, node: Node, ref: Ref) -> Placements | None:
        """How an input lies that is resharded for a call, where that copies it."""
        source = self.place.where(scope, ref)
        target = choices.operators[scope.name, node.name].inputs[node.inputs.index(ref)]
        path = steps(source, target, self.pricer.mesh.sizes) or ()
        return None if is_free(path) else target

    def _pieces(self, scope: Scope) -> dict[str, tuple[tuple[Node, ...], list[tuple[Ref, Placements]]]]:
        """The calls of every block of a scope, and its results as they lie when it ends."""
        if scope.layer:
            run = next(p for p in self.graph.body if isinstance(p, LayerRun) and p.layer.name == scope.name)
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

    # --- reshards -----------------------------------------------------------------------------------------------------

    def _moves(self) -> None:
        """Every reshard that the plan pays for, as in space.py."""
        for scope in self.scopes.values():
            for node in scope.nodes:
                option, block = self.choices.operators[scope.name, node.name], self._block(scope, node.name)
                for position, ref in enumerate(node.inputs):
                    source, target, site = self.place.where(scope, ref), option.inputs[position], (scope.name, ref)
                    hidden = self._hidden(site, source, target)
                    self._move(block, source, target, scope.metas[ref], hidden=hidden)
                for index, placements in enumerate(option.outputs):
                    kept = self.choices.tensors.get((scope.name, Ref(node.name, index)))
                    if kept is not None:
                        site = scope.name, Ref(node.name, index)
                        hidden = self._hidden(site, placements, kept, is_kept=True)
                        self._move(block, placements, kept, node.outputs[index], hidden=hidden)
        nearest = next(iter(self.segment.values()), "")
        for piece in self.graph.body:
            nearest = self.segment.get(piece.name, nearest)
            if isinstance(piece, LayerRun):
                self._run_moves(piece, self.costs[nearest])
        loss, top = self.graph.loss, self.scopes[""]
        self._move(
            self._block(top, loss.node), self.place.where(top, loss), (R,) * len(self.pricer.mesh.axes), top.metas[loss]
        )

    def _hidden(self, site: Site, source: Placements, target: Placements, is_kept: bool = False) -> float:
        """Seconds of a reshard that run beside weight gradients, where the program has it so."""
        return self.overlaps.seconds(site, source, target, is_kept) if site in self.passed.facts.overlapped else 0.0

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
        self,
        block: BlockCost,
        source: Placements,
        target: Placements,
        meta: TensorMeta,
        share: float = 1.0,
        hidden: float = 0.0,
    ) -> None:
        """share: of the block's layers that do it. hidden: seconds of the last step's backward beside other work."""
        path = steps(source, target, self.pricer.mesh.sizes) or ()
        for index, step in enumerate(path):
            forward, backward = self.pricer.step_seconds(step, meta)
            axis = self.pricer.mesh.axes[step.axis]
            kind = f"{step.backward} {axis}" if step.backward else "local resharding"
            if hidden and index == len(path) - 1:
                block.beside[kind] += hidden * share
                backward -= hidden
            block.forward[f"{step.forward} {axis}" if step.forward else "local resharding"] += forward * share
            block.backward[kind] += backward * share
