"""Pad the heads of attention to a number that a degree divides, by heads whose weights are zeros.

A head whose queries, keys and values come from rows of zeros gives 0, and meets columns of zeros in the layer that
takes all heads in. Neither the loss nor any gradient changes, and an elementwise update keeps its weights zero.

For grouped heads, either groups are padded, or the query heads of each group. These see the group's values, so their
results are multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.frontend.fx_import import unused_name
from autopar.frontend.padding.head_loops import Longer, Scope, not_zero
from autopar.ir.graph import Graph, LayerRun, Node, Parameter, Ref, TensorMeta, base_name, map_refs, with_refs
from autopar.ir.operators import arguments_of
from autopar.operators.schemas import find_op
from autopar.operators.traits import ATTENTION, SHAPES


def with_whole_heads(graph: Graph, multiple: int) -> Graph:
    """Return the graph with numbers of heads that `multiple` divides, wherever that is exact; itself if nowhere."""
    if multiple == 1:
        return graph
    runs = [piece for piece in graph.body if isinstance(piece, LayerRun)]
    nodes = [piece for piece in graph.body if not isinstance(piece, LayerRun)]
    classes = {run.layer.name: run.layer for run in runs}
    paths = {name: [path for run in runs if run.layer.name == name for path in run.instances] for name in classes}
    private, layers, longer = _read_once(graph, runs), dict(classes), dict[str, Longer]()
    for name, layer in classes.items():
        metas = dict(layer.inputs) | {p.name: p.meta for p in layer.parameters}
        alone = {p.name for p in layer.parameters if all(f"{path}.{p.name}" in private for path in paths[name])}
        work = _Padding.of(layer.nodes, metas, alone, frozenset(layer.outputs), multiple)
        longer |= {f"{path}.{ref.node}": longer_dim for path in paths[name] for ref, longer_dim in work.longer.items()}
        parameters = tuple(_padded(p, work.longer.get(Ref(p.name))) for p in layer.parameters)
        nodes_of_layer = (new for node in layer.nodes for new in work.rewritten(node))
        layers[name] = replace(layer, parameters=parameters, nodes=tuple(nodes_of_layer))
    metas = {i.name: i.meta for i in graph.inputs} | {p.name: p.meta for p in graph.parameters}
    returned = {graph.loss} | ({graph.logits} if graph.logits is not None else set())
    leaving = frozenset({*returned, *(ref for run in runs for ref in run.args)})
    outer = _Padding.of(nodes, metas, private, leaving, multiple, runs)
    longer |= {ref.node: longer_dim for ref, longer_dim in outer.longer.items()}
    parameters = tuple(_padded(longer_dim, longer.get(longer_dim.name)) for longer_dim in graph.parameters)
    if parameters == graph.parameters:
        return graph
    body: list[Node | LayerRun] = []
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            body.append(replace(piece, layer=layers[piece.layer.name]))
        else:
            body += outer.rewritten(piece)
    return replace(graph, parameters=parameters, body=tuple(body), heads_padded_to=multiple)


def _read_once(graph: Graph, runs: Sequence[LayerRun]) -> set[str]:
    """Return names of parameters that one scope reads, under their first names."""
    first = {name: p.name for p in graph.parameters for name in (p.name, *p.aliases)}
    readers: dict[str, set[tuple[str, str]]] = {}
    for run in runs:
        for path in run.instances:
            for p in run.layer.parameters:
                name = f"{path}.{p.name}"
                readers.setdefault(first.get(name, name), set()).add((path, name))
    for ref in (ref for piece in graph.body for ref in piece.inputs):
        readers.setdefault(first.get(ref.node, ref.node), set()).add(("", ref.node))
    stored = {p.name for p in graph.parameters if not p.is_buffer and not p.padding}
    return {name for name in stored if [reader for _, reader in readers.get(name, ())] == [name]}


def _padded(parameter: Parameter, longer: Longer | None) -> Parameter:
    if longer is None:
        return parameter
    meta, more = longer.lengthened(parameter.meta), longer.more * longer.inner
    return replace(parameter, meta=meta, padding=more, padded_dim=longer.dim, padded_sections=longer.outer)


@dataclass(frozen=True, slots=True)
class _Padding:
    """The calls of a scope with longer tensors. found: these; masked: (call, tensor) of all whose padding is zeroed."""

    scope: Scope
    longer: Mapping[Ref, Longer]
    masked: frozenset[tuple[str, Ref]]
    names: set[str]

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        metas: Mapping[str, TensorMeta],
        parameters: set[str],
        leaving: frozenset[Ref],
        multiple: int,
        runs: Sequence[LayerRun] = (),
    ) -> _Padding:
        """Return the padding of a scope. parameters: names of those that only this scope reads."""
        metas_of = {Ref(name): meta for name, meta in metas.items()}
        pieces: list[Node | LayerRun] = [*nodes, *runs]
        metas_of |= {Ref(piece.name, i): meta for piece in pieces for i, meta in enumerate(piece.outputs)}
        scope = Scope(nodes, frozenset(map(Ref, parameters)), metas_of, leaving)
        longer_dims: dict[Ref, Longer] = {}
        masked: set[tuple[str, Ref]] = set()
        for node in nodes:
            for longer in _candidates(node, metas_of, multiple) if Ref(node.name) not in longer_dims else ():
                reached = scope.reached(Ref(node.name), longer)
                summed = (
                    None if reached is None or not longer_dims.keys().isdisjoint(reached) else not_zero(scope, reached)
                )
                if reached is None or summed is None:
                    continue
                trial = cls(scope, reached, frozenset(summed), {ref.node for ref in metas_of})
                if trial.is_right():
                    longer_dims |= reached
                    masked |= summed
                    break
        return cls(scope, longer_dims, frozenset(masked), {ref.node for ref in metas_of})

    def rewritten(self, node: Node) -> Iterator[Node]:
        """Yield a call after those that zero the padding of its sums."""
        zeroed: dict[Ref, Ref] = {}
        for ref in dict.fromkeys(node.inputs):
            if (node.name, ref) in self.masked:
                steps = self._zeroed(ref, node.module)
                yield from steps
                zeroed[ref] = Ref(steps[-1].name)
        rewired = with_refs(node, lambda ref: zeroed.get(ref, ref)) if zeroed else node
        outputs = tuple(self._meta(Ref(node.name, i), meta) for i, meta in enumerate(node.outputs))
        yield rewired if outputs == node.outputs else self._sized(replace(rewired, outputs=outputs))

    def is_right(self) -> bool:
        """Return whether torch gives the calls with sizes among their arguments the expected shapes."""
        for node in self.scope.nodes:
            (*_, new) = self.rewritten(node)
            if new == node or base_name(node.op) in ATTENTION:
                continue
            metas = [self._meta(ref, self.scope.metas[ref]) for ref in node.inputs]
            try:
                shapes = _shapes(new, metas)
            except (RuntimeError, ValueError):
                return False
            if shapes != [meta.shape for meta in new.outputs]:
                return False
        return True

    def _meta(self, ref: Ref, meta: TensorMeta) -> TensorMeta:
        return self.longer[ref].lengthened(meta) if ref in self.longer else meta

    def _sized(self, node: Node) -> Node:
        """Return a call that makes longer tensors, with the new sizes among its arguments."""
        name, arguments = base_name(node.op), arguments_of(node)
        shape = node.outputs[0].shape
        changed: dict[str, Any] = {}
        if name in SHAPES:
            key = SHAPES[name]
            lead = len(shape) - len(arguments[key])
            changed[key] = tuple(-1 if n == -1 else shape[lead + i] for i, n in enumerate(arguments[key]))
        elif name == "unflatten":
            at, sizes = arguments["dim"] % (len(shape) - len(arguments["sizes"]) + 1), arguments["sizes"]
            changed["sizes"] = tuple(-1 if n == -1 else shape[at + i] for i, n in enumerate(sizes))
        elif name in ("split", "unsafe_split", "split_with_sizes"):
            dim = arguments["dim"] % len(shape)
            sizes = tuple(meta.shape[dim] for meta in node.outputs)
            changed["split_sizes" if name == "split_with_sizes" else "split_size"] = sizes
            if name != "split_with_sizes":
                changed["split_size"] = sizes[0]
        elif name == "slice":
            changed |= self._slice(node, arguments, shape)
        elif name == "repeat":
            operand_shape = self._meta(node.inputs[0], self.scope.metas[node.inputs[0]]).shape
            operand_shape = (1,) * (len(shape) - len(operand_shape)) + operand_shape
            changed["repeats"] = tuple(n // m for n, m in zip(shape, operand_shape, strict=True))
        elif name == "repeat_interleave":
            dim = arguments["dim"] % len(shape)
            operand_shape = self._meta(node.inputs[0], self.scope.metas[node.inputs[0]]).shape
            changed |= {"repeats": shape[dim] // operand_shape[dim], "output_size": None}
        return _with_arguments(node, changed)

    def _slice(self, node: Node, arguments: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the bounds of a slice of a longer tensor; a slice of one of equal sections stays that."""
        dim, longer = arguments["dim"] % len(shape), self.longer[Ref(node.name)]
        if longer.dim != dim:
            return {}
        size, section = self.scope.metas[node.inputs[0]].shape[dim], self.scope.metas[Ref(node.name)].shape[dim]
        start = (arguments["start"] or 0) % size // section * shape[dim]
        return {"start": start, "end": start + shape[dim]}

    def _zeroed(self, ref: Ref, module: str) -> list[Node]:
        """Return a tensor times 0 in its padding and 1 elsewhere."""
        longer, meta = self.longer[ref], self.longer[ref].lengthened(self.scope.metas[ref])
        size, whole = meta.shape[longer.dim], longer.units * longer.inner
        steps: list[tuple[str, int | torch.dtype]] = [("aten.arange.default", size)]
        steps += [("aten.remainder.Scalar", longer.section)] if longer.outer > 1 else []
        steps += [("aten.lt.Scalar", whole), ("aten.to.dtype", meta.dtype)]
        steps += [("aten.unsqueeze.default", -1)] * (len(meta.shape) - 1 - longer.dim)
        nodes: list[Node] = []
        shape: tuple[int, ...] = (size,)
        dtype = torch.int64
        for op, argument in steps:
            dtype = torch.bool if op == "aten.lt.Scalar" else meta.dtype if op == "aten.to.dtype" else dtype
            shape = (*shape, 1) if op == "aten.unsqueeze.default" else shape
            before = (Ref(nodes[-1].name),) if nodes else ()
            nodes.append(self._node("padding", op, (*before, argument), TensorMeta(shape, dtype), module))
        nodes.append(self._node("zeroed", "aten.mul.Tensor", (ref, Ref(nodes[-1].name)), meta, module))
        return nodes

    def _node(self, wish: str, op: str, args: tuple[Any, ...], meta: TensorMeta, module: str) -> Node:
        name = unused_name(wish, self.names)
        self.names.add(name)
        return Node(name=name, op=op, args=args, kwargs=(), outputs=(meta,), module=module)


