"""Tiny hand-written models for `examples/zoo.py` that Hugging Face has no configuration for.

B batch, S sequence, V vocabulary, W width, C channels, H height, T tables, F dense features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """An encoder of two halvings, a decoder of two doublings, and a skip across each: GroupNorm, SiLU, segmentation."""

    def __init__(self, width: int = 16, num_classes: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([_convolutions(width, width), _convolutions(width, 2 * width)])
        self.bottom = _convolutions(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), nn.ConvTranspose2d(2 * width, width, 2, stride=2)]
        )
        self.merge = nn.ModuleList([_convolutions(4 * width, 2 * width), _convolutions(2 * width, width)])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels: float [B, 3, H, H]. Returns logits [B, num_classes, H, H]."""
        hidden = self.enter(pixels)
        skips = []
        for block in self.down:
            hidden = block(hidden)
            skips.append(hidden)
            hidden = F.max_pool2d(hidden, 2)
        hidden = self.bottom(hidden)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            hidden = merge(torch.cat([up(hidden), skip], dim=1))
        logits: Tensor = self.head(hidden)
        return logits


def _convolutions(channels: int, out_channels: int) -> nn.Sequential:
    """Twice: a 3 x 3 convolution, GroupNorm in four groups, SiLU."""
    first, second = (nn.Conv2d(c, out_channels, 3, padding=1) for c in (channels, out_channels))
    norms = (nn.GroupNorm(4, out_channels), nn.GroupNorm(4, out_channels))
    return nn.Sequential(first, norms[0], nn.SiLU(), second, norms[1], nn.SiLU())


class LSTMLanguageModel(nn.Module):
    """Embedding, torch's own LSTM of two layers, and a linear head."""

    def __init__(self, vocab_size: int = 96, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [B, S]. Returns logits [B, S, V]."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits


class LoraLinear(nn.Module):
    """A frozen linear layer plus the product of two trained matrices of low rank."""

    def __init__(self, frozen: nn.Linear, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.frozen, self.scale = frozen, scale
        self.a = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.b = nn.Parameter(0.02 * torch.randn(frozen.out_features, rank))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: float [..., in_features]. Returns [..., out_features]."""
        low: Tensor = F.linear(F.linear(hidden, self.a), self.b)
        return self.frozen(hidden) + self.scale * low


def with_lora(model: nn.Module, names: tuple[str, ...] = ("q_proj", "v_proj")) -> nn.Module:
    """`model`, frozen, with a LoraLinear in place of each linear layer of one of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in names:
            linear = getattr(module, name, None)
            if isinstance(linear, nn.Linear):
                setattr(module, name, LoraLinear(linear))
    return model


class DLRM(nn.Module):
    """Recommendation: an embedding bag per table, a dense MLP, all pairwise products, and an MLP above them."""

    def __init__(self, num_tables: int = 3, rows: int = 64, num_features: int = 8, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(num_tables))
        self.bottom = nn.Sequential(nn.Linear(num_features, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        num_pairs = num_tables * (num_tables + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + num_pairs, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.tril_indices(num_tables + 1, num_tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """dense: float [B, F]; sparse: int64 [B, T, ids per bag]. Returns logits [B]."""
        below = self.bottom(dense)
        vectors = torch.stack([below, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs: Any = self.pairs
        logits: Tensor = self.top(torch.cat([below, products[:, pairs[0], pairs[1]]], dim=1))
        return logits.squeeze(1)


class TwoTower(nn.Module):
    """Two MLPs whose unit vectors are compared with those of every row of the batch, at a learned temperature."""

    def __init__(self, left_width: int = 16, right_width: int = 24, width: int = 32) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(left_width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.right = nn.Sequential(nn.Linear(right_width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """left: float [B, left_width]; right: float [B, right_width]. Returns logits [B, B]."""
        a, b = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        return self.log_scale.exp() * a @ b.t()


class SwitchMLP(nn.Module):
    """A mixture of experts as a loop over them. Each row of the batch goes to the router's top expert."""

    def __init__(self, width: int = 16, num_experts: int = 4, num_classes: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """features: float [B, W]. Returns logits [B, num_classes]."""
        shares, chosen = self.router(features).softmax(dim=-1).max(dim=-1)
        mixed = torch.zeros_like(features)
        for index, expert in enumerate(self.experts):
            mixed = mixed + expert(features) * (shares * (chosen == index)).unsqueeze(-1)
        logits: Tensor = self.head(features + mixed)
        return logits
