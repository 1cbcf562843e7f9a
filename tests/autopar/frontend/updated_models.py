"""Models whose forward updates buffers, or frozen parameters, from values: by name, with a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 8


class Centers(nn.Module):
    """A center loss whose centers follow the classes' means, a running maximum, and a count of rows in each class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
        self.register_buffer("centers", torch.randn(3, 6))
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.long))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        features = self.layer(x)
        distance = (features - self.centers[label]).square().sum(1).mean()
        with torch.no_grad():
            of_class = F.one_hot(label, 3).to(features.dtype)
            count = of_class.sum(0)
            means = of_class.T @ features / count.clamp(min=1)[:, None]
            self.centers += 0.3 * (count > 0)[:, None] * (means - self.centers)
            self.largest.copy_(torch.maximum(self.largest, features.abs().amax()))
            self.seen.add_(count.long())
        return F.cross_entropy(self.head(features / self.largest), label) + 0.1 * distance


class Contrast(nn.Module):
    """Momentum contrast: a key encoder that follows by `.data`, and a ring of keys with a pointer."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))
        self.key = copy.deepcopy(self.query)
        for parameter in self.key.parameters():
            parameter.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(6, size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        queries = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for own, kept in zip(self.query.parameters(), self.key.parameters(), strict=True):
                kept.data = kept.data * 0.9 + own.data * 0.1
            keys = F.normalize(self.key(other), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone().detach()], 1)
        loss = F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))
        with torch.no_grad():
            places = (self.pointer + torch.arange(len(x))) % self.queue.shape[1]
            self.queue[:, places] = keys.T
            self.pointer[0] = (self.pointer[0] + len(x)) % self.queue.shape[1]
        return loss


class Teacher(nn.Module):
    """A mean teacher with a center of its outputs (DINO): frozen parameters that follow after they were read."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 6))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 6))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.teacher(other)
            targets = torch.softmax((goal - self.center) / 0.5, -1)
            self.center.mul_(0.9).add_(goal.mean(0, keepdim=True), alpha=0.1)
            for own, kept in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                kept.lerp_(own, 0.1)
        return -(targets * F.log_softmax(self.student(x), -1)).sum(-1).mean()


class Codebook(nn.Module):
    """A vector quantizer whose codes are averages: cluster sizes, sums, and the codes made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(12, 4))
        self.register_buffer("sizes", torch.ones(12))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        quantized = self.codes[nearest]
        with torch.no_grad():
            chosen = F.one_hot(nearest, 12).to(x.dtype)
            self.sizes.data.mul_(0.8).add_(chosen.sum(0), alpha=0.2)
            self.sums.data.mul_(0.8).add_(chosen.T @ hidden, alpha=0.2)
            self.codes.data.copy_(self.sums / (self.sizes + 1e-3)[:, None])
        straight = hidden + (quantized - hidden).detach()
        return F.mse_loss(self.decoder(straight), x) + 0.25 * F.mse_loss(hidden, quantized)


class Observed(nn.Module):
    """Fake quantization by the least and greatest values seen, which forward assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        self.low = torch.minimum(self.low, hidden.detach().min())
        self.high = 0.9 * self.high + 0.1 * hidden.detach().max()
        scale = (self.high - self.low) / 255
        rounded = ((hidden - self.low) / scale).round() * scale + self.low
        return F.mse_loss(self.second(hidden + (rounded - hidden).detach()), y)


class Block(nn.Module):
    """A residual layer with a normalization written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("power", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        normed = self.norm((hidden - self.mean) / (self.power + 1e-5).sqrt())
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
            self.power.mul_(0.9).add_(0.1 * hidden.square().mean(0))
        return x + normed


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


class Spectral(nn.Module):
    """Both spectral norms of torch, whose power iterations go on from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Linear(8, 16))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.relu(self.first(x))), y)


class Power(nn.Module):
    """A power iteration written by hand, beside torch's older spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.utils.spectral_norm(nn.Linear(16, 4))
        self.register_buffer("u", F.normalize(torch.randn(16), dim=0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.first.weight.T @ self.u, dim=0)
            u = F.normalize(self.first.weight @ v, dim=0)
            self.u.copy_(u)
        sigma = u @ self.first.weight @ v
        hidden = F.linear(x, self.first.weight / sigma, self.first.bias)
        return F.mse_loss(self.second(torch.relu(hidden)), y)


class Cumulative(nn.Module):
    """Batch norm of averages over all steps so far, and instance norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(4, 6, 1), nn.Linear(6, 4)
        self.batch, self.instance = (
            nn.BatchNorm1d(6, momentum=None),
            nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.instance(torch.relu(self.batch(self.conv(x.view(-1, 4, 2)))))
        return F.mse_loss(self.head(hidden.mean(2)), y) + F.mse_loss(self.head(hidden.amax(2)), y)


def _pair(second: str, columns: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"x": torch.randn(ROWS, 8), second: torch.randn(ROWS, columns)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "centers": (Centers, lambda: {"x": torch.randn(ROWS, 8), "label": torch.arange(ROWS) % 3}),
    "contrast": (Contrast, _pair("other", 8)),
    "teacher": (Teacher, _pair("other", 8)),
    "codebook": (Codebook, lambda: {"x": torch.randn(ROWS, 8)}),
    "observed": (Observed, _pair("y", 4)),
    "blocks": (Blocks, _pair("y", 4)),
    "spectral": (Spectral, _pair("y", 4)),
    "power": (Power, _pair("y", 4)),
    "cumulative": (Cumulative, _pair("y", 4)),
}


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    return make(), batch()
