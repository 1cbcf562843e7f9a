"""Turn in-place calls into functional ones, in the flat graph of a trace (torch's IR is not functional).

`x.add_(y)` becomes `add(x, y)`, and later uses of x are renamed. A write to a view also reaches its base tensor and the
other views: `x[:, 1:] = y` becomes a `cat`, and views that are used later are taken again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import TraceError
from autopar.frontend.effects import at
from autopar.frontend.fx_import import FlatGraph, is_view, unused_name
from autopar.frontend.layers import layer_path
from autopar.frontend.overloads import functional_overload
from autopar.frontend.rewrites.unregistered_tensors import carried
from autopar.ir.graph import UPDATE_BUFFER, Node, Ref, TensorMeta, base_name, map_refs, with_refs
from autopar.operators.schemas import find_op
from autopar.operators.traits import RESHAPES, SAME_PLACES
from codegen.functions import NAMESPACE

_COPY = "aten.copy_.default"
_PLAIN = {
    f"aten.__i{name}__.{kind}": f"aten.bitwise_{name}_.{kind}"
    for name in ("or", "and", "xor")
    for kind in ("Tensor", "Scalar")
}
"""In-place operators of Python -> their named forms."""


def functionalize(flat: FlatGraph) -> None:
    """Rewrite all writes. Raises TraceError for a write whose effect on tensors of the same memory
    cannot be written.
    """
    write_each(flat)
    _Functionalizer(flat).run()


class _Functionalizer:
    def __init__(self, flat: FlatGraph) -> None:
        self.flat = flat
        self.metas = flat.metas()
        self.names = {ref.node for ref in self.metas}
        self.nodes: list[Node] = []
        self.current: dict[Ref, Ref] = {}  # a tensor of the trace -> the tensor with its present value, if written to
        self.views: dict[Ref, Node] = {}  # in order of creation
        self.last_use: dict[Ref, int] = {ref: i for i, node in enumerate(flat.nodes) for ref in node.inputs}
        self.last_use |= {ref: len(flat.nodes) for ref in (flat.loss, *map(Ref, flat.parameters))}  # calls to keep
        self.written: dict[str, tuple[Node, int]] = {}  # buffer -> (the last call that writes to it, calls until then)

    def run(self) -> None:
        for position, node in enumerate(self.flat.nodes):
            self.check_kind(node)
            plain = without_out(node)
            if plain is not None:
                node = self.copying(node, plain)
            functional = functional_name(node.op)
            if functional is not None:
                self.write(position, node, functional)
                continue
            self.nodes.append(self.updated(node))
            if is_view(node, self.metas):
                self.views |= {Ref(node.name, index): node for index in range(len(node.outputs))}
        self.flat.nodes = self.nodes
        self.flat.loss = self.now(self.flat.loss)
        for name, (write, place) in sorted(self.written.items(), key=lambda item: -item[1][1]):
            self.keep(name, write, place)  # backwards, since calls are inserted

    def now(self, ref: Ref) -> Ref:
        return self.current.get(ref, ref)

    def updated(self, node: Node) -> Node:
        return with_refs(node, self.now)

    def write(self, position: int, node: Node, functional: str) -> None:
        written: Ref = node.args[0]
        chain = self.chain(written)
        root = chain[-1]
        if root.node in self.flat.constants:
            carried(self.flat, root.node)
        self.check_target(node, root)
        self.check_functions(node, root)
        value = self.copied(node, written) if functional == _COPY else replace(self.updated(node), op=functional)
        value = self.as_written(node, value)
        self.nodes.append(value)
        self.current[written] = self.current[Ref(node.name)] = Ref(value.name)
        self.metas[Ref(value.name)] = value.meta
        self.views[Ref(node.name)] = replace(node, op="aten.alias.default", args=(written,), kwargs=())
        family = [ref for ref in self.views if self.chain(ref)[-1] == root and ref.node != node.name]
        if any(self.last_use.get(ref, -1) > position for ref in (root, *family) if ref != written):
            self.spread(node, chain, [ref for ref in family if ref not in chain])
        if root.node in self.flat.parameters:
            self.written[root.node] = node, len(self.nodes)

    def copying(self, node: Node, plain: str) -> Node:
        """Return a call with `out=` as the same call without it, followed by a copy into the former `out`."""
        out = dict(node.kwargs)["out"]
        kwargs = tuple((key, value) for key, value in node.kwargs if key != "out")
        computed = replace(self.updated(node), name=self.unique(node.name), op=plain)
        computed = replace(computed, kwargs=tuple((key, map_refs(value, self.now)) for key, value in kwargs))
        self.nodes.append(computed)
        self.metas[Ref(computed.name)] = computed.meta
        return replace(node, op=_COPY, args=(out, Ref(computed.name)), kwargs=())

    def as_written(self, write: Node, value: Node) -> Node:
        """Return a call whose result has the dtype of the written tensor, even where operands are wider."""
        dtypes = {self.metas[ref].dtype for ref in value.inputs}
        dtype = dtype_of(value, self.metas) if dtypes - {write.meta.dtype} else write.meta.dtype
        if dtype == write.meta.dtype:
            return value
        wide = replace(value, name=self.unique(value.name), outputs=(replace(value.meta, dtype=dtype),))
        self.nodes.append(wide)
        self.metas[Ref(wide.name)] = wide.meta
        return replace(value, op="aten.to.dtype", args=(Ref(wide.name), write.meta.dtype), kwargs=())

    def check_kind(self, node: Node) -> None:
        """Raise TraceError for a write without a functional form."""
        overload = find_op(node.op)
        if overload is None or not overload._schema.is_mutable:
            return
        if functional_name(node.op) is None and without_out(node) is None:
            raise TraceError(
                "forward calls an operator that writes into its operands",
                values=f"{node.op}{at(self.flat, node)}",
                alternatives="write it out of place in the model (without out=)",
            )

    def check_target(self, node: Node, root: Ref) -> None:
        """Raise TraceError for a write to a parameter, or to a differentiated tensor where gradients are off."""
        target = self.flat.parameters.get(root.node)
        if target is not None:
            if not target.is_buffer and target.meta.requires_grad:
                raise TraceError(
                    "forward changes a trained parameter in place, which the optimizer changes too",
                    values=f"{root.node}: {node.op}{at(self.flat, node)}",
                    alternatives=[
                        "change it in the training loop, or compute the changed value from the parameter in forward",
                        "use torch.nn.utils.parametrize for a constrained parameter, max_norm=None for an embedding",
                        "call requires_grad_(False) on a parameter that forward alone changes (an average of others)",
                    ],
                )
            if not target.is_buffer and target.meta.dtype.itemsize < 4 and target.meta.dtype.is_floating_point:
                raise TraceError(
                    "forward updates a frozen parameter, and half precision would round the updates away",
                    values=f"{root.node} in {str(target.meta.dtype).removeprefix('torch.')}{at(self.flat, node)}",
                    alternatives=['precision="fp32"', "use a buffer (register_buffer), which keeps its dtype"],
                )
        elif not node.meta.requires_grad and any(self.metas[self.now(r)].requires_grad for r in (node.args[0], root)):
            raise TraceError(
                "forward writes, without gradients, to a tensor that gradients flow through",
                values=f"{node.op}{at(self.flat, node)}",
                alternatives="write it out of place in the model",
            )

    def check_functions(self, node: Node, root: Ref) -> None:
        """Raise TraceError for a write to an operand of an earlier custom Function, which may have returned a view of
        it.
        """
        before = itertools.takewhile(lambda other: other is not node, self.flat.nodes)
        for earlier in (other for other in before if other.op.startswith(f"{NAMESPACE}.")):
            if any(self.chain(ref)[-1] == root for ref in earlier.inputs):
                raise TraceError(
                    "forward writes to a tensor after passing it to a custom autograd.Function",
                    values=f"{node.op} after {earlier.op}{at(self.flat, node)}",
                    alternatives="write it out of place in the model",
                )

    def keep(self, name: str, write: Node, place: int) -> None:
        """Keep the value of a buffer after forward for the next step: as a counter, or as an update."""
        buffer, value = replace(self.flat.parameters[name], is_buffer=True), self.now(Ref(name))
        self.flat.parameters[name] = buffer
        increment = self.increment(name)
        if increment is not None:
            self.flat.parameters[name] = replace(buffer, increment=increment)
            return
        places = {node.name: index for index, node in enumerate(self.nodes)}
        while value.node in places and self.is_whole_copy(self.nodes[places[value.node]]):
            value = self.nodes[places[value.node]].args[0]
        maker = self.nodes[places[value.node]] if value.node in places else write
        place = places[value.node] + 1 if value.node in places else place
        # A layer updates its own buffers; writes of layers to other buffers follow after all layers.
        is_own = layer_path(name) == layer_path(maker.module)
        update = Node(
            name=self.unique("update"),
            op=UPDATE_BUFFER,
            args=(Ref(name), value),
            kwargs=(),
            outputs=(replace(buffer.meta, requires_grad=False),),
            module=maker.module if is_own else "",
        )
        self.nodes.insert(place if is_own else len(self.nodes), update)

    def is_whole_copy(self, node: Node) -> bool:
        """Return whether a call that replaced a `copy_` changes nothing."""
        source = self.metas.get(node.args[0]) if node.op == "aten.expand.default" else None
        return source is not None and (source.shape, source.dtype) == (node.meta.shape, node.meta.dtype)

    def increment(self, name: str) -> int | float | None:
        """Return the number that forward adds to a buffer; None for any other change."""
        by_name = {node.name: node for node in self.nodes}
        total: int | float = 0
        ref, count = self.now(Ref(name)), 0
        while ref != Ref(name):
            node = by_name.get(ref.node)
            sign = {"add": 1, "sub": -1}.get(base_name(node.op), 0) if node is not None else 0
            is_number = node is not None and len(node.args) == 2 and type(node.args[1]) in (int, float)
            if node is None or not sign or not is_number or node.kwargs:
                return None
            total, count, ref = total + sign * node.args[1], count + 1, node.args[0]
        is_exact = count == 1 or not self.flat.parameters[name].meta.dtype.is_floating_point
        return total if is_exact else None

    def chain(self, ref: Ref) -> list[Ref]:
        """Return the tensor, its base, the base of that, and so on."""
        refs = [ref]
        while refs[-1] in self.views:
            refs.append(self.views[refs[-1]].args[0])
        return refs

    def copied(self, node: Node, written: Ref) -> Node:
        """`x.copy_(y)`: y in x's shape and dtype."""
        source, meta = self.now(node.args[1]), node.meta
        if self.metas[source].dtype != meta.dtype:
            cast = replace(self.metas[source], dtype=meta.dtype)
            source = self.add(node, "aten.to.dtype", (source, meta.dtype), cast)
        return replace(node, op="aten.expand.default", args=(source, self.metas[written].shape), kwargs=())

    def spread(self, write: Node, chain: list[Ref], family: list[Ref]) -> None:
        """Carry the new value of chain[0] up to the base, then take the other views again."""
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
        """Write `source` with the elements that `view` shows replaced by their new value."""
        value, name = self.now(ref), view.op.split(".")[1]
        arguments = (*view.args[1:], *(v for _, v in view.kwargs))
        if (name in SAME_PLACES or name == "dropout") and self.metas[ref].dtype == meta.dtype:
            return value
        if name in RESHAPES:
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
        """Write a join of `value`, inside start .. end of `dim`, and `source` outside."""
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
        """Append a call in place of `write`."""
        name = self.unique(op.split(".")[1])
        self.nodes.append(Node(name=name, op=op, args=args, kwargs=(), outputs=(meta,), module=write.module))
        self.metas[Ref(name)] = meta
        return Ref(name)

    def unique(self, wish: str) -> str:
        name = unused_name(wish, self.names)
        self.names.add(name)
        return name


