"""Scaled dot-product attention: batch, heads, query positions and value features may be sharded.

q [..., H, S, E], k [..., G, T, E], v [..., G, T, F] -> [..., H, S, F]. With grouped heads H = G * r and q's head dim
is the composite (G, r), as torch repeats each key/value head r times in place.
"""

from __future__ import annotations

import math

from autopar.rules.call import Call, Groups, Operand, make_rule
from autopar.rules.rule import Lowering, Rule


def attention(call: Call) -> Rule:
    """T is blocked (the softmax needs whole rows), E is blocked (contracted inside the softmax).

    is_causal blocks S: the mask depends on the absolute position. Dropout on the probabilities needs the lowering
    "attention" whatever is sharded, since its mask is indexed by global position.
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
    mask = call.get("attn_mask")
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
        blocked={"t", "e", *({"s"} if call["is_causal"] else ())},
        linear=("value",),
        lowerings={"*": Lowering("attention")} if call["dropout_p"] > 0 else {},
    )


TABLE = {"aten.scaled_dot_product_attention": attention}
