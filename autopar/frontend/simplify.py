"""Simplify the flat graph without changing its numbers: each pass removes or rewrites artifacts of a trace.

Order matters and is `simplify`'s body. Every pass takes the FlatGraph and changes it in place.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from autopar.frontend.effects import refuse_effects, refuse_untrained
from autopar.frontend.fx_import import LOGITS, FlatGraph
from autopar.frontend.rewrites.attention_sinks import write_sinks
from autopar.frontend.rewrites.chosen_experts import write_chosen
from autopar.frontend.rewrites.draws import write_draws
from autopar.frontend.rewrites.embedding_bags import write_bags
from autopar.frontend.rewrites.experts import join_biases, write_unsorted
from autopar.frontend.rewrites.functional import functionalize
from autopar.frontend.rewrites.gradient_flow import settle_gradients
from autopar.frontend.rewrites.grouped_keys import share_keys
from autopar.frontend.rewrites.integer_bounds import drop_constant_masks
from autopar.frontend.rewrites.joins import drop_cut_joins, nest_joins
from autopar.frontend.rewrites.losses import split_means
from autopar.frontend.rewrites.mask_windows import forms_of, window_of
from autopar.frontend.rewrites.narrow_inputs import narrow_inputs
from autopar.frontend.rewrites.scattered_rows import write_scattered_rows
from autopar.frontend.rewrites.unregistered_tensors import keep_tables
from autopar.ir.draws import DRAW, is_keyed, is_single_draw
from autopar.ir.graph import UPDATE_BUFFER, WINDOW_ATTENTION, Node, Ref, TensorMeta, map_refs
from autopar.ir.operators import arguments_of
from codegen.runtime.windows import Window

FOLD_LIMIT_ELEMENTS = 1 << 26
CONSTANT_RUNS = 32
"""The most runs of equal values of a constant that a program writes out; one with more becomes a buffer."""
_CAUSAL, _FULL = Window(after=0), Window()
_SDPA = "aten.scaled_dot_product_attention.default"
_NO_EFFECT = ("aten._assert_tensor_metadata.default", "aten._assert_async.msg", "aten.sym_constrain_range.default")
_IDENTITY = ("aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default")


def simplify(flat: FlatGraph) -> FlatGraph:
    """Run all passes, then remove unused calls."""
    drop_no_effect(flat)
    write_draws(flat)
    functionalize(flat)
    drop_identities(flat)
    keep_numbers(flat)
    eliminate_dead(flat)
    refuse_effects(flat)
    refuse_untrained(flat)
    drop_constant_masks(flat)
    write_unsorted(flat)
    write_chosen(flat)
    write_scattered_rows(flat)
    eliminate_dead(flat)
    join_biases(flat)
    settle_gradients(flat)
    drop_cut_joins(flat)
    eliminate_dead(flat)
    nest_joins(flat)
    split_means(flat)
    constants = evaluate_constants(flat)
    fold_iota_index(flat, constants)
    fold_causal_masks(flat, constants)
    write_sinks(flat, constants)
    write_bags(flat, constants)
    share_keys(flat)
    write_reshapes(flat)
    unpack_attention_defaults(flat)
    eliminate_dead(flat)
    narrow_inputs(flat)
    write_out_constants(flat)
    return flat


def drop_no_effect(flat: FlatGraph) -> None:
    """Drop assertions about metadata."""
    flat.nodes = [node for node in flat.nodes if node.op not in _NO_EFFECT]


def drop_identities(flat: FlatGraph) -> None:
    """Drop calls that return their tensors unchanged."""
    metas = flat.metas()
    renamed: dict[Ref, Ref] = {}
    for node in flat.nodes:
        if node.op == "aten.broadcast_tensors.default":
            pairs = [(metas[ref], meta) for ref, meta in zip(node.inputs, node.outputs, strict=True)]
            if all(source.shape == meta.shape and not _stops_gradients(source, meta) for source, meta in pairs):
                renamed |= {Ref(node.name, i): ref for i, ref in enumerate(node.inputs)}
        elif node.args and isinstance(node.args[0], Ref) and _is_identity(node, metas):
            renamed[Ref(node.name)] = node.args[0]
    flat.nodes = [n for n in flat.nodes if Ref(n.name) not in renamed]
    flat.substitute(renamed)


def _is_identity(node: Node, metas: dict[Ref, Any]) -> bool:
    if len(node.outputs) != 1 or _stops_gradients(metas[node.args[0]], node.meta):
        return False
    source, result = metas[node.args[0]], node.meta
    same = bool(source.shape == result.shape and source.dtype == result.dtype)
    name = node.op.split(".")[1]
    if node.op in _IDENTITY:
        return True
    if name in ("to", "expand", "view", "reshape", "flatten", "type_as", "_to_copy"):
        return same
    if name == "detach":
        return not bool(source.requires_grad)
    if name == "dropout":
        return node.args[1] == 0.0 or not node.args[2]
    if name in ("add", "sub") and len(node.args) == 2:
        return same and isinstance(node.args[1], int) and node.args[1] == 0
    if name in ("mul", "div") and len(node.args) == 2:
        return same and isinstance(node.args[1], (int, float)) and node.args[1] == 1
    if name == "slice" and same:
        return True
    return name == "clone" and not source.requires_grad


def _stops_gradients(source: TensorMeta, result: TensorMeta) -> bool:
    """Return whether a result is a constant to backward though its source is not (`torch.no_grad`)."""
    return source.requires_grad and not result.requires_grad


def eliminate_dead(flat: FlatGraph) -> None:
    """Keep calls that the loss needs, the mark of the logits, updates of buffers, and numbers that are drawn one by
    one.
    """
    live = _needed(flat, {*_roots(flat), *(node.name for node in flat.nodes if is_single_draw(node))})
    flat.nodes = [node for node in flat.nodes if node.name in live]


def _roots(flat: FlatGraph) -> set[str]:
    """Return names of calls that are kept for themselves: the loss, the mark of the logits, and updates of buffers."""
    return {flat.loss.node, *(node.name for node in flat.nodes if node.op in (LOGITS, UPDATE_BUFFER))}


def _needed(flat: FlatGraph, roots: set[str]) -> set[str]:
    """Return names of the calls that the roots need."""
    live = set(roots)
    for node in reversed(flat.nodes):
        if node.name in live:
            live |= {ref.node for ref in node.inputs}
    return live


def keep_numbers(flat: FlatGraph) -> None:
    """Replace an unneeded random call by the draw of one number, so that later calls keep their numbers.

    The model on one process makes that call and counts it. Lowering leaves out draws that nothing reads.
    """
    live = _needed(flat, _roots(flat))
    number = TensorMeta((), torch.float32)
    for position, node in enumerate(flat.nodes):
        if node.name not in live and (is_keyed(node) or arguments_of(node).get("dropout_p")):
            kwargs = (("dtype", torch.float32),)
            flat.nodes[position] = replace(node, op=DRAW, args=("uniform", ()), kwargs=kwargs, outputs=(number,))


def evaluate_constants(flat: FlatGraph) -> dict[Ref, torch.Tensor]:
    """Return values of nodes that depend on no input, parameter or randomness, up to FOLD_LIMIT_ELEMENTS
    elements each.
    """
    values: dict[Ref, torch.Tensor] = {Ref(name): value for name, value in flat.constants.items()}
    for node in flat.nodes:
        foldable = all(ref in values for ref in node.inputs) and not is_keyed(node) and node.op != UPDATE_BUFFER
        if not foldable or sum(meta.numel for meta in node.outputs) > FOLD_LIMIT_ELEMENTS:
            continue
        args = map_refs(node.args, values.__getitem__)
        kwargs = {name: map_refs(value, values.__getitem__) for name, value in node.kwargs}
        result = call_op(node.op, args, kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        values |= {Ref(node.name, index): value for index, value in enumerate(results)}
    return values


def write_out_constants(flat: FlatGraph) -> None:
    """Replace constant tensors of the trace by `full` calls, one per run of equal values, shared by equal tensors.

    One of more than CONSTANT_RUNS runs becomes a buffer, which keeps its value.
    """
    used = {ref.node for node in flat.nodes for ref in node.inputs}
    constant_names: dict[Any, Ref] = {}
    renamed: dict[Ref, Ref] = {}
    nodes: list[Node] = []
    tables: dict[str, torch.Tensor] = {}

    def call(key: Any, op: str, args: tuple[Any, ...], meta: TensorMeta, **kwargs: Any) -> Ref:
        if key not in constant_names:
            constant_names[key] = Ref(f"constant_{len(constant_names)}")
            name = constant_names[key].node
            nodes.append(Node(name=name, op=op, args=args, kwargs=tuple(kwargs.items()), outputs=(meta,)))
        return constant_names[key]

    def full(number: Any, meta: TensorMeta) -> Ref:
        key = (type(number), str(number), meta)  # as text, which distinguishes -0.0 from 0.0 and equates nan
        return call(key, "aten.full.default", (meta.shape, number), meta, dtype=meta.dtype)

    for name, value in flat.constants.items():
        meta = flat.parameters.pop(name).meta
        if name not in used:
            continue
        runs = _runs(value)
        if len(runs) > CONSTANT_RUNS:
            tables[name] = value
            continue
        if len(runs) == 1:
            renamed[Ref(name)] = full(runs[0][0], meta)
            continue
        parts = tuple(full(number, replace(meta, shape=(length,))) for number, length in runs)
        row = call(parts, "aten.cat.default", (parts, 0), replace(meta, shape=(meta.numel,)))
        shaped = ("aten.view.default", (row, meta.shape), meta)
        renamed[Ref(name)] = row if len(meta.shape) == 1 else call((row, meta.shape), *shaped)
    flat.nodes = [*nodes, *flat.nodes]
    flat.substitute(renamed | keep_tables(flat, tables))


def _runs(value: torch.Tensor) -> list[tuple[Any, int]]:
    """Return runs of equal values in a tensor's rows, with their lengths; [(0, 0)] for an empty one."""
    flat = value.detach().reshape(-1)
    if not len(flat):
        return [(0, 0)]
    differs = flat[1:] != flat[:-1]
    if flat.dtype.is_floating_point:
        differs |= flat.signbit()[1:] != flat.signbit()[:-1]  # 0.0 equals -0.0
    starts = [0, *(torch.nonzero(differs).flatten() + 1).tolist(), len(flat)]
    return [(flat[at].item(), end - at) for at, end in itertools.pairwise(starts)]