def dtype_of(node: Node, metas: Mapping[Ref, TensorMeta]) -> torch.dtype:
    """Return the dtype of a call's result, as torch promotes those of its operands."""
    empty = {ref: torch.empty(metas[ref].shape, dtype=metas[ref].dtype, device="meta") for ref in node.inputs}
    overload = find_op(node.op)
    assert overload is not None
    kwargs = {name: map_refs(value, empty.__getitem__) for name, value in node.kwargs}
    result: torch.Tensor = overload(*map_refs(node.args, empty.__getitem__), **kwargs)
    return result.dtype


def write_each(flat: FlatGraph) -> None:
    """Write calls on lists (`torch._foreach_mul_`) as a call per tensor."""
    metas = flat.metas()
    taken, nodes, renamed = {ref.node for ref in metas}, list[Node](), dict[Ref, Ref]()
    for node in flat.nodes:
        op = each_of(node.op)
        if op is None or not isinstance(node.args[0], tuple):
            nodes.append(node)
            continue
        for index, operand in enumerate(node.args[0]):
            name = unused_name(f"{node.name}_{index}", taken)
            taken.add(name)
            args = tuple(argument[index] if isinstance(argument, tuple) else argument for argument in node.args)
            meta = node.outputs[index] if node.outputs else metas[operand]
            nodes.append(replace(node, name=name, op=op, args=args, outputs=(meta,)))
            renamed[Ref(node.name, index)] = Ref(name)
    if renamed:
        flat.nodes = nodes
        flat.substitute(renamed)


