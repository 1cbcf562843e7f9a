"""Random losses over micro-batches: each is exact or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.autopar.accumulation.test_micro_batches import LENGTH, WIDTH, Loss, is_exact
from tests.turns import one_in


def random_loss(seed: int) -> Loss:
    """A few random steps per row, one or two reductions over the batch, and something done with these."""
    draw = random.Random(seed)
    steps = [draw.choice(ROW_STEPS) for _ in range(draw.randint(1, 3))]
    sums = [draw.choice(REDUCTIONS) for _ in range(draw.randint(1, 2))]
    after = [draw.choice(AFTERWARDS) for _ in range(draw.randint(0, 2))]

    def loss(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        for step in steps:
            scores = step(scores, mask, labels)
        total: Any = 0.0
        for reduce in sums:
            total = total + reduce(scores, mask, labels)
        for step in after:
            total = step(total, scores, mask, labels)
        return total

    return loss


ROW_STEPS: tuple[Loss, ...] = (
    lambda s, m, y: s * m[..., None],
    lambda s, m, y: s.exp(),
    lambda s, m, y: s.softmax(-1),
    lambda s, m, y: s - s.mean(1, keepdim=True),
    lambda s, m, y: s / s.shape[0],
    lambda s, m, y: (s / s.shape[0]).exp(),
    lambda s, m, y: s / (m.sum(1)[:, None, None] + 1),
    lambda s, m, y: s * m.mean(),
    lambda s, m, y: s / (1 + m.sum()),
    lambda s, m, y: s.flip(1).cumsum(1),
    lambda s, m, y: F.layer_norm(s, s.shape[1:]),
    lambda s, m, y: torch.cat([s[:, 1:], s[:, :1]], 1),
    lambda s, m, y: s.reshape(-1, WIDTH).unflatten(0, (-1, LENGTH)),
    lambda s, m, y: torch.where(m[..., None] > 0, s, 0.0),
    lambda s, m, y: s - s.mean(0),
    lambda s, m, y: s.roll(1, 0),
    lambda s, m, y: s - m.mean(0)[:, None],
    lambda s, m, y: s * (m - m.mean()).pow(2).mean(),
)
REDUCTIONS: tuple[Loss, ...] = (
    lambda s, m, y: s.mean(),
    lambda s, m, y: s.sum(),
    lambda s, m, y: s.pow(2).sum(0).mean(),
    lambda s, m, y: s.sum((1, 2)).mean(),
    lambda s, m, y: (s.mean(-1) * m).sum() / m.sum(),
    lambda s, m, y: s.mean((0, 1)).logsumexp(0),
    lambda s, m, y: s.logsumexp(-1).mean(),
    lambda s, m, y: s.amax(0).sum(),
    lambda s, m, y: F.cross_entropy(s.flatten(0, 1), y.flatten()),
    lambda s, m, y: F.cross_entropy(s.transpose(1, 2), y, label_smoothing=0.2),
    lambda s, m, y: F.mse_loss(s.mean(-1), m),
    lambda s, m, y: F.smooth_l1_loss(s.mean(-1), m, reduction="sum"),
    lambda s, m, y: torch.einsum("bsw,bs->w", s, m).sum() / s.shape[0],
)
AFTERWARDS: tuple[Callable[..., Any], ...] = (
    lambda t, s, m, y: t + 1.0,
    lambda t, s, m, y: 2 - 3 * t,
    lambda t, s, m, y: t / y.shape[0],
    lambda t, s, m, y: t * (m.sum() + 1).sqrt(),
    lambda t, s, m, y: t / (y >= 0).sum(),
    lambda t, s, m, y: t + m.mean().exp(),
    lambda t, s, m, y: t * t,
    lambda t, s, m, y: t.clamp(min=-5.0),
    lambda t, s, m, y: t - t.detach() + t.detach(),
    lambda t, s, m, y: (t.square() + 1).log(),
    lambda t, s, m, y: t / (1 + s.pow(2).mean()),
    lambda t, s, m, y: t * s.sigmoid().sum((0, 1)).norm() + s.mean(),
    lambda t, s, m, y: t * (s.detach() > 0.1).double().mean(),
    lambda t, s, m, y: torch.stack([t, m.sum(), t * 2]).mean(),
)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in one_in(2, range(2, 20)))])
def test_random_losses_are_exact_or_refused(seed: int) -> None:
    is_exact(random_loss(seed), random.Random(seed).choice((2, 4, 8)), seed)