def call_op(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the overload named `op`. Creation ops place results on the CPU."""
    overload: Any = torch.ops
    for part in op.split("."):
        overload = getattr(overload, part)
    return overload(*_lists(args), **kwargs)


def _lists(value: Any) -> Any:
    """Return arguments with tuples as lists, as overload schemas want them."""
    return [(_lists(list(v)) if isinstance(v, (tuple, list)) else v) for v in value]


def fold_causal_masks(flat: FlatGraph, constants: dict[Ref, torch.Tensor]) -> None:
    """Drop masks of attention that hide nothing, or keys by position alone.

    A causal mask becomes `is_causal`, any other `window_attention`, unless probabilities are dropped.
    """
    metas = flat.metas()
    forms = forms_of(flat.nodes, metas) if any(node.op == _SDPA for node in flat.nodes) else {}
    windows: dict[Ref, Window | None] = {}
    for position, node in enumerate(flat.nodes):
        arguments = arguments_of(node) if node.op == _SDPA else {}
        mask = arguments.get("attn_mask")
        if not isinstance(mask, Ref):
            continue
        lengths = {metas[arguments[name]].shape[-2] for name in ("query", "key")} | {*metas[mask].shape[-2:]}
        if mask not in windows:
            windows[mask] = window_of(forms.get(mask), constants.get(mask), lengths)
        window, is_added = windows[mask], metas[mask].dtype.is_floating_point
        if window is None or (is_added and min(window.before or 0, window.after or 0) < 0):
            continue  # under an added mask, a query that sees no key gets a mean of all values
        arguments |= {"attn_mask": None, "is_causal": window == _CAUSAL}
        if window in (_CAUSAL, _FULL):
            flat.nodes[position] = _attention_node(node, arguments)
        elif window.width(max(lengths)) < max(lengths) and _may_be_windowed(arguments, metas):
            flat.nodes[position] = _window_node(node, arguments, window)


def _may_be_windowed(arguments: dict[str, Any], metas: dict[Ref, TensorMeta]) -> bool:
    shapes = [metas[arguments[name]].shape for name in ("query", "key", "value")]
    return arguments["dropout_p"] == 0.0 and not arguments["is_causal"] and {len(shape) for shape in shapes} == {4}


def _window_node(node: Node, arguments: dict[str, Any], window: Window) -> Node:
    bounds = (("before", window.before), ("after", window.after), ("chunk", window.chunk))
    rest = (("scale", arguments["scale"]), ("enable_gqa", arguments["enable_gqa"]))
    tensors = tuple(arguments[name] for name in ("query", "key", "value"))
    return replace(node, op=WINDOW_ATTENTION, args=tensors, kwargs=(*bounds, *rest))


def _attention_node(node: Node, arguments: dict[str, Any]) -> Node:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    rest = (("scale", arguments["scale"]), ("enable_gqa", arguments["enable_gqa"]))
    return replace(node, args=tuple(arguments[name] for name in names), kwargs=rest)


def write_reshapes(flat: FlatGraph) -> None:
    """Rewrite torch's own form of a reshape (tensordot, reshape under autograd): a copy with one reader,
    `_unsafe_view`.

    Whether a copy is needed follows from the layout of a program's tensors (codegen/strides.py).
    """
    metas, by_ref = flat.metas(), {Ref(node.name): node for node in flat.nodes}
    uses = Counter(ref for node in flat.nodes for ref in node.inputs)
    for position, node in enumerate(flat.nodes):
        if node.op != "aten._unsafe_view.default":
            continue
        source, sizes = node.args[0], node.args[1]
        maker = by_ref.get(source)
        is_copy = maker is not None and maker.op == "aten.clone.default" and uses[source] == 1
        if is_copy and maker is not None and not _stops_gradients(metas[maker.args[0]], maker.meta):
            flat.nodes[position] = replace(node, op="aten.reshape.default", args=(maker.args[0], sizes))
        else:
            flat.nodes[position] = replace(node, op="aten.view.default", args=(source, sizes))


def unpack_attention_defaults(flat: FlatGraph) -> None:
    """Give every attention call all its arguments, so that rules and emission see one form."""
    flat.nodes = [_attention_node(n, arguments_of(n)) if n.op == _SDPA else n for n in flat.nodes]


def fold_iota_index(flat: FlatGraph, constants: dict[Ref, torch.Tensor]) -> None:
    """`x[arange(B)[:, None], arange(S)[None, :]]` -> a view of x.

    An index that counts through a whole dim selects everything. As an index it would hold global row numbers, which a
    shard of x does not have.
    """
    metas = flat.metas()
    for position, node in enumerate(flat.nodes):
        if node.op != "aten.index.Tensor":
            continue
        source, indices = node.args
        if not all(isinstance(i, Ref) and i in constants for i in indices) or len(indices) != len(metas[source].shape):
            continue
        dims = [
            _iota_dim(constants[i], len(node.meta.shape), size)
            for i, size in zip(indices, metas[source].shape, strict=True)
        ]
        shape = [1] * len(node.meta.shape)
        for dim, size in zip(dims, metas[source].shape, strict=True):
            if dim is not None:
                shape[dim] = size
        in_order = None not in dims and dims == sorted(d for d in dims if d is not None) and len(set(dims)) == len(dims)
        if in_order and tuple(shape) == node.meta.shape:
            flat.nodes[position] = replace(node, op="aten.view.default", args=(source, tuple(shape)))


def _iota_dim(index: torch.Tensor, rank: int, size: int) -> int | None:
    """Return the output dim along which `index` counts 0 .. size-1, or None."""
    long_dims = [d for d, n in enumerate(index.shape) if n > 1]
    is_iota = index.numel() == size and math.prod(index.shape) == size and len(long_dims) <= 1
    if not is_iota or not torch.equal(index.reshape(-1).long(), torch.arange(size)):
        return None
    dim = long_dims[0] if long_dims else 0
    return rank - index.dim() + dim
