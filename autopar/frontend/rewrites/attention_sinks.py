"""Join attention with a sink, which a model writes out, into one call.

A sink is a logit per head with a share of every softmax, and without a value. Models join it to the scores as a column,
and drop its probabilities (transformers' GPT-OSS):

    scores  = q k^T * scale                     also divided
    masked  = scores + mask                     also where(mask, scores, -inf), or masked_fill
    joined  = cat((masked, sinks), -1)          also the sinks first; [H] as [B, H, S, 1]
    shifted = joined - max(joined, -1)          may be missing: a softmax does not change, nor its gradient
    result  = softmax(shifted, -1)[..., :-1] v

This is `sink_attention(q, k, v, sinks)` [B, H, S, F], without scores in memory, under three conditions. No other call
reads an intermediate result, no probabilities are dropped, and the mask is a window (mask_windows.py) in which each
query sees at least its own key. Casts between floating dtypes, which only round, may occur anywhere. Keys and values
that are repeated for heads that share them are taken unrepeated. Any other form stays unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.frontend.fx_import import FlatGraph, unused_name
from autopar.frontend.rewrites.grouped_keys import shared_keys
from autopar.frontend.rewrites.mask_windows import Form, forms_of, hides, negated, window_of
from autopar.ir.graph import SINK_ATTENTION, Node, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import RESHAPES
from codegen.runtime.windows import Window


def write_sinks(flat: FlatGraph, constants: Mapping[Ref, torch.Tensor]) -> None:
    """Rewrite every such attention, as the module docstring describes. constants: values of nodes that depend on no
    input.
    """
    names = {base_name(node.op) for node in flat.nodes}
    if not {"cat", "softmax", "matmul", "slice"} <= names:
        return
    written = _SinkWriter(flat, constants)
    flat.nodes = [call for node in flat.nodes for call in written.calls(node)]


class _NoSinkError(Exception):
    """The calls are not attention with a sink."""


def _is(holds: bool) -> None:
    if not holds:
        raise _NoSinkError


@dataclass(frozen=True, slots=True)
class _Scores:
    """q k^T * scale under a window."""

    query: Ref
    keys: Ref
    scale: float
    window: Window


class _SinkWriter:
    """A graph in which attention may be written out."""

    def __init__(self, flat: FlatGraph, constants: Mapping[Ref, torch.Tensor]) -> None:
        self.constants, self.metas, self.loss = constants, flat.metas(), flat.loss
        self.made_by = {node.name: node for node in flat.nodes}
        self.uses = Counter(ref for node in flat.nodes for ref in node.inputs)
        self.taken = {ref.node for ref in self.metas}
        self.nodes, self.windows = flat.nodes, dict[tuple[Ref, bool, tuple[int, ...]], Window | None]()
        self._forms: dict[Ref, Form] | None = None

    @property
    def forms(self) -> dict[Ref, Form]:
        if self._forms is None:
            self._forms = forms_of(self.nodes, self.metas)
        return self._forms

    def calls(self, node: Node) -> Iterator[Node]:
        """Yield the calls in place of one call."""
        if base_name(node.op) == "matmul" and len(node.meta.shape) == 4:
            try:
                yield from self.attention(node)
            except _NoSinkError:
                yield node
        else:
            yield node

    # --- walking back -------------------------------------------------------------------------------------------------

    def maker(self, ref: Ref, *names: str) -> Node | None:
        """Return the call whose first result is a tensor, if it is one of these."""
        node = self.made_by.get(ref.node)
        return node if node is not None and ref.index == 0 and base_name(node.op) in names else None

    def only(self, ref: Ref, *names: str, num_uses: int = 1) -> Node:
        """Return `maker` of a tensor that no call outside the pattern reads."""
        node = self.maker(ref, *names)
        _is(node is not None and ref != self.loss)
        assert node is not None
        _is([self.uses[Ref(node.name, index)] for index in range(len(node.outputs))][1:] in ([], [0]))
        _is(self.uses[ref] == num_uses)
        return node

    def uncast(self, ref: Ref) -> Ref:
        """Return a tensor before casts between floating dtypes, if no other call reads a step of them."""
        while (node := self.maker(ref, "to", "to_copy")) is not None:
            _is(self.uses[ref] == 1 and ref != self.loss and self.metas[node.inputs[0]].dtype.is_floating_point)
            ref = node.inputs[0]
        return ref

    def is_last(self, dims: Any) -> bool:
        """Return whether a dim of a tensor [B, H, S, T] is its last."""
        return (dims if isinstance(dims, int) else dims[0] if len(dims) == 1 else None) in (3, -1)

    # --- the pattern, from its end ------------------------------------------------------------------------------------

    def attention(self, node: Node) -> list[Node]:
        """Return the call in place of the last product, and its operands. Raises _NoSinkError."""
        weights, values = node.inputs
        cut = self.only(self.uncast(weights), "slice")
        cut_arguments = arguments_of(cut)
        num_joined = self.metas[cut_arguments["self"]].shape[-1]
        kept = range(num_joined)[slice(cut_arguments["start"], cut_arguments["end"], cut_arguments["step"])]
        _is(self.is_last(cut_arguments["dim"]) and kept in (range(num_joined - 1), range(1, num_joined)))
        softmax = self.only(self.uncast(cut_arguments["self"]), "softmax")
        _is(self.is_last(arguments_of(softmax)["dim"]))
        joined = self.joined(self.uncast(softmax.inputs[0]))
        parts = joined.inputs
        _is(len(parts) == 2 and self.is_last(arguments_of(joined)["dim"]))
        masked, column = parts if kept.start == 0 else parts[::-1]
        _is(self.metas[column].shape[-1] == 1)
        scores = self.scores(self.uncast(masked))
        return self.written(node, scores, values, column)

    def joined(self, ref: Ref) -> Node:
        """Return the scores and the sinks, before their largest is subtracted."""
        shifted = self.maker(ref, "sub")
        if shifted is None:
            return self.only(ref, "cat")
        self.only(ref, "sub")
        _is(len(shifted.inputs) == 2 and arguments_of(shifted)["alpha"] == 1)
        source, largest = shifted.inputs
        maximum = self.only(self.detached(largest), "max", "amax")
        arguments = arguments_of(maximum)
        _is(
            bool(arguments.get("keepdim"))
            and self.is_last(arguments["dim"])
            and self.detached(arguments["self"]) == source
        )
        return self.only(source, "cat", num_uses=2)

    def detached(self, ref: Ref) -> Ref:
        """Return a tensor, or the operand of its detach."""
        node = self.maker(ref, "detach")
        return self.only(ref, "detach").inputs[0] if node is not None else ref

    def scores(self, ref: Ref) -> _Scores:
        """Return the parts of masked scores."""
        window = Window()
        node = self.only(ref, "add", "where", "masked_fill", "mul", "div", "matmul")
        if base_name(node.op) in ("add", "where", "masked_fill"):
            ref, window = self.unmasked(node)
            ref = self.uncast(ref)
            node = self.only(ref, "mul", "div", "matmul")
        scale = 1.0
        while base_name(node.op) != "matmul":
            arguments = arguments_of(node)
            factor = self.number(arguments["other"])
            _is(factor is not None and factor != 0 and arguments.get("rounding_mode") is None)
            assert factor is not None
            scale = scale * factor if base_name(node.op) == "mul" else scale / factor
            node = self.only(self.uncast(arguments["self"]), "mul", "div", "matmul")
        query, keys = node.inputs
        return _Scores(query, keys, scale, window)

    def unmasked(self, node: Node) -> tuple[Ref, Window]:
        """Return (scores, the window that hides some of them) for a call that masks scores."""
        arguments, name = arguments_of(node), base_name(node.op)
        if name == "add":
            _is(len(node.inputs) == 2 and arguments["alpha"] == 1)
            pairs = [node.inputs, node.inputs[::-1]]
            return (
                next(((x, window_found) for x, mask in pairs if (window_found := self.window(mask, node))), None)
                or self.no_mask()
            )
        hidden = self.number(arguments["other" if name == "where" else "value"])
        _is(hidden is not None and hides(hidden, node.meta.dtype))
        mask = arguments["condition" if name == "where" else "mask"]
        window = self.window(mask, node, is_kept=name == "where")
        return (arguments["self"], window) if window is not None else self.no_mask()

    def no_mask(self) -> Any:
        raise _NoSinkError

    def window(self, mask: Ref, masked: Node, is_kept: bool = True) -> Window | None:
        """Return the window of a mask; None if it is no window, or hides a query's own key.

        is_kept: whether the mask is true where a key is seen, else where it is hidden.
        """
        is_added = base_name(masked.op) == "add"
        meta = self.metas[mask]
        if len(meta.shape) < 2 or meta.dtype.is_floating_point != is_added or meta.requires_grad:
            return None
        key = mask, is_kept, masked.meta.shape[-2:]
        if key not in self.windows:
            form, values = self.forms.get(mask), self.constants.get(mask)
            if not is_kept:
                form, values = negated(form), None if values is None else ~values
            lengths = {*masked.meta.shape[-2:], *meta.shape[-2:]}
            self.windows[key] = window_of(form, values, lengths)
        window = self.windows[key]
        return None if window is None or min(window.before or 0, window.after or 0) < 0 else window

    def number(self, value: Any) -> float | None:
        """Return a number, or the value of a constant of one element."""
        if isinstance(value, Ref):
            constant = self.constants.get(value)
            return float(constant.item()) if constant is not None and constant.numel() == 1 else None
        return float(value) if isinstance(value, (int, float)) else None

    # --- what is written ----------------------------------------------------------------------------------------------

    def written(self, node: Node, scores: _Scores, values: Ref, column: Ref) -> list[Node]:
        """Return the call, after views that it needs."""
        calls: list[Node] = []
        keys = self.untransposed(scores.keys, node, calls)
        metas = [self.metas[ref] for ref in (scores.query, keys, values)]
        _is(all(meta.shape[:2] == node.meta.shape[:2] and meta.dtype == node.meta.dtype for meta in metas))
        sinks = self.per_head(column, node, calls)
        key, value, is_shared = shared_keys(keys, values, self.made_by, self.metas)
        window = scores.window
        is_causal = window == Window(after=0)
        bounds = (None, None, None) if is_causal else (window.before, window.after, window.chunk)
        kwargs: dict[str, Any] = {"is_causal": is_causal}
        kwargs |= dict(zip(("before", "after", "chunk"), bounds, strict=True))
        kwargs |= {"scale": scores.scale, "enable_gqa": is_shared}
        args = (scores.query, key, value, sinks)
        return [*calls, replace(node, op=SINK_ATTENTION, args=args, kwargs=tuple(kwargs.items()))]

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
        num_heads, ref = node.meta.shape[1], self.uncast(column)
        _is(len(self.metas[ref].shape) == 4 and self.uses[column] == 1)
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
        return (
            ref
            if shape == (num_heads,)
            else self.append_call(node, calls, "aten.view.default", (ref, (num_heads,)), (num_heads,))
        )
