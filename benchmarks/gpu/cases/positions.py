"""Rotary position embeddings."""

from __future__ import annotations

import torch

from benchmarks.gpu.cases.case import BOTH, FORWARD, Case, Kernel, liger


def _rotary(shape: tuple[int, ...], dtype: torch.dtype, device: str, interleaved: bool = False) -> Case:
    """shape: (batch, tokens, query heads, key heads, components, rotated ones); heads lie after tokens."""
    from codegen.kernels.rotary import rotary, rotary_reference

    batch, num_tokens, num_q_heads, num_k_heads, num_components, num_rotated = shape
    heads_dim = 2 if interleaved else 1
    q, k = (
        torch.randn(batch, num_tokens, heads, num_components, dtype=dtype, device=device).transpose(1, 3 - heads_dim)
        for heads in (num_q_heads, num_k_heads)
    )
    position = torch.arange(num_tokens, device=device)[None, :, None]
    angle = position * 1e4 ** -(torch.arange(num_rotated // 2, device=device) / (num_rotated // 2))
    angle = angle if interleaved else torch.cat((angle, angle), -1)
    inputs = (q.requires_grad_(), k.requires_grad_(), angle.cos().to(dtype), angle.sin().to(dtype))
    size = (q.numel() + k.numel()) * dtype.itemsize
    return Case(
        "rotary_interleaved" if interleaved else "rotary",
        shape,
        dtype,
        inputs,
        lambda q, k, cos, sin: rotary(q, k, cos, sin, interleaved, heads_dim),
        lambda q, k, cos, sin: rotary_reference(q, k, cos, sin, interleaved, heads_dim),
        {FORWARD: 2 * size, BOTH: 4 * size},
        # Its results, and later its gradients, take the place of the inputs.
        others={} if interleaved or num_rotated < num_components else liger("liger_rope", lambda f: f),
    )


def _rotary_interleaved(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    return _rotary(shape, dtype, device, interleaved=True)


# Timed: Heads of Llama 3 8B and GPT-NeoX 20B; of GPT-J.
KERNELS = {
    "rotary": Kernel(
        _rotary,
        checked=((2, 5, 3, 1, 6, 6), (2, 130, 40, 8, 128, 128), (1, 70, 64, 64, 96, 24)),
        interpreted=((2, 5, 3, 1, 6, 6),),
        timed=((1, 8192, 32, 8, 128, 128), (4, 2048, 64, 64, 96, 24)),
    ),
    "rotary_interleaved": Kernel(
        _rotary_interleaved,
        checked=((2, 5, 3, 1, 6, 4), (2, 130, 16, 16, 256, 64), (1, 70, 70, 2, 128, 128)),
        interpreted=((2, 5, 3, 1, 6, 4),),
        timed=((4, 2048, 16, 16, 256, 64),),
    ),
}
