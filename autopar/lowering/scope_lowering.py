"""Lower one scope, the top level or a layer class, to statements.

A tensor used in other placements than its own becomes one reshard statement per step. Each is written once per
(tensor, placements), right before the first use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch

from autopar.ir.draws import DrawNumbers, is_single_draw
from autopar.ir.graph import Graph, LayerRun, Node, Ref, TensorMeta, ancestors, map_refs
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, Placements, R
from autopar.lowering.call_lowerings import lower_call
from autopar.lowering.names import free_name, readable_names, uses_of
from autopar.rules.localize import local_call
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator
from autopar.sharding.reshard import Step, steps
from autopar.sharding.scopes import Scope
from codegen.program import UNREAD, Call, LayerLoop, LayerRunSpec, Layout, Reshard, Statement, TensorType, Var
from codegen.reshards import METHODS, axis_kwargs
from codegen.source.names import attribute_path

SUMS = "sums"
"""forward's name for the sums over the whole batch that it receives."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Data that all scopes of a stage share.

    graph: of one stage. results: of its forward. received: inputs that are tensors of earlier stages. defers_weights:
    linear layers defer their weights' gradients (zero-bubble schedules). numbers: of draws, in the whole model.
    """

    graph: Graph
    operators: Mapping[tuple[str, str], Operator]
    mesh: Mesh
    assignment: Assignment
    scopes: Mapping[str, Scope]
    results: tuple[Ref, ...]
    received: frozenset[str] = frozenset()
    defers_weights: bool = False
    numbers: DrawNumbers = field(kw_only=True)


@dataclass
class Lowering:
    """The statements of one scope, with the current placements of every tensor and the variables that hold them.

    given_sums: sums over the whole batch that forward receives, with their names.
    """

    shared: Shared
    scope: Scope
    names: dict[Ref, str] = field(default_factory=dict)
    placements: dict[Ref, Placements] = field(default_factory=dict)
    available: dict[tuple[Ref, Placements], Var] = field(default_factory=dict)
    pending: list[Statement] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    losses: list[tuple[Node, Ref, int]] = field(default_factory=list)
    layer_runs: list[LayerRunSpec] = field(default_factory=list)
    runtime_results: dict[tuple[str, tuple[object, ...]], Var] = field(default_factory=dict)
    given_sums: Mapping[Ref, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assignment, scope, graph = self.shared.assignment, self.scope, self.shared.graph
        self.names = readable_names(graph, scope.name, self.shared.results)
        for (owner, name), stored in assignment.parameters.items():
            if owner == scope.name and Ref(name) in scope.metas:
                ref, where = Ref(name), stored.placements
                self.placements[ref], self.available[ref, where] = (
                    where,
                    self.variable(ref, where, attribute_path(name)),
                )
        entering = [name for name, _ in scope.layer.inputs] if scope.layer else [i.name for i in graph.inputs]
        for name in entering:
            ref = Ref(name)
            if (scope.name, ref) in assignment.tensors:
                self.define(ref, assignment.tensors[scope.name, ref])
        pieces, results = (scope.nodes, scope.layer.outputs) if scope.layer else (graph.body, self.shared.results)
        self.uses = uses_of(pieces, results)
        self.taken = set(self.names.values())

    def define(self, ref: Ref, placements: Placements) -> Var:
        """Record that `ref` has `placements` under its own name."""
        self.placements[ref] = placements
        self.available[ref, placements] = self.variable(ref, placements, self.names[ref])
        return self.available[ref, placements]

    def variable(self, ref: Ref, placements: Placements, name: str) -> Var:
        """Return a variable that holds `ref` in these placements."""
        meta, pairs = self.scope.metas[ref], placement_pairs(placements, self.shared.mesh)
        tensor_type = TensorType(
            meta.shape, dtype_name(meta.dtype), pairs, meta.requires_grad, tensor=(ref.node, ref.index)
        )
        return Var(name, tensor_type)

    def receive(self, kept: Mapping[str, Placements]) -> None:
        """Reshard tensors of earlier stages from their placements at the boundary to those in the plan."""
        for name, placements in kept.items():
            ref = Ref(name)
            if placements != self.placements[ref]:
                self.use(ref, placements, rename=False)
                self.placements[ref] = placements

    def drain(self) -> list[Statement]:
        """Return the statements since the last call of drain."""
        statements, self.pending = self.pending, []
        return statements

    def run(self, pieces: tuple[Node | LayerRun, ...]) -> tuple[Statement, ...]:
        for ref, name in self.given_sums.items():
            where = (R,) * len(self.shared.mesh.axes)
            self.placements[ref], self.available[ref, where] = where, self.variable(ref, where, name)
        for piece in pieces:
            if any(Ref(piece.name, index) in self.given_sums for index in range(len(piece.outputs))):
                continue
            if isinstance(piece, LayerRun):
                self.layer_run(piece)
            elif not is_single_draw(piece) or Ref(piece.name) in self.uses:
                self.node(piece)
        return tuple(self.drain())

    def node(self, node: Node) -> None:
        operator = self.shared.operators[self.scope.name, node.name]
        option = self.shared.assignment.operators[self.scope.name, node.name]
        arguments = [self.use(ref, where) for ref, where in zip(node.inputs, option.inputs, strict=True)]
        arguments = [self._scaled(node, index, variable) for index, variable in enumerate(arguments)]
        local = local_call(node, operator.rule, option.axes, operator.inputs, self.shared.mesh.sizes)
        values = iter(arguments)
        args = map_refs(local.args, lambda _: next(values))
        kwargs = map_refs(local.kwargs, lambda _: next(values))
        outputs = [(Ref(node.name, index), placements) for index, placements in enumerate(option.outputs)]
        variables = [self.define(ref, placements) for ref, placements in outputs]
        results = tuple(v if ref in self.uses else UNREAD for v, (ref, _) in zip(variables, outputs, strict=True))
        call = Call(local.op, args, kwargs, results, section=node.module)
        self.pending.append(lower_call(self, node, operator, option, local, call))
        for ref, placements in outputs:
            self._complete(ref, node.module)
            kept = self.shared.assignment.tensors.get((self.scope.name, ref))
            if kept is not None and kept != placements and ref in self.uses:
                self.use(ref, kept, rename=False)
                self.placements[ref] = kept

    def _complete(self, ref: Ref, section: str) -> None:
        """Replace a tensor by its sum over all micro-batches, if the accumulation says so, for all later reads."""
        accumulation = self.shared.graph.accumulation
        summed = (
            [ref for scope, ref in accumulation.summed if scope == self.scope.name] if accumulation is not None else []
        )
        if ref in summed and ref in self.uses:
            variable = self.available[ref, self.placements[ref]]
            args = variable, summed.index(ref)
            self.pending.append(Call("self.whole_sum", args, (), (variable,), section=section))

    def _scaled(self, node: Node, index: int, variable: Var) -> Var:
        """Multiply a call's input as the micro-batches' accumulation says."""
        accumulation = self.shared.graph.accumulation
        scale = accumulation.scales.get((self.scope.name, node.name, index)) if accumulation is not None else None
        return variable if scale is None else self.multiply(variable, scale, node.module)

    def multiply(self, variable: Var, scale: Fraction, section: str) -> Var:
        """Return a new variable with `scale` times the value; placements do not matter."""
        result = self.fresh_name(f"{_words_of(variable)[-1]}_scaled")
        op, number = ("div", scale.denominator) if scale.numerator == 1 else ("mul", scale.numerator)
        exact = 1 in (scale.numerator, scale.denominator)
        argument = number if exact else float(scale)
        scaled = Var(result, replace(variable.type, tensor=("", 0)))
        self.pending.append(Call(f"aten.{op}.Tensor", (variable, argument), (), (scaled,), section=section))
        return scaled

    def layer_run(self, run: LayerRun) -> None:
        layer = self.shared.scopes[run.layer.name]
        args = []
        for ref, (formal, _) in zip(run.args, run.layer.inputs, strict=True):
            args.append(self.use(ref, self.shared.assignment.tensors[layer.name, Ref(formal)]))
        carried = {output: position for position, output in run.carried}
        results = []
        for index, inner in enumerate(run.layer.outputs):
            ref = Ref(run.name, index)
            where = self._layer_output(layer, run, inner, carried.get(index))
            variable = self.define(ref, where)
            results.append(variable if ref in self.uses or index in carried else UNREAD)
        first = sum(len(r.paths) for r in self.layer_runs if r.layer == run.layer.name)
        self.layer_runs.append(LayerRunSpec(run.layer.name, run.instances))
        self.pending.append(
            LayerLoop(
                layer=run.layer.name,
                first=first,
                count=len(run.instances),
                args=tuple(args),
                carried=run.carried,
                results=tuple(results),
            )
        )
        for index in range(len(results)):
            self._complete(Ref(run.name, index), "")

    def _layer_output(self, layer: Scope, run: LayerRun, inner: Ref, position: int | None) -> Placements:
        assignment = self.shared.assignment
        if position is not None:
            return assignment.tensors[layer.name, Ref(run.layer.inputs[position][0])]
        kept = assignment.tensors.get((layer.name, inner))
        return kept if kept is not None else assignment.operators[layer.name, inner.node].outputs[inner.index]

    # --- resharding -------------------------------------------------------------------------------------------

    def use(self, ref: Ref, wanted: Placements, rename: bool = True) -> Var:
        """Return the variable that holds `ref` in `wanted`, and append the reshard if there is none yet."""
        available = self.available.get((ref, wanted))
        if available is not None:
            return available
        current, meta = self.placements[ref], self.scope.metas[ref]
        path = steps(current, wanted, self.shared.mesh.sizes)
        assert path is not None, f"no way from {current} to {wanted}"
        variable = self.available[ref, current]
        is_external = variable.is_stored or ref in self.given_sums
        keeps_name = not is_external and (not rename or self.uses.get(ref, 0) == 1)
        target = variable.name if keeps_name else self._fresh(_words_of(variable), wanted)
        for step in path:
            statement = self._reshard(step, variable, target, meta)
            self.pending.append(statement)
            variable = statement.result
        self.available[ref, wanted] = variable
        if keeps_name:
            self.available = {key: v for key, v in self.available.items() if key[0] != ref or key[1] == wanted}
        return variable

    def _fresh(self, words: list[str], wanted: Placements) -> str:
        """Return a name that tells the placements of a copy: its last two words, or three if others have these."""
        ending = "part"
        if all(p.is_replicated for p in wanted):
            ending = "whole"
        elif any(p.kind == "P" for p in wanted):
            ending = "partial"
        short, long = (f"{'_'.join(words[-count:])}_{ending}" for count in (2, 3))
        return self.fresh_name(long if short in self.taken else short)

    def fresh_name(self, wish: str) -> str:
        """Return an unused name."""
        name = free_name(wish, self.taken)
        self.taken.add(name)
        return name

    def _reshard(self, step: Step, source: Var, name: str, meta: TensorMeta) -> Reshard:
        axes, before = self.shared.mesh.axes, source.type
        sections = step.source_sections, step.target_sections
        method = METHODS[step.source.kind, step.target.kind].name
        kwargs = axis_kwargs(str(step.source), str(step.target), sections, meta.requires_grad)
        placements = dict(before.placements) | {axes[step.axis]: str(step.target)}
        pairs = tuple((axis, placements[axis]) for axis in axes if placements.get(axis, "R") != "R")
        result = Var(name, replace(before, placements=pairs))
        backward = step.backward if meta.requires_grad else None
        return Reshard(
            axis=axes[step.axis],
            method=method,
            source=source,
            kwargs=kwargs,
            result=result,
            num_bytes=meta.num_bytes * step.fraction,
            forward=step.forward or "",
            backward=backward or "",
        )

    def once(self, function: str, args: tuple[object, ...], name: str, like: Var, section: str) -> Var:
        """Return the result of a run-time function on these arguments, computed at the first request only.

        name: preferred for the result; like: a variable with the type of the result.
        """
        key = function, tuple((arg.name, arg.type) if isinstance(arg, Var) else arg for arg in args)
        if key not in self.runtime_results:
            self.runtime_results[key] = Var(self.fresh_name(name), replace(like.type, tensor=("", 0)))
            self.pending.append(Call(f"runtime.{function}", args, (), (self.runtime_results[key],), section=section))
        return self.runtime_results[key]

    # --- targets ----------------------------------------------------------------------------------------------

    def loss_index(self, node: Node, target: Ref, ignore_index: int) -> int:
        """Return the index of this cross-entropy among those whose targets are counted."""
        self.losses.append((node, target, ignore_index))
        return len(self.losses) - 1

    def layout(self, shape: tuple[int, ...], placements: Placements) -> str:
        """Return the name of a layout constant."""
        pairs = tuple((a, str(p)) for a, p in zip(self.shared.mesh.axes, placements, strict=True) if p.is_shard)
        for existing in self.layouts:
            if (existing.shape, existing.placements) == (shape, pairs):
                return existing.name
        prefix = f"{self.scope.name}_" if self.scope.name else ""
        name = f"{prefix}layout_{len(self.layouts)}".upper()
        self.layouts.append(Layout(name, shape, pairs))
        return name

    def count_targets(self, losses: list[tuple[Node, Ref, int]]) -> tuple[list[Statement], tuple[Var, ...]]:
        """Return statements that count the valid targets of each loss from the batch alone, and the counts."""
        statements: list[Statement] = []
        counts = []
        graph = self.shared.graph
        for number, (node, target, ignore_index) in enumerate(losses):
            needed = ancestors(graph, target)
            for piece in graph.body:
                if piece.name in needed and isinstance(piece, Node) and Ref(piece.name) not in self.placements:
                    self.node(piece)
            variable = self.use(target, self.shared.assignment.operators["", node.name].inputs[1])
            counts.append(self.count_valid(variable, ignore_index, f"count_{number}"))
            statements = without_waiting([*statements, *self.drain()])
        return statements, tuple(counts)

    def count_valid(self, target: Var, ignore_index: int, name: str, section: str = "") -> Var:
        """Return a new variable `name`: the number of valid targets on all ranks."""
        shards = tuple(axis for axis, text in target.type.placements if Placement.parse(text).is_shard)
        count = Var(name, TensorType((), "int64", tuple((axis, "P") for axis in shards)))
        self.pending.append(Call("runtime.count_valid", (target, ignore_index), (), (count,), section=section))
        for axis in shards:
            summed = Var(name, replace(count.type, placements=count.type.placements[1:]))
            reduction = Reshard(axis, "sum_over", count, (), result=summed, num_bytes=8, forward="all_reduce")
            self.pending.append(reduction)
            count = summed
        return count

    def sums(self, refs: tuple[Ref, ...]) -> tuple[list[Statement], tuple[Var, ...]]:
        """Return statements that compute these tensors, whole on every rank, from the batch alone, and the tensors."""
        needed = set().union(*(ancestors(self.shared.graph, ref) for ref in refs))
        for piece in self.shared.graph.body:
            if piece.name in needed and isinstance(piece, Node):
                self.node(piece)
        where = (R,) * len(self.shared.mesh.axes)
        tensors = tuple(self.use(ref, where) for ref in refs)
        return self.drain(), tensors


def without_waiting(statements: list[Statement]) -> list[Statement]:
    """Make a final sum over an axis asynchronous: only the step reads it, and waits for it (Mesh.finish)."""
    last = statements[-1] if statements else None
    if isinstance(last, Reshard) and last.method in ("all_reduce", "sum_over") and not last.kwargs:
        return [*statements[:-1], replace(last, kwargs=(("wait", False),))]
    return statements


def _words_of(variable: Var) -> list[str]:
    """Return the names in a variable's path."""
    return re.findall(r"(?<![\w])[A-Za-z_]\w*", variable.name.removeprefix("self."))


def placement_pairs(placements: Placements, mesh: Mesh) -> tuple[tuple[str, str], ...]:
    """Return placements as text per axis, without R."""
    return tuple((axis, str(p)) for axis, p in zip(mesh.axes, placements, strict=True) if p != R)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
