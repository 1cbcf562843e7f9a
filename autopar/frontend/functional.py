"""Turns in-place calls into functional ones, for the flat graph that a trace makes (its IR is not functional).

`x.add_(y)` becomes `add(x, y)` with later uses of x renamed. A write to a view also reaches the tensor that it is a
view of, and that one's other views: `x[:, 1:] = y` becomes a `cat`, and views that are used later are taken again.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import TraceError
from autopar.frontend.effects import at, refused_random
from autopar.frontend.fx_import import FlatGraph, is_view, unused_name
from autopar.frontend.overloads import functional_overload
from autopar.ir.graph import Node, Ref, TensorMeta, base_name, with_refs
from autopar.ir.operators import find_op
from codegen.functions import NAMESPACE

_COPY = "aten.copy_.default"
_DROPOUT = "aten.dropout_.default"
"""Whose functional form draws what no other random operator does: the same mask under every plan."""
_RESHAPES = frozenset({"view", "unsqueeze", "squeeze", "_unsafe_view", "reshape", "flatten", "unflatten", "view_as"})
_SAME = frozenset({"alias", "detach", "to", "lift_fresh", "dropout"})


def functionalise(flat: FlatGraph) -> None:
    """Raises TraceError for a write that cannot be carried to what shares its memory."""
    _Functionaliser(flat).run()


class _Functionaliser:
    def __init__(self, flat: FlatGraph) -> None:
        self.flat = flat
        self.metas = flat.metas()
        self.names = {ref.node for ref in self.metas}
        self.nodes: list[Node] = []
        self.current: dict[Ref, Ref] = {}  # a tensor of the trace -> what holds its value now, if written to
        self.views: dict[Ref, Node] = {}  # in order of creation
        self.last_use: dict[Ref, int] = {ref: i for i, node in enumerate(flat.nodes) for ref in node.inputs}
        self.last_use |= {ref: len(flat.nodes) for ref in (flat.loss, *map(Ref, flat.parameters))}  # what is kept
        self.written: dict[str, Node] = {}  # buffer -> the last call that writes to it

    def run(self) -> None:
        for position, node in enumerate(self.flat.nodes):
            self.check_kind(node)
            functional = functional_name(node.op)
            if functional is not None:
                self.write(position, node, functional)
                continue
            self.nodes.append(self.updated(node))
            if is_view(node, self.metas):
                self.views |= {Ref(node.name, index): node for index in range(len(node.outputs))}
        self.flat.nodes = self.nodes
        self.flat.loss = self.now(self.flat.loss)
        for name, write in self.written.items():
            counter = replace(self.flat.parameters[name], increment=self.increment(name, write))
            self.flat.parameters[name] = counter

    def now(self, ref: Ref) -> Ref:
        return self.current.get(ref, ref)

    def updated(self, node: Node) -> Node:
        return with_refs(node, self.now)

    def write(self, position: int, node: Node, functional: str) -> None:
        written: Ref = node.args[0]
        chain = self.chain(written)
        root = chain[-1]
        self.check_target(node, root)
        self.check_functions(node, root)
        value = self.copied(node, written) if functional == _COPY else replace(self.updated(node), op=functional)
        self.nodes.append(value)
        self.current[written] = self.current[Ref(node.name)] = Ref(value.name)
        self.metas[Ref(value.name)] = value.meta
        self.views[Ref(node.name)] = replace(node, op="aten.alias.default", args=(written,), kwargs=())
        family = [ref for ref in self.views if self.chain(ref)[-1] == root and ref.node != node.name]
        if any(self.last_use.get(ref, -1) > position for ref in (root, *family) if ref != written):
            self.spread(node, chain, [ref for ref in family if ref not in chain])

    def check_kind(self, node: Node) -> None:
        """Raises TraceError for a write that no functional call can stand for."""
        overload = find_op(node.op)
        if overload is None or not overload._schema.is_mutable:
            return
        if torch.Tag.nondeterministic_seeded in overload.tags and node.op != _DROPOUT:
            raise refused_random(node.op, at(self.flat, node))
        if functional_name(node.op) is None:
            out = dict(node.kwargs).get("out")
            root = self.chain(out)[-1].node if isinstance(out, Ref) else ""
            if root in self.flat.parameters and root not in self.flat.constants:
                raise self.refused_update(root, node)
            raise TraceError(
                "forward calls an operator that writes into its operands",
                values=f"{node.op}{at(self.flat, node)}",
                alternatives="write it out of place in the model (without out=)",
            )

    def check_target(self, node: Node, root: Ref) -> None:
        """Raises TraceError for a write to a parameter, or to a differentiated tensor where gradients are off."""
        target = self.flat.parameters.get(root.node)
        if target is not None and root.node not in self.flat.constants:
            if not target.is_buffer:
                raise TraceError(
                    "forward changes a parameter in place, which no step of the program would keep",
                    values=f"{root.node}: {node.op}{at(self.flat, node)}",
                    alternatives=[
                        "change it in the training loop, or compute the changed value from the parameter in forward",
                        "torch.nn.utils.parametrize for a constrained parameter, max_norm=None for an embedding",
                    ],
                )
            self.written[root.node] = node
        elif not node.meta.requires_grad and any(self.metas[self.now(r)].requires_grad for r in (node.args[0], root)):
            raise TraceError(
                "forward writes, without gradients, to a tensor that gradients flow through",
                values=f"{node.op}{at(self.flat, node)}",
                alternatives="write it out of place in the model",
            )

    def check_functions(self, node: Node, root: Ref) -> None:
        """Raises TraceError for a write to what a custom Function took before, and may have returned a view of."""
        before = itertools.takewhile(lambda each: each is not node, self.flat.nodes)
        for earlier in (each for each in before if each.op.startswith(f"{NAMESPACE}.")):
            if any(self.chain(ref)[-1] == root for ref in earlier.inputs):
                raise TraceError(
                    "forward writes to a tensor that it gave to a custom autograd.Function before",
                    values=f"{node.op} after {earlier.op}{at(self.flat, node)}",
                    alternatives="write it out of place in the model",
                )

    def increment(self, name: str, write: Node) -> int | float:
        """What forward adds to a buffer. Raises TraceError where it does anything else to it."""
        made = {node.name: node for node in self.nodes}
        total: int | float = 0
        ref, count = self.now(Ref(name)), 0
        while ref != Ref(name):
            node = made[ref.node]
            sign = {"add": 1, "sub": -1}.get(base_name(node.op), 0)
            is_number = len(node.args) == 2 and type(node.args[1]) in (int, float)
            if not sign or not is_number or node.kwargs:
                break
            total, count, ref = total + sign * node.args[1], count + 1, node.args[0]
        is_exact = count == 1 or (count > 1 and not self.flat.parameters[name].meta.dtype.is_floating_point)
        if ref == Ref(name) and is_exact:
            return total
        raise self.refused_update(name, write)

    def refused_update(self, name: str, write: Node) -> TraceError:
        """The error for a buffer that forward changes otherwise than by a constant number."""
        return TraceError(
            "forward updates a buffer with values that a parallel plan does not compute as one process does",
            values=f"{name}: {write.op}{at(self.flat, write)}",
            alternatives=[
                "a counter: adding a constant number in place (self.count += 1), which is kept",
                "what follows from parameters and buffers (a mean over steps, a power iteration) in the training loop, "
                "between step.full_state_dict() and step.load(state)",
                "batch norm, whose running statistics are kept",
            ],
        )

    def chain(self, ref: Ref) -> list[Ref]:
        """The tensor, what it is a view of, what that is a view of, and so on."""
        found = [ref]
        while found[-1] in self.views:
            found.append(self.views[found[-1]].args[0])
        return found

    def copied(self, node: Node, written: Ref) -> Node:
        """`x.copy_(y)`: y in x's shape and dtype."""
        source, meta = self.now(node.args[1]), node.meta
        if self.metas[source].dtype != meta.dtype:
            cast = replace(self.metas[source], dtype=meta.dtype)
            source = self.add(node, "aten.to.dtype", (source, meta.dtype), cast)
        return replace(node, op="aten.expand.default", args=(source, self.metas[written].shape), kwargs=())

    def spread(self, write: Node, chain: list[Ref], family: list[Ref]) -> None:
        """Carry the new value of chain[0] up to the root, then take the other views again."""
        for view, source in zip(chain, chain[1:], strict=False):
            grad = self.metas[self.now(view)].requires_grad or self.metas[self.now(source)].requires_grad
            meta = replace(self.metas[source], requires_grad=grad)
            self.current[source] = self.scattered(write, self.views[view], view, source, meta)
            self.metas[self.current[source]] = meta
        for name in dict.fromkeys(ref.node for ref in family):
            node = self.views[Ref(name)]
            op = "aten.reshape.default" if node.op == "aten.view.default" else node.op  # strides may differ now
            again = replace(self.updated(node), name=self.unique(name), op=op)
            self.nodes.append(again)
            for index, meta in enumerate(again.outputs):
                self.current[Ref(name, index)] = Ref(again.name, index)
                self.metas[Ref(again.name, index)] = meta

    def scattered(self, write: Node, view: Node, ref: Ref, source: Ref, meta: TensorMeta) -> Ref:
        """`source` with the elements that `view` shows replaced by their new value."""
        value, name = self.now(ref), view.op.split(".")[1]
        arguments = (*view.args[1:], *(v for _, v in view.kwargs))
        if name in _SAME and self.metas[ref].dtype == meta.dtype:
            return value
        if name in _RESHAPES:
            return self.add(write, "aten.reshape.default", (value, meta.shape), meta)
        if name in ("transpose", "t", "swapaxes", "swapdims"):
            return self.add(write, "aten.transpose.int", (value, *(arguments or (0, 1))), meta)
        if name == "select":
            dim, index = arguments
            dim %= len(meta.shape)
            index %= meta.shape[dim]
            row = replace(meta, shape=(*meta.shape[:dim], 1, *meta.shape[dim + 1 :]))
            value = self.add(write, "aten.unsqueeze.default", (value, dim), row)
            return self.joined(write, value, source, meta, dim, index, index + 1)
        defaults: tuple[Any, ...] = (0, None, None, 1)
        if name == "diagonal":
            return self.add(write, "aten.diagonal_scatter.default", (self.now(source), value, *arguments), meta)
        if name == "narrow":
            dim, start, length = arguments
            dim, start = dim % len(meta.shape), start % meta.shape[dim]
            return self.joined(write, value, source, meta, dim, start, start + length)
        if name == "permute":
            dims = arguments[0]
            back = sorted(range(len(dims)), key=lambda place: dims[place] % len(dims))
            return self.add(write, "aten.permute.default", (value, tuple(back)), meta)
        if name == "slice":
            dim, start, end, step = (*arguments, *defaults[len(arguments) :])
            if step != 1:
                return self.add(
                    write, "aten.slice_scatter.default", (self.now(source), value, dim, start, end, step), meta
                )
            start, end, _ = slice(start, end).indices(meta.shape[dim])
            return self.joined(write, value, source, meta, dim % len(meta.shape), start, end)
        raise TraceError(
            "the model writes in place to a view of a tensor that it uses later",
            values=f"{write.op} to a result of {view.op}" + (f" in {write.module}" if write.module else ""),
            alternatives="write it out of place in the model, with torch.cat or torch.where",
        )

    def joined(self, write: Node, value: Ref, source: Ref, meta: TensorMeta, dim: int, start: int, end: int) -> Ref:
        """`source` outside of start .. end of `dim`, `value` inside."""
        parts = [value]
        if start > 0:
            parts.insert(0, self.kept(write, source, dim, 0, start))
        if end < meta.shape[dim]:
            parts.append(self.kept(write, source, dim, end, meta.shape[dim]))
        return parts[0] if len(parts) == 1 else self.add(write, "aten.cat.default", (tuple(parts), dim), meta)

    def kept(self, write: Node, source: Ref, dim: int, start: int, end: int) -> Ref:
        meta = self.metas[self.now(source)]
        part = replace(meta, shape=(*meta.shape[:dim], end - start, *meta.shape[dim + 1 :]))
        return self.add(write, "aten.slice.Tensor", (self.now(source), dim, start, end), part)

    def add(self, write: Node, op: str, args: tuple[Any, ...], meta: TensorMeta) -> Ref:
        """Append a call where `write` is made."""
        name = self.unique(op.split(".")[1])
        self.nodes.append(Node(name=name, op=op, args=args, kwargs=(), outputs=(meta,), module=write.module))
        self.metas[Ref(name)] = meta
        return Ref(name)

    def unique(self, wish: str) -> str:
        name = unused_name(wish, self.names)
        self.names.add(name)
        return name


def functional_name(op: str) -> str | None:
    """`aten.add_.Tensor` -> `aten.add.Tensor` where torch has it; None if `op` is functional already."""
    namespace, name, _ = op.split(".")
    if not name.endswith("_") or name.endswith("__"):
        return None
    if op == _COPY:
        return op
    found = functional_overload(find_op(op))
    if found is None:
        raise TraceError(
            "an in-place operator without a functional form",
            values=op,
            alternatives="write it out of place in the model",
        )
    return str(found)
