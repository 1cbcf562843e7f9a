"""The model of the README, written for one device."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def net(width=8192, depth=16, batch_size=4096, device="meta"):
    """Return a model, a batch and a loss. On meta they take no memory, which is enough to plan."""
    with torch.device(device):
        batch = {"x": torch.randn(batch_size, width), "target": torch.randn(batch_size, width)}
        return Net(width, depth), batch, F.mse_loss
