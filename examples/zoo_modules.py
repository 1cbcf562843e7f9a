"""More models written by hand for `examples/zoo.py`: diffusion, graphs, speech, several losses, shared modules.

B batch, S sequence, W width, H heads, C channels, L samples, N nodes, E edges.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DiTBlock(nn.Module):
    """Attention and an MLP whose norms are scaled, shifted and gated by the time's embedding."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first, self.second = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x: float [B, S, W]; time: float [B, W]. Returns [B, S, W]."""
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(time).unsqueeze(1).chunk(6, dim=-1)
        q, k, v = self.qkv(self.first(x) * (1 + scale) + shift).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + gate * self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + gate_2 * self.mlp(self.second(x) * (1 + scale_2) + shift_2)
        return result


class DiT(nn.Module):
    """A diffusion transformer: patches, sines of the time, DiTBlocks, and the patches joined again."""

    def __init__(self, side: int = 16, patch: int = 4, width: int = 32, num_heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.patch, self.grid = patch, side // patch
        self.enter = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, self.grid**2, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiTBlock(width, num_heads) for _ in range(layers))
        self.leave = nn.Linear(width, 3 * patch * patch)
        self.register_buffer("rates", torch.exp(-math.log(1e4) * torch.arange(width // 2) / (width // 2)))

    def forward(self, pixels: Tensor, times: Tensor) -> Tensor:
        """pixels: float [B, 3, side, side]; times: float [B]. Returns the noise, shaped as the pixels."""
        x = self.enter(pixels).flatten(2).transpose(1, 2) + self.positions
        angles = times[:, None] * self.get_buffer("rates")
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype))
        for block in self.blocks:
            x = block(x, time)
        patches = self.leave(x).view(-1, self.grid, self.grid, 3, self.patch, self.patch)
        noise: Tensor = torch.einsum("bhwcpq->bchpwq", patches).flatten(4).flatten(2, 3)
        return noise


class ConformerBlock(nn.Module):
    """Half an MLP, attention, a gated depthwise convolution, half an MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.before = nn.LayerNorm(width)
        self.enter, self.leave = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depthwise = nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        """x: float [B, S, W]. Returns [B, S, W]."""
        x = x + 0.5 * self.mlps[0](x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = F.glu(self.enter(self.before(x).transpose(1, 2)), dim=1)
        x = x + self.leave(F.silu(self.batch_norm(self.depthwise(y)))).transpose(1, 2)
        result: Tensor = self.last(x + 0.5 * self.mlps[1](x))
        return result


class Conformer(nn.Module):
    """Two strided convolutions over frames, ConformerBlocks, and a class per remaining frame."""

    def __init__(self, num_mels: int = 8, width: int = 32, num_classes: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv1d(num_mels, width, 3, stride=2, padding=1), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(ConformerBlock(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, num_classes)

    def forward(self, frames: Tensor) -> Tensor:
        """frames: float [B, mels, 2 S]. Returns logits [B, S, classes]."""
        logits: Tensor = self.head(self.blocks(self.enter(frames).transpose(1, 2)))
        return logits


class Mixer(nn.Module):
    """MLP-Mixer: linears over positions and over features in turn."""

    def __init__(self, num_patches: int = 16, width: int = 32, num_classes: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n)) for n in (num_patches, width) * layers
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels: float [B, 3, 16, 16]. Returns logits [B, classes]."""
        x = self.enter(pixels).flatten(2).transpose(1, 2)
        for index, (norm, mlp) in enumerate(zip(self.norms, self.mlps, strict=True)):
            y = norm(x)
            x = x + (mlp(y) if index % 2 else mlp(y.transpose(1, 2)).transpose(1, 2))
        logits: Tensor = self.head(x.mean(dim=1))
        return logits


class GraphNetwork(nn.Module):
    """Messages along the edges of one graph per row, gathered at their sources and added up at their targets."""

    def __init__(self, num_features: int = 8, width: int = 32, num_classes: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(num_features, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.updates = nn.ModuleList(nn.GRUCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, num_classes)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """nodes: float [B, N, features]; edges: int64 [B, 2, E]. Returns logits [B, classes]."""
        x = self.enter(nodes)
        source, target = (ends.unsqueeze(-1).expand(-1, -1, x.shape[-1]) for ends in edges.unbind(1))
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([x.gather(1, source), x.gather(1, target)], dim=-1)).relu()
            sums = torch.zeros_like(x).scatter_add(1, target, sent)
            x = update(sums.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        logits: Tensor = self.head(x.max(dim=1).values)
        return logits


class Autoencoder(nn.Module):
    """A variational autoencoder with a critic. It returns a dictionary of losses, weighted in the last.

    Its noise is an input, and its decoder's last weight the encoder's first, transposed.
    """

    def __init__(self, num_features: int = 16, width: int = 32, latent: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(num_features, width), nn.Linear(width, 2 * latent)
        self.decode = nn.Linear(latent, width)
        self.critic = nn.Sequential(nn.Linear(num_features, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, features: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """features: float [B, F]; noise: float [B, latent]. Returns the losses `made`, `prior`, `fooled`, scalars."""
        mean, log_variance = self.second(F.elu(self.first(features))).chunk(2, dim=-1)
        made = F.linear(F.elu(self.decode(mean + noise * (0.5 * log_variance).exp())), self.first.weight.t())
        prior = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(dim=-1).mean()
        fooled = F.softplus(-self.critic(made)).mean()
        return {"made": made, "prior": prior, "fooled": fooled}


class Siamese(nn.Module):
    """One tower of 1-d convolutions over three recordings of a row, which share it."""

    def __init__(self, channels: int = 16, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, channels, 5, padding=2)
        self.dilated = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.leave = nn.Linear(channels, width)

    def tower(self, samples: Tensor) -> Tensor:
        """samples: float [B, L]. Returns unit vectors [B, W]."""
        x = self.enter(samples.unsqueeze(1))
        for convolution in self.dilated:
            value, gate = convolution(x).chunk(2, dim=1)
            x = x + value.tanh() * gate.sigmoid()
        return F.normalize(self.leave(x.mean(dim=-1)), dim=-1)

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each float [B, L]. Returns three of [B, W]."""
        return self.tower(anchor), self.tower(positive), self.tower(negative)
