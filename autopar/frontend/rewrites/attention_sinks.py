"""Join attention with a sink, which a model writes out, into one call.

A sink is a logit per head with a share of every softmax, and without a value. Models join it to the scores as a column,
and drop its probabilities (transformers' GPT-OSS):

    scores  = q k^T * scale
    joined  = cat((scores + mask, sinks), -1)           sinks [H] as [B, H, S, 1]
    shifted = joined - max(joined, -1)
    result  = softmax(shifted, -1)[..., :-1] v

ATTENTION is this pattern with its variants. It is `sink_attention(q, k, v, sinks)` [B, H, S, F], without scores in
memory, under three conditions. No other call reads an intermediate result, no probabilities are dropped, and the mask
is a window (mask_windows.py) in which each query sees at least its own key. Keys and values that are repeated for heads
that share them are taken unrepeated. Any other form stays unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from autopar.frontend.fx_import import FlatGraph, unused_name
from autopar.frontend.rewrites.call_patterns import matches_in, ref_of
from autopar.frontend.rewrites.grouped_keys import shared_keys
from autopar.frontend.rewrites.mask_windows import forms_of, hides, negated, window_of
from autopar.ir.graph import SINK_ATTENTION, Node, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import RESHAPES
from codegen.fusion.template import Behind, Bindings, Either, Is, Leaf, Op, Pattern, Template, Value
from codegen.program import Var
from codegen.runtime.windows import Window

# --- the pattern ------------------------------------------------------------------------------------------------------


def _any(*options: Template) -> Either:
    return Either(options)


def _cast(x: Template) -> Behind:
    return Behind(("cast",), x)


def _detached(x: Template) -> Behind:
    return Behind(("detach",), x)


def _number(name: str) -> Either:
    """A number, or a constant of one element."""
    return _any(Value(name), Leaf(name))


_LAST: Final = _any(Is(-1), Is(3), Is((-1,)), Is((3,)))
"""The last dim of a tensor [B, H, S, T]."""

_PRODUCT: Final = Op("matmul", (Leaf("query"), Leaf("key")))
_SCORES: Final = _any(
    _PRODUCT,
    Op("mul", (_cast(_PRODUCT), _number("factor"))),
    Op("div", (_cast(_PRODUCT), _number("divisor"))),
)
_MASKED: Final = _any(
    _SCORES,
    Op("add", (_cast(_SCORES), Leaf("added mask"), Is(1)), commutes=True),
    Op("where", (Leaf("seen"), _cast(_SCORES), _number("fill")), name="filled"),
    Op("masked_fill", (_cast(_SCORES), Leaf("hidden"), _number("fill")), name="filled"),
)
_JOINED: Final = _any(
    Op("cat", ((_cast(_MASKED), _cast(Leaf("last column"))), _LAST), name="joined"),
    Op("cat", ((_cast(Leaf("first column")), _cast(_MASKED)), _LAST), name="joined"),
)
"""One call, although the pattern has it twice: whatever is subtracted is the largest of the same scores."""
_OF_JOINED: Final = (_detached(_JOINED), _LAST, Is(True))
_LARGEST: Final = _any(Op("max", _OF_JOINED), Op("amax", _OF_JOINED))
_SHIFTED: Final = _any(_JOINED, Op("sub", (_JOINED, _detached(_LARGEST), Is(1))))
"""The same to a softmax, and to its gradient."""
_SOFTMAX: Final = Op("softmax", (_cast(_SHIFTED), _LAST, Value("dtype")))
_WEIGHTS: Final = Op("slice", (_cast(_SOFTMAX), _LAST, Value("start"), Value("stop"), Value("step")))

ATTENTION: Final = Pattern(
    name="attention with sinks",
    target=SINK_ATTENTION,
    leaves=("query", "key", "value", "first column", "last column"),
    template=Op("matmul", (_cast(_WEIGHTS), Leaf("value"))),
    fits=lambda bound: len(bound["query"].type.shape) == len(bound["value"].type.shape) == 4,
)


def write_sinks(flat: FlatGraph, constants: Mapping[Ref, torch.Tensor]) -> None:
    """Rewrite every such attention, as the module docstring describes. constants: values of nodes that depend on no
    input.
    """
    if not {"cat", "softmax", "matmul", "slice"} <= {base_name(node.op) for node in flat.nodes}:
        return
    matches = matches_in(flat, ATTENTION)
    if not matches:
        return
    writer = _SinkWriter(flat, constants)
    nodes: list[Node] = []
    for node in flat.nodes:
        try:
            nodes += writer.written(node, matches[node.name].bound) if node.name in matches else [node]
        except _NoSinkError:
            nodes.append(node)
    flat.nodes = nodes


class _NoSinkError(Exception):
    """The calls are not attention with a sink."""


def _is(holds: bool) -> None:
    if not holds:
        raise _NoSinkError


class _SinkWriter:
    """A graph in which attention may be written out."""

    def __init__(self, flat: FlatGraph, constants: Mapping[Ref, torch.Tensor]) -> None:
        self.constants, self.metas = constants, flat.metas()
        self.made_by = {node.name: node for node in flat.nodes}
        self.taken = {ref.node for ref in self.metas}
        self.forms = forms_of(flat.nodes, self.metas)
        self.windows: dict[tuple[Ref, bool, tuple[int, int]], Window | None] = {}

    def maker(self, ref: Ref, *names: str) -> Node | None:
        """Return the call whose first result is a tensor, if it is one of these."""
        node = self.made_by.get(ref.node)
        return node if node is not None and ref.index == 0 and base_name(node.op) in names else None

    # --- the parts of a match -----------------------------------------------------------------------------------------

    def column(self, bound: Bindings) -> Ref:
        """Return the column of sinks, whose probabilities are cut off."""
        name = "last column" if "last column" in bound else "first column"
        column, num_keys = bound[name], self.metas[ref_of(bound["key"])].shape[-1]
        columns = range(num_keys + 1)[slice(*(bound[word].value for word in ("start", "stop", "step")))]
        _is(column.type.shape[-1] == 1)
        _is(columns == (range(num_keys) if name == "last column" else range(1, num_keys + 1)))
        return ref_of(column)

    def scale(self, bound: Bindings) -> float:
        """Return the factor of the scores."""
        factor, divisor = self.number(bound, "factor"), self.number(bound, "divisor")
        _is(bool(factor) and bool(divisor))
        return factor / divisor

    def number(self, bound: Bindings, name: str) -> float:
        """Return a number of the pattern, or the value of a constant of one element; 1 if the match has none."""
        value = bound[name].value if name in bound else 1.0
        if isinstance(value, Var):
            constant = self.constants.get(ref_of(bound[name]))
            if constant is None or constant.numel() != 1:
                raise _NoSinkError
            value = constant.item()
        return float(value)

    def window(self, bound: Bindings) -> Window:
        """Return the window of the mask. Raises _NoSinkError if it is no window, or hides a query's own key."""
        name = next((name for name in ("added mask", "seen", "hidden") if name in bound), None)
        if name is None:
            return Window()
        mask, lengths = ref_of(bound[name]), (bound["query"].type.shape[-2], bound["key"].type.shape[-1])
        meta = self.metas[mask]
        _is(len(meta.shape) >= 2 and not meta.requires_grad)
        _is(meta.dtype.is_floating_point == (name == "added mask"))
        if "filled" in bound:
            (filled,) = bound["filled"].value.results
            _is(hides(self.number(bound, "fill"), self.metas[Ref(*filled.type.tensor)].dtype))
        key = mask, name == "hidden", lengths
        if key not in self.windows:
            form, values = self.forms.get(mask), self.constants.get(mask)
            if name == "hidden":
                form, values = negated(form), None if values is None else ~values
            self.windows[key] = window_of(form, values, {*lengths, *meta.shape[-2:]})
        window = self.windows[key]
        if window is None or min(window.before or 0, window.after or 0) < 0:
            raise _NoSinkError
        return window

    # --- what is written ----------------------------------------------------------------------------------------------

    def written(self, node: Node, bound: Bindings) -> list[Node]:
        """Return the call in place of the last product, after views that it needs. Raises _NoSinkError."""
        calls: list[Node] = []
        column, window, scale = self.column(bound), self.window(bound), self.scale(bound)
        query, values = ref_of(bound["query"]), ref_of(bound["value"])
        keys = self.untransposed(ref_of(bound["key"]), node, calls)
        metas = [self.metas[ref] for ref in (query, keys, values)]
        _is(all(meta.shape[:2] == node.meta.shape[:2] and meta.dtype == node.meta.dtype for meta in metas))
        sinks = self.per_head(column, node, calls)
        key, value, is_shared = shared_keys(keys, values, self.made_by, self.metas)
        is_causal = window == Window(after=0)
        bounds = (None, None, None) if is_causal else (window.before, window.after, window.chunk)
        kwargs: dict[str, Any] = {"is_causal": is_causal}
        kwargs |= dict(zip(("before", "after", "chunk"), bounds, strict=True))
        kwargs |= {"scale": scale, "enable_gqa": is_shared}
        return [*calls, replace(node, op=SINK_ATTENTION, args=(query, key, value, sinks), kwargs=tuple(kwargs.items()))]

    def append_call(self, node: Node, calls: list[Node], op: str, args: tuple[Any, ...], shape: tuple[int, ...]) -> Ref:
        """Append a call before `node` that reshapes its first argument; return its result."""
        name = unused_name(f"{node.name}_{base_name(op)}", self.taken)
        self.taken.add(name)
        meta: TensorMeta = replace(self.metas[args[0]], shape=shape)
        calls.append(replace(node, name=name, op=op, args=args, kwargs=(), outputs=(meta,)))
        self.metas[Ref(name)] = meta
        return Ref(name)

    def untransposed(self, ref: Ref, node: Node, calls: list[Node]) -> Ref:
        """Return the keys [B, H, T, E] of [B, H, E, T]."""
        _is(len(self.metas[ref].shape) == 4)
        flip = self.maker(ref, "transpose")
        if flip is not None and {arguments_of(flip)[name] % 4 for name in ("dim0", "dim1")} == {2, 3}:
            return flip.inputs[0]
        shape = self.metas[ref].shape
        return self.append_call(node, calls, "aten.transpose.int", (ref, 2, 3), (*shape[:2], shape[3], shape[2]))

    def per_head(self, column: Ref, node: Node, calls: list[Node]) -> Ref:
        """Return the sinks [H] of a column [B, H, S, 1]."""
        num_heads, ref = node.meta.shape[1], column
        at = -3  # the dim of heads, from the end
        while self.metas[ref].shape != (num_heads,):
            view = self.maker(ref, "expand", *RESHAPES)
            if view is None or (source := self.metas[view.inputs[0]].shape) == ():
                break
            if base_name(view.op) != "expand":
                long = [dim for dim, size in enumerate(source) if size > 1]
                result = [dim for dim, size in enumerate(view.meta.shape) if size > 1]
                _is(num_heads == 1 or (len(long) == len(result) == 1 and result[0] - len(view.meta.shape) == at))
                at = long[0] - len(source) if long else at
            elif -at > len(source):
                break
            ref = view.inputs[0]
        shape = self.metas[ref].shape
        is_vector = sum(size > 1 for size in shape) <= 1 and (num_heads == 1 or shape[at] == num_heads)
        _is(is_vector and self.metas[ref].numel == num_heads)
        if shape == (num_heads,):
            return ref
        return self.append_call(node, calls, "aten.view.default", (ref, (num_heads,)), (num_heads,))
