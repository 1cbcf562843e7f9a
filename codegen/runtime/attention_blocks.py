"""Attention of some queries over some of the keys, in a form that joins with attention over the other keys.

Shapes: B batch, H heads, G key/value heads (G divides H), L queries, T keys of the block, E and F head sizes.
With x = scale * q k^T + mask, a block has the result and the logarithm of each row's sum of exponentials:

    lse = log sum_t exp(x_t)        out = sum_t exp(x_t - lse) v_t

Two blocks with different keys give the attention over both (`merge`; H. Liu et al., "Ring Attention with Blockwise
Transformers" (2023), section 3):

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

The gradient of the whole is a sum over blocks. A block needs the *whole* attention's out and lse, and g = d loss/d out
(T. Dao, "FlashAttention-2" (2023), section 2.3):

    p = exp(x - lse)    dv = p^T g    ds = p * (g v^T - rowsum(g * out))    dq = scale * ds k    dk = scale * ds^T q

This is what flash kernels compute from the out and lse that they are given. The only module that calls torch's own,
which are private: on a CPU, and on a GPU in half precision without a mask; what they do not take is computed by the
formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .windows import Masks, Piece, Positions, Window

Block = tuple[Tensor, Tensor]
"""(out [B, H, L, F], lse [B, H, L]). lse, and a merged out, are float32 for half precision, else in the dtype of q."""

_FLASH_HEAD_SIZES = (8, 256)
"""Head sizes of the GPU kernel: what divides them, and the largest one."""


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Block:
    """Attention of q [B, H, L, E] over k [B, G, T, E] and v [B, G, T, F].

    mask: boolean (True takes part) or floating (added), broadcastable to [B, H, L, T]. is_causal: query i sees the keys
    0 to i. A row that sees no key has out 0 and lse -inf.
    """
    aten: Any = torch.ops.aten
    q, k, v = map(_in_rows, (q, k, v))
    kernel = _kernel(q, k, v, mask)
    if kernel == "cpu":
        bias = _bias(mask, q, k)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return out, lse if bias is None else lse.masked_fill((bias == -math.inf).all(-1), -math.inf)
    if kernel == "gpu":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[:2]
        return out, lse
    scores = _scores(q, k, mask, is_causal, scale)
    lse = scores.logsumexp(-1)
    return (_probabilities(scores, lse) @ _per_head(v, q).to(scores.dtype)).to(q.dtype), lse


def block_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Block, mask: Tensor | None, is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return a block's part of the gradients of its q, k and v, in their dtypes.

    grad: of the whole result. whole: out (in q's dtype) and lse of the attention over all keys. Others as in
    `block_attention`.
    """
    aten: Any = torch.ops.aten
    out, lse = _in_rows(whole[0]), whole[1]
    grad, q, k, v = map(_in_rows, (grad, q, k, v))
    kernel = _kernel(q, k, v, mask)
    if kernel == "cpu":
        lse = lse.masked_fill(lse == -math.inf, 0.0) if mask is not None else lse
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=_bias(mask, q, k), scale=scale
        )
        return dq, dk, dv
    if kernel == "gpu":
        zeros = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that is 0
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, is_causal, zeros, zeros, scale=scale
        )
        return dq, dk, dv
    scores = _scores(q, k, mask, is_causal, scale)
    p, wide = _probabilities(scores, lse), scores.dtype
    g, keys, values = grad.to(wide), _per_head(k, q).to(wide), _per_head(v, q).to(wide)
    ds = p * (g @ values.transpose(-2, -1) - (g * out.to(wide)).sum(-1, keepdim=True)) * _factor(q, scale)
    dk, dv = ds.transpose(-2, -1) @ q.to(wide), p.transpose(-2, -1) @ g
    return (ds @ keys).to(q.dtype), _per_group(dk, k).to(k.dtype), _per_group(dv, v).to(v.dtype)


