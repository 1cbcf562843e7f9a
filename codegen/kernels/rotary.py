"""Rotary position embedding of queries and keys in one launch, out of place.

Formula (Su et al. 2021, "RoFormer", section 3.4.2, eq. 34), for each pair (a, b) of components of a head, at the
position of its token:

    y_a = round(x_a * cos_a) - round(x_b * sin_a)
    y_b = round(x_b * cos_b) + round(x_a * sin_b)          round: to the tensors' dtype, as is the sum

    dx_a = round(dy_a * cos_a) + round(dy_b * sin_b)
    dx_b = round(dy_b * cos_b) - round(dy_a * sin_a)       the rotation by the negative angle, where both angles are one

The first R of D components are rotated, in pairs (j, j + R / 2) ("rotate half": Llama, GPT-NeoX; cos and sin hold
both halves) or (2j, 2j + 1) (interleaved: GPT-J, GLM; cos and sin hold one angle per pair). The others are copied.

Roundings are those of the modules of Hugging Face's transformers, forward and backward, so the results are theirs bit
for bit. Hence the kernel is compiled without fused multiply-adds: the compiler turns products rounded to bf16 into bf16
products, which it would then fuse with the sums, without the rounding between.

Shapes: B batch, S tokens, H query heads, K key heads, D components, R rotated ones, A angles (R, or R / 2 interleaved).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .dispatch import jit, power_of_2_at_least, tl, use_triton
from .tile import Tile
from .tuning import launch

# Of one program's query heads: of one token, with their share of its key heads. Halves of a head are read by
# themselves, so that 256 elements per warp would be too few for 16 bytes at once.
TILES: Final = (Tile(4096), Tile(4096, per_warp=1024), Tile(2048), Tile(8192), Tile(8192, per_warp=1024))


def rotary_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    heads_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in torch operations."""
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        if interleaved:
            turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
        else:
            first, second = part.chunk(2, -1)
            turned = torch.cat((-second, first), -1)
        rotated = part * cos + turned * sin
        return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated

    return rotate(q), rotate(k)


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    heads_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, rotated; differentiable once in both.

    Args:
        q: `[B, H, S, D]`, or `[B, S, H, D]` with heads_dim 2; any strides.
        k: `[B, K, S, D]`, or `[B, S, K, D]`; any strides.
        cos, sin: `[B or 1, S, A]`, any strides; of a dtype with q and k. Where they require gradients, the reference
            runs.
        interleaved: pairs are (2j, 2j + 1), of one angle each, R = 2 A; otherwise (j, j + R / 2), R = A.
        heads_dim: which dim of q and k the heads are, 1 or 2.

    Returns:
        In q's and k's shapes and dtype, and on the Triton path in their memory order, without gaps.

    Raises:
        ValueError: shapes or dtypes do not agree, R is odd or above D, or heads_dim is neither 1 nor 2.
    """
    _check(q, k, cos, sin, interleaved, heads_dim)
    if not use_triton(q, k, cos, sin) or cos.requires_grad or sin.requires_grad:
        return rotary_reference(q, k, cos, sin, interleaved, heads_dim)
    q_out, k_out = _Rotary.apply(q, k, cos, sin, interleaved, heads_dim)  # type: ignore[no-untyped-call]
    return q_out, k_out


def _check(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, heads_dim: int
) -> None:
    if heads_dim not in (1, 2):
        raise ValueError(f"heads_dim must be 1 or 2, got {heads_dim}")
    if len({q.dtype, k.dtype, cos.dtype, sin.dtype}) != 1:
        raise ValueError(f"q, k, cos and sin must have one dtype, got {q.dtype}, {k.dtype}, {cos.dtype}, {sin.dtype}")
    tokens_dim = 3 - heads_dim
    fits = q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape
    fits = fits and all(q.shape[dim] == k.shape[dim] for dim in (0, tokens_dim, 3))
    fits = fits and cos.shape[0] in (1, q.shape[0]) and cos.shape[1] == q.shape[tokens_dim]
    num_rotated = cos.shape[-1] * (2 if interleaved else 1)
    if not fits or num_rotated % 2 or num_rotated > q.shape[-1]:
        order = "[B, heads, S, D]" if heads_dim == 1 else "[B, S, heads, D]"
        raise ValueError(
            f"q and k must be {order} and cos and sin [B or 1, S, A], with an even number of components up to D; "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(cos.shape)}, {tuple(sin.shape)}"
        )


@jit
def _load_halves(
    row_ptr: tl.tensor, NUM_PAIRS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load the factors of the two components of each pair, `[1, PAIRS]` in fp32: one number where interleaved."""
    pairs = tl.arange(0, PAIRS)[None, :]
    ok = pairs < NUM_PAIRS
    first = tl.load(row_ptr + pairs, mask=ok, other=0.0).to(tl.float32)
    second = first
    if not INTERLEAVED:
        second = tl.load(row_ptr + NUM_PAIRS + pairs, mask=ok, other=0.0).to(tl.float32)
    return first, second