def _candidates(node: Node, metas: Mapping[Ref, TensorMeta], multiple: int) -> list[Longer]:
    """Return ways to pad the heads of an attention call, or of its softmax, the fewest heads first.

    A way is worthwhile if the padded heads are less than twice those of the model.
    """
    name = base_name(node.op)
    if (name not in ATTENTION and name != "softmax") or len(node.meta.shape) != 4:
        return []
    heads = node.meta.shape[1]
    keys = metas[arguments_of(node)["key"]].shape if name in ATTENTION else ()
    groups = keys[1] if len(keys) == 4 and keys[1] > 1 else heads

    def is_shared(total: int, total_groups: int) -> bool:
        """Return whether one loop of the attention is divided: over groups, or over the heads of a group."""
        return total_groups % multiple == 0 or (groups < heads and total // total_groups % multiple == 0)

    candidates = []
    for outer in (n for n in range(1, heads) if heads % n == 0):
        for units in (n for n in range(2, heads // outer + 1) if heads // outer % n == 0):
            inner = heads // outer // units
            grows = inner % (heads // groups) == 0
            for more in range(1, units):
                total = heads + outer * more * inner
                if is_shared(total, groups * total // heads if grows else groups):
                    candidates.append(Longer(dim=1, outer=outer, units=units, inner=inner, more=more))
                    break
    candidates.sort(key=lambda candidate: (candidate.outer * candidate.section, candidate.outer, candidate.inner))
    return [] if is_shared(heads, groups) else candidates


def _shapes(node: Node, metas: Sequence[TensorMeta]) -> list[tuple[int, ...]]:
    """Return torch's shapes for a call on fake tensors."""
    tensors = iter([torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in metas])
    args, kwargs = map_refs((node.args, node.kwargs), lambda _: next(tensors))
    op = find_op(node.op)
    results = op(*[list(value) if isinstance(value, tuple) else value for value in args], **dict(kwargs)) if op else ()
    return [tuple(value.shape) for value in (results if isinstance(results, tuple | list) else (results,))]


def _with_arguments(node: Node, changed: Mapping[str, Any]) -> Node:
    """Return the call with the arguments of those names replaced in place."""
    if not changed:
        return node
    names = list(arguments_of(node))
    args = [changed.get(names[i], value) for i, value in enumerate(node.args)]
    kwargs = [(name, changed.get(name, value)) for name, value in node.kwargs]
    return replace(node, args=tuple(args), kwargs=tuple(kwargs))