@dataclass(frozen=True, slots=True)
class WindowedKeys:
    """A window and where queries and the keys at hand lie in a sequence of `length` positions."""

    window: Window
    queries: Positions
    keys: Positions
    length: int

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Block:
        """`block_attention` of q [B, H, L, E] over k [B, G, T, E] and v [B, G, T, F]: by one kernel that knows of
        windows, or by pieces, with out as lse is."""
        if self._has_kernel(q, k, v):
            heads_last = (_in_rows(x).transpose(1, 2) for x in (q, k, v))
            aten: Any = torch.ops.aten
            outputs = aten._flash_attention_forward(
                *heads_last, None, None, q.shape[-2], k.shape[-2], 0.0, False, False, scale=scale, **self._sides()
            )
            return outputs[0].transpose(1, 2), outputs[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        batch, heads, length = q.shape[:-1]
        # As kernels lay out results: to join the heads of a position then takes no copy.
        out = q.new_zeros(batch, length, heads, v.shape[-1], dtype=wide).transpose(1, 2)
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        for piece, mask in self._pieces(q.device):
            block = block_attention(*_cut(piece, q, k, v), mask, piece.kind in _TRIANGLES, scale)
            out_rows, lse_rows = out.narrow(-2, *piece.rows), lse.narrow(-1, *piece.rows)
            if piece.kind == "upper":
                block = block[0].flip(-2), block[1].flip(-1)
            out_rows[:], lse_rows[:] = merge((out_rows, lse_rows), block)
        return out, lse

    def gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Block, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`block_gradients`; by pieces in the dtype of lse."""
        out, lse = whole
        if self._has_kernel(q, k, v):
            g, *tensors, result = (_in_rows(x).transpose(1, 2) for x in (grad, q, k, v, out))
            zeros = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that is 0
            aten: Any = torch.ops.aten
            gradients = aten._flash_attention_backward(
                g, *tensors, result, lse, None, None, q.shape[-2], k.shape[-2], 0.0, False, zeros, zeros,
                scale=scale, **self._sides(),
            )  # fmt: skip
            dq, dk, dv = (x.transpose(1, 2) for x in gradients)
            return dq, dk, dv
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for piece, mask in self._pieces(q.device):
            own_grad, own_out, own_lse = (_rows(piece, x) for x in (grad, out, lse[..., None]))
            block = own_out, own_lse[..., 0].contiguous()
            gradients = block_gradients(own_grad, *_cut(piece, q, k, v), block, mask, piece.kind in _TRIANGLES, scale)
            for total, part, at in zip((dq, dk, dv), gradients, (piece.rows, piece.keys, piece.keys), strict=True):
                total.narrow(-2, *at).add_(part.flip(-2) if piece.kind == "upper" else part)
        return dq, dk, dv

    def _has_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether a flash kernel takes the window as it is: of queries and keys at the same positions, which all see
        their own."""
        sides = (self.window.before or 0, self.window.after or 0)
        is_plain = self.window.chunk is None and self.queries == self.keys and min(sides) >= 0
        return is_plain and self.queries.stride == 1 and _kernel(q, k, v, None) == "gpu"

    def _sides(self) -> dict[str, int]:
        """Return how far the window reaches, as kernels take it: -1 for all the way."""
        sides = {"window_size_left": self.window.before, "window_size_right": self.window.after}
        return {name: -1 if side is None else side for name, side in sides.items()}

    def _pieces(self, device: torch.device) -> Iterator[tuple[Piece, Tensor | None]]:
        """The pieces with their masks."""
        masks = Masks(self.window, self.queries, self.keys, device)
        for piece in self.window.pieces(self.queries, self.keys, self.length):
            (row, rows), (key, keys) = piece.rows, piece.keys
            yield piece, masks.of((row, row + rows), (key, key + keys)) if piece.kind == "masked" else None


_TRIANGLES = ("lower", "upper")


def _rows(piece: Piece, x: Tensor) -> Tensor:
    """The rows of a piece; of an upper triangle backwards, as which it is a lower one."""
    rows = x.narrow(-2, *piece.rows)
    return rows.flip(-2) if piece.kind == "upper" else rows


def _cut(piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of a piece, backwards where the rows are."""
    keys, values = (x.narrow(-2, *piece.keys) for x in (k, v))
    if piece.kind == "upper":
        keys, values = keys.flip(-2), values.flip(-2)
    return _rows(piece, q), keys, values


def merge(first: Block, second: Block) -> Block:
    """The attention over the keys of both blocks."""
    (out_1, lse_1), (out_2, lse_2) = first, second
    lse = torch.logaddexp(lse_1, lse_2)
    # Where neither sees a key, both weights would be exp(-inf + inf).
    base = lse.masked_fill(lse == -math.inf, 0.0)
    return out_1 * (lse_1 - base).exp()[..., None] + out_2 * (lse_2 - base).exp()[..., None], lse


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Literal["cpu", "gpu", ""]:
    """Return the flash kernel of torch that takes these tensors; "" for none."""
    if not q.shape[-2] or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return ""
    if q.device.type == "cpu":
        return "cpu"
    if mask is not None:
        return ""
    divisor, largest = _FLASH_HEAD_SIZES
    is_fit = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % divisor == 0 and q.shape[-1] <= largest
    return "gpu" if is_fit and torch.cuda.get_device_capability(q.device) >= (8, 0) else ""


def _in_rows(x: Tensor) -> Tensor:
    """x with the elements of a row one after the other in memory, as flash kernels read them: that for a CPU whatever
    the stride is, those for a GPU refuse any other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as what is added to scores, in q's dtype: [B or 1, H or 1, L, T]."""
    if mask is None:
        return None
    shape = (*(1,) * (4 - mask.dim()), *mask.shape)
    whole = mask.view(shape).expand(*shape[:2], q.shape[-2], k.shape[-2])
    if mask.dtype != torch.bool:
        return _in_rows(whole.to(q.dtype))
    return torch.zeros(whole.shape, dtype=q.dtype, device=q.device).masked_fill_(~whole, -math.inf)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """The scores scale * q k^T + mask [B, H, L, T], in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * _factor(q, scale)) @ _per_head(k, q).to(wide).transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(wide)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """The probabilities exp(scores - lse); zeros in rows that see no key."""
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()


def _factor(q: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def _per_head(k: Tensor, q: Tensor) -> Tensor:
    """[B, G, T, E] -> [B, H, T, E]: each key head for the consecutive query heads that share it."""
    return k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)


def _per_group(grad: Tensor, k: Tensor) -> Tensor:
    """[B, H, T, E] -> [B, G, T, E]: the sum over the query heads that share a key head."""
    shape = (*k.shape[:-2], grad.shape[-3] // k.shape[-3], *grad.shape[-2:])
    return grad.reshape(shape).sum(-3)
