"""Attention with sinks: a logit per head that has a share of every softmax, and no value.

Sources: S. Agarwal et al., "gpt-oss-120b & gpt-oss-20b Model Card" (2025), section 2.2; G. Xiao et al., "Efficient
Streaming Language Models with Attention Sinks" (2023).

Shapes: B batch, H heads, G key/value heads (G divides H), L positions, E and F head sizes. A sink s is one more key
whose value is zero. With out and lse of the attention without it (attention_blocks.py), those with it are

    lse' = log(exp(lse) + exp(s))        out' = exp(lse - lse') out = sigmoid(lse - s) out

and from these two the backward of the attention without it makes the gradients of q, k and v with it. With g the
gradient of out', that of a sink is a sum over the rows of its head:

    ds = - sum exp(s - lse') rowsum(g * out')
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .attention_blocks import Block, WindowedKeys, block_attention, block_gradients
from .windows import Positions, Window

SAVED: Final = ((0, 1, 2, 3), True, 4)
"""What autograd keeps: (positions of arguments, whether the result, bytes per row of the first argument): q, k, v,
sinks, out and lse."""


def with_sinks(block: Block, sinks: Tensor, dtype: torch.dtype) -> Block:
    """(out' in `dtype`, lse') of a block's (out [B, H, L, F], lse [B, H, L]) and sinks [H]."""
    out, lse = block
    sink = sinks.to(lse.dtype)[:, None]
    result = torch.empty_like(out, dtype=dtype)
    # Computed in the wider dtype, without a copy in it; not in place, since selective recomputation keeps `out`.
    torch.mul(out, torch.sigmoid(lse - sink)[..., None], out=result)
    return result, torch.logaddexp(lse, sink)


def sink_gradient(grad: Tensor, whole: Block, sinks: Tensor) -> Tensor:
    """The gradient [H] of the sinks, in their dtype. grad: of out'. whole: (out', lse')."""
    out, lse = whole
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    wide = grad.to(lse.dtype)
    product = wide * out if wide is grad else wide.mul_(out)  # of half precision the copy is used
    return -(share * product.sum(-1)).sum((0, 2)).to(sinks.dtype)


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    is_causal: bool = False,
    before: int | None = None,
    after: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` whose softmax has one more logit for each head, without a value.

    Args: query: [B, H, L, E]; key: [B, G, T, E]; value: [B, G, T, F]; G may differ from H with enable_gqa only.
        sinks: [H]. is_causal: query i sees the keys 0 to i. before, after, chunk: of the window that queries see of as
        many keys (windows.py); without, they see all.

    Returns [B, H, L, F] in query's dtype. Not differentiable twice. Raises ValueError for shapes that
    do not fit, which kernels do not check, and for is_causal beside a window.
    """
    batch, heads = query.shape[:2]
    is_shared = heads % key.shape[1] == 0 if enable_gqa else heads == key.shape[1]
    is_alike = key.shape[:3] == value.shape[:3] and key.shape[0] == batch and key.shape[3] == query.shape[3]
    if not (is_shared and is_alike and sinks.shape == (heads,)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value, sinks))
        raise ValueError(f"sink_attention takes [B, H, L, E], [B, G, T, E], [B, G, T, F] and [H], got {shapes}")
    window = None if (before, after, chunk) == (None,) * 3 else Window(before, after, chunk)
    if window is not None and (is_causal or query.shape[-2] != key.shape[-2]):
        raise ValueError("sink_attention takes a window of as many keys as queries, without is_causal")
    function: Any = _SinkAttention
    result: Tensor = function.apply(query, key, value, sinks, is_causal, window, scale)
    return result


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        is_causal: bool,
        window: Window | None,
        scale: float | None,
    ) -> Tensor:
        if window is None:
            block = block_attention(q, k, v, None, is_causal, scale)
        else:
            block = _whole(window, q).attention(q, k, v, scale)
        out, lse = with_sinks(block, sinks, q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.options = (is_causal, window, scale)  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, *whole = ctx.saved_tensors  # type: ignore[attr-defined]
        out, lse = whole
        is_causal, window, scale = ctx.options  # type: ignore[attr-defined]
        ds = sink_gradient(grad, (out, lse), sinks) if ctx.needs_input_grad[3] else None  # type: ignore[attr-defined]
        if window is None:
            grads = block_gradients(grad, q, k, v, (out, lse), None, is_causal, scale)
        else:
            grads = _whole(window, q).gradients(grad, q, k, v, (out, lse), scale)
        dq, dk, dv = (gradient.to(x.dtype) for gradient, x in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv, ds, None, None, None


def _whole(window: Window, q: Tensor) -> WindowedKeys:
    """A window of a sequence that is at hand as a whole."""
    length = q.shape[-2]
    return WindowedKeys(window, Positions(0, length), Positions(0, length), length)