@jit
def _rotate_heads(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    block: tl.tensor,
    heads_per_block: tl.tensor,
    num_heads: tl.tensor,
    x_head_stride: tl.tensor,
    out_head_stride: tl.tensor,
    cos_a: tl.tensor,
    cos_b: tl.tensor,
    sin_a: tl.tensor,
    sin_b: tl.tensor,
    HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    NUM_REST: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
) -> None:
    """One block of the heads (at most HEADS) of the token at x_ptr; cos and sin are `[1, PAIRS]` in fp32."""
    dtype = x_ptr.dtype.element_ty
    first = block * heads_per_block
    heads = first + tl.arange(0, HEADS).to(tl.int64)
    head_ok = (heads < tl.minimum(first + heads_per_block, num_heads))[:, None]
    x_heads = x_ptr + heads[:, None] * x_head_stride
    out_heads = out_ptr + heads[:, None] * out_head_stride
    pairs = tl.arange(0, PAIRS)[None, :]
    ok = head_ok & (pairs < NUM_PAIRS)
    both = tl.arange(0, 2 * PAIRS)[None, :]
    both_ok = head_ok & (both < 2 * NUM_PAIRS)
    if INTERLEAVED:
        x = tl.load(x_heads + both, mask=both_ok, other=0.0)
        x_a, x_b = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
    else:
        x_a = tl.load(x_heads + pairs, mask=ok, other=0.0)
        x_b = tl.load(x_heads + NUM_PAIRS + pairs, mask=ok, other=0.0)
    x_a = x_a.to(tl.float32)
    x_b = x_b.to(tl.float32)
    y_a = (x_a * cos_a).to(dtype).to(tl.float32)
    y_b = (x_b * cos_b).to(dtype).to(tl.float32)
    if BACKWARD:
        y_a += (x_b * sin_b).to(dtype).to(tl.float32)
        y_b -= (x_a * sin_a).to(dtype).to(tl.float32)
    else:
        y_a -= (x_b * sin_a).to(dtype).to(tl.float32)
        y_b += (x_a * sin_b).to(dtype).to(tl.float32)
    if INTERLEAVED:
        y = tl.reshape(tl.join(y_a.to(dtype), y_b.to(dtype)), (HEADS, 2 * PAIRS))
        tl.store(out_heads + both, y, mask=both_ok)
    else:
        tl.store(out_heads + pairs, y_a.to(dtype), mask=ok)
        tl.store(out_heads + NUM_PAIRS + pairs, y_b.to(dtype), mask=ok)
    if NUM_REST:
        rest = tl.arange(0, REST)[None, :]
        rest_ok = head_ok & (rest < NUM_REST)
        x = tl.load(x_heads + 2 * NUM_PAIRS + rest, mask=rest_ok, other=0.0)
        tl.store(out_heads + 2 * NUM_PAIRS + rest, x, mask=rest_ok)