def each_of(op: str) -> str | None:
    """Return the operator that `aten._foreach_NAME` calls per tensor; None for any other operator."""
    if not op.startswith("aten._foreach_"):
        return None
    name, overload = op.removeprefix("aten._foreach_").split(".")
    wanted = {"ScalarList": ("Scalar", "Tensor_Scalar"), "Scalar": ("Scalar", "Tensor_Scalar")}
    wishes = (*wanted.get(overload, ()), "Tensor", "default")
    return next(
        (f"aten.{name}.{overload}" for overload in wishes if find_op(f"aten.{name}.{overload}") is not None), None
    )


def without_out(node: Node) -> str | None:
    """Return the operator whose result this call writes to its one argument `out`; None for any other call."""
    overload = find_op(node.op)
    if overload is None or not isinstance(dict(node.kwargs).get("out"), Ref):
        return None
    arguments = [str(a.type) for a in overload._schema.arguments if not a.is_out]
    packet = overload.overloadpacket
    for name in packet.overloads():
        schema = getattr(packet, name)._schema
        if not schema.is_mutable and [str(a.type) for a in schema.arguments] == arguments:
            return f"{node.op.rpartition('.')[0]}.{name}"
    return None


def functional_name(op: str) -> str | None:
    """`aten.add_.Tensor` -> `aten.add.Tensor` where torch has it; None if `op` is functional already."""
    plain = _PLAIN.get(op, op)
    _, name, _ = plain.split(".")
    if not name.endswith("_") or name.endswith("__"):
        return None
    if op == _COPY:
        return op
    overload = functional_overload(find_op(plain))
    if overload is None:
        raise TraceError(
            "forward calls an in-place operator that has no functional form",
            values=op,
            alternatives="write it out of place in the model",
        )
    return str(overload)
