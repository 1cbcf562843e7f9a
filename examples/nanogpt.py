"""A hand-written GPT for one GPU: one fused QKV projection, tied embeddings.

Shape suffixes: B batch, S sequence, D width, N heads, H width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class NanoGPTConfig:
    """Sizes of a `NanoGPT`. `width` must divide by `num_heads`; `dropout` is a probability."""

    vocab_size: int = 96
    max_seq_len: int = 32
    width: int = 32
    num_heads: int = 4
    num_layers: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} does not divide by num_heads {self.num_heads}")


class CausalSelfAttention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, seq_len, width = x_BSD.shape
        q_BNSH, k_BNSH, v_BNSH = (
            part.view(batch, seq_len, self.num_heads, width // self.num_heads).transpose(1, 2)
            for part in self.qkv(x_BSD).split(width, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, dropout_p=dropout, is_causal=True)
        y_BSD = y_BNSH.transpose(1, 2).reshape(batch, seq_len, width)
        out_BSD: Tensor = self.residual_dropout(self.proj(y_BSD))
        return out_BSD


class FeedForward(nn.Module):
    """Two linears with a GELU between, with a hidden width of four times the input's."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.dropout(self.proj(F.gelu(self.up(x_BSD))))
        return out_BSD


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        out_BSD: Tensor = x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))
        return out_BSD


class NanoGPT(nn.Module):
    """Tokens to logits, and to the mean cross-entropy when targets are given."""

    def __init__(self, config: NanoGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.max_seq_len, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights of deviation 0.02; projections into the residual stream shrink with its number of terms
        (Radford et al. 2019, section 2.3)."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, (CausalSelfAttention, FeedForward)):
            nn.init.normal_(module.proj.weight, std=0.02 / math.sqrt(2 * self.config.num_layers))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """tokens, targets: int64 [B, S]; targets of -100 do not count. Returns logits [B, S, V] and the loss."""
        positions_S = torch.arange(tokens.shape[1], device=tokens.device)
        x_BSD = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions_S))
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits_BSV: Tensor = self.head(self.final_norm(x_BSD))
        if targets is None:
            return logits_BSV, None
        return logits_BSV, F.cross_entropy(logits_BSV.flatten(0, 1), targets.flatten(), ignore_index=-100)