@jit
def _rotary_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_q_heads: tl.tensor,
    num_k_heads: tl.tensor,
    blocks_per_token: tl.tensor,
    q_heads_per_block: tl.tensor,
    k_heads_per_block: tl.tensor,
    q_batch_stride: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_batch_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    q_out_batch_stride: tl.tensor,
    q_out_token_stride: tl.tensor,
    q_out_head_stride: tl.tensor,
    k_out_batch_stride: tl.tensor,
    k_out_token_stride: tl.tensor,
    k_out_head_stride: tl.tensor,
    cos_batch_stride: tl.tensor,
    cos_token_stride: tl.tensor,
    sin_batch_stride: tl.tensor,
    sin_token_stride: tl.tensor,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    NUM_REST: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
) -> None:
    """Some query heads of a token and as large a share of its key heads, with one reading of cos and sin."""
    program = tl.program_id(0)
    block, row = program % blocks_per_token, program // blocks_per_token
    batch, token = (row // num_tokens).to(tl.int64), (row % num_tokens).to(tl.int64)
    cos_row = cos_ptr + batch * cos_batch_stride + token * cos_token_stride
    sin_row = sin_ptr + batch * sin_batch_stride + token * sin_token_stride
    cos_a, cos_b = _load_halves(cos_row, NUM_PAIRS, PAIRS, INTERLEAVED)
    sin_a, sin_b = _load_halves(sin_row, NUM_PAIRS, PAIRS, INTERLEAVED)
    _rotate_heads(
        q_ptr + batch * q_batch_stride + token * q_token_stride,
        q_out_ptr + batch * q_out_batch_stride + token * q_out_token_stride,
        block, q_heads_per_block, num_q_heads, q_head_stride, q_out_head_stride,
        cos_a, cos_b, sin_a, sin_b,
        Q_HEADS, NUM_PAIRS, PAIRS, NUM_REST, REST, INTERLEAVED, BACKWARD,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + batch * k_batch_stride + token * k_token_stride,
        k_out_ptr + batch * k_out_batch_stride + token * k_out_token_stride,
        block, k_heads_per_block, num_k_heads, k_head_stride, k_out_head_stride,
        cos_a, cos_b, sin_a, sin_b,
        K_HEADS, NUM_PAIRS, PAIRS, NUM_REST, REST, INTERLEAVED, BACKWARD,
    )  # fmt: skip


def _with_unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    heads_dim: int,
    backward: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, cos, sin = (_with_unit_stride(tensor) for tensor in (q, k, cos, sin))
    tokens_dim = 3 - heads_dim
    num_q_heads, num_k_heads, num_tokens = q.shape[heads_dim], k.shape[heads_dim], q.shape[tokens_dim]
    num_pairs = cos.shape[-1] if interleaved else cos.shape[-1] // 2
    num_rest = q.shape[-1] - 2 * num_pairs
    pairs, rest = power_of_2_at_least(num_pairs), power_of_2_at_least(num_rest) if num_rest else 0
    num_elements = num_q_heads * (2 * pairs + rest)
    angle_strides = [s for x in (cos, sin) for s in (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1))]

    def run(tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        # Keeps the order of strides: heads that lie beside one another stay so.
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        strides = [x.stride(dim) for x in (q, k, q_out, k_out) for dim in (0, tokens_dim, heads_dim)]
        blocks = -(-num_elements // tile.most)
        q_heads_per_block, k_heads_per_block = -(-num_q_heads // blocks), -(-num_k_heads // blocks)
        q_heads, k_heads = power_of_2_at_least(q_heads_per_block), power_of_2_at_least(k_heads_per_block)
        _rotary_kernel[(q.shape[0] * num_tokens * blocks,)](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            num_tokens,
            num_q_heads,
            num_k_heads,
            blocks,
            q_heads_per_block,
            k_heads_per_block,
            *strides,
            *angle_strides,
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            NUM_PAIRS=num_pairs,
            PAIRS=pairs,
            NUM_REST=num_rest,
            REST=rest,
            INTERLEAVED=interleaved,
            BACKWARD=backward,
            num_warps=tile.num_warps(q_heads * (2 * pairs + rest)),
            enable_fp_fusion=False,
        )
        return q_out, k_out

    shape, flags = (q.shape[0] * num_tokens, num_elements), {"interleaved": interleaved, "backward": backward}
    return launch("rotary", TILES, run, shape, q, **flags)


class _Rotary(torch.autograd.Function):
    """Saves cos and sin only: the rotation is linear."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        heads_dim: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.layout = interleaved, heads_dim
        return _launch(q, k, cos, sin, interleaved, heads_dim, backward=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (cos, sin), (interleaved, heads_dim) = ctx.saved_tensors, ctx.layout
        dq, dk = _launch(dq, dk, cos, sin, interleaved, heads_dim, backward=True)
        return dq, dk, None, None, None, None
