"""One scope, the top level or a layer class, as statements.

Every use of a tensor in other placements than it lies in becomes one reshard statement per step, written once per
(tensor, placements) and placed right before the first use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch

from autopar.graph import Graph, LayerRun, Node, Ref, TensorMeta, ancestors, map_refs
from autopar.lowering.lowerings import lower_call
from autopar.lowering.reshard_calls import reshard_call, traffic_text
from autopar.mesh import Mesh
from autopar.names import readable_names
from autopar.placement import Placements, R
from autopar.rules.localize import local_call
from autopar.sharding.choices import Choices
from autopar.sharding.reshard import Step, steps
from autopar.sharding.strategies import Operator, Scope
from codegen.names import attribute_path
from codegen.program import Call, LayerLoop, LayerRunSpec, Layout, Operand, Reshard, Statement, Var

SUMS = "sums"
"""What forward calls the sums over the whole batch that it is given."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all scopes look things up in.

    graph: of one stage. results: what its forward returns. received: inputs that are tensors of earlier stages.
    defers_weights: linear layers leave their weights' gradients for later (zero-bubble schedules).
    """

    graph: Graph
    operators: Mapping[tuple[str, str], Operator]
    mesh: Mesh
    choices: Choices
    scopes: Mapping[str, Scope]
    results: tuple[Ref, ...]
    received: frozenset[str] = frozenset()
    defers_weights: bool = False


@dataclass
class Lowering:
    """Statements of one scope, with where every tensor lies and under which name it is at hand.

    known: sums over the whole batch that forward is given, and what they are called there.
    """

    shared: Shared
    scope: Scope
    calls_per_layer: Mapping[str, int] = field(default_factory=dict)
    names: dict[Ref, str] = field(default_factory=dict)
    lies: dict[Ref, Placements] = field(default_factory=dict)
    at_hand: dict[tuple[Ref, Placements], Var] = field(default_factory=dict)
    pending: list[Statement] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    losses: list[tuple[Node, Ref, int]] = field(default_factory=list)
    layer_runs: list[LayerRunSpec] = field(default_factory=list)
    num_dropout_calls: int = 0
    known: Mapping[Ref, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choices, scope, graph = self.shared.choices, self.scope, self.shared.graph
        self.names = readable_names(scope, graph, self.shared.results)
        for (owner, name), stored in choices.parameters.items():
            if owner == scope.name:
                self.lies[Ref(name)] = stored.placements
                self.at_hand[Ref(name), stored.placements] = Var(attribute_path(name))
        entering = [name for name, _ in scope.layer.inputs] if scope.layer else [i.name for i in graph.inputs]
        for name in entering:
            ref = Ref(name)
            if (scope.name, ref) in choices.tensors:
                self.define(ref, choices.tensors[scope.name, ref])
        uses: dict[Ref, int] = {}
        for piece in scope.nodes if scope.layer else graph.body:
            for ref in piece.inputs:
                uses[ref] = uses.get(ref, 0) + 1
        for ref in scope.layer.outputs if scope.layer else self.shared.results:
            uses[ref] = uses.get(ref, 0) + 1
        self.uses = uses
        self.taken = set(self.names.values())

    def define(self, ref: Ref, placements: Placements) -> None:
        """`ref` lies in `placements` under its own name."""
        self.lies[ref] = placements
        self.at_hand[ref, placements] = Var(self.names[ref])

    def receive(self, kept: Mapping[str, Placements]) -> None:
        """Tensors of earlier stages go from how they crossed the border to how the plan keeps them."""
        for name, placements in kept.items():
            ref = Ref(name)
            if placements != self.lies[ref]:
                self.use(ref, placements, rename=False)
                self.lies[ref] = placements

    def drain(self) -> list[Statement]:
        """Statements since the last call of drain."""
        found, self.pending = self.pending, []
        return found

    def run(self, pieces: tuple[Node | LayerRun, ...]) -> tuple[Statement, ...]:
        for ref, name in self.known.items():
            where = (R,) * len(self.shared.mesh.axes)
            self.lies[ref], self.at_hand[ref, where] = where, Var(name)
        for piece in pieces:
            if any(Ref(piece.name, index) in self.known for index in range(len(piece.outputs))):
                continue
            if isinstance(piece, LayerRun):
                self.layer_run(piece)
            else:
                self.node(piece)
        return tuple(self.drain())

    def node(self, node: Node) -> None:
        operator = self.shared.operators[self.scope.name, node.name]
        option = self.shared.choices.operators[self.scope.name, node.name]
        arguments = [self.use(ref, where) for ref, where in zip(node.inputs, option.inputs, strict=True)]
        arguments = [self._scaled(node, index, variable) for index, variable in enumerate(arguments)]
        local = local_call(node, operator.rule, option.axes, operator.inputs, self.shared.mesh.sizes)
        values = iter(arguments)
        args = map_refs(local.args, lambda _: next(values))
        kwargs = map_refs(local.kwargs, lambda _: next(values))
        results = tuple(
            self.names[Ref(node.name, i)] if Ref(node.name, i) in self.uses else "" for i in range(len(node.outputs))
        )
        held = tuple(
            (variable.name, Operand(meta.shape, dtype_name(meta.dtype)))
            for variable, meta in zip(arguments, operator.inputs, strict=True)
        )
        call = Call(local.op, args, kwargs, results, node.module, operands=held)
        self.pending.append(lower_call(self, node, operator, option, local, call))
        for index, placements in enumerate(option.outputs):
            ref = Ref(node.name, index)
            self.define(ref, placements)
            kept = self.shared.choices.tensors.get((self.scope.name, ref))
            if kept is not None and kept != placements and ref in self.uses:
                self.use(ref, kept, rename=False)
                self.lies[ref] = kept

    def _scaled(self, node: Node, index: int, variable: Var) -> Var:
        """What a call reads, multiplied as the micro-batches' accumulation says."""
        found = self.shared.graph.accumulation
        scale = found.scales.get((self.scope.name, node.name, index)) if found is not None else None
        return variable if scale is None else self.multiply(variable, scale, node.module)

    def multiply(self, variable: Var, scale: Fraction, section: str) -> Var:
        """A new variable of `scale` times the value, whose placement does not matter."""
        words = re.findall(r"(?<![\w])[A-Za-z_]\w*", variable.name.removeprefix("self."))
        result = self.fresh_name(f"{words[-1]}_scaled")
        op, number = ("div", scale.denominator) if scale.numerator == 1 else ("mul", scale.numerator)
        exact = 1 in (scale.numerator, scale.denominator)
        argument = number if exact else float(scale)
        self.pending.append(Call(f"aten.{op}.Tensor", (variable, argument), (), (result,), section))
        return Var(result)

    def layer_run(self, run: LayerRun) -> None:
        layer = self.shared.scopes[run.layer.name]
        args = []
        for ref, (formal, _) in zip(run.args, run.layer.inputs, strict=True):
            args.append(self.use(ref, self.shared.choices.tensors[layer.name, Ref(formal)]))
        carried = {output: position for position, output in run.carried}
        results = []
        for index, inner in enumerate(run.layer.outputs):
            ref = Ref(run.name, index)
            where = self._layer_output(layer, run, inner, carried.get(index))
            results.append(self.names[ref] if ref in self.uses or index in carried else "")
            self.define(ref, where)
        first = sum(len(r.paths) for r in self.layer_runs if r.layer == run.layer.name)
        self.layer_runs.append(LayerRunSpec(run.layer.name, run.instances, self.num_dropout_calls))
        self.num_dropout_calls += self.calls_per_layer[run.layer.name] * len(run.instances)
        self.pending.append(
            LayerLoop(run.layer.name, first, len(run.instances), tuple(args), run.carried, tuple(results))
        )

    def _layer_output(self, layer: Scope, run: LayerRun, inner: Ref, position: int | None) -> Placements:
        choices = self.shared.choices
        if position is not None:
            return choices.tensors[layer.name, Ref(run.layer.inputs[position][0])]
        kept = choices.tensors.get((layer.name, inner))
        return kept if kept is not None else choices.operators[layer.name, inner.node].outputs[inner.index]

    # --- resharding -------------------------------------------------------------------------------------------

    def use(self, ref: Ref, wanted: Placements, rename: bool = True) -> Var:
        """The variable that holds `ref` in `wanted`; appends the reshard if it is not at hand."""
        found = self.at_hand.get((ref, wanted))
        if found is not None:
            return found
        current, meta = self.lies[ref], self.scope.metas[ref]
        path = steps(current, wanted, self.shared.mesh.sizes)
        assert path is not None, f"no way from {current} to {wanted}"
        variable = self.at_hand[ref, current]
        is_stored = variable.name.startswith(("self.", "self[", f"{SUMS}["))
        keeps_name = not is_stored and (not rename or self.uses.get(ref, 0) == 1)
        if keeps_name:
            target = variable.name
        else:
            words = re.findall(r"(?<![\w])[A-Za-z_]\w*", variable.name.removeprefix("self."))
            target = self._fresh("_".join(words[-2:]), wanted)
        for step in path:
            statement = self._reshard(step, variable, target, meta)
            self.pending.append(statement)
            variable = Var(target)
        self.at_hand[ref, wanted] = variable
        if keeps_name:
            self.at_hand = {key: v for key, v in self.at_hand.items() if key[0] != ref or key[1] == wanted}
        return variable

    def _fresh(self, name: str, wanted: Placements) -> str:
        """A name that says how the copy lies."""
        if all(p.is_replicated for p in wanted):
            return self.fresh_name(f"{name}_whole")
        return self.fresh_name(f"{name}_partial" if any(p.kind == "P" for p in wanted) else f"{name}_part")

    def fresh_name(self, wish: str) -> str:
        """A name that nothing has yet."""
        name, count = wish, 2
        while name in self.taken:
            name, count = f"{wish}_{count}", count + 1
        self.taken.add(name)
        return name

    def _reshard(self, step: Step, source: Var, result: str, meta: TensorMeta) -> Reshard:
        method, kwargs = reshard_call(step, meta.requires_grad)
        axis = self.shared.mesh.axes[step.axis]
        comment = f"{step.source} -> {step.target}: {traffic_text(step, meta)}"
        return Reshard(axis, method, source, kwargs, result, comment)

    # --- targets ----------------------------------------------------------------------------------------------

    def loss_index(self, node: Node, target: Ref, ignore_index: int) -> int:
        """Position of this cross-entropy among those whose targets are counted."""
        self.losses.append((node, target, ignore_index))
        return len(self.losses) - 1

    def layout(self, shape: tuple[int, ...], placements: Placements) -> str:
        """The name of a layout constant."""
        pairs = tuple((a, str(p)) for a, p in zip(self.shared.mesh.axes, placements, strict=True) if p.is_shard)
        for known in self.layouts:
            if (known.shape, known.placements) == (shape, pairs):
                return known.name
        prefix = f"{self.scope.name}_" if self.scope.name else ""
        name = f"{prefix}layout_{len(self.layouts)}".upper()
        self.layouts.append(Layout(name, shape, pairs))
        return name

    def count_targets(self, losses: list[tuple[Node, Ref, int]]) -> tuple[list[Statement], tuple[str, ...]]:
        """Statements that count the valid targets of each loss from the batch alone, and the counts' names."""
        statements: list[Statement] = []
        counts = []
        graph = self.shared.graph
        for number, (node, target, ignore_index) in enumerate(losses):
            needed = ancestors(graph, target)
            for piece in graph.body:
                if piece.name in needed and isinstance(piece, Node) and Ref(piece.name) not in self.lies:
                    self.node(piece)
            option = self.shared.choices.operators["", node.name]
            where = option.inputs[1]
            variable = self.use(target, where)
            statements += self.drain()
            name = f"count_{number}"
            statements.append(Call("runtime.count_valid", (variable, ignore_index), (), (name,)))
            for axis, placement in zip(self.shared.mesh.axes, where, strict=True):
                if placement.is_shard:
                    statements.append(Reshard(axis, "sum_over", Var(name), (), name, "targets of all ranks"))
            statements = without_waiting(statements)
            counts.append(name)
        return statements, tuple(counts)

    def sums(self, refs: tuple[Ref, ...]) -> tuple[list[Statement], tuple[str, ...]]:
        """Statements that compute these tensors, whole on every rank, from the batch alone, and their names."""
        needed = set().union(*(ancestors(self.shared.graph, ref) for ref in refs))
        for piece in self.shared.graph.body:
            if piece.name in needed and isinstance(piece, Node):
                self.node(piece)
        where = (R,) * len(self.shared.mesh.axes)
        names = tuple(self.use(ref, where).name for ref in refs)
        return self.drain(), names


def without_waiting(statements: list[Statement]) -> list[Statement]:
    """A sum over an axis that ends `statements` is read by the step alone, which waits for it (Mesh.finish)."""
    last = statements[-1] if statements else None
    if isinstance(last, Reshard) and last.method in ("all_reduce", "sum_over") and not last.kwargs:
        comment = f"{last.comment}; the step waits for it"
        return [*statements[:-1], replace(last, kwargs=(("wait", False),), comment=comment)]
    return statements


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
