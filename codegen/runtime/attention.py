"""Scaled dot product attention with counter-based dropout on the probabilities.

Shapes: B batch, H heads, G key/value heads (G divides H), L queries, S keys, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .dropout import Key, dropout
from .layout import Layout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key: Key = 0,
    layout: Layout | None = None,
    mesh: object = None,
    batch_offset: int = 0,
) -> Tensor:
    """`F.scaled_dot_product_attention`, with a dropout mask that does not depend on the plan.

    Without dropout this is torch's function (flash kernels). With dropout it is the mathematical form, since no flash
    kernel takes a mask of ours: it keeps L x S probabilities per head for backward (softmax output, kept, mask).

    Args:
        q: [B, H, L, E]; k: [B, G, S, E]; v: [B, G, S, Ev]; this rank's parts. Keys are never sharded over S.
        mask: boolean (True takes part) or floating (added), broadcastable to [B, H, L, S]; not with is_causal.
        layout, mesh: of the probabilities [B, H, L, S]. Needed if dropout_p > 0; if it shards L, is_causal compares
            global positions.
        key, batch_offset: see `dropout`.

    Returns [B, H, L, Ev] in q's dtype. Softmax is computed in float32 at least.
    """
    if is_causal and mask is not None:
        raise ValueError("attention takes a mask or is_causal, not both")
    if is_causal and layout is not None and any(dim == len(layout.global_shape) - 2 for _, dim, _ in layout.shards):
        mask, is_causal = _causal_mask(layout, mesh, q.device), False
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if layout is None:
        raise ValueError("attention with dropout needs the layout of the probabilities [B, H, L, S]")
    drop = partial(dropout, p=dropout_p, key=key, layout=layout, mesh=mesh, batch_offset=batch_offset)
    return attention_with(drop, q, k, v, mask, is_causal, scale, enable_gqa)


def attention_with(
    drop: Callable[[Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention in its mathematical form. drop: what becomes of the probabilities [B, H, L, S] before they weigh v."""
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    probabilities = _probabilities(q, k, mask, is_causal, 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return drop(probabilities.to(v.dtype)) @ v


def _causal_mask(layout: Layout, mesh: object, device: torch.device) -> Tensor:
    """[L, S] of this rank's queries and all keys, True where the key is not after the query (top-left aligned)."""
    queries = layout.coordinates(len(layout.global_shape) - 2, mesh, device)
    keys = torch.arange(layout.global_shape[-1], device=device)
    return queries[:, None] >= keys[None, :]


def _probabilities(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """softmax(scale * q k^T + mask), in float32 for half precision; rows with nothing to attend to are zeros."""
    scores = (q * scale) @ k.transpose(-2, -1)
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if is_causal:
        queries, keys = scores.shape[-2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # aten's own attention gives zeros for a row that is masked completely, plain softmax nan.
    return scores.softmax(-1) if is_causal else torch.ops.aten._safe_softmax.default(scores, -1)
