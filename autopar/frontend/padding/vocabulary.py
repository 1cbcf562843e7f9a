"""Pad vocabularies to a size that a degree divides, or that products like: padding changes no loss and no gradient.

A table of V rows may be longer where all its readers look up rows by ids, which are below V, or are a linear layer
whose logits go to cross-entropies alone. Logits of padding get a number added for which exp() is 0. So they take no
part in a loss, their gradient and that of the padded rows is 0, and the rows keep their values. Look-ups and losses
know the number of the user's rows, so that an id of padding still is an IndexError.

Matrix units read rows of 16 bytes. A product of 16-bit numbers with a dim that is no multiple of 8 runs a kernel that
reads less at a time: on an H100 the three products of BERT's head (V = 30,522) run at 250 TFLOP/s instead of some 600
(shared/design/gpu_steps.md, section 6). So on GPUs a vocabulary is a multiple of `ALIGNMENT`, as in Megatron-LM
(`--make-vocab-size-divisible-by`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from autopar.frontend.fx_import import unused_name
from autopar.ir.graph import Graph, LayerRun, Node, Parameter, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import RESHAPES, SAME_VALUES, SHAPES
from autopar.rules.families.loss import is_plain_cross_entropy

LOWEST = -1e30
"""The number added to logits of padding; in fp16, which lacks such a number, half of the lowest."""
ALIGNMENT = 64
"""Rows of a vocabulary on a GPU are a multiple of this: a tile's side, and eight times the least that matters."""
_LEAST_ALIGNMENT = 8
_LARGEST_SHARE = 1 / 4
"""Padding to the alignment, or of a table that no product reads, is at most this share of the rows: 2 rows get no 62
more."""
_SIZED = RESHAPES & SHAPES.keys()


def alignment_of(graph: Graph) -> int:
    """Return `ALIGNMENT` if a vocabulary is too unaligned for 16-bit products on a GPU, and may be padded; else 1."""
    search = _Search(graph)
    unaligned = [
        parameter
        for parameter in graph.parameters
        if _is_table(parameter, _LEAST_ALIGNMENT)
        and -parameter.meta.shape[0] % ALIGNMENT <= parameter.meta.shape[0] * _LARGEST_SHARE
    ]
    is_useful = any(len(search.reached(Ref(parameter.name)) or ()) > 1 for parameter in unaligned)
    return ALIGNMENT if is_useful else 1


def padded(graph: Graph, multiple: int) -> Graph:
    """Return the graph with vocabularies of a multiple of `multiple` rows, wherever that is exact;
    itself if nowhere.
    """
    if multiple == 1:
        return graph
    search = _Search(graph)
    longer: dict[Ref, int] = {}
    for parameter in graph.parameters:
        if _is_table(parameter, multiple) and parameter.name in search.users:
            lengthened_dims = search.reached(Ref(parameter.name)) or {}
            size = parameter.meta.shape[0]
            is_product = len(lengthened_dims) > 1 and multiple % ALIGNMENT
            if is_product or _more(size, multiple) <= size * _LARGEST_SHARE:
                longer |= lengthened_dims
    if not longer:
        return graph
    parameters = tuple(_longer(original, longer, multiple) for original in graph.parameters)
    body = _Rewriting(graph, longer, multiple).body()
    vocabularies = {
        piece.name: search.metas[ref].shape[longer[ref]]
        for piece in graph.body
        if isinstance(piece, Node) and base_name(piece.op) in ("embedding", "cross_entropy_loss")
        if (ref := piece.inputs[0]) in longer
    }
    padded_graph = replace(graph, parameters=parameters, body=body, padded_to=multiple, vocabularies=vocabularies)
    if graph.logits not in longer:
        return padded_graph
    dim = longer[graph.logits]
    return replace(padded_graph, logits_size=(dim, search.metas[graph.logits].shape[dim]))


def _is_table(parameter: Parameter, multiple: int) -> bool:
    """Return whether the parameter is a matrix whose rows are no multiple of `multiple`."""
    shape = parameter.meta.shape
    return not parameter.is_buffer and len(shape) == 2 and bool(shape[0] % multiple)


def _more(size: int, multiple: int) -> int:
    return -size % multiple


def _longer(parameter: Parameter, longer: dict[Ref, int], multiple: int) -> Parameter:
    if Ref(parameter.name) not in longer:
        return parameter
    more = _more(parameter.meta.shape[0], multiple)
    return replace(parameter, meta=lengthened(parameter.meta, 0, more), padding=more)


def lengthened(meta: TensorMeta, dim: int, more: int) -> TensorMeta:
    """Return the same with `more` entries behind those of a dim."""
    return replace(meta, shape=(*meta.shape[:dim], meta.shape[dim] + more, *meta.shape[dim + 1 :]))


