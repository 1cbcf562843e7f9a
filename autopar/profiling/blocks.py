"""A transformer block, forward and backward: the time of kernels inside a program.

A tiny block shows only the host's overhead. At usual sizes a block shows how long its kernels take together, which is
0.9 to 1.15 times the sum of their times one by one. `fit_device.py` divides a CPU's rates by this factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autopar.profiling.load import Call
from cost_models.compute import Work

FORWARD_KERNELS, BACKWARD_KERNELS = 10, 14
"""Kernel launches as the cost model counts them: two norms, four linears (two matmuls each in backward), attention, two
additions, a GELU."""
VIEWS = 5
"""Views of the block, each with one in backward."""
TINY: Mapping[str, int] = {"batch": 1, "length": 4, "width": 16, "heads": 2}
FP32 = 4


def call(sizes: Mapping[str, int], has_backward: bool, device: torch.device) -> Call:
    """Return a call of the block. sizes: batch, length, width, heads. Weight gradients accumulate, as over
    micro-batches."""
    tokens, width = sizes["batch"] * sizes["length"], sizes["width"]
    x = torch.randn(tokens, width, device=device, requires_grad=True)
    norms = [torch.ones(width, device=device, requires_grad=True) for _ in range(2)]
    weights = [(torch.randn(n, k, device=device) / k**0.5).requires_grad_() for n, k in _shapes(width)]
    gradient = torch.ones(tokens, width, device=device)
    if not has_backward:
        return lambda: _forward(x, norms, weights, sizes)
    return lambda: torch.autograd.backward(_forward(x, norms, weights, sizes), gradient)


def works(sizes: Mapping[str, int]) -> list[Work]:
    """Return the block's kernels, forward and backward, and one more for the sums of gradients."""
    batch, length, width, heads = (sizes[name] for name in ("batch", "length", "width", "heads"))
    tokens = batch * length
    return [
        *(work for n, k in _shapes(width) for work in _linear(tokens, n, k)),
        *_attention(batch * heads, length, width // heads),
        *(_elementwise(tokens * width, tensors, specials) for tensors, specials in ((2, 1), (3, 1), (3, 0)) * 2),
        *(_elementwise(tokens * 4 * width, tensors, specials) for tensors, specials in ((2, 1), (3, 2))),
        *(_elementwise(tokens * width, 3, 0) for _ in range(2)),
        _elementwise(sum(n * k for n, k in _shapes(width)), 3, 0),
    ]


def _shapes(width: int) -> tuple[tuple[int, int], ...]:
    return (3 * width, width), (width, width), (4 * width, width), (width, 4 * width)


def _linear(m: int, n: int, k: int) -> Iterator[Work]:
    """Yield the product and the products of both gradients."""
    for shape in ((m, n, k), (m, k, n), (n, k, m)):
        yield Work(
            kind="matmul",
            flops=2.0 * m * n * k,
            num_bytes=float(FP32 * (m * n + m * k + n * k)),
            dtype="fp32",
            shape=shape,
        )


def _attention(heads: int, length: int, width: int) -> Iterator[Work]:
    num_bytes, flops = 4.0 * FP32 * heads * length * width, 2.0 * heads * length**2 * width
    yield Work(
        kind="attention", flops=flops, num_bytes=num_bytes, dtype="fp32", shape=(heads, length, length), causal=True
    )
    yield Work(
        kind="attention",
        flops=2.5 * flops,
        num_bytes=2 * num_bytes,
        dtype="fp32",
        shape=(heads, length, length),
        backward=True,
        causal=True,
    )


def _elementwise(elements: int, tensors: int, specials: int) -> Work:
    return Work("memory", 0.0, float(FP32 * elements * tensors), specials=elements * specials)


def _forward(
    x: torch.Tensor, norms: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], sizes: Mapping[str, Any]
) -> torch.Tensor:
    """Return the block's output [tokens, width] for x [tokens, width]."""
    batch, length, width, heads = (sizes[name] for name in ("batch", "length", "width", "heads"))
    h = F.linear(F.layer_norm(x, (width,), norms[0]), weights[0])
    query, key, value = h.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind()
    h = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + F.linear(h.transpose(1, 2).reshape(batch * length, width), weights[1])
    h = F.gelu(F.linear(F.layer_norm(x, (width,), norms[1]), weights[2]))
    return x + F.linear(h, weights[3])
