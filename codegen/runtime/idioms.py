"""Runs of operators that models write out, under the names that the field has for them: the same calls, in order."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C] over the root of its mean square, times weight [C]; the root and the quotient are in fp32."""
    wide = x.to(torch.float32)
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int = 1) -> tuple[Tensor, Tensor]:
    """q and k [B, H, S, D] with each pair (j, j + D / 2) turned by its angle: cos, sin [B or 1, S, D].

    heads_dim: of q and k; 2 where they are [B, S, H, D].
    """
    cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    return q * cos + _quarter_turn(q) * sin, k * cos + _quarter_turn(k) * sin


def _quarter_turn(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """x times the normal distribution's function of x, approximated with tanh (Hendrycks and Gimpel, 2016)."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3.0))))


def next_tokens(labels: Tensor, ignored: float) -> Tensor:
    """labels [..., S] moved by one: every position has the token after it, and the last one `ignored`."""
    return F.pad(labels, (0, 1), value=ignored)[..., 1:].contiguous()
