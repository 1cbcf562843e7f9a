"""Rules of scaled dot-product attention, with or without sinks.

Batch, heads, query positions and value features may be sharded, and query and key positions together.

q [..., H, S, E], k [..., G, T, E], v [..., G, T, F], sinks [H] -> [..., H, S, F]. With grouped heads H = G * r and
q's head dim is the composite (G, r), as torch repeats each key/value head r times in place.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from autopar.ir.graph import SINK_ATTENTION, WINDOW_ATTENTION, Node
from autopar.ir.operators import arguments_of
from autopar.rules.call import Call, Groups, Operand, make_rule
from autopar.rules.rule import Joint, Lowering, Rule
from codegen.runtime.sink_attention import sink_attention
from codegen.runtime.windows import Window, window_attention

ATTENTION = "aten.scaled_dot_product_attention"

HEADS = ("h", "r")
"""Head factors: of keys and values, and of the queries that share one of these."""

EXCHANGES = ("all_gather", "ring")
"""How ranks that share a sequence's positions exchange keys and values (codegen/runtime/context_attention.py)."""


_WINDOW = "int? before=None, int? after=None, int? chunk=None, float? scale=None, bool enable_gqa=False) -> Tensor"
_SCHEMAS = {
    WINDOW_ATTENTION: "(Tensor query, Tensor key, Tensor value, " + _WINDOW,
    SINK_ATTENTION: "(Tensor query, Tensor key, Tensor value, Tensor sinks, bool is_causal=False, " + _WINDOW,
}
_LIBRARY: Any = cast(Any, torch.library).Library("autopar", "FRAGMENT")
for _op, _function in ((WINDOW_ATTENTION, window_attention), (SINK_ATTENTION, sink_attention)):
    _LIBRARY.define(_op.split(".")[1] + _SCHEMAS[_op])
    _LIBRARY.impl(_op.split(".")[1], _function, "CompositeImplicitAutograd")


def attention(call: Call) -> Rule:
    """Return the rule: T is blocked (the softmax needs whole rows), E is blocked (contracted inside the softmax).

    is_causal and a window block S, because the mask depends on the absolute position. Dropout on the probabilities
    always needs the lowering "attention", because its mask is indexed by global position.

    Context parallelism shards S and T on one axis together, with one option per exchange; see `_context`.
    """
    q, k, v = call.tensor("query"), call.tensor("key"), call.tensor("value")
    num_batch = len(q.shape) - 3 if len(q.shape) > 3 else 0
    has_heads = len(q.shape) > 2
    lead = [f"b{i}" for i in range(num_batch)]
    sizes = dict(zip(lead, (max(a, b) for a, b in zip(q.shape, k.shape, strict=True)), strict=False))
    sizes |= {"s": q.shape[-2], "t": k.shape[-2], "e": q.shape[-1], "f": v.shape[-1]}
    heads: list[list[str]] = []
    shared: list[list[str]] = []
    if has_heads:
        grouped = k.shape[-3] != q.shape[-3] and k.shape[-3] > 1
        sizes["h"] = k.shape[-3] if grouped else q.shape[-3]
        sizes["r"] = q.shape[-3] // sizes["h"]
        heads = [["h", "r"]]
        shared = [["h"]] if k.shape[-3] > 1 else [[]]

    def leading(shape: tuple[int, ...]) -> list[list[str]]:
        return [[f] if size == sizes[f] else [] for f, size in zip(lead, shape, strict=False)]

    tensors: dict[int, Groups] = {
        q.index: [*leading(q.shape), *heads, ["s"], ["e"]],
        k.index: [*leading(k.shape), *shared, ["t"], ["e"]],
        v.index: [*leading(v.shape), *shared, ["t"], ["f"]],
    }
    if "sinks" in call.arguments:
        tensors[call.tensor("sinks").index] = heads
    mask, is_positional = call.get("attn_mask"), call.get("is_causal") or window_of(call.node)
    probability_dims = [*([f] for f in lead), *heads, ["s"], ["t"]]
    if isinstance(mask, Operand):
        aligned = probability_dims[len(probability_dims) - len(mask.shape) :]
        tensors[mask.index] = [
            dim if math.prod(sizes[f] for f in dim) == size else []
            for dim, size in zip(aligned, mask.shape, strict=True)
        ]
    return make_rule(
        call,
        [tensors[i] for i in range(len(tensors))],
        [[*([f] for f in lead), *heads, ["s"], ["f"]]],
        sizes,
        blocked={"t", "e", *({"s"} if is_positional else ())},
        linear=("value",),
        lowerings={"*": Lowering("attention")} if call.get("dropout_p", 0.0) > 0 else {},
        joints=_context(call) if has_heads else {},
    )


def _context(call: Call) -> dict[str, Joint]:
    """Return options that shard queries, keys and values along the sequence on one axis, by label.

    Causal attention is sharded in stripes, in which every rank sees equally many keys; other attention in either way. A
    mask is sharded along its rows and keeps all columns. There are no such options with dropout, with a learned mask,
    where causal queries and keys differ in number, or where q, k and v are broadcast against each other.
    """
    q, k, v, mask = call.tensor("query"), call.tensor("key"), call.tensor("value"), call.get("attn_mask")
    is_aligned = len({x.shape[:-3] for x in (q, k, v)}) == 1 and len(q.shape) == 4 and k.shape[-3] == v.shape[-3]
    is_grouped = call["enable_gqa"] or k.shape[-3] == q.shape[-3]
    is_learned = isinstance(mask, Operand) and mask.meta.requires_grad
    is_causal = call.get("is_causal", False)
    is_uneven = is_causal and k.shape[-2] != q.shape[-2]
    is_trivial = min(q.shape[-2], k.shape[-2]) == 1
    if not is_aligned or not is_grouped or is_learned or is_uneven or is_trivial or call.get("dropout_p", 0.0) > 0:
        return {}
    factors = tuple("t" if i in (k.index, v.index) else "s" for i in range(len(call.inputs)))
    joints = {f"s+t/{exchange}/stripes": Joint(factors, "s", exchange, is_striped=True) for exchange in EXCHANGES}
    if not is_causal:
        joints |= {f"s+t/{exchange}": Joint(factors, "s", exchange) for exchange in EXCHANGES}
    return joints


def window_of(node: Node) -> Window | None:
    """Return the window of keys that an attention call's queries see, or None if it has no window."""
    if node.op not in _SCHEMAS:
        return None
    arguments = arguments_of(node)
    bounds = tuple(arguments[name] for name in ("before", "after", "chunk"))
    return None if node.op == SINK_ATTENTION and bounds == (None,) * 3 else Window(*bounds)


TABLE = {ATTENTION: attention, **{op.rpartition(".")[0]: attention for op in _SCHEMAS}}