class _Search:
    """Find tensors that grow with a table: tensors of the top level, and the dim of each that grows."""

    def __init__(self, graph: Graph) -> None:
        self.loss = graph.loss
        self.parameters = {Ref(p.name) for p in graph.parameters if not p.is_buffer}
        self.metas = {Ref(p.name): p.meta for p in graph.parameters} | {Ref(i.name): i.meta for i in graph.inputs}
        self.uses: dict[Ref, list[tuple[Node | LayerRun, int]]] = {}
        for piece in graph.body:
            self.metas |= {Ref(piece.name, index): meta for index, meta in enumerate(piece.outputs)}
            for position, ref in enumerate(piece.inputs):
                self.uses.setdefault(ref, []).append((piece, position))
        self.users = {ref.node for ref in self.uses}
        # A layer may read a parameter under a local name.
        runs = [piece for piece in graph.body if isinstance(piece, LayerRun)]
        self.users -= {f"{path}.{p.name}" for run in runs for path in run.instances for p in run.layer.parameters}

    def reached(self, table: Ref) -> dict[Ref, int] | None:
        """Return all tensors that grow with the table; None if a reader would change with padding."""
        longer = {table: 0}
        open_refs = [table]
        while open_refs:
            ref = open_refs.pop()
            for piece, position in self.uses.get(ref, ()):
                results = None if isinstance(piece, LayerRun) else self._made(piece, position, longer[ref])
                if results is None:
                    return None
                for result, dim in results.items():
                    if result not in longer:
                        open_refs += [result] if result not in self.parameters else []
                        longer[result] = dim
        return None if self.loss in longer else longer

    def _made(self, node: Node, position: int, dim: int) -> dict[Ref, int] | None:
        """Return the results that grow when one input grows in `dim`; None for a call that depends on
        its last entries.
        """
        name, arguments, ref = base_name(node.op), arguments_of(node), node.inputs[position]
        if ref in self.parameters:
            if name == "embedding" and arguments["weight"] == ref != arguments["indices"]:
                return {}
            return self._linear(node, arguments) if name == "linear" and arguments["weight"] == ref else None
        result = Ref(node.name)
        if name == "cross_entropy_loss":
            metas = [self.metas[operand] for operand in node.inputs]
            is_plain = is_plain_cross_entropy(node, metas, any_dims=True) and not arguments["label_smoothing"]
            return {} if is_plain and position == 0 and dim == min(1, len(metas[0].shape) - 1) else None
        shape, last = self.metas[ref].shape, len(self.metas[ref].shape) - 1
        if name in SAME_VALUES and len(node.inputs) == 1 and node.meta.dtype.is_floating_point:
            return {result: dim}
        if name in _SIZED and dim == last and node.meta.shape[-1:] == shape[-1:]:
            return {result: len(node.meta.shape) - 1}
        if name == "slice" and arguments["dim"] % len(shape) != dim:
            return {result: dim}
        if name == "flatten":
            start, end = (arguments[bound] % len(shape) for bound in ("start_dim", "end_dim"))
            return None if start <= dim <= end else {result: dim - (end - start) * (dim > end)}
        if name == "transpose":
            swapped = [arguments["dim0"] % len(shape), arguments["dim1"] % len(shape)]
            return {result: swapped[1 - swapped.index(dim)] if dim in swapped else dim}
        return None

    def _linear(self, node: Node, arguments: dict[str, Any]) -> dict[Ref, int] | None:
        """Return the logits, and the bias, which no other call may read."""
        bias = arguments.get("bias")
        if arguments["input"] == arguments["weight"]:
            return None
        if bias is not None and (bias not in self.parameters or len(self.uses[bias]) > 1):
            return None
        bias_dims = {} if bias is None else {bias: 0}
        return bias_dims | {Ref(node.name): len(node.meta.shape) - 1}


class _Rewriting:
    """Rewrite the body with longer tensors, and with an addition to logits."""

    def __init__(self, graph: Graph, longer: dict[Ref, int], multiple: int) -> None:
        self.graph, self.longer, self.multiple = graph, longer, multiple
        self.names = {part.name for part in (*graph.body, *graph.parameters, *graph.inputs)}

    def body(self) -> tuple[Node | LayerRun, ...]:
        return tuple(new for piece in self.graph.body for new in self._rewritten(piece))

    def _rewritten(self, piece: Node | LayerRun) -> Iterator[Node | LayerRun]:
        dim = self.longer.get(Ref(piece.name))
        if dim is None or isinstance(piece, LayerRun):
            yield piece
            return
        size = piece.meta.shape[dim]
        meta = lengthened(piece.meta, dim, _more(size, self.multiple))
        if base_name(piece.op) == "linear":
            (*before, added) = self._added(piece, size, meta)
            yield from (*before, added)
            bias = arguments_of(piece).get("bias")
            if bias is not None:
                both = replace(added, name=self._unique("bias"), op="aten.add.Tensor", args=(bias, Ref(added.name)))
                added = replace(both, outputs=(replace(both.meta, requires_grad=self._is_trained(bias)),))
                yield added
            yield replace(piece, args=(*piece.args[:2], Ref(added.name)), kwargs=(), outputs=(meta,))
        elif base_name(piece.op) in _SIZED:
            sizes = piece.args[1]
            last = sizes[-1] if sizes[-1] == -1 else meta.shape[-1]
            yield replace(piece, args=(piece.args[0], (*sizes[:-1], last), *piece.args[2:]), outputs=(meta,))
        else:
            yield replace(piece, outputs=(meta,))

    def _added(self, node: Node, size: int, meta: TensorMeta) -> Iterator[Node]:
        """Yield calls that make 0 for each of a layer's `size` classes and LOWEST for padding, of the logits' dtype."""
        lowest = max(LOWEST, torch.finfo(meta.dtype).min / 2)
        steps = (
            ("aten.arange.default", meta.shape[-1], torch.int64),
            ("aten.ge.Scalar", size, torch.bool),
            ("aten.to.dtype", meta.dtype, meta.dtype),
            ("aten.mul.Tensor", lowest, meta.dtype),
        )
        before: tuple[Ref, ...] = ()
        for op, argument, dtype in steps:
            name = self._unique("padding")
            outputs = (TensorMeta(meta.shape[-1:], dtype),)
            yield Node(name=name, op=op, args=(*before, argument), kwargs=(), outputs=outputs, module=node.module)
            before = (Ref(name),)

    def _is_trained(self, bias: Ref) -> bool:
        return next(p.meta.requires_grad for p in self.graph.parameters if p.name == bias.node)

    def _unique(self, wish: str) -> str:
        name = unused_name(wish, self.names)
        self.names.add(name)
        return name
