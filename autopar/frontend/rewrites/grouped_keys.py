"""Remove repetition of keys and values for the heads that share them: attention takes them unrepeated.

With G key heads and H = G r query heads, models expand [B, G, 1, T, E] to [B, G, r, T, E] and join the dims of the
heads, or repeat each head r times in turn. `enable_gqa` means the same without the memory and, where keys travel
between ranks, without r times the bytes. Calls with a mask in memory stay as they are: GPU kernels that take masks do
not take grouped heads. So do fp32 calls of `scaled_dot_product_attention`: kernels for grouped heads take half
precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.frontend.fx_import import FlatGraph
from autopar.ir.graph import SINK_ATTENTION, WINDOW_ATTENTION, Node, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import ATTENTION, RESHAPES


def share_keys(flat: FlatGraph) -> None:
    """Remove the repetition from calls of attention that need none, after masks have become windows."""
    metas: dict[Ref, TensorMeta] = {}
    made_by: dict[str, Node] = {}
    for position, node in enumerate(flat.nodes):
        if base_name(node.op) not in ATTENTION or node.op == SINK_ATTENTION or len(node.meta.shape) != 4:
            continue
        metas, made_by = metas or flat.metas(), made_by or {call.name: call for call in flat.nodes}
        arguments, is_half = arguments_of(node), node.meta.dtype.itemsize < 4
        has_kernel = is_half and arguments.get("attn_mask") is None and not arguments.get("dropout_p")
        if arguments["enable_gqa"] or not (node.op == WINDOW_ATTENTION or has_kernel):
            continue
        key, value, is_shared = shared_keys(arguments["key"], arguments["value"], made_by, metas)
        if is_shared:
            rest = {name: arguments[name] for name in arguments if name not in ("query", "key", "value")}
            kwargs = tuple((rest | {"enable_gqa": True}).items())
            flat.nodes[position] = replace(node, args=(arguments["query"], key, value), kwargs=kwargs)


def shared_keys(
    key: Ref, value: Ref, made_by: Mapping[str, Node], metas: Mapping[Ref, TensorMeta]
) -> tuple[Ref, Ref, bool]:
    """Return (keys [B, G, T, E], values [B, G, T, F], whether G is less than H) of [B, H, T, E] and [B, H, T, F].

    made_by: calls by name.
    """
    sources = [_unrepeated(ref, made_by, metas) for ref in (key, value)]
    (keys, repeats), (values, of_values) = sources
    return (keys, values, True) if repeats == of_values > 1 else (key, value, False)


def _unrepeated(ref: Ref, made_by: Mapping[str, Node], metas: Mapping[Ref, TensorMeta]) -> tuple[Ref, int]:
    """Return (the unrepeated tensor, the repetitions of each head), the tensor itself if it is not repeated."""

    def maker(of: Ref, *names: str) -> Node | None:
        node = made_by.get(of.node)
        return node if node is not None and of.index == 0 and base_name(node.op) in names else None

    shape = metas[ref].shape
    merged = maker(ref, "repeat_interleave", *RESHAPES)
    if merged is None or len(shape) != 4:
        return ref, 1
    arguments, source = arguments_of(merged), merged.inputs[0]
    if base_name(merged.op) == "repeat_interleave":
        is_by_head = isinstance(arguments.get("repeats"), int) and arguments["dim"] in (1, -3)
        return (source, arguments["repeats"]) if is_by_head else (ref, 1)
    copied = maker(source, "clone", "contiguous")
    expanded = maker(copied.inputs[0] if copied else source, "expand")
    single = maker(expanded.inputs[0], *RESHAPES) if expanded else None
    if expanded is None or single is None:
        return ref, 1
    heads_shape, (groups, repeats) = metas[single.inputs[0]].shape, (*expanded.meta.shape, 1, 1)[1:3]
    batch, length, width = shape[0], *shape[2:]
    is_repeated = (
        heads_shape == (batch, groups, length, width)
        and single.meta.shape == (batch, groups, 1, length, width)
        and expanded.meta.shape == (batch, groups, repeats, length, width)
        and groups * repeats == shape[1]
    )
    return (single.inputs[0], repeats) if is_repeated else (ref, 1)
